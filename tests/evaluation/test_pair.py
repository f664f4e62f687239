"""A routed pair of token-pair models: which tokens must be routed is known, so that what each router reaches is too."""

import json

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.evaluation import pair
from molora_jax.evaluation.pair import ENTROPY, QUESTION, RANDOM, TRAINED, Answers, PairConfig
from molora_jax.training.heads import HeadTraining
from tests.training import bigrams

pytestmark = pytest.mark.slow

# the answer is what follows the arrow; the small model goes astray after d and after e, never after h, i or k
LARGE = {
    "a": "b",
    "b": "c",
    "c": "d",
    "d": " ->",
    " ->": "e",
    "e": "f",
    "f": "",
    "h": "i",
    "i": "->",
    "->": "k",
    "k": "",
}
SMALL = LARGE | {"d": "x", "e": "y"}
TOKENS = {"a": 7, "b": 6, "c": 5, "d": 4, "h": 4, "i": 3}
"""Of the large model's answer after each prompt, the end among them."""

CONFIG = PairConfig(
    shares=(0.3,),
    rows=3,
    length=16,
    close=0.02,
    top_k=4,
    width=8,
    training=HeadTraining(rows=16, rate=2e-2, epochs=30, patience=30, held_out=0.3),
    repeats=1,
)


def examples(count: int, seed: int) -> list:
    prompts = np.random.default_rng(seed).choice(list(TOKENS), count)
    return [bigrams.example(i, str(p), "k" if p in "hi" else "ef") for i, p in enumerate(prompts)]


SETS = dict(train=examples(40, 0), validation=examples(16, 1), test=examples(24, 2))


@pytest.fixture(scope="module")
def found():
    return pair.measure(bigrams.model(SMALL), bigrams.model(LARGE), SETS, seed=1, config=CONFIG)


def row(found, router: str):
    (own,) = [row for row in found["rows"] if row["router"] == router]
    return own


def test_ends(found):
    easy = [int(example.prompt in "hi") for example in SETS["test"]]
    assert found["ends"]["small"]["right"] == easy
    assert found["ends"]["large"]["right"] == [1] * 24
    assert (found["ends"]["small"]["realised"], found["ends"]["large"]["realised"]) == (0, 1)


def test_labels_count_what_goes_astray(found):
    hard = [example.prompt for example in SETS["train"] if example.prompt in "abcd"]
    total = sum(TOKENS[example.prompt] for example in SETS["train"])
    want = dict(questions=40, identical=total - 2 * len(hard), neutral=0, divergent=2 * len(hard))
    assert found["labels"] == want


def test_the_trained_router_asks_for_the_tokens_that_matter(found):
    own = row(found, TRAINED)
    hard = sum(example.prompt in "abcd" for example in SETS["test"])
    needed = 2 * hard / sum(TOKENS[example.prompt] for example in SETS["test"])
    assert own["right"] == [1] * 24
    assert needed <= own["realised"] < 0.5
    assert own["over_random"]["mean"] == pytest.approx(1 - np.mean(row(found, RANDOM)["right"]))
    assert own["over_random"]["low"] > 0


def test_random_tokens_are_as_many(found):
    own = row(found, RANDOM)
    assert own["knobs"]["share"] == row(found, TRAINED)["realised"]
    assert 0 < own["realised"] < 1
    assert own["over_random"] == dict(mean=0, low=0, high=0)


def test_whole_questions(found):
    own, questions = row(found, QUESTION), SETS["test"]
    small, large = (np.array(found["ends"][name]["right"]) for name in ("small", "large"))
    # which prompts go is one decision for all questions that have the same
    goes = {q.prompt for q, right, alone in zip(questions, own["right"], small, strict=True) if right and not alone}
    assert own["right"] == np.where([q.prompt in goes for q in questions], large, small).tolist()
    speeds = [found["ends"][name]["tokens_per_s"] for name in ("small", "large")]
    assert min(speeds) <= own["tokens_per_s"] <= max(speeds)


def test_everything_is_measured_and_json(found):
    assert [row["router"] for row in found["rows"]] == [TRAINED, ENTROPY, RANDOM, QUESTION]
    assert all(row["tokens_per_s"] > 0 for row in [*found["rows"], *found["ends"].values()])
    # small answers to hard questions end at once after x: four tokens at most
    assert found["speed"]["requests"] == 3
    assert 1 <= found["speed"]["tokens"] <= 7
    assert json.loads(json.dumps(found))["seed"] == 1


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_the_threshold_of_questions_gives_the_nearest_share(share):
    rng = np.random.default_rng(4)
    scores, small, large = rng.integers(0, 9, 30) / 8, rng.integers(1, 20, 30), rng.integers(1, 20, 30)

    def realised(value: float) -> float:
        goes = scores >= value
        return large[goes].sum() / (large[goes].sum() + small[~goes].sum())

    got = realised(pair.question_threshold(scores, small, large, share))
    assert abs(got - share) == min(abs(realised(value) - share) for value in [*scores, 2.0])


def test_answers_of_two_are_put_together():
    one = Answers(np.array([True, False, True]), np.array([4, 5, 6]), np.array([4, 5, 6]))
    other = Answers(np.array([False, True, False]), np.array([1, 2, 3]), np.array([0, 0, 0]))
    got = one.where(np.array([True, False, False]), other)
    assert (got.accuracy.right, got.accuracy.n, got.share) == (2, 3, 4 / 9)


def test_refusals():
    with pytest.raises(UserError, match=r"pair: got the shares \(0, 0.5\), expected some between 0 and 1"):
        PairConfig(shares=(0, 0.5))
    with pytest.raises(UserError, match="expected counts of at least 1"):
        PairConfig(test=0)
