"""Encodings against one plain row after the other, with the whole prefix in each."""

import functools

import jax
import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.retrieval import encode
from molora_jax.retrieval.encode import Encoder, EncoderConfig, Job
from tests import fakes
from tests.numerics import assert_close
from tests.retrieval.questions import Letters

JOBS = [
    Job("Who is the boss of Ada", ["Ada: boss Ben", "Ben: twin Kim, and then " * 9, "C"]),
    Job("?", ["alone"]),
    Job("Who?", [f"{'word ' * i}end" for i in range(23)], anchors=["Ada: boss Ben, owner Kim", "Kim: guard Ada"]),
]


@pytest.fixture(scope="module")
def tiny():
    """A decoder with windows, so that pages of two kinds are used."""
    return fakes.model("gemma3")


@functools.partial(jax.jit, static_argnums=(0, 3))
def hidden(cfg, params, ids, layers: int):
    """States after each of the first layers; no token sees what fills up a row behind it."""
    return transformer.apply(cfg, params, ids, dense(1, len(ids)), layers=layers, taps=("hidden",)).taps["hidden"]


def naive(cfg, params, config, job):
    """Each segment alone in a row of its own, pooled by plain loops."""
    words, pooled = Letters(), []
    prefix = words.encode(f"Question: {job.question}\n")
    for anchor in job.anchors:
        prefix += words.encode(f"{anchor}\n", special=False)[: config.longest]
    for text in job.segments:
        own = words.encode(f"{text}\n", special=False)[: config.longest]
        again = words.encode(f"Question: {job.question}", special=False) if config.again else []
        ids = [*prefix, *own, *again]
        h = hidden(cfg, params, np.pad(ids, (0, -len(ids) % 64)), config.depths[-1])[:, : len(ids)]
        h = np.asarray(h, np.float64)[np.array(config.depths) - 1]
        h = h / np.sqrt((h**2).mean(-1, keepdims=True) + cfg.norm_eps)
        own, rest = h[:, len(prefix) : len(prefix) + len(own)], h[:, len(prefix) + len(own) :]
        pools = [own.mean(1), own[:, -1]] + ([rest.mean(1), rest[:, -1]] if config.again else [])
        pooled.append((np.stack(pools, axis=1), own[-1]))
    return np.stack([pool for pool, _ in pooled]), np.concatenate([own for _, own in pooled])


@pytest.mark.parametrize("config", [
    EncoderConfig(depths=(1, 3), again=True, batch=256, longest=40, tokens=True),
    EncoderConfig(depths=(2,), batch=512, longest=100),
])  # fmt: skip
@pytest.mark.parametrize("unrolled", [False, True])
def test_encodings_against_one_row_each(tiny, config, unrolled):
    cfg, params = tiny
    own = transformer.unstack(dict(params)) if unrolled else params
    for job, got in zip(JOBS, Encoder(cfg, own, Letters(), config).encode(JOBS), strict=True):
        want, tokens = naive(cfg, params, config, job)
        assert_close(got.pooled, want, "model")
        assert (got.tokens is not None) == config.tokens
        if config.tokens:
            assert_close(got.tokens, tokens, "model")
            assert len(tokens) == got.lengths.sum()


def test_the_prefix_is_run_once(tiny):
    encoder = Encoder(*tiny, Letters(), EncoderConfig(depths=(2,)))
    job = Job("w" * 37, ["a" * 9, "b" * 20])  # 1 + 10 + 37 + 1 tokens before the segments, of 10 and 21 tokens
    [found] = encoder.encode([job])
    assert encoder.tokens == 48 + (1 + 10) + (1 + 21)  # six full pages once; what is left of the prefix with each
    assert found.cost == 2 * encoder.tokens
    assert list(found.lengths) == [10, 21]


def test_what_is_kept_is_found_again_and_for_nothing_else(tiny, tmp_path):
    cfg, params = tiny
    make = lambda params=params, **kw: Encoder(cfg, params, Letters(), EncoderConfig(depths=(1,), **kw), tmp_path)
    first = make()
    kept = first.encode(JOBS)
    assert (first.hits, len(list(tmp_path.iterdir()))) == (0, 3)
    again = make()
    for one, other in zip(kept, again.encode(JOBS[::-1])[::-1], strict=True):
        np.testing.assert_array_equal(one.pooled, other.pooled)
        assert one.cost == other.cost
    assert (again.hits, again.tokens) == (3, 0)
    other = params | {"embed": {"weight": params["embed"]["weight"] * 2}}
    moved = Job(JOBS[0].question[:-1], [f"a{text}" for text in JOBS[0].segments])
    cut = Job(JOBS[0].question, JOBS[0].segments[:2])
    for encoder, jobs in [
        (make(other), JOBS), (make(again=True), JOBS), (make(dtype="float16"), JOBS), (make(), [moved, cut]),
    ]:  # fmt: skip
        encoder.encode(jobs)
        assert encoder.hits == 0


def test_a_broken_file_is_said(tiny, tmp_path):
    encoder = Encoder(*tiny, Letters(), EncoderConfig(depths=(1,)), tmp_path)
    encoder.encode(JOBS[1:2])
    [file] = tmp_path.iterdir()
    file.write_bytes(b"no")
    with pytest.raises(UserError, match="delete it"):
        encoder.encode(JOBS[1:2])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(depths=(2, 1)), "ascending"),
        (dict(depths=()), "ascending"),
        (dict(depths=(0,)), "from 1"),
        (dict(dtype="int8"), "float16, float32"),
        (dict(batch=8), "from 1 and 256"),
    ],
)
def test_configs_that_cannot_be(fields, said):
    with pytest.raises(UserError, match=said):
        EncoderConfig(**fields)


def test_jobs_that_cannot_be(tiny):
    with pytest.raises(UserError, match="at most the model's 3"):
        Encoder(*tiny, Letters(), EncoderConfig(depths=(4,)))
    encoder = Encoder(*tiny, Letters(), EncoderConfig(depths=(1,), batch=256))
    with pytest.raises(UserError, match="at least one"):
        encoder.encode([Job("q", [])])
    with pytest.raises(UserError, match="256 tokens"):
        encoder.encode([Job("q" * 250, ["some text"])])


def test_batches_hold_every_row_once_behind_its_prefix():
    row = lambda job, segment, size: encode._Row(job, segment, [1] * size, 0, (0, size, size))
    jobs = [[row(j, -1, 8), *(row(j, i, 30 + i) for i in range(1 + 9 * j))] for j in range(4)]
    batches = list(encode._batches(jobs, 256))
    assert [r for b in batches for r in b if r.segment >= 0] == [r for _, *own in jobs for r in own]
    for batch in batches:
        assert sum(len(r.ids) for r in batch) <= 256
        for r in batch:
            assert any(p.job == r.job and p.segment == -1 for p in batch[: batch.index(r) + 1])
