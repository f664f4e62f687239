"""A tree of parameters taken apart by the paths of its leaves: what trains, and what is frozen."""

import collections
import dataclasses
import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from molora_jax.config import UserError
from molora_jax.typing import Array

Leaves = dict[str, Array]
"""Leaves by path: "params.embed.weight", "bank.layers.attn.q_proj.a"."""


def path_name(path: tuple) -> str:
    """The path of a leaf as text; entries of dicts, dataclasses and lists alike."""
    return ".".join(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path)


def matches(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a path fits one of some shell patterns, whose `*` also spans dots: "router.*", "bank.*.[ab]"."""
    patterns = tuple(patterns)
    return lambda path: any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


@dataclasses.dataclass(frozen=True)
class Partition:
    """What is needed to put a tree together again; made by `partition`.

    Attributes:
      tree: the structure.
      paths: of all leaves, in order.
      dtypes: of the trained leaves, as the model computes with them; their masters may be wider.
    """

    tree: Any
    paths: tuple[str, ...]
    dtypes: dict[str, Any]

    def join(self, trained: Leaves, frozen: Leaves) -> Any:
        """The tree with each trained leaf in the dtype that the model computes in."""
        own = {path: leaf.astype(self.dtypes[path]) for path, leaf in trained.items()}
        return self.tree.unflatten([own[path] if path in own else frozen[path] for path in self.paths])


def partition(
    tree: Any, trains: Callable[[str], bool], *, compute: tuple[Any, Callable[[str], bool]] | None = None
) -> tuple[Partition, Leaves, Leaves]:
    """(how to put it together, trained masters in fp32 or wider, frozen leaves as they are).

    Integers, flags and random keys never train. Trained leaves are copies: the tree that came in stays usable when a
    step has donated them.

    Args:
      tree: of dicts, registered dataclasses and lists, as {"params": …, "bank": …, "router": …}.
      trains: by path.
      compute: a dtype, and the paths whose leaves the model computes with in it; the others keep theirs.

    Raises:
      UserError: nothing trains, or two leaves have the same path.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = tuple(path_name(path) for path, _ in flat)
    if twice := [path for path, count in collections.Counter(paths).items() if count > 1]:
        raise UserError(f"training: got two leaves at {twice[0]!r}, expected keys without dots")
    trained, frozen, dtypes = {}, {}, {}
    for path, (_, leaf) in zip(paths, flat, strict=True):
        is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        dtype = compute[0] if compute and is_float and compute[1](path) else getattr(leaf, "dtype", None)
        if is_float and trains(path):
            trained[path] = jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32), copy=True)
            dtypes[path] = dtype
        else:
            frozen[path] = leaf if dtype is None or leaf.dtype == dtype else jnp.asarray(leaf, dtype)
    if not trained:
        raise UserError(f"training: got no leaf that trains among {_some(paths)}; change the groups' paths")
    return Partition(structure, paths, dtypes), trained, frozen


def _some(paths: tuple[str, ...]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
