"""The throughput model: the paper's theory values, limits known in closed form, and an independent chain."""

import itertools
import math

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.engine import throughput, tuning
from molora_jax.engine.throughput import (
    BucketTime,
    Routing,
    StepTimes,
    best_separate,
    best_shared,
    constant,
    fluid_share,
    latencies,
    separate,
    shared,
)

PAPER = {  # TokenRouter, figure 10: N to tokens/s of B = 1, 2, …
    2: (99.0, 110.3),
    3: (142.3, 158.1, 151.9),
    4: (187.2, 195.4, 207.9, 190.7),
}
PAPER_TIMES = (constant(6.0e-3), constant(27.9e-3))
TABLE = [  # L1/L0, p, N; tokens/s: separate eager and best, shared eager, best and its B (L0 = 6 ms)
    (5, 0.05, 4, 510, 510, 346, 405, 2),
    (5, 0.05, 16, 1971, 1975, 702, 1484, 8),
    (5, 0.10, 4, 399, 399, 245, 322, 3),
    (5, 0.10, 16, 1550, 1554, 526, 1202, 9),
    (5, 0.20, 16, 1072, 1079, 455, 921, 11),
    (5, 0.35, 4, 180, 200, 131, 189, 3),
    (5, 0.35, 16, 715, 763, 445, 713, 12),
    (10, 0.05, 16, 1528, 1533, 404, 1183, 9),
    (10, 0.10, 16, 1052, 1059, 292, 897, 11),
    (10, 0.35, 4, 95, 124, 72, 124, 4),
]


def pair_times(ratio: float):
    return constant(6e-3), constant(6e-3 * ratio)


@pytest.mark.parametrize("requests", PAPER)
def test_the_papers_theory_values(requests):
    for threshold, want in enumerate(PAPER[requests], 1):
        got = separate(Routing.pair(0.35), PAPER_TIMES, (1, threshold), requests, tick=1e-4)
        assert got == pytest.approx(want, rel=1e-3)
        assert separate(Routing.pair(0.35), PAPER_TIMES, (1, threshold), requests) == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_both_placements_over_the_table(row):
    ratio, share, requests, eager, best, shared_eager, shared_best, threshold = row
    times, routing = pair_times(ratio), Routing.pair(share)
    rounded = lambda want: pytest.approx(want, rel=2e-3, abs=0.55)
    assert separate(routing, times, (1, 1), requests) == rounded(eager)
    edges = None if requests == 4 else (1, 2, 3, 6, 10, 16)
    assert best_separate(routing, times, requests, edges)[1] == rounded(best)
    assert shared(share, times, 1, requests) == rounded(shared_eager)
    assert best_shared(share, times, requests) == (threshold, rounded(shared_best))


def test_lockstep_is_eager_on_one_device():
    for share, n in itertools.product((0.05, 0.35, 0.9), (1, 4, 16)):
        want = n / (6e-3 + 30e-3 * (1 - (1 - share) ** n))
        assert shared(share, pair_times(5), 1, n) == pytest.approx(want, rel=1e-9)


def test_without_routing_and_with_nothing_else():
    times = pair_times(5)
    for n in (1, 5):
        assert separate(Routing.pair(0), times, (1, 1), n) == pytest.approx(n / 6e-3)
        assert shared(0, times, 1, n) == pytest.approx(n / 6e-3)
        assert separate(Routing.pair(1), times, (1, n), n) == pytest.approx(n / 36e-3)
        assert shared(1, times, n, n) == pytest.approx(n / 36e-3)


def test_one_request_alone_has_no_company():
    share, times = 0.3, pair_times(5)
    want = 1 / (6e-3 + share * 30e-3)
    assert separate(Routing.pair(share), times, (1, 1), 1) == pytest.approx(want)
    assert shared(share, times, 1, 1) == pytest.approx(want)


def test_three_models_against_a_chain_written_out():
    """One request and constant times: tokens per visit over seconds per visit, by the visits' stationary shares."""
    moves = ((0.5, 0.3, 0.2), (0.6, 0.4, 0.0), (0.0, 0.5, 0.5))
    commits = ((1, 0, 1), (1, 2, 0), (0, 3, 1))
    seconds = np.array([1.0, 2.0, 5.0])
    share = np.linalg.matrix_power(np.array(moves), 200)[0]
    want = share @ (np.array(moves) * commits).sum(1) / (share @ seconds)
    got = separate(Routing(moves, commits), [constant(s) for s in seconds], (1, 1, 1), 1)
    assert got == pytest.approx(want)


def test_tokens_of_a_visit():
    assert Routing.pair(0.25).writes == pytest.approx(1 / 1.25)  # a token a visit of the small one, kept or rewritten
    three = Routing(((0.5, 0.3, 0.2), (0.6, 0.4, 0.0), (0.0, 0.5, 0.5)), ((1, 0, 1), (1, 2, 0), (0, 3, 1)))
    share = np.linalg.matrix_power(np.array(three.moves), 200)[0]
    assert three.writes == pytest.approx(share @ (np.array(three.moves) * three.commits).sum(1))


def test_nobody_waits_where_requests_were_never_seen_to_come_back():
    """The first counts of an engine: some went to the large model, which has not run yet; it stays put in the law."""
    seen = Routing.counted(np.array([[3, 2], [0, 0]]), np.array([[3, 0], [0, 0]]))
    assert seen.moves[1] == (0, 1)
    assert seen.writes == pytest.approx(0, abs=1e-6)
    rare = Routing.counted(np.array([[399, 1], [0, 0]]), np.array([[399, 0], [0, 0]]))
    assert rare.writes == pytest.approx(0, abs=1e-6)
    times = [StepTimes((BucketTime(8, 64, seconds),)) for seconds in (1.0, 10.0)]
    assert tuning.best(seen, times, 5, range(1, 6)) == (1, 1)
    assert tuning.best(seen, times, 5, range(1, 6), shared=False) == (1, 1)


def means(routing: Routing) -> list[float]:
    return [float(law @ np.arange(law.size)) for law in routing.suffixes]


def test_suffixes_are_what_others_wrote():
    assert means(Routing.pair(0.1)) == pytest.approx((1, 10))
    assert means(Routing.pair(1)) == pytest.approx((1, 1))
    assert means(Routing.pair(0)) == pytest.approx((1, 1))
    thirds = Routing(((1 / 3,) * 3,) * 3, ((1, 1, 1),) * 3)
    assert means(thirds) == pytest.approx((3, 3, 3))
    large = Routing.pair(0.25).suffixes[1]  # its own last token, and what the small one wrote until it was routed
    np.testing.assert_allclose(large[1:20], 0.25 * 0.75 ** np.arange(19), atol=1e-9)


def test_suffixes_are_those_of_drawn_traces():
    """Three models, tokens taken back among them, against a long walk."""
    routing = Routing(((0.5, 0.3, 0.2), (0.6, 0.4, 0.0), (0.7, 0.0, 0.3)), ((1, 0, 1), (2, 1, 0), (3, 0, 1)))
    rng, seen, model = np.random.default_rng(0), [[], [], []], 0
    written, last = 0, [None] * 3
    for _ in range(100_000):
        if last[model] is not None:
            seen[model].append(max(written - last[model], 1))
        last[model] = written
        following = rng.choice(3, p=routing.moves[model])
        written += routing.commits[model][following]
        model = following
    for law, drawn in zip(routing.suffixes, seen, strict=True):
        counts = np.bincount(drawn, minlength=law.size)[: law.size] / len(drawn)
        np.testing.assert_allclose(counts, law, atol=0.01)


def test_counts_become_shares():
    got = Routing.counted(np.array([[6, 2, 0], [2, 0, 0], [0, 0, 0]]), np.array([[6, 0, 0], [2, 0, 0], [0, 0, 0]]))
    assert got.moves == ((0.75, 0.25, 0), (1, 0, 0), (0, 0, 1))
    assert got.commits == ((1, 0, 0), (1, 0, 0), (0, 0, 0))


STEPS = ((1, 1, 1.0), (4, 4, 2.0), (4, 16, 3.0), (8, 32, 5.0))
STAIRS = StepTimes(tuple(BucketTime(*step) for step in STEPS))


def test_step_times_are_a_staircase():
    assert [STAIRS(*load) for load in ((1, 1), (1, 2), (3, 4), (2, 5), (4, 16.5), (8, 32))] == [1, 2, 2, 3, 5, 5]
    assert STAIRS(9, 9) == 6  # three runs of three rows
    assert STAIRS(2, 70) == 15


def test_a_step_slopes_with_what_it_has_to_do():
    times = StepTimes((BucketTime(4, 16, 1.0, 0.5, 0.25), BucketTime(8, 64, 4.0)))
    assert times(2, 6) == pytest.approx(1 + 2 * 0.5 + 6 * 0.25)
    assert times(4, 16) == 4  # the larger bucket takes no longer
    assert times(8, 60) == 4


def test_latencies_charge_the_suffix():
    times = (lambda rows, tokens: rows, lambda rows, tokens: tokens)
    np.testing.assert_allclose(latencies(Routing.pair(0.25), times, 3), [[0, 1, 2, 3], [0, 4, 8, 12]], rtol=1e-6)


def test_latencies_are_expected_over_the_suffixes_and_not_those_of_their_mean():
    """A pair of suffixes that sum to 2 or more, of chance (n - 1) p² (1 - p)^(n - 2) each, on a staircase."""
    step = lambda rows, tokens: 1.0 if tokens <= 8 else 3.0
    n = np.arange(2, 9)
    short = np.sum((n - 1) * 0.1**2 * 0.9 ** (n - 2))
    got = latencies(Routing.pair(0.1), (step, step), 2)
    assert got[1, 2] == pytest.approx(3 - 2 * short, abs=2 / 32)
    assert got[1, 1] == pytest.approx(3 - 2 * (1 - 0.9**8), abs=2 / 32)


def test_slope_takes_the_gain_away():
    """Where a run costs what its rows do, waiting for company brings nothing."""
    flat = lambda seconds, slope: lambda rows, tokens: seconds * (1 + slope * (rows - 1))
    gains = []
    for slope in (0.0, 0.05, 0.2):
        times = flat(6e-3, slope), flat(27.9e-3, slope)
        eager = separate(Routing.pair(0.35), times, (1, 1), 6)
        gains.append(best_separate(Routing.pair(0.35), times, 6)[1] / eager)
    assert gains[0] > gains[1] > gains[2] > 0.999
    assert gains[2] < 1.01


@pytest.mark.parametrize(("share", "want"), [(0.05, 0.46), (0.1, 0.57), (0.2, 0.67), (0.35, 0.82)])
def test_the_fluid_rule(share, want):
    got = fluid_share(share, 5)
    s, q = math.log1p(-got) / math.log1p(-share), -math.log1p(-share)
    assert math.exp(q * s) == pytest.approx(1 + q * (s + 5))
    assert got == pytest.approx(want, abs=0.04)
    assert abs(best_shared(share, pair_times(5), 16)[0] - 16 * got) <= 1.3


def test_the_climb_tries_few_thresholds(monkeypatch):
    tried = []
    whole = throughput.separate
    monkeypatch.setattr(throughput, "separate", lambda *args: tried.append(args[2]) or whole(*args))
    for n in (4, 16):
        tried.clear()
        edges = (1, 2, 4, 8, 16)
        found, value = best_separate(Routing.pair(0.35), PAPER_TIMES, n, edges)
        assert len(tried) <= 8
        reachable = [(a, b) for a in edges for b in edges if a + b <= n + 1 and n == 4]
        assert value >= max([whole(Routing.pair(0.35), PAPER_TIMES, t, n) for t in reachable], default=0)


def test_impossible_thresholds_are_refused_in_one_line():
    with pytest.raises(UserError, match=r"got \(2, 2\), expected Σ"):
        separate(Routing.pair(0.1), PAPER_TIMES, (2, 2), 2)
    with pytest.raises(UserError, match="got 5, expected 1 to 4"):
        shared(0.1, PAPER_TIMES, 5, 4)
    with pytest.raises(UserError, match="share: got 1"):
        fluid_share(1, 5)
