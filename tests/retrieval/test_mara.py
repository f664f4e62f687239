"""The router scores as a loop in fp64 does; pads change nothing, and order only what it may."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.config import UserError
from molora_jax.retrieval import mara, mixers
from molora_jax.retrieval.mara import MaraConfig
from tests.numerics import assert_close
from tests.retrieval import router_reference as reference

jitted = jax.jit(mara.score, static_argnums=0)
pool = jax.jit(mara.pool, static_argnums=0)
ROWS, COUNT, ANCHORS = 2, 5, 3


def score(cfg, params, x, anchors=(), valid=None):
    """Of shapes that most tests share, so that each mixer compiles once: the same anchors in every row, -1 behind."""
    picked = np.full((len(x), ANCHORS), -1, np.int32)
    picked[:, : len(anchors)] = anchors
    return jitted(cfg, params, x, np.ones(x.shape[:2], bool) if valid is None else valid, picked)


def test_the_published_router_has_its_number_of_parameters():
    assert sum(leaf.size for leaf in jax.tree.leaves(mara.abstract(MaraConfig(encoding=3584)))) == 2_864_149


@pytest.mark.parametrize("mixer", mixers.KINDS)
def test_scores_against_a_loop(mixer):
    cfg = reference.config(mixer, chained=True)
    params, x = reference.params(cfg), reference.segments(ROWS, COUNT)
    for anchors in ((), (3,), (-1, 3, 0)):
        got = score(cfg, params, x, anchors)
        for row in range(ROWS):
            local, slots = reference.score(cfg, params, x[row], anchors)
            assert_close(got.local[row], local, "model")
            if cfg.slots:
                assert_close(got.slots[row], slots, "model")
        assert (got.slots is None) == (mixer in mixers.ORDER_FREE)


def test_a_router_without_a_mark_or_mixer():
    for cfg in (reference.config(), reference.config(layers=0)):
        params, x = reference.params(cfg), reference.segments(1, COUNT)
        got, (local, slots) = jitted(cfg, params, x), reference.score(cfg, params, x[0])
        assert_close(got.local[0], local, "model")
        assert_close(got.slots[0], slots, "model")


@pytest.mark.parametrize("mixer", mixers.KINDS)
def test_pads_change_nothing(mixer):
    cfg = reference.config(mixer, chained=True)
    params, x = reference.params(cfg), reference.segments(ROWS, 3)
    at = np.array([1, 3, 4])  # pads lie in front, between, and behind, and hold anything
    padded, valid = np.full((ROWS, 6, x.shape[2]), np.nan, np.float32), np.zeros((ROWS, 6), bool)
    padded[:, at], valid[:, at] = x, True
    got = score(cfg, params, padded, (4,), valid)
    for row in range(ROWS):
        local, slots = reference.score(cfg, params, x[row], (2,))
        assert_close(got.local[row, at], local, "model")
        if cfg.slots:
            assert_close(got.slots[row, at], slots, "model")
    assert np.all(np.isneginf(got.local[~valid]))


@pytest.mark.parametrize("mixer", mixers.KINDS)
def test_order_matters_only_to_mixers_that_read_in_order(mixer):
    cfg = reference.config(mixer, chained=True)
    params, x = reference.params(cfg), reference.segments(ROWS, COUNT)
    order = np.array([4, 1, 0, 3, 2])
    want = score(cfg, params, x, (3, 0)).local[:, order]
    got = score(cfg, params, x[:, order], (3, 2)).local  # the anchors are the same segments
    if mixer in mixers.ORDER_FREE:
        assert_close(got, want, "model")
    else:
        assert np.abs(got - want).max() > 1e-3


@pytest.mark.parametrize(("mixer", "sees_later"), [("mamba", False), ("gru", False), ("bimamba", True)])
def test_who_sees_later_segments(mixer, sees_later):
    cfg = reference.config(mixer, chained=True)
    params, x = reference.params(cfg), reference.segments(ROWS, COUNT)
    changed = x.copy()
    changed[:, 3] += 1
    moved = np.abs(score(cfg, params, x).local - score(cfg, params, changed).local)[0]
    assert np.all(moved[3:] > 1e-6)
    assert np.all(moved[:3] > 1e-6) if sees_later else np.all(moved[:3] == 0)


@pytest.mark.parametrize("mixer", mixers.KINDS)
def test_every_candidate_hears_of_the_anchors(mixer):
    cfg = reference.config(mixer, chained=True)
    params, x = reference.params(cfg), reference.segments(ROWS, COUNT)
    one, other = (score(cfg, params, x, (a,)).local for a in (0, 3))
    assert np.all(np.abs(one - other) > 1e-6)


def naive_pool(cfg, params, h, valid):
    h = np.asarray(h, np.float64)[np.asarray(valid)]
    if not len(h):
        return np.zeros(cfg.encoding)
    if cfg.pooling == "mean":
        return h.mean(axis=0)
    if cfg.pooling == "last":
        return h[-1]
    w, v = (np.asarray(params["pool"][name], np.float64) for name in ("weight", "query"))
    a = np.exp([v @ np.tanh(w @ token) for token in h])
    return a @ h / a.sum()


@pytest.mark.parametrize("pooling", mara.POOLINGS)
def test_pooling_against_a_loop(pooling):
    cfg = reference.config(pooling=pooling)
    params, rng = reference.params(cfg), np.random.default_rng(3)
    h, valid = rng.standard_normal((2, 3, 4, cfg.encoding)).astype(np.float32), rng.random((2, 3, 4)) < 0.6
    valid[0, 0], valid[1, 2] = False, [False, True, True, False]
    got = pool(cfg, params, np.where(valid[..., None], h, np.nan), valid)
    want = [[naive_pool(cfg, params, h[i, j], valid[i, j]) for j in range(3)] for i in range(2)]
    assert_close(got, np.array(want))


def test_bfloat16_encodings_are_scored_in_float32():
    cfg = reference.config("mlp", chained=True)
    params, x = reference.params(cfg), jnp.asarray(reference.segments(ROWS, COUNT), jnp.bfloat16)
    got = score(cfg, params, x)
    assert got.local.dtype == jnp.float32
    assert_close(got.local, score(cfg, params, x.astype(jnp.float32)).local)


def test_a_router_can_be_called_and_starts_as_published():
    cfg = reference.config("mlp", layers=0)
    router = mara.Router(cfg, rngs=nnx.Rngs(0))
    tree = mara.init(cfg)
    x = reference.segments(1, 3)
    assert_close(router(x).local, jitted(cfg, tree, x).local, "model")
    bound = 0.1 * (6 / (cfg.encoding + cfg.width)) ** 0.5
    assert 0.8 * bound < np.abs(tree["proj"]).max() <= bound
    assert tree["local"]["bias"] == 0


@pytest.mark.parametrize("mixer", mixers.KINDS)
def test_save_and_load_give_it_back(mixer, tmp_path):
    cfg = reference.config(mixer, chained=True)
    params = reference.params(cfg)
    mara.save(tmp_path / "new", cfg, params, dict(backbone="tiny", layers=2))
    got, tree, about = mara.load(tmp_path / "new")
    assert got == cfg
    assert about == dict(backbone="tiny", layers=2)
    jax.tree.map(np.testing.assert_array_equal, tree, params)


def test_files_that_are_none(tmp_path):
    cfg = reference.config()
    with pytest.raises(UserError, match="no mara.json"):
        mara.load(tmp_path)
    mara.save(tmp_path, cfg, reference.params(cfg) | dict(stray=jnp.zeros(2)), {})
    with pytest.raises(UserError, match="no such tensor"):
        mara.load(tmp_path)
    mara.save(tmp_path, cfg, reference.params(reference.config(width=4)), {})
    with pytest.raises(UserError, match="expected"):
        mara.load(tmp_path)
    (tmp_path / "mara.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        mara.load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (dict(pooling="max"), "pooling 'max'"),
        (dict(mixer="lstm"), "mixer 'lstm'"),
        (dict(mixer="sorted"), "slots=0"),
        (dict(mixer="transformer", slots=0, width=6), "multiple"),
    ],
)
def test_architectures_that_are_none(fields, line):
    with pytest.raises(UserError, match=line):
        MaraConfig(encoding=4, **fields)


def test_scores_that_cannot_be():
    cfg = reference.config(slots=3)
    params = reference.params(cfg)
    with pytest.raises(UserError, match="got 4 segments"):
        mara.score(cfg, params, reference.segments(1, 4))
    with pytest.raises(UserError, match="chained"):
        mara.score(cfg, params, reference.segments(1, 3), anchors=jnp.zeros((1, 1), jnp.int32))
