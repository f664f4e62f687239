"""Where the leaves of a model in training lie on a mesh, from the logical axes that its declaration names."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from molora_jax import sharding
from molora_jax.config import ModelConfig, UserError
from molora_jax.data.batch import Batch
from molora_jax.models.transformer import Transformer
from molora_jax.training.partition import Leaves, path_name

Axes = dict[str, tuple[str | None, ...]]
"""Logical axes by the path of a leaf."""


def declared(cfg: ModelConfig) -> Axes:
    """The axes of a decoder's parameters, layers stacked, by paths as "layers.attn.q_proj.weight"."""
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): tuple(leaf.get_metadata()["axes"]) for path, leaf in leaves}


@dataclasses.dataclass(frozen=True)
class Placement:
    """The shardings of a tree {"params": …, "bank": …, …} on a mesh; a leaf of unknown axes is whole everywhere.

    Attributes:
      mesh: of all devices of all processes.
      axes: of the decoder's parameters.
    """

    mesh: Mesh
    axes: Axes

    @classmethod
    def of(cls, cfg: ModelConfig, mesh: Mesh) -> "Placement":
        return cls(mesh, declared(cfg))

    def sharding(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Of the leaf at "params.layers.mlp.up_proj.weight", "bank.layers.mlp.up_proj.a", …"""
        axes = self._axes(path)
        if axes is None or len(axes) != len(shape):
            return sharding.whole(self.mesh)
        return sharding.placed(self.mesh, axes, shape)

    def _axes(self, path: str) -> tuple[str | None, ...] | None:
        top, _, rest = path.partition(".")
        if top == "params":
            return self.axes.get(rest)
        site, _, leaf = rest.rpartition(".")
        base = self.axes.get(f"{site}.weight") if top == "bank" else self.axes.get(f"layers.{rest}.weight")
        if base is None:
            return None
        *lead, out, width = base
        own = {"a": (None, None, width), "b": (None, None, out), "bias": (None, out), "growth": (None, out)}
        if top == "magnitudes":
            return (*lead, None, out)
        return (*lead, *own[leaf]) if leaf in own else None

    def params(self, abstract: Any) -> Any:
        """A tree of shardings for the decoder's parameters, as `checkpoints.hf.load` takes it."""
        name = lambda path, leaf: self.sharding(f"params.{path_name(path)}", leaf.shape)
        return jax.tree_util.tree_map_with_path(name, abstract)

    def leaves(self, leaves: Leaves) -> Leaves:
        """Leaves by path, moved to where they belong."""
        return {path: jax.device_put(leaf, self.sharding(path, jnp.shape(leaf))) for path, leaf in leaves.items()}

    def state(self, abstract: Any, trained: Leaves) -> Any:
        """Shardings of a training state: moments lie with the leaf that they are of, by its path; all else is whole."""

        def place(path, leaf):
            mine = [str(entry.key) for entry in path if str(getattr(entry, "key", None)) in trained]
            same = mine and trained[mine[-1]].shape == leaf.shape
            return self.sharding(mine[-1], leaf.shape) if same else sharding.whole(self.mesh)

        return jax.tree_util.tree_map_with_path(place, abstract)

    def batch(self, batch: Batch) -> Batch:
        """The rows of this process as part of the one batch of all processes.

        Raises:
          UserError: they do not divide over the devices.
        """
        parts, rows = sharding.row_parts(self.mesh), batch.tokens.shape[0] * jax.process_count()
        if rows % parts:
            raise UserError(
                f"mesh: got {rows} rows over {parts} devices of the axes {' and '.join(sharding.ROWS)}, expected a "
                "multiple of them"
            )
        place = sharding.rows(self.mesh)
        return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(place, leaf), batch)

    def gathered(self, tree: Any) -> Any:
        """The tree with every leaf whole on every device, for the host to read."""
        return jax.jit(lambda tree: tree, out_shardings=sharding.whole(self.mesh))(tree)
