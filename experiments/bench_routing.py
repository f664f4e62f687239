"""Routed inference over two models: policies side by side, the throughput model, and what a hand-off costs.

python -m experiments.bench_routing
"""

from absl import flags

from experiments.routing_costs import baselines, handoff, programs, theory
from experiments.routing_costs.grid import Grid
from experiments.routing_costs.pair import PROMPT, pair, prompts
from molora_jax import benchmarking, cli, compilation
from molora_jax.checkpoints.resolve import cache_folder

_NEW = flags.DEFINE_integer("new_tokens", 512, "Tokens of each answer.")
_RATIO = flags.DEFINE_float("ratio", 5.0, "Step time of the large model over the small one's, at least.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Runs of each candidate.")
_QUICK = flags.DEFINE_bool("quick", False, "Two runs each, of the sizes that the summary names.")

ROWS, SHARES = (1, 4, 16, 32), (0.05, 0.1, 0.35)
N, P = 16, 0.1
"""Where the summary's ratios are taken."""


def main() -> None:
    """Prints every policy's tokens per second, and what was predicted."""
    compilation.use_cache(cache_folder() / "xla")
    bench, quick = benchmarking.Bench("routing"), _QUICK.value
    repeats, new = 2 if quick else _REPEATS.value, _NEW.value
    summary = dict(theory_max_error=theory.theory_max_error(bench))
    summary["sim_max_error"] = theory.sim_max_error(bench, 10_000 if quick else 100_000)
    theory.virtual_clock(bench)
    models = pair(N, _RATIO.value)
    bench.add(step="pair", layers=[own.cfg.layers for own in models], width=[own.cfg.width for own in models])
    grid = Grid(bench, models, N, new, repeats)
    summary |= headline(bench, grid, models, new)
    for rows in () if quick else ROWS:
        other = grid if rows == N else Grid(bench, models, rows, 128, 3)
        for share in SHARES:
            if (rows, share) != (N, P):
                other.routed(share)
    if not quick:
        programs.published(bench, models, N, 128, P)
    summary["handoff_ratio_4096_over_128"] = handoff.handoff(bench, models, (128, 512, 2048, 4096), 7)
    keys = ("host_syncs_per_token", "padding_ratio", "compiles_after_warmup")
    bench.finish({key: value for key, value in summary.items() if key not in keys} | {k: summary[k] for k in keys})


def headline(bench: benchmarking.Bench, grid: Grid, models, new: int) -> dict[str, float]:
    """All policies at N requests and a share of P."""
    _, large = grid.alone()
    with compilation.counted() as later:
        best, measured = grid.routed(P, (4, 8, 12, 16))
    eager, delayed, fused = (measured[name] for name in ("eager", "delayed", "fused"))
    contexts = range(PROMPT, PROMPT + new + 1, new // 4)
    naive = baselines.naive(models, P, contexts)
    bench.add(policy="no cache", share=P, tokens_per_s=naive)
    served = baselines.dispatched(models, N, grid.length)
    served(prompts(N, 1), P, 2)
    bench.add(policy="dispatcher", requests=N, share=P, tokens_per_s=served(prompts(N, 1), P, min(new, 32)))
    top = max(one.rate for name, one in measured.items() if name.startswith("delayed"))
    promised = grid.predicted(P, best, 1)
    return dict(
        delayed_over_eager=delayed.rate / eager.rate,
        predicted_delayed_over_eager=promised / grid.predicted(P, 1, 1),
        fused_over_eager=fused.rate / eager.rate,
        fused_over_naive=fused.rate / naive,
        routed_over_llm_only=fused.rate / large,
        predicted_over_measured=promised / delayed.rate,
        b_star_regret=1 - delayed.rate / top,
        host_syncs_per_token=fused.looks,
        padding_ratio=fused.padding,
        compiles_after_warmup=later.programs,
    )


if __name__ == "__main__":
    cli.run(main)
