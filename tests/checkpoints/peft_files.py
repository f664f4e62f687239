"""Adapters written as PEFT writes them, without the code under test; the golden ones; and how loading one ends."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from molora_jax.checkpoints import peft
from molora_jax.config import UserError
from tests import golden

FOLDER = golden.FOLDER / "peft"
Q = "base_model.model.model.layers.{}.self_attn.q_proj"
V = "base_model.model.model.layers.{}.self_attn.v_proj"
Q_PATH, V_PATH = ("layers", "attn", "q_proj"), ("layers", "attn", "v_proj")


def names() -> list[str]:
    """Every golden adapter, in the form for `pytest.mark.parametrize`."""
    return sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def logits(name: str) -> tuple[str, np.ndarray, np.ndarray]:
    """The base of a golden adapter, a row of tokens [T] and the logits [T, V] that PEFT gives them."""
    with np.load(FOLDER / name / "logits.npz", allow_pickle=False) as file:
        return file["base"].item(), file["tokens"], file["logits"]


def read(folder: pathlib.Path) -> tuple[dict, dict[str, np.ndarray]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, safetensors.numpy.load_file(folder / "adapter_model.safetensors")


def write(folder: pathlib.Path, config: dict, tensors: dict[str, np.ndarray]) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def small(rank: int = 4, dtype=np.float32, **changes) -> tuple[dict, dict[str, np.ndarray]]:
    """Config and tensors of an adapter of q and v of both layers of `llama_tied` (D 36, 36 and 12 features)."""
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    rng, tensors = np.random.default_rng(0), {}
    for module, width in ((Q, 36), (V, 12)):
        for layer in range(2):
            name = module.format(layer)
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, 36)).astype(dtype)
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((width, rank)).astype(dtype)
    return config | changes, tensors


def load(tmp_path, cfg, config, tensors, **kwargs):
    return peft.load(write(tmp_path / "x", config, tensors), cfg, **kwargs)


def refused(tmp_path, cfg, config, tensors, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        load(tmp_path, cfg, config, tensors, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused_then_allowed(tmp_path, cfg, config, tensors, kind: str):
    """The refusal names how to allow it; allowed, it loads and the report repeats the line."""
    line = refused(tmp_path, cfg, config, tensors)
    assert f"allow={{'{kind}'}}" in line
    adapter, report = load(tmp_path, cfg, config, tensors, allow={kind})
    assert line.startswith(report.notes[0])
    return line, adapter, report


def assert_same(adapter, tensors, *, skip=()):
    """The adapter holds the tensors of `small`, but for (path, layer) in `skip`."""
    for path, module in ((Q_PATH, Q), (V_PATH, V)):
        for layer in range(2):
            weights = adapter.sites[path][layer]
            if (path, layer) in skip:
                assert weights is None
                continue
            np.testing.assert_array_equal(weights.a, tensors[f"{module.format(layer)}.lora_A.weight"], strict=True)
            np.testing.assert_array_equal(weights.b, tensors[f"{module.format(layer)}.lora_B.weight"], strict=True)
            assert weights.scale == 2
