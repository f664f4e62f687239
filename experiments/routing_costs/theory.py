"""The throughput model against the paper's own values, and the simulator against the throughput model."""

from molora_jax.engine.simulate import Schedule, random_trace, simulate
from molora_jax.engine.throughput import Routing, constant, separate, shared

SHARE, TIMES = 0.35, (constant(6.0e-3), constant(27.9e-3))
PAPER = {2: (99.0, 110.3), 3: (142.3, 158.1, 151.9), 4: (187.2, 195.4, 207.9, 190.7)}
"""TokenRouter (arXiv 2610.12242), figure 10: requests to tokens/s at B = 1, 2, …"""


def theory_max_error(bench) -> float:
    """Largest relative error of the nine values."""
    errors = []
    for requests, values in PAPER.items():
        for threshold, want in enumerate(values, 1):
            got = separate(Routing.pair(SHARE), TIMES, (1, threshold), requests, tick=1e-4)
            errors.append(abs(got / want - 1))
            bench.add(step="theory", requests=requests, threshold=threshold, paper=want, ours=got)
    return max(errors)


def sim_max_error(bench, tokens: int) -> float:
    """Largest relative error of the simulator against the chain, at the share that the simulation drew."""
    errors = []
    for requests in PAPER:
        for threshold in range(1, requests + 1):
            traces = [random_trace(Routing.pair(SHARE), 100 + i) for i in range(requests)]
            got = simulate(traces, TIMES, Schedule(thresholds=(1, threshold)), tokens=tokens)
            want = separate(Routing.pair(got.rows[1] / got.rows[0]), TIMES, (1, threshold), requests, tick=1e-4)
            errors.append(abs(got.throughput / want - 1))
    bench.add(step="simulator", tokens=tokens, max_error=max(errors))
    return max(errors)


def virtual_clock(bench) -> None:
    """Delayed over eager on one device whose small model takes 6 ms and the large one five times as long."""
    times = constant(6e-3), constant(30e-3)
    for requests in (4, 16):
        for share in (0.05, 0.1, 0.35):
            rates = [shared(share, times, b, requests) for b in range(1, requests + 1)]
            best = max(range(requests), key=rates.__getitem__)
            row = dict(requests=requests, share=share, eager=rates[0], delayed=rates[best], threshold=best + 1)
            bench.add(step="virtual clock", **row, ratio=rates[best] / rates[0])
