"""Reads the golden files of `goldens/`: tiny models of every family and the logits that transformers gives them."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.config import ModelConfig
from molora_jax.models import families, transformer
from molora_jax.typing import Params

FOLDER = pathlib.Path(__file__).parent / "goldens"


def names() -> list[str]:
    """Every variant, in the form for `pytest.mark.parametrize`."""
    return sorted(path.stem for path in FOLDER.glob("*.npz"))


def load(name: str) -> tuple[dict, dict[str, np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """A variant's `config.json`, its fp32 weights by HF name, its rows of tokens [T], and their fp32 logits [T, V]."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        weights = {key.removeprefix("weights/"): file[key] for key in file if key.startswith("weights/")}
        rows = range(sum(key.startswith("tokens/") for key in file))
        return (
            json.loads(file["config"].item()),
            {key: value.astype(np.float32) for key, value in weights.items()},
            [file[f"tokens/{i}"] for i in rows],
            [file[f"logits/{i}"] for i in rows],
        )


def saved_config(name: str) -> dict:
    """The same `config.json` in the form in which transformers 5 saves it."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        return json.loads(file["saved_config"].item())


def params(name: str, dtype=jnp.float32) -> tuple[ModelConfig, Params]:
    """A variant's config, and its weights as the parameter tree of `models.transformer`, layers stacked."""
    hf, weights, _, _ = load(name)
    cfg = families.from_hf(hf)

    def read(path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        key = families.hf_name(cfg, tuple(entry.key for entry in path))
        if "{}" in key:
            return jnp.asarray(np.stack([weights[key.format(i)] for i in range(cfg.layers)]), leaf.dtype)
        return jnp.asarray(weights[key], leaf.dtype)

    return cfg, jax.tree_util.tree_map_with_path(read, transformer.abstract(cfg, dtype))
