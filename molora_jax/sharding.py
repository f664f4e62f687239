"""Where arrays lie: logical axis names of dimensions, and the rules that give them to the axes of a device mesh.

Three mesh axes: `data` and `fsdp` share the rows of a batch, `fsdp` also cuts every weight, which is gathered where it
is used, and `tensor` cuts the heads and the MLP, whose results are summed. XLA derives the communication (GSPMD).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from molora_jax.config import UserError
from pallas_kernels.mesh import AXES

ROWS = AXES["rows"]
"""Mesh axes over which the rows of a batch are spread, those of every kernel too."""

RULES: Mapping[str, str] = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "channels": "tensor",
}
"""Logical axis to mesh axis. Any other is whole everywhere: the vocabulary and the layers are walked in slices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each mesh axis.

    Attributes:
      data: replicas; 0 for as many as there are devices left.
      fsdp: parts of every weight, and of the rows.
      tensor: parts of the heads and of the MLP.
    """

    data: int = 0
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        if self.data < 0 or min(self.fsdp, self.tensor) < 1:
            raise UserError(f"mesh: got {self}, expected positive sizes, or data=0 for all devices that are left")


def mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over `devices`, by default all of all processes.

    Raises:
      UserError: they cannot be laid out so.
    """
    devices = jax.devices() if devices is None else devices
    inner = config.fsdp * config.tensor
    shape = (config.data or len(devices) // inner, config.fsdp, config.tensor)
    if math.prod(shape) != len(devices):
        raise UserError(
            f"mesh: got data={config.data}, fsdp={config.fsdp}, tensor={config.tensor} for {len(devices)} devices, "
            "expected sizes whose product is their number"
        )
    return Mesh(np.asarray(devices).reshape(shape), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def placed(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """The sharding of an array with these logical axes; a dimension that does not divide stays whole."""
    return NamedSharding(mesh, spec(mesh, axes, shape))


def spec(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """Example: ("layers", "mlp", "embed") of [30 1536 576] gives (None, "tensor", "fsdp") on a mesh of 2·2·2."""
    found, used = [], set()
    for axis, size in zip(axes, shape, strict=True):
        to = RULES.get(axis)
        fits = to is not None and to not in used and size % mesh.shape[to] == 0
        found.append(to if fits else None)
        used.add(found[-1])
    return PartitionSpec(*found)


def whole(mesh: Mesh) -> NamedSharding:
    """All of it on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over all devices that hold different ones."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def row_parts(mesh: Mesh) -> int:
    """Into how many parts the rows are cut."""
    return math.prod(mesh.shape[axis] for axis in ROWS)
