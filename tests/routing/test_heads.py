"""Trained heads against fp64 numpy, on disk and back, and their thresholds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from molora_jax.config import UserError
from molora_jax.routing import heads
from molora_jax.routing.calibration import calibrate
from molora_jax.routing.heads import HeadConfig
from tests.numerics import assert_close
from tests.routing import numpy_heads

CONFIGS = {
    "r2r": HeadConfig(kind="r2r", hidden=7, width=6, top_k=5, blocks=2, expansion=3),
    "mlp": HeadConfig(kind="mlp", hidden=7, width=5),
    "linear": HeadConfig(kind="linear", hidden=7),
}


score = jax.jit(heads.score, static_argnums=0)


def features(kind: str, rng, dtype=np.float32):
    drawn = [rng.normal(0, 1, n).astype(dtype) for n in (7, 7, 5)]
    return drawn if kind == "r2r" else drawn[:1]


def want(kind: str, params, *given):
    if kind == "linear":
        return numpy_heads.sigmoid(numpy_heads.affine(params["output"], *given))[0]
    return getattr(numpy_heads, kind)(params, *given)


def perturbed(cfg):
    rng = np.random.default_rng(0)
    noise = lambda leaf: np.asarray(leaf) + 0.3 * rng.normal(0, 1, leaf.shape).astype(np.float32)
    return jax.tree.map(noise, heads.init(cfg, 1))


@pytest.mark.parametrize("kind", CONFIGS)
def test_scores(kind):
    cfg, rng = CONFIGS[kind], np.random.default_rng(1)
    params = perturbed(cfg)
    for _ in range(3):
        given = features(kind, rng)
        assert_close(score(cfg, params, *given), want(kind, params, *given), "model")
    batch = [np.stack(column) for column in zip(*(features(kind, rng) for _ in range(4)), strict=True)]
    scores = jax.jit(jax.vmap(lambda *row: heads.score(cfg, params, *row)))(*batch)
    assert_close(scores, np.array([want(kind, params, *row) for row in zip(*batch, strict=True)]), "model")


def test_r2r_has_the_size_of_the_published_one():
    """56.3 M parameters at D = 1536, without the embedding of the small model."""
    graph = nnx.eval_shape(lambda: heads.Head(HeadConfig(kind="r2r", hidden=1536), rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(graph, nnx.Param))) == 56_302_081


def test_a_module_scores_like_its_parameters():
    module = heads.Head(CONFIGS["mlp"], rngs=nnx.Rngs(1))
    (hidden,) = features("mlp", np.random.default_rng(2))
    assert_close(module(hidden), want("mlp", heads.init(CONFIGS["mlp"], 1), hidden), "model")


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_head_comes_back_from_disk(kind, tmp_path):
    cfg, params = CONFIGS[kind], perturbed(CONFIGS[kind])
    heads.save(tmp_path / "head", cfg, params, 0.25)
    read_cfg, read, threshold = heads.load(tmp_path / "head")
    assert (read_cfg, threshold) == (cfg, 0.25)
    jax.tree.map(np.testing.assert_array_equal, read, params)
    assert all((tmp_path / "head" / name).stat().st_mode & 0o044 for name in (heads.WEIGHTS, heads.CONFIG))


def test_a_broken_folder_is_refused_in_one_line(tmp_path):
    cfg = CONFIGS["mlp"]

    def refused(line):
        with pytest.raises(UserError, match=line) as error:
            heads.load(tmp_path)
        assert "\n" not in str(error.value)

    refused("no head.json")
    heads.save(tmp_path, cfg, heads.init(cfg), 0.5)
    good = (tmp_path / heads.CONFIG).read_text()
    for change, line in [
        (dict(hidden=8), "expected shape"),
        (dict(kind="linear"), "expected shape"),
        (dict(kind="tree"), "got kind 'tree'"),
        (dict(depth=3), "cannot be read"),
    ]:
        (tmp_path / heads.CONFIG).write_text(json.dumps(json.loads(good) | change))
        refused(line)
    (tmp_path / heads.CONFIG).write_text("{")
    refused("cannot be read")
    (tmp_path / heads.CONFIG).write_text(json.dumps(json.loads(good) | dict(kind="linear", hidden=5)))
    refused("unused tensors inner.bias")
    (tmp_path / heads.CONFIG).write_text(good)
    (tmp_path / heads.WEIGHTS).write_bytes(b"no tensors")
    refused("cannot be read")


def realised(scores, threshold, below: bool, budget: float, dropped: bool) -> float:
    """Share of the large model when these tokens are routed one after another."""
    small = large = 0.0
    for score in np.asarray(scores, np.float32):
        routed = score < np.float32(threshold) if below else score >= np.float32(threshold)
        large += budget * routed
        small += 0.0 if routed and dropped else 1.0
    return large / (small + large)


@given(
    st.lists(st.sampled_from([0.0, 0.125, 0.5, 0.3, 1.0, -2.0, 1e-7]), min_size=1, max_size=30),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from([(1.0, True), (4.0, True), (2.5, False), (1.0, False)]),
)
def test_calibration_is_the_nearest_share_there_is(scores, share, below, terms):
    budget, dropped = terms
    got = calibrate(np.array(scores), share, below=below, budget=budget, dropped=dropped)
    assert got.share == pytest.approx(realised(scores, got.threshold, below, budget, dropped))
    others = [*scores, *(np.nextafter(np.float32(s), np.float32(9)) for s in scores), -9.0, 9.0]
    best = min(abs(realised(scores, other, below, budget, dropped) - share) for other in others)
    assert abs(got.share - share) == pytest.approx(best, abs=1e-12)


def test_calibration_hits_the_quantile_of_many_scores():
    scores = np.random.default_rng(0).permutation(10_000).astype(np.float32)
    got = calibrate(scores, 0.123)
    assert got == (8769.5, 0.123)
    assert calibrate(scores, 0.123, below=True) == (1229.5, 0.123)


@pytest.mark.parametrize(
    ("scores", "share", "line"), [([], 0.5, "got 0"), ([np.nan], 0.5, "not all finite"), ([1.0], 1.5, "got 1.5")]
)
def test_calibration_refuses_in_one_line(scores, share, line):
    with pytest.raises(UserError, match=line):
        calibrate(np.array(scores), share)


def test_scores_are_wide_for_narrow_features():
    cfg = CONFIGS["linear"]
    assert heads.score(cfg, heads.init(cfg), jnp.ones(7, jnp.bfloat16)).dtype == jnp.float32
