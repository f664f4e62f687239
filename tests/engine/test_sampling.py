"""Sampling, against transformers' order of cuts in fp64 numpy with sorts, and by frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from molora_jax.engine import sampling
from molora_jax.engine.sampling import Sampling
from tests import naive
from tests.numerics import assert_close

sample = jax.jit(sampling.sample, static_argnames="model")


def settings_of(rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0) -> Sampling:
    """The same or each its own for every row."""
    full = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype), rows)
    f32 = np.float32
    return Sampling(
        full(temperature, f32), full(top_k, np.int32), full(top_p, f32), full(min_p, f32), full(seed, np.uint32)
    )


@jax.jit
def kept(scores, how: Sampling):
    """Which tokens survive the cuts."""
    return sampling._cut(scores, how) > -jnp.inf


DEFAULTS = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
cuts = st.fixed_dictionaries(
    dict(
        temperature=st.sampled_from([0.3, 1.0, 2.5]),
        top_k=st.sampled_from([0, 1, 2, 7, 36, 37]),
        top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.93, 0.9999, 1.0]),
        min_p=st.sampled_from([0.0, 1e-3, 0.2, 1.0]),
    )
)


@settings(max_examples=60)
@given(st.lists(cuts, min_size=4, max_size=4), st.integers(0, 2**32 - 1))
@example([dict()] * 4, 0)  # nothing is cut
@example([dict(), dict(top_k=3), dict(top_p=0.5), dict(min_p=0.1)], 0)  # each row its own
def test_cuts_keep_what_transformers_keeps(rows, seed):
    scores = (np.random.default_rng(seed).standard_normal((4, 37)) * 3).astype(np.float32)
    how = settings_of(4, **{k: [row.get(k, d) for row in rows] for k, d in DEFAULTS.items()})
    want = [naive.probabilities(s, **row) > 0 for s, row in zip(scores, rows, strict=True)]
    np.testing.assert_array_equal(kept(scores, how), want)


def test_cuts_keep_all_that_tie_with_the_last():
    scores = np.array([[1, 5, 3, 3, 3, -2]], np.float32)
    np.testing.assert_array_equal(kept(scores, settings_of(1, top_k=2)), [[0, 1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(kept(scores, settings_of(1, top_p=0.8)), [[0, 1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(kept(scores, settings_of(1, min_p=1.0)), [[0, 1, 0, 0, 0, 0]])
    alike = np.zeros((1, 6), np.float32)
    for how in (dict(top_k=1), dict(top_p=0.1), dict(min_p=1.0)):
        np.testing.assert_array_equal(kept(alike, settings_of(1, **how)), np.ones((1, 6)))


def test_cuts_work_on_scores_of_any_size_and_sign():
    scores = np.array([[-1e30, -1e-30, 0.0, -0.0, 1e-30, -3e38], [1e30, 2e30, -1e30, 3e30, 0, 1]], np.float32)
    got = kept(scores, settings_of(2, top_k=[4, 2]))
    np.testing.assert_array_equal(got[1], [0, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(got[0], [0, 1, 1, 1, 1, 0])


ROWS = 4000
SCORES = np.array([0.3, 2.0, -1.0, 1.9, 0.0, -4.0, 1.0, 0.9, -0.5, 2.4, 0.1], np.float32)


@pytest.mark.parametrize(
    "cuts",
    [
        dict(),
        dict(temperature=0.5),
        dict(temperature=3.0, top_k=4),
        dict(top_p=0.7),
        dict(min_p=0.25),
        dict(temperature=2.0, top_k=8, top_p=0.9, min_p=0.1),
    ],
)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_frequencies_are_those_of_the_cut_distribution(cuts, over):
    want = naive.probabilities(SCORES, **cuts)
    numbers = np.arange(ROWS, dtype=np.int32)
    seeds, positions = (numbers, np.full(ROWS, 5, np.int32)) if over == "seeds" else (7, numbers)
    got = sample(np.tile(SCORES, (ROWS, 1)), settings_of(ROWS, seed=seeds, **cuts), positions)
    counts = np.bincount(got, minlength=len(SCORES))
    assert counts[want == 0].sum() == 0
    expected = ROWS * want[want > 0]
    statistic = np.sum((counts[want > 0] - expected) ** 2 / expected)
    df = len(expected) - 1  # the 99.99th percentile of chi-square, by Wilson and Hilferty
    assert statistic < df * (1 - 2 / (9 * df) + 3.72 * np.sqrt(2 / (9 * df))) ** 3, (counts, expected)


def test_a_token_depends_on_seed_position_and_model_alone():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((5, 300)).astype(np.float32)
    how = settings_of(
        5, temperature=[1, 0, 2, 1, 0.5], top_k=[0, 0, 50, 3, 0], top_p=[1, 1, 0.9, 1, 0.3], seed=range(5)
    )
    positions = np.array([3, 1, 4, 1, 5], np.int32)
    together = np.asarray(sample(scores, how, positions))
    for order in (rng.permutation(5), np.array([2]), np.array([4, 3])):
        part = jax.tree.map(lambda leaf, order=order: leaf[order], how)
        np.testing.assert_array_equal(sample(scores[order], part, positions[order]), together[order])
    many = lambda **to: sample(np.tile(scores[:1], (64, 1)), settings_of(64, seed=to.pop("seed", 1)), **to)
    base = np.asarray(many(position=np.arange(64)))
    assert len(set(base)) > 20
    np.testing.assert_array_equal(base, many(position=np.arange(64)))
    for other in (many(position=np.arange(64) + 64), many(position=np.arange(64), model=1)):
        assert np.mean(base == other) < 0.5
    assert np.mean(base == many(position=np.arange(64), seed=2)) < 0.5


def test_purposes_and_seeds_beyond_31_bits_draw_apart():
    draw = lambda seed, purpose=0: float(
        sampling.draw(np.array([seed], np.uint32), np.array([3], np.int32), model=0, purpose=purpose)[0]
    )
    draws = [draw(0), draw(1), draw(2**31), draw(2**32 - 1), draw(0, purpose=1)]
    assert len(set(draws)) == len(draws)
    assert all(0 <= d < 1 for d in draws)


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 1000])
def test_greedy_picks_the_first_of_ties(vocab):
    rng = np.random.default_rng(vocab)
    scores = rng.integers(0, 3, (6, vocab)).astype(np.float32)
    scores[0] = -np.inf
    scores[1] = -5.0
    got = sample(scores, Sampling.greedy(6), np.zeros(6, np.int32))
    np.testing.assert_array_equal(got, np.argmax(scores, axis=-1))


@pytest.mark.parametrize("how", [dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0), dict(temperature=1e-9)])
def test_the_narrowest_settings_are_greedy(how):
    scores = np.random.default_rng(3).standard_normal((128, 300)).astype(np.float32) * 3
    how = dict(temperature=np.linspace(0.1, 3, 128)) | how  # many quotients: the best must survive the rounding of each
    got = sample(scores, settings_of(128, seed=range(128), **how), np.arange(128, dtype=np.int32))
    np.testing.assert_array_equal(got, np.argmax(scores, axis=-1))


inverse = jax.jit(sampling._inverse_cdf)


@pytest.mark.parametrize("vocab", [1, 3, 256, 300, 1024, 5000])
@pytest.mark.parametrize("density", [1.0, 0.3, 0.01])
def test_inverse_cdf_lands_where_the_running_sum_passes(vocab, density):
    rng = np.random.default_rng(vocab)
    mass = rng.exponential(size=vocab).astype(np.float32) ** 3
    mass[(rng.random(vocab) >= density) & (np.arange(vocab) != vocab // 2)] = 0
    sums = np.cumsum(mass.astype(np.float64))
    ends = (sums / sums[-1]).astype(np.float32)  # where rounding has a choice
    edges = [
        f(ends)
        for f in (lambda e: e, lambda e: np.nextafter(e, np.float32(0)), lambda e: np.nextafter(e, np.float32(2)))
    ]
    uniform = np.concatenate([rng.random(200), *edges])
    uniform = np.concatenate([[0.0], rng.choice(uniform, 254), [1.0]]).astype(np.float32)
    uniform = np.clip(uniform, 0, 1 - 2**-23)  # the largest that jax.random.uniform gives
    token = np.asarray(inverse(np.tile(mass, (256, 1)), uniform))
    assert (mass[token] > 0).all()  # raises for a token beyond the vocabulary
    slack = 2e-6 * sums[-1]
    target = uniform.astype(np.float64) * sums[-1]
    assert (sums[token] >= target - slack).all()
    assert (sums[token] - mass[token] <= target + slack).all()
    assert mass[: token[0]].sum() == 0  # u = 0 is the first token with mass
    assert uniform[-1] == np.float32(1 - 2**-23)


def test_inverse_cdf_never_lands_in_a_gap():
    """What top-k drops often fills a whole run, and the start of the next: sums of either differ in rounding."""
    rng = np.random.default_rng(0)
    for size in (5, 50, 500):
        mass = np.zeros(51_200, np.float32)
        mass[rng.choice(len(mass), size, replace=False)] = rng.exponential(size=size) ** 3
        ends = np.cumsum(mass.astype(np.float64)) / mass.sum(dtype=np.float64)
        uniform = np.resize(np.unique(ends), 200).astype(np.float32)
        uniform = np.concatenate([uniform, np.nextafter(uniform, np.float32(0)), np.nextafter(uniform, np.float32(2))])
        token = np.asarray(inverse(np.tile(mass, (600, 1)), np.clip(uniform, 0, 1 - 2**-23)))
        assert (mass[token] > 0).all()


def test_log_prob():
    scores = (np.random.default_rng(1).standard_normal((3, 50)) * 5).astype(np.float32)
    token = np.array([4, 0, 49], np.int32)
    want = [np.log(naive.probabilities(s)[t]) for s, t in zip(scores, token, strict=True)]
    assert_close(sampling.log_prob(scores, token), np.array(want))


def test_only_if_gives_one_or_the_other():
    scores = np.arange(6, dtype=np.float32).reshape(2, 3)
    run = jax.jit(lambda wanted: sampling.only_if(wanted, lambda s: s[:, 1] * 2, jnp.full(2, -1.0), scores))
    np.testing.assert_array_equal(run(True), [2, 8])
    np.testing.assert_array_equal(run(False), -1)
