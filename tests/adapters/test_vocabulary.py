"""Tables of the experts that token ids call for."""

import numpy as np
import pytest

from molora_jax.adapters.route import NONE, vocabulary_ids
from molora_jax.adapters.vocabulary import KEEP, ranges, switched, table
from molora_jax.config import UserError
from tests.adapters.routing import identical

SLOTS = {"text": 3, "image": 0}


def test_ranges_become_a_table():
    rule = ranges({"image": (4, 6), "text": (0, 3), None: (6, 7)}, 9)
    got = vocabulary_ids(table(rule, SLOTS, 9), np.arange(9))
    identical(got, [3, 3, 3, NONE, 0, 0, NONE, NONE, NONE])


BAD = [
    ({"text": (0, 4), "image": (3, 6)}, r"\[0, 4\) for 'text' and \[3, 6\) for 'image', which both hold token 3"),
    ({"text": (0, 9), "image": (2, 3)}, "both hold token 2"),
    ({"text": (5, 5)}, r"got \[5, 5\) for 'text'"),
    ({"text": (5, 10)}, "high <= 9"),
    ({"text": (-1, 2)}, "expected 0 <= low"),
]


@pytest.mark.parametrize(("named", "message"), BAD)
def test_ranges_that_cannot_be(named, message):
    with pytest.raises(UserError, match=message):
        ranges(named, 9)


def test_rules_of_nobody():
    with pytest.raises(UserError, match="got 'sound', expected one of 'text', 'image'"):
        table({1: "sound"}, SLOTS, 9)
    with pytest.raises(UserError, match="got token id 9 for 'text', expected 0 to 8"):
        table({9: "text"}, SLOTS, 9)


def test_control_tokens_switch_what_follows():
    rng = np.random.default_rng(0)
    calls = table({1: "text", 2: "image", 3: None}, SLOTS, 6, other=KEEP)
    tokens, valid = rng.integers(0, 6, (4, 11)), rng.random((4, 11)) < 0.7
    segments, first = np.repeat([[0, 5]], 4, axis=0).repeat([4, 7], axis=1), np.array([NONE, 0, 3, 1])
    want = np.zeros((4, 11), int)
    for b in range(4):
        for t in range(11):
            if t in (0, 4):
                last = first[b]
            last = calls[tokens[b, t]] if valid[b, t] and calls[tokens[b, t]] != KEEP else last
            want[b, t] = last
    identical(switched(calls, tokens, first, valid=valid, segments=segments), want)
    assert (want != first[:, None]).any()
