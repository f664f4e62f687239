"""The parts of the benchmark of adapters; each adds its rows and returns ratios to the base, or to the peers' times."""

import functools
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.adapter_costs import mixtures, ops, runs
from molora_jax.benchmarking import Bench, Timing
from molora_jax.checkpoints import hf, peft
from molora_jax.config import ModelConfig
from molora_jax.typing import Params
from pallas_kernels.routed_lora import routed_lora

Time = Callable[[dict[str, Callable[[], float | None]]], dict[str, Timing]]
WIDTH, BATCH, LENGTH = 1024, 8, 64


def milliseconds(times: dict[str, Timing]) -> dict[str, float]:
    """Minimum and median of each candidate, as columns."""
    columns = {f"{name}_ms": 1e3 * timing.min for name, timing in times.items()}
    return columns | {f"{name}_median_ms": 1e3 * timing.median for name, timing in times.items()}


def finish(run: Callable, operands: tuple) -> None:
    """Runs it to its end."""
    jax.block_until_ready(run(*operands))


def op(bench: Bench, time: Time, sizes: Sequence[tuple[int, int]]) -> dict[tuple[str, int, int], float]:
    """One projection of width 1024 at (experts, tokens), each token with an expert drawn at random: theirs ÷ ours."""
    ways = dict(ours=functools.partial(routed_lora, rank_major=True))
    ways |= dict(onehot=ops.one_hot, concatenated=ops.concatenated, ragged_dot=ops.ragged_dot)
    jitted, draw, speedups = {name: jax.jit(way) for name, way in ways.items()}, np.random.default_rng(0), {}
    for experts, tokens in sizes:
        shapes = (tokens, WIDTH), (experts, runs.RANK, WIDTH), (experts, runs.RANK, WIDTH)
        x, a, b = (jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in shapes)
        given, scale = jnp.asarray(draw.integers(0, experts, tokens)), jnp.ones(experts)
        operands = dict.fromkeys(ways, (x, a, b, given, scale))
        operands["ragged_dot"] = (x, a.swapaxes(1, 2), b, given, scale)
        times = time({name: functools.partial(finish, jitted[name], given) for name, given in operands.items()})
        bench.add(part="op", experts=experts, tokens=tokens, **milliseconds(times))
        speedups |= {(name, experts, tokens): t.min / times["ours"].min for name, t in times.items()}
    return speedups


def peft_forward(
    bench: Bench, time: Time, cfg: ModelConfig, params: Params, counts: Sequence[int]
) -> dict[tuple[str, int], float]:
    """PEFT, eager as it comes (no torch.compile), with a thread a core: overhead of (way, experts); empty without it.

    Args:
      params: with stacked layers.
    """
    overheads, tokens = {}, np.random.default_rng(0).integers(0, cfg.vocab, (BATCH, LENGTH))
    with tempfile.TemporaryDirectory() as name:
        base, folders = pathlib.Path(name) / "base", [pathlib.Path(name) / str(i) for i in range(max(counts))]
        hf.save(base, cfg, params)
        for seed, folder in enumerate(folders):
            peft.save(folder, cfg, runs.adapter(cfg, params, folder.name, seed))
        for count in counts:
            found = mixtures.forwards(base, folders[:count], tokens, os.cpu_count())
            if found is None:
                print("peft: left out, it is not installed: pip install 'molora_jax[bench]'")
                return {}
            times = time(found)
            bench.add(part="peft forward", experts=count, tokens=tokens.size, **milliseconds(times))
            own = times.pop("base").min
            overheads |= {(way, count): timing.min / own for way, timing in times.items()}
    return overheads


def forward(
    bench: Bench,
    time: Time,
    cfg: ModelConfig,
    params: Params,
    shapes: Sequence[tuple[int, int]],
    counts: Sequence[int],
) -> dict[tuple[int, int], float]:
    """Whole-model logits of batches [B, T] with a bank: overhead of (experts, tokens)."""
    overheads, libraries = {}, {count: runs.library(cfg, params, count) for count in counts}
    for rows, length in shapes:
        candidates = {"base": runs.forward(cfg, params, None, rows, length)}
        candidates |= {f"n{count}": runs.forward(cfg, params, lib, rows, length) for count, lib in libraries.items()}
        times = time(candidates)
        bench.add(part="forward", tokens=rows * length, **milliseconds(times))
        overheads |= {(count, rows * length): times[f"n{count}"].min / times["base"].min for count in counts}
    return overheads


def decode(
    bench: Bench, time: Time, model: str, cfg: ModelConfig, params: Params, counts: Sequence[int]
) -> tuple[dict[int, float], int]:
    """Decoding 32 rows with a bank: overhead of each number of experts, and programs compiled by a swap while they run.

    Args:
      params: with a list of layers.
    """
    engines = {"base": runs.engine(cfg, params, None)}
    engines |= {f"n{count}": runs.engine(cfg, params, runs.library(cfg, params, count)) for count in counts}
    times = time({name: functools.partial(runs.decode, engine, 32) for name, engine in engines.items()})
    swaps, programs = runs.swap(engines[f"n{counts[-1]}"], runs.adapter(cfg, params, "0", 99))
    row = dict(part="decode", model=model, batch=runs.ROWS, swaps=swaps, swap_compiles=programs)
    bench.add(**row, **milliseconds(times))
    return {count: times[f"n{count}"].min / times["base"].min for count in counts}, programs


def plot(axes, forward: dict[tuple[int, int], float], peft: dict[tuple[str, int], float]) -> None:
    """Ours over the tokens of a pass; PEFT's ways where they were measured."""
    for count in sorted({count for count, _ in forward}):
        points = sorted((tokens, ratio) for (n, tokens), ratio in forward.items() if n == count)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"ours, {count} experts")
    for (way, count), ratio in peft.items():
        axes.plot([BATCH * LENGTH], [ratio], marker="x", linestyle="", label=f"PEFT {way}, {count} experts")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="tokens", ylabel="× the base of the same library", xscale="log", yscale="log")
    axes.set_title("Whole-model forward, rank 16 on all projections")
    axes.legend(fontsize="small")
