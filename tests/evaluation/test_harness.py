"""The model class of the lm-evaluation-harness, against logits of each text alone."""

import jax
import numpy as np
import pytest

lm_eval = pytest.importorskip("lm_eval", reason="needs the lm-evaluation-harness: pip install lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402

from molora_jax.adapters.fresh import fresh  # noqa: E402
from molora_jax.adapters.library import Library  # noqa: E402
from molora_jax.adapters.route import Route  # noqa: E402
from molora_jax.checkpoints import model as models  # noqa: E402
from molora_jax.config import UserError  # noqa: E402
from molora_jax.evaluation.harness import HarnessModel  # noqa: E402
from molora_jax.evaluation.systems import System, answers  # noqa: E402
from molora_jax.models import transformer  # noqa: E402
from molora_jax.nn.layout import dense  # noqa: E402

PAIRS = [("calc:47 +08\n", "47+08=55 ->55"), ("calc:47 +08\n", "47"), ("list: 1 2, rev ", "x y"), ("", "date")]


@pytest.fixture(scope="module")
def world():
    model = models.load("testbed:small")
    experts = tuple(fresh(model.cfg, model.params, n, rank=2, seed=i, spread=0.2) for i, n in enumerate("ab"))
    return model, System(name="b", experts=experts, single="b")


def _instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def _log_probs(model, system, tokens):
    how = {}
    if system is not None:
        bank = Library.holding(system.experts, model.params).bank
        how = dict(bank=bank, route=Route.of(np.full(len(tokens), 1, np.int32)))
    hidden = transformer.apply(model.cfg, model.params, np.asarray(tokens), dense(1, len(tokens)), **how).hidden
    return np.asarray(jax.nn.log_softmax(transformer.logits(model.cfg, model.params, hidden)), np.float64)


@pytest.mark.parametrize("adapted", [False, True])
def test_continuations_are_as_probable_as_their_tokens(world, adapted):
    model, system = world
    lm = HarnessModel(model, system, rows=3) if adapted else HarnessModel(model, rows=3)
    got = lm.loglikelihood(_instances("loglikelihood", PAIRS))
    encode = model.tokenizer.encode
    for (context, continuation), (value, greedy) in zip(PAIRS, got, strict=True):
        tokens = encode(context + continuation)  # begins with the token that begins every text
        start = len(encode(context.rstrip())) if context else 1
        log_p = _log_probs(model, system if adapted else None, tokens)
        own = [log_p[t - 1, tokens[t]] for t in range(start, len(tokens))]
        assert value == pytest.approx(sum(own), abs=1e-3)
        assert greedy == all(np.argmax(log_p[t - 1]) == tokens[t] for t in range(start, len(tokens)))


def test_every_token_of_a_long_text_counts_once(world):
    model, _ = world
    text = "calc:47 +08 -03\n47+08=55;55-03=52 ->52"
    tokens = model.tokenizer.encode(text)
    whole = HarnessModel(model, length=128).loglikelihood_rolling(_instances("loglikelihood_rolling", [(text,)]))
    log_p = _log_probs(model, None, tokens)
    assert whole[0] == pytest.approx(sum(log_p[t - 1, tokens[t]] for t in range(1, len(tokens))), abs=1e-3)
    lm = HarnessModel(model, length=8)
    windows = lm._windows(0, text)
    assert sum(document.weights.sum() for document in windows) == len(tokens) - 1
    assert max(map(len, windows)) <= 8
    counted = np.concatenate([document.tokens[document.weights > 0] for document in windows])
    assert counted.tolist() == tokens[1:]


def test_what_is_generated_stops_before_the_stop_string(world):
    model, system = world
    prompts = ["calc:47 +08 -03\n", "list: 7 3 5 9, sort, rev\n"]
    how = dict(until=["->"], max_gen_toks=40)
    lm = HarnessModel(model, length=100)
    got = lm.generate_until(_instances("generate_until", [(p, how) for p in prompts]))
    want = answers(model, System(name="base"), [_Asked(p) for p in prompts], length=100)
    assert got == [text.split("->")[0] for text in want]
    assert all("=" in text or ";" in text for text in got)


class _Asked:
    """A prompt and nothing else."""

    id = "x"

    def __init__(self, prompt):
        self.prompt = prompt


def test_a_prompt_has_its_room_before_the_answer(world):
    """Tasks ask for hundreds of tokens by default: what there is no room for is not taken from the question."""
    model, _ = world
    prompt = "calc:47 +08 -03\n"
    lm = HarnessModel(model, length=40)
    asked = lm._request(prompt, dict(until=["->"], max_gen_toks=256))
    assert asked.prompt == model.tokenizer.encode(prompt)
    assert asked.max_new_tokens == 40 - len(asked.prompt)
    got = lm.generate_until(_instances("generate_until", [(prompt, dict(until=["->"], max_gen_toks=256))]))
    assert got == [answers(model, System(name="base"), [_Asked(prompt)], length=40)[0].split("->")[0]]
    for most, room in ((5, 5), (256, 20)):
        long = lm._request(prompt * 20, dict(until=["->"], max_gen_toks=most))
        assert long.prompt == model.tokenizer.encode(prompt * 20)[room - 40 :]
        assert long.max_new_tokens == room


def test_what_needs_more_than_a_text_is_refused(world):
    model, system = world
    with pytest.raises(UserError, match="expected a base, an expert or a router"):
        HarnessModel(model, System(name="oracle", experts=system.experts, owner={"calc": "a"}))
