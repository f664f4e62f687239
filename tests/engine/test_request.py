"""What a request may ask for, and the line that refuses the rest."""

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.engine.request import EngineConfig, Request, Usage, check, entry
from molora_jax.engine.table import MAX_STOPS
from tests import fakes

CFG = fakes.config((0,))  # a vocabulary of 8
CONFIG = EngineConfig(max_length=20)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (dict(prompt=[]), "prompt: got no tokens, expected at least one"),
        (dict(prompt=[3, -1]), "prompt: got token ids -1 to 3, expected 0 to 7"),
        (dict(prompt=[8, 2]), "prompt: got token ids 2 to 8, expected 0 to 7"),
        (dict(prompt=[1] * 11, max_new_tokens=10), "prompt: got 11 tokens and 10 to generate, expected at most 20"),
        (dict(max_new_tokens=0), "max_new_tokens: got 0, expected 1 to"),
        (dict(max_new_tokens=-30), "max_new_tokens: got -30, expected 1 to"),
        (dict(temperature=-0.1), "temperature: got -0.1, expected 0 to 100"),
        (dict(temperature=float("inf")), "temperature: got inf"),
        (dict(temperature=float("nan")), "temperature: got nan"),
        (dict(top_k=-1), "top_k: got -1, expected 0 to 8"),
        (dict(top_k=9), "top_k: got 9, expected 0 to 8"),
        (dict(min_p=1.5), "min_p: got 1.5, expected 0 to 1"),
        (dict(min_p=float("nan")), "min_p: got nan"),
        (dict(top_p=0.0), "top_p: got 0.0, expected above 0 and at most 1"),
        (dict(top_p=1.1), "top_p: got 1.1, expected above 0 and at most 1"),
        (dict(top_p=float("nan")), "top_p: got nan"),
        (dict(seed=-1), "seed: got -1, expected 0 to 4294967295"),
        (dict(seed=2**32), "seed: got 4294967296, expected 0 to 4294967295"),
        (dict(stops=tuple(range(9))), f"stops: got 9 stop tokens, expected at most {MAX_STOPS}"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(fields, line):
    with pytest.raises(UserError) as error:
        check(CFG, CONFIG, Request(**dict(prompt=[1], max_new_tokens=2) | fields))
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        dict(prompt=[0, 7]),
        dict(prompt=np.array([7, 0])),
        dict(prompt=(1,) * 10, max_new_tokens=10),
        dict(temperature=100, top_k=8, top_p=1e-9, min_p=1.0, seed=2**32 - 1, stops=tuple(range(8))),
    ],
)
def test_the_limits_themselves_are_allowed(fields):
    check(CFG, CONFIG, Request(**dict(prompt=[1], max_new_tokens=2) | fields))


def test_entry_is_the_request_as_arrays():
    request = Request(prompt=[5, 6], max_new_tokens=3, temperature=0.5, top_k=2, seed=2**32 - 1, stops=(0, 4))
    row = entry(CONFIG, request, anchor=[1])
    np.testing.assert_array_equal(row.tokens, [5, 6] + [0] * 18)
    assert (row.length, row.limit, row.anchor) == (2, 5, 1)
    np.testing.assert_array_equal(row.stops, [0, 4] + [-1] * 6)  # token 0 may be a stop: the padding is another
    assert (row.sampling.temperature, row.sampling.top_k, row.sampling.seed) == (0.5, 2, 2**32 - 1)
    assert row.logprob_at == 0


@pytest.mark.parametrize(
    ("fields", "at"), [({}, 1), (dict(tempered=True), 0.5), (dict(tempered=True, temperature=0), 1)]
)
def test_log_probabilities_are_asked_for_at_a_temperature(fields, at):
    request = Request(**dict(prompt=[5], max_new_tokens=3, temperature=0.5, logprobs=True) | fields)
    assert entry(CONFIG, request, anchor=[0]).logprob_at == at


def test_usage_prints_rates_and_survives_nothing():
    assert str(Usage()) == "prefill no tokens · decode no tokens"
    usage = Usage(prefill_tokens=10, prefill_seconds=2.0, decode_tokens=3, decode_seconds=1.5)
    assert str(usage) == "prefill 10 tokens, 5.0 tokens/s · decode 3 tokens, 2.0 tokens/s"
