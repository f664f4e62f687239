"""Decoders in the folders that Hugging Face's transformers reads and writes: `config.json` and safetensors."""

import dataclasses
import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.checkpoints import tensors
from molora_jax.checkpoints.json_file import read_object
from molora_jax.config import ModelConfig, UserError
from molora_jax.models import families, transformer
from molora_jax.typing import Params

MAX_SHARD_BYTES = 2 << 30
_HARMLESS = ("*.rotary_emb.inv_freq", "*.masked_bias", "*.attn.bias")
_VISION = ("vision_tower.", "multi_modal_projector.")
_ALIGNMENT = 64
"""Bytes; an aligned buffer becomes a CPU array of jax as it is, any other one is copied."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One array of the parameter tree and the tensors it is made of: one, or one a layer (`stack`)."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stack: bool

    def layer(self, i: int) -> "_Leaf":
        return _Leaf(self.names[i : i + 1], self.shape[1:], False)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.stack else self.shape


def load(
    folder: Path | str, *, dtype=jnp.float32, stacked: bool = True, sharding: Any = None
) -> tuple[ModelConfig, Params]:
    """Reads a decoder: its configuration and the parameter tree that `models.transformer.abstract` describes.

    Tensors are read one at a time, straight into the arrays, so that memory peaks little above the result.

    Args:
      folder: holds `config.json` and `model.safetensors`, or the shards that `model.safetensors.index.json` names.
      dtype: of the parameters; the file's bf16, f16, f32 or f64 is cast to it.
      stacked: every leaf of `params["layers"]` has a leading layer axis. If false, `params["layers"]` is a list of L
        trees, as a decoder that unrolls its layers takes them.
      sharding: where the arrays go: one `jax.sharding.Sharding` for all, or a tree of them with the structure of the
        result; each process reads only the parts its own devices hold. None is the default device.

    Raises:
      UserError: something is missing, cut short, has another shape, or is left over; the line names it.
    """
    folder = Path(folder)
    if jax.dtypes.canonicalize_dtype(dtype) != np.dtype(dtype):
        raise UserError(f"load: got dtype {np.dtype(dtype)}, which needs jax.config.update('jax_enable_x64', True)")
    raw = read_config(folder)
    cfg = families.from_hf(raw)
    entries = tensors.entries(folder)
    if raw["model_type"] == "gemma3":
        entries = _without_vision(folder, entries)
    plan = _plan(cfg, stacked)
    _check(folder, cfg, plan, entries)
    places = jax.tree.map(lambda _: sharding, plan) if _is_single(sharding) else sharding
    return cfg, jax.tree.map(lambda leaf, place: _array(leaf, entries, dtype, place), plan, places)


def save(
    folder: Path | str, cfg: ModelConfig, params: Params, *, dtype=None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes a decoder as a folder that `load` and transformers read; weights of an earlier export are replaced.

    Args:
      folder: made if it is not there.
      params: with stacked layers or with a list of L layers.
      dtype: of the file; None keeps the parameters' own.
      max_shard_bytes: what exceeds it is written as several files; at most one file's cast copy is held in memory.

    Raises:
      UserError: `params` is not the tree of `cfg`, or the family cannot express `cfg`.
    """
    folder = Path(folder)
    config = families.to_hf(cfg)
    plan = _plan(cfg, stacked=not isinstance(params.get("layers"), list | tuple))
    if jax.tree.structure(plan) != jax.tree.structure(params):
        raise UserError(f"save: got parameters of another structure than a {cfg.family} with {cfg.layers} layers has")
    sources = {}
    for leaf, array in zip(jax.tree.leaves(plan), jax.tree.leaves(params), strict=True):
        if array.shape != leaf.shape:
            raise UserError(f"save: got shape {array.shape} for {leaf.names[0]}, expected {leaf.shape}")
        sources |= _sources(leaf, array, np.dtype(dtype or array.dtype))
    tensors.write(folder, sources, max_shard_bytes)
    dtypes = {source.dtype.name for source in sources.values()}
    stored = {"torch_dtype": dtypes.pop()} if len(dtypes) == 1 else {}
    (folder / "config.json").write_text(json.dumps(config | stored, indent=2) + "\n")


def read_config(folder: Path) -> families.Json:
    """The contents of `folder/config.json`.

    Raises:
      UserError: no such folder or file, or it holds no JSON object.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: got no such folder, expected one with config.json and {tensors.SINGLE}")
    return read_object(folder / "config.json", expected="the config.json of a HF folder")


def _is_single(sharding) -> bool:
    return sharding is None or isinstance(sharding, jax.sharding.Sharding)


def _plan(cfg: ModelConfig, stacked: bool) -> Params:
    """The parameter tree, with a `_Leaf` for every array."""

    def leaf(path, abstract) -> _Leaf:
        keys = tuple(key.key for key in path)
        name = families.hf_name(cfg, keys)
        if keys[0] != "layers":
            return _Leaf((name,), abstract.shape, False)
        return _Leaf(tuple(name.format(i) for i in range(cfg.layers)), abstract.shape, True)

    plan = jax.tree_util.tree_map_with_path(leaf, transformer.abstract(cfg))
    if not stacked:
        layers = plan["layers"]
        plan["layers"] = [jax.tree.map(lambda leaf, i=i: leaf.layer(i), layers) for i in range(cfg.layers)]
    return plan


def _without_vision(folder: Path, entries: dict[str, tensors.Entry]) -> dict[str, tensors.Entry]:
    """Text decoder of a Gemma 3 that sees images, under the names of one that does not."""
    kept, dropped = {}, 0
    for name, entry in entries.items():
        bare = name.removeprefix("model.")
        if bare.startswith(_VISION):
            dropped += 1
        elif name.startswith("model.language_model."):
            kept["model." + name.removeprefix("model.language_model.")] = entry
        else:
            kept[name.removeprefix("language_model.")] = entry
    print(f"{folder}: the {dropped} tensors that see images are left out; only text is supported", file=sys.stderr)
    return kept


def _check(folder: Path, cfg: ModelConfig, plan: Params, entries: dict[str, tensors.Entry]) -> None:
    """Raises unless the files hold exactly the tensors of the plan, in the right shapes, in a float dtype."""
    expected = {name: leaf.tensor_shape for leaf in jax.tree.leaves(plan) for name in leaf.names}
    if missing := [name for name in expected if name not in entries]:
        hint = (
            "; if its head is the embedding, set tie_word_embeddings in config.json"
            if missing == ["lm_head.weight"]
            else ""
        )
        raise UserError(f"{folder}: got a {cfg.family} checkpoint without {_some(missing)}{hint}")
    for name, shape in expected.items():
        if entries[name].shape != shape:
            raise UserError(f"{folder}: got shape {entries[name].shape} for {name}, expected {shape}")
        if entries[name].dtype not in tensors.DTYPES:
            raise UserError(
                f"{folder}: got dtype {entries[name].dtype} for {name}, expected one of {', '.join(tensors.DTYPES)}; "
                "quantised checkpoints are not supported"
            )
    unused = [n for n in entries if n not in expected and not any(fnmatch.fnmatch(n, known) for known in _HARMLESS)]
    if cfg.tied and "lm_head.weight" in unused:
        _check_tied(folder, entries)
        unused.remove("lm_head.weight")
    if unused:
        raise UserError(f"{folder}: got {_some(unused)}, which no {cfg.family} decoder with this config.json has")


def _check_tied(folder: Path, entries: dict[str, tensors.Entry]) -> None:
    embed, head = entries["model.embed_tokens.weight"], entries["lm_head.weight"]
    rows = max(1, (1 << 22) // embed.shape[1])
    equal = embed.shape == head.shape and head.dtype in tensors.DTYPES
    for start in range(0, embed.shape[0] if equal else 0, rows):
        part = (slice(start, min(start + rows, embed.shape[0])), slice(0, embed.shape[1]))
        left, right = (np.empty((part[0].stop - start, embed.shape[1]), np.float64) for _ in range(2))
        tensors.read(embed, left, part)
        tensors.read(head, right, part)
        equal = equal and np.array_equal(left, right)
    if not equal:
        raise UserError(
            f"{folder}: config.json ties the head to the embedding, but lm_head.weight differs from it; "
            "set tie_word_embeddings to false to use it, or remove it from the file"
        )


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")


def _array(leaf: _Leaf, entries: dict[str, tensors.Entry], dtype, sharding) -> jax.Array:
    if sharding is None:
        return jax.device_put(_part(leaf, entries, dtype, (slice(None),) * len(leaf.shape)))
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: _part(leaf, entries, dtype, index))


def _part(leaf: _Leaf, entries: dict[str, tensors.Entry], dtype, index: tuple[slice, ...]) -> np.ndarray:
    """Reads `index` of the leaf into fresh memory that jax can adopt without a copy."""
    index = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, leaf.shape, strict=True))
    out = _aligned(tuple(s.stop - s.start for s in index), dtype)
    if not leaf.stack:
        tensors.read(entries[leaf.names[0]], out, index)
        return out
    for row, name in zip(out, leaf.names[index[0]], strict=True):
        tensors.read(entries[name], row, index[1:])
    return out


def _aligned(shape: tuple[int, ...], dtype) -> np.ndarray:
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def _sources(leaf: _Leaf, array: jax.Array, dtype: np.dtype) -> dict[str, tensors.Source]:
    def make(i: int) -> np.ndarray:
        host = np.asarray(array)
        return (host[i] if leaf.stack else host).astype(dtype, copy=False)

    return {name: tensors.Source(leaf.tensor_shape, dtype, lambda i=i: make(i)) for i, name in enumerate(leaf.names)}
