"""Measures which method is the fastest at each shape on this device, and writes the table that the library reads.

    python -m pallas_kernels.routed_lora.tune [FILE]

FILE defaults to `tuned/<device kind>.json` of the package. Takes ten minutes on two CPU cores, two on a GPU.
"""

import functools
import itertools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import common
from pallas_kernels.routed_lora import gpu, reference, specs, xla
from pallas_kernels.routed_lora.layout import banks

REPEATS = 7
GRIDS = {
    "cpu": [dict(D=1024, F=1024, E=e, R=r) for e, r in itertools.product((2, 4, 8, 16, 64), (16, 64))],
    "gpu": [dict(D=d, F=f, E=e, R=r) for (d, f), e, r in itertools.product([(2048, 6144)], (4, 16, 64), (16, 64))],
}
TOKENS = (1, 8, 32, 128, 1024)
METHODS = {
    "cpu": [("rows", 1), ("gather", 0), ("packed", 0), ("loop", 8), ("loop", 16), ("loop", 32), ("loop", 64)],
    "gpu": [("gather", 0), ("packed", 0), ("tiles", 16), ("tiles", 64)],
}


def operands(spec: specs.Spec):
    """(x, banks, ids, multiplier) with tokens spread evenly over the experts."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape, scale=shape[-1] ** -0.5), spec.dtype)
    pair = banks(normal(spec.E, spec.R, spec.D), normal(spec.E, spec.F, spec.R))
    ids = jnp.asarray(rng.integers(0, spec.E, spec.N), jnp.int32)
    return normal(spec.N, spec.D), pair, ids, jnp.ones(spec.N, jnp.float32)


def candidates(spec: specs.Spec, platform: str) -> dict:
    """Compiled programs by (method, tile); a gather too big to be allowed is left out."""
    x, pair, ids, mult = operands(spec)
    runs = {m: functools.partial(xla.hard, method=m) for m in METHODS[platform]}
    if spec.N * spec.R * (spec.D + spec.F) > xla.GATHER_LIMIT:
        runs.pop(("gather", 0))
    if platform == "gpu" and gpu.why_not(x, pair, soft=False) is None:
        runs["kernel", 0] = gpu.hard

    def program(run):
        forward = lambda x, a, b, ids, mult: run(x, banks(a, b), ids, mult)[0].astype(x.dtype)
        return jax.jit(forward).lower(x, pair.down, pair.up, ids, mult).compile()

    return {name: program(run) for name, run in runs.items()}


def measure(spec: specs.Spec, platform: str) -> dict:
    """Shortest of `REPEATS` interleaved runs, in ms, by (method, tile); raises where one gives another result."""
    x, pair, ids, mult = operands(spec)
    args = (x, pair.down, pair.up, ids, mult)
    want = np.asarray(reference.hard(x, pair, ids, mult)[0], np.float32)
    programs = candidates(spec, platform)
    best = dict.fromkeys(programs, np.inf)
    for name, run in programs.items():
        error = np.max(np.abs(np.asarray(run(*args), np.float32) - want)) / np.max(np.abs(want))
        if not error < 0.02:
            raise ArithmeticError(f"{name} is off by {error:.1e} at {spec}")
    for _, (name, run) in itertools.product(range(REPEATS), programs.items()):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        best[name] = min(best[name], time.perf_counter() - start)
    return {name: round(seconds * 1e3, 4) for name, seconds in best.items()}


def row(spec: specs.Spec, times: dict) -> dict:
    dims = {name: getattr(spec, name) for name in "NDFER"}
    ms = {f"{name}{tile or ''}": value for (name, tile), value in times.items()}
    kernel = times.pop(("kernel", 0), None)
    method, tile = min(times, key=times.get)
    choice = {"method": method, "tile": tile}
    if kernel is not None:
        choice["backend"] = "gpu" if kernel < times[method, tile] else "xla"
    return {"dims": dims, "choice": choice, "ms": ms}


def main(path: str | None = None) -> None:
    platform, kind = common.target()
    if platform not in GRIDS:
        raise SystemExit(f"tune: nothing to choose on {platform}; its kernel has one way for each shape")
    file = pathlib.Path(path or pathlib.Path(__file__).parent / "tuned" / f"{common.slug(kind)}.json")
    dtype = "float32" if platform == "cpu" else "bfloat16"
    rows = []
    for size, n in itertools.product(GRIDS[platform], TOKENS):
        spec = specs.Spec(N=n, dtype=dtype, **size)
        rows.append(row(spec, measure(spec, platform)))
        print(json.dumps(rows[-1]), flush=True)
    file.parent.mkdir(exist_ok=True)
    lines = ",\n".join("  " + json.dumps(r) for r in rows)
    file.write_text(f'{{"jax": "{jax.__version__}", "dtype": "{dtype}", "choices": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
