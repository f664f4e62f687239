"""The published chain: what is encoded behind which anchors, and what it costs."""

import dataclasses

import numpy as np
import pytest

from molora_jax.retrieval import mara, published
from molora_jax.retrieval.encode import Encoder, EncoderConfig, Job
from molora_jax.retrieval.mara import MaraConfig
from tests import fakes
from tests.retrieval.questions import Letters, question


def pool(encoding):
    """The means after both depths, side by side."""
    return encoding.pooled[:, :, 0].reshape(len(encoding.pooled), -1)


TEXTS = [f"T{i}: text {i}" for i in range(4)]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(*fakes.model("llama_tied"), Letters(), EncoderConfig(depths=(1, 2)))


def test_each_pass_is_encoded_behind_its_anchors(encoder):
    own = dataclasses.replace(question(support=(0, 2)), question="Who is it?")
    found = published.slates(encoder, [own], [(2, 1)], pool)
    assert [slate.gold.tolist() for slate in found] == [[1, 0, 1, 0], [1, 0, 0], [1, 0]]
    for slate, left, picked in zip(found, ([0, 1, 2, 3], [0, 1, 3], [0, 3]), ([], [2], [2, 1]), strict=True):
        job = Job("Who is it?", [TEXTS[i] for i in left], [TEXTS[i] for i in picked])
        np.testing.assert_array_equal(slate.encodings, pool(encoder.encode([job])[0]))
    assert [slate.gold.sum() for slate in published.slates(encoder, [own], [(0, 2)], pool)] == [2, 1]


def test_a_run_against_a_loop(encoder):
    own = question()
    cfg = MaraConfig(encoding=2 * encoder.width, width=8, layers=0, slots=0, pooling="mean", mixer="mlp")
    params = mara.init(cfg, 4)
    got = published.run(encoder, cfg, params, own, pool, passes=3)
    picked = []
    for _ in range(3):
        left = [i for i in range(4) if i not in picked]
        job = Job(own.question, [TEXTS[i] for i in left], [TEXTS[i] for i in picked])
        local = mara.score(cfg, params, pool(encoder.encode([job])[0])[None]).local[0]
        picked.append(left[int(np.argmax(local))])
        last = [left[i] for i in np.argsort(-np.asarray(local))]
    assert got.ranking == (*picked, *(i for i in last if i not in picked))


def test_the_cost_is_that_of_whole_rows(encoder):
    own, rows = question(), 0
    [found] = encoder.encode([Job(own.question, TEXTS)])
    for picked in ([], [3], [3, 1]):
        for text in TEXTS:
            rows += len(encoder.prefix(Job(own.question, [], [TEXTS[i] for i in picked]))) + len(text) + 1
    assert published.cost(encoder, own, found.lengths.tolist(), [3, 1, 0]) == 2 * rows
