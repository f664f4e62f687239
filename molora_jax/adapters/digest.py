"""What tells one adapter, or one base model, from another: a hash of its content."""

import hashlib
from typing import Any

import jax
import ml_dtypes
import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.composition import Composition
from molora_jax.typing import Params

SAMPLES = 32
"""Rows and columns of a base's weight that are looked at."""


def adapter_digest(adapter: Adapter) -> str:
    """Of all that an adapter does to a base, whatever its name, its file and the order of its sites."""
    digest = hashlib.blake2b(digest_size=16)
    for path, layer, weights in sorted(adapter.weights(), key=lambda item: item[:2]):
        _add(digest, f"{path} {layer} {weights.scale!r}", weights.a, weights.b, weights.magnitude, weights.bias)
    for kind in (adapter.full, adapter.base):
        for path, column in sorted(kind.items()):
            _add(digest, f"{path}", *column)
    for group in adapter.gates:
        for layer, core in enumerate(group.cores):
            for path, leaf in _leaves(core):
                _add(digest, f"{adapter.gate} {group.sites} {layer} {path}", np.asarray(leaf))
    return digest.hexdigest()


def base_digest(params: Params) -> str:
    """Of a base, whether its layers are stacked or unrolled and in whatever dtype it is kept.

    Takes `SAMPLES` evenly spaced rows and columns of every weight, rounded to bf16, so that a model read in bf16 and in
    fp32 is the same one.
    """
    digest = hashlib.blake2b(digest_size=16)
    layers = params["layers"]
    for path, leaf in _leaves({key: value for key, value in params.items() if key != "layers"}):
        _add(digest, path, _sampled(leaf))
    if isinstance(layers, list):
        columns = [dict(_leaves(layer)) for layer in layers]
        found = {path: np.stack([_sampled(column[path]) for column in columns]) for path in columns[0]}
    else:
        found = {path: _sampled(leaf, skip=1) for path, leaf in _leaves(layers)}
    for path in sorted(found):
        _add(digest, f"layers{path}", found[path])
    return digest.hexdigest()


def tree_digest(tree: Any) -> str:
    """Of any pytree: what is static in it, and the content of its arrays."""
    digest = hashlib.blake2b(f"{jax.tree_util.tree_structure(tree)}".encode(), digest_size=16)
    for path, leaf in _leaves(tree):
        _add(digest, path, np.asarray(leaf))
    return digest.hexdigest()


def composition_digest(found: Composition) -> list[str | None]:
    """Of the router, and of the adapter that all tokens have, if any; the experts have digests of their own."""
    return [tree_digest(found.mixer), found.attention and adapter_digest(found.attention)]


def _leaves(tree) -> list[tuple[str, jax.Array]]:
    return sorted((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree))


def _sampled(leaf: jax.Array, skip: int = 0) -> np.ndarray:
    steps = [slice(None)] * skip + [slice(None, None, -(-size // SAMPLES)) for size in leaf.shape[skip:]]
    return np.asarray(leaf[tuple(steps)]).astype(np.float32).astype(ml_dtypes.bfloat16)


def _add(digest, label: str, *arrays: np.ndarray | None) -> None:
    digest.update(label.encode())
    for array in arrays:
        digest.update(b"none" if array is None else f"{array.dtype} {array.shape}".encode())
        if array is not None:
            digest.update(np.ascontiguousarray(array).view(np.uint8).tobytes())
