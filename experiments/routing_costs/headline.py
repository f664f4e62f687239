"""The ratios that the summary names: every policy and baseline at one number of requests and one share."""

from collections.abc import Sequence

from experiments.routing_costs import baselines
from experiments.routing_costs.grid import Grid
from experiments.routing_costs.pair import PROMPT, prompts
from molora_jax import benchmarking, compilation


def headline(bench: benchmarking.Bench, grid: Grid, share: float, thresholds: Sequence[int]) -> dict[str, float]:
    """All policies of a grid at one share, and its part of the summary."""
    models, new = grid.models, grid.new
    _, large = grid.alone()
    with compilation.counted() as later:
        best, measured = grid.routed(share, thresholds)
    eager, delayed, fused = (measured[name] for name in ("eager", "delayed", "fused"))
    contexts = range(PROMPT, PROMPT + new + 1, new // 4)
    naive = baselines.naive(models, share, contexts)
    bench.add(policy="no cache", share=share, tokens_per_s=naive)
    served = baselines.dispatched(models, grid.rows, grid.length)
    served(prompts(grid.rows, 1), share, 2)
    bench.add(
        policy="dispatcher",
        requests=grid.rows,
        share=share,
        tokens_per_s=served(prompts(grid.rows, 1), share, min(new, 32)),
    )
    top = max(one.rate for name, one in measured.items() if name.startswith("delayed"))
    promised = grid.predicted(share, best, 1)
    return dict(
        delayed_over_eager=delayed.rate / eager.rate,
        predicted_delayed_over_eager=promised / grid.predicted(share, 1, 1),
        fused_over_eager=fused.rate / eager.rate,
        fused_over_naive=fused.rate / naive,
        routed_over_llm_only=fused.rate / large,
        predicted_over_measured=promised / delayed.rate,
        b_star_regret=1 - delayed.rate / top,
        host_syncs_per_token=fused.looks,
        padding_ratio=fused.padding,
        compiles_after_warmup=later.programs,
    )
