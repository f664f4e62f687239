"""The scheduler on a virtual clock: against the throughput model, and never at a standstill."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molora_jax.config import UserError
from molora_jax.engine.simulate import Schedule, random_trace, recorded_trace, simulate
from molora_jax.engine.throughput import Routing, best_shared, constant, separate, shared

PAPER = (constant(6.0e-3), constant(27.9e-3))
TIMES = (constant(6e-3), constant(30e-3))


def endless(share: float, requests: int, seed: int = 1):
    return [random_trace(Routing.pair(share), 100 * seed + i) for i in range(requests)]


def realised(outcome) -> float:
    """The share of its runs' rows that the small model passed on."""
    return outcome.rows[1] / outcome.rows[0]


@pytest.mark.parametrize("requests", [2, 3, 4])
def test_delayed_batching_is_within_a_percent_of_the_chain(requests):
    for threshold in range(1, requests + 1):
        schedule = Schedule(thresholds=(1, threshold))
        got = simulate(endless(0.35, requests), PAPER, schedule, tokens=15_000)
        want = separate(Routing.pair(realised(got)), PAPER, (1, threshold), requests, tick=1e-4)
        assert got.throughput == pytest.approx(want, rel=0.01)
        assert realised(got) == pytest.approx(0.35, rel=0.05)


@pytest.mark.parametrize(("share", "requests", "threshold"), [(0.05, 16, 8), (0.1, 16, 1), (0.35, 4, 3)])
def test_one_device_is_as_the_renewal_process_says(share, requests, threshold):
    schedule = Schedule(shared=True, thresholds=(1, threshold))
    got = simulate(endless(share, requests), TIMES, schedule, tokens=30_000)
    assert got.throughput == pytest.approx(shared(realised(got), TIMES, threshold, requests), rel=0.02)


def test_delaying_pays_on_one_device():
    """N = 16, p = 0.1, step-time ratio 5."""
    threshold, _ = best_shared(0.1, TIMES, 16)
    rates = [
        simulate(endless(0.1, 16), TIMES, Schedule(shared=True, thresholds=(1, b)), tokens=20_000).throughput
        for b in (1, threshold)
    ]
    assert rates[1] >= 1.2 * rates[0]
    assert rates[1] / rates[0] == pytest.approx(1202 / 526, rel=0.03)


@pytest.mark.parametrize(("share", "requests", "synchronous"), [(0.05, 16, 802), (0.1, 4, 267), (0.35, 16, 398)])
def test_barriers_cost_what_theory_says(share, requests, synchronous):
    rate = lambda kind: simulate(endless(share, requests), TIMES, Schedule(kind=kind), tokens=20_000).throughput
    lockstep = requests / (6e-3 + 30e-3 * (1 - (1 - share) ** requests))
    assert rate("lockstep") == pytest.approx(lockstep, rel=0.03)
    assert rate("step_sync") == pytest.approx(synchronous, rel=0.03)


def test_by_hand():
    """Two requests, one of which is routed twice: every moment worked out."""
    traces = lambda: [recorded_trace([0, 1, 0, 1]), recorded_trace([0, 0, 0])]
    times = (lambda rows, tokens: 1.0, lambda rows, tokens: 2.0 + tokens)
    got = simulate(traces(), times, Schedule(kind="lockstep"), prompt=4)
    assert got.tokens == 7
    # rounds: 0+0 | 0(routed)+0, then 1 | 0+0 | 0(routed), then 1
    assert (got.runs, got.rows, got.read) == ([4, 2], [7, 2], [4 + 4 + 1 + 1 + 1 + 1 + 1, 5 + 2])
    assert got.seconds == pytest.approx(4 * 1 + (2 + 5) + (2 + 2))
    assert got.busy == pytest.approx([4, 11])
    eager = simulate(traces(), times, Schedule(shared=True), prompt=4)
    assert (eager.tokens, eager.seconds, eager.finished) == (7, got.seconds, 2)
    apart = simulate(traces(), times, Schedule(), prompt=4)
    # the second request goes on while the first is with the large model: 0, 0 | 0 alone | … and the first needs
    # 1 + 1 + 7 + 1 + 1 + 4 by itself
    assert apart.seconds == pytest.approx(15)
    assert apart.finished == 2


def test_the_guard_bounds_every_wait():
    """A threshold of 3 that two routed requests never reach while the others go on for long."""
    traces = lambda: [recorded_trace([1]), recorded_trace([1]), recorded_trace([0] * 50), recorded_trace([0] * 50)]
    times = (constant(1.0), constant(1.0))
    patient = simulate(traces(), times, Schedule(thresholds=(1, 3)))
    guarded = simulate(traces(), times, Schedule(thresholds=(1, 3), max_wait=4.0))
    assert patient.waited[1] > 90  # until the others have left
    assert guarded.waited[1] == pytest.approx(8.0, abs=1e-6)
    shared_guard = simulate(traces(), times, Schedule(shared=True, thresholds=(1, 3), max_wait=4.0))
    assert shared_guard.waited[1] <= 2 * 5.0


@pytest.mark.parametrize("schedule", [Schedule(thresholds=(1, 4)), Schedule(shared=True, thresholds=(2, 3))])
def test_the_order_of_time_changes_no_counts(schedule):
    writers = [[0, 1, 0, 0, 1, 1], [1, 1, 1], [0, 0, 0, 0], [0, 1]]
    got = simulate([recorded_trace(w) for w in writers], TIMES, schedule)
    assert got.tokens == sum(map(len, writers))
    assert got.rows == [sum(map(len, writers)), sum(map(sum, writers))]
    assert got.finished == 4


TRACES = st.integers(1, 3).flatmap(
    lambda models: st.tuples(
        st.lists(
            st.lists(st.tuples(st.integers(0, models - 1), st.integers(0, 2)), max_size=8), min_size=1, max_size=7
        ),
        st.lists(st.integers(1, 9), min_size=models, max_size=models),
    )
)


@given(
    TRACES,
    st.sampled_from(["delayed", "lockstep", "step_sync"]),
    st.booleans(),
    st.sampled_from([math.inf, 0.0, 0.7, 3.0]),
    st.dictionaries(st.integers(0, 6), st.sampled_from([0.0, 0.3, 1.0, 2.5, 9.0]), max_size=4),
)
def test_nobody_is_left_waiting(case, kind, on_one, max_wait, aborts):
    """Requests that end or are aborted at any time, thresholds of any size: all others come to their end."""
    traces, thresholds = case
    aborts = {i: at for i, at in aborts.items() if i < len(traces)}
    times = [lambda rows, tokens, i=i: 0.3 + 0.7 * i + 0.1 * rows + 0.01 * tokens for i in range(len(thresholds))]
    schedule = Schedule(kind=kind, shared=on_one, thresholds=tuple(thresholds), max_wait=max_wait)
    got = simulate(traces, times, schedule, aborts=aborts)
    kept = [trace for i, trace in enumerate(traces) if i not in aborts]
    assert len(kept) <= got.finished <= len(traces)
    whole = list(itertools.chain(*traces))
    assert sum(commit for trace in kept for _, commit in trace) <= got.tokens <= sum(commit for _, commit in whole)
    assert sum(got.rows) <= len(whole)
    if not aborts:
        assert (got.tokens, got.finished) == (sum(commit for _, commit in whole), len(traces))
        assert got.rows == [sum(model == i for model, _ in whole) for i in range(len(thresholds))]


def test_unreachable_thresholds_would_stall_without_the_clamp(monkeypatch):
    """The property above can fail."""
    monkeypatch.setattr("molora_jax.engine.policy.clamp", lambda thresholds, active: thresholds)
    with pytest.raises(RuntimeError, match="stalled"):
        simulate([recorded_trace([0, 1, 0])], TIMES, Schedule(thresholds=(1, 2)))


@pytest.mark.parametrize(
    ("fields", "line"), [(dict(kind="random"), "got 'random'"), (dict(thresholds=(0, 1)), r"got \(0, 1\)")]
)
def test_impossible_schedules_are_refused_in_one_line(fields, line):
    with pytest.raises(UserError, match=line):
        Schedule(**fields)
