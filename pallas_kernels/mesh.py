"""Kernels on a mesh of devices: XLA cannot cut a Pallas call, so each device gets its own part of the operands."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

AXES = {"rows": ("data", "fsdp"), "columns": ("tensor",)}
"""The mesh axes over which a kernel's own are cut: rows as those of a batch, columns as those of a weight."""

Dims = Sequence[str | None]
"""A key of `AXES`, or None for a dimension that is whole everywhere, for each dimension of an array."""


def over_mesh(kernel: Callable, ins: Sequence[Dims], outs: Any, *operands: jax.Array | None) -> Any:
    """kernel(*operands), on each device with its own part where the trace is for several (`jax.set_mesh`).

    The kernel must compute each part alone: nothing passes between devices but the sums of gradients of what is whole.

    Args:
      ins: dimensions of each operand, which may be None; one that does not divide over its mesh axes stays whole.
      outs: dimensions of what comes out, a tree of them as that of the results.
    """
    mesh = jax.sharding.get_abstract_mesh()
    cut = {name: tuple(axis for axis in axes if axis in mesh.auto_axes) for name, axes in AXES.items()}
    if math.prod(mesh.shape[axis] for axes in cut.values() for axis in axes) == 1:
        return kernel(*operands)
    for operand, dims in zip(operands, ins, strict=True):
        for size, name in zip(() if operand is None else operand.shape, dims, strict=False):
            if name is not None and size % math.prod(mesh.shape[axis] for axis in cut[name]):
                cut[name] = ()
    spec = lambda dims: PartitionSpec(*(cut[name] if name else None for name in dims))
    is_dims = lambda node: isinstance(node, tuple) and all(name is None or name in AXES for name in node)
    outs = jax.tree.map(spec, outs, is_leaf=is_dims)
    return jax.shard_map(kernel, in_specs=tuple(map(spec, ins)), out_specs=outs, check_vma=False)(*operands)
