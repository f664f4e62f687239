"""What the conformance rows are fed: small random bases, and adapter folders written without the code under test."""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import ml_dtypes
import numpy as np
import safetensors.numpy

from molora_jax.checkpoints import hf
from molora_jax.models import families, transformer

Tensors = dict[str, np.ndarray]
ROOT = "base_model.model.model."
Q = "layers.{}.self_attn.q_proj"
TOKENS = np.random.default_rng(7).integers(0, 97, 12)
_SHAPES = {
    "q_proj": ("layers.{}.self_attn.q_proj", 64, 64),
    "v_proj": ("layers.{}.self_attn.v_proj", 32, 64),
    "down_proj": ("layers.{}.mlp.down_proj", 64, 96),
}
_BASE = dict(
    model_type="llama",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
DTYPES = {"untied": np.float32, "tied": np.float32, "bfloat16": ml_dtypes.bfloat16}
"""The bases, and the dtype in which each is kept."""


class Inputs:
    """Writes folders below one; equal arguments give equal contents."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._written = 0

    @functools.cache  # noqa: B019  an object of this class lives as long as the program
    def base(self, kind: str) -> pathlib.Path:
        """A Llama of two layers and width 64, as transformers reads it; `kind` is a key of `DTYPES`."""
        cfg = families.from_hf(_BASE | dict(tie_word_embeddings=kind == "tied"))
        hf.save(self.folder / f"base-{kind}", cfg, transformer.init(cfg), dtype=DTYPES[kind])
        return self.folder / f"base-{kind}"

    def base_tensors(self, kind: str) -> Tensors:
        """The parameters of a base, by the names of transformers."""
        return safetensors.numpy.load_file(self.base(kind) / "model.safetensors")

    def new(self) -> pathlib.Path:
        """A path that is not taken."""
        self._written += 1
        return self.folder / f"{self._written}"

    def adapter(
        self,
        *,
        modules: Sequence[str] = ("q_proj", "v_proj"),
        rank: int | Callable[[str], int] = 4,
        seed: int = 0,
        dtype=np.float32,
        edit: Callable[[Tensors], Tensors] = lambda tensors: tensors,
        **config,
    ) -> pathlib.Path:
        """A folder as PEFT writes it, of updates large enough to change the tokens, α = 8.

        Args:
          rank: of all modules, or of each by its name, as "layers.0.self_attn.q_proj".
          edit: the tensors as they would be to those that are written.
          config: fields of `adapter_config.json`.
        """
        rng, tensors = np.random.default_rng(seed), {}
        for module in modules:
            form, out, width = _SHAPES[module]
            for name in map(form.format, range(2)):
                r = rank if isinstance(rank, int) else rank(name)
                a, b = rng.uniform(-1, 1, (r, width)) / 8, rng.standard_normal((out, r)) / 4
                tensors[f"{ROOT}{name}.lora_A.weight"] = a.astype(dtype)
                tensors[f"{ROOT}{name}.lora_B.weight"] = b.astype(dtype)
        fields = dict(peft_type="LORA", task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=list(modules))
        fields |= dict(r=rank) if isinstance(rank, int) else {}
        return self._write(edit(tensors), fields | config)

    def folded(self, *adapters: pathlib.Path, weights: Sequence[float] = (1.0,)) -> pathlib.Path:
        """The untied base with plain adapters folded in, W + Σ w·(8/r)·B A in fp64, as a model of its own."""
        tensors = self.base_tensors("untied")
        for folder, weight in zip(adapters, weights, strict=True):
            own = read(folder)
            for name, a in own.items():
                if name.endswith("lora_A.weight"):
                    b = own[name.replace("lora_A", "lora_B")].astype(np.float64)
                    at = name.removeprefix("base_model.model.").replace("lora_A.", "")
                    tensors[at] = (tensors[at] + weight * 8 / len(a) * b @ a).astype(np.float32)
                elif "lora_" not in name:
                    tensors[name.removeprefix("base_model.model.")] = own[name]
        folder = self.new()
        folder.mkdir()
        (folder / "config.json").write_bytes((self.base("untied") / "config.json").read_bytes())
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def _write(self, tensors: Tensors, config: Mapping) -> pathlib.Path:
        folder = self.new()
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(config))
        safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return folder


def read(folder: pathlib.Path) -> Tensors:
    """The tensors of an adapter folder."""
    return safetensors.numpy.load_file(folder / "adapter_model.safetensors")
