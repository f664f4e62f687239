"""A state as the arrays and the JSON value of a checkpoint, and back."""

import base64
import dataclasses
from typing import Any

import jax

from molora_jax import distributed
from molora_jax.checkpoints.store import Store
from molora_jax.config import UserError
from molora_jax.training.partition import Leaves, path_name
from molora_jax.training.step import State


def arrays(state: State) -> Leaves:
    """Every array of a state by its path; the random key as its words."""
    state = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def from_arrays(like: State, found: Leaves) -> State:
    """The state of which `arrays` gave `found`; `like` has its structure."""
    words = dataclasses.replace(like, key=jax.random.key_data(like.key))
    state = jax.tree_util.tree_map_with_path(lambda path, _: found[path_name(path)], words)
    return dataclasses.replace(state, key=jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(like.key)))


def save(store: Store, step: int, state: State, position: Any, *, score: float | None = None) -> None:
    """Begins to write a checkpoint of a run; the state may be donated then.

    Args:
      position: of this process's data, as its iterator gives it: a JSON value, or bytes.
      score: what the best checkpoint is chosen by.
    """
    if isinstance(position, bytes):
        position = dict(base64=base64.b64encode(position).decode())
    store.save(step, arrays(state), dict(data=distributed.gather(position)), score=score)


def restore(store: Store, like: State, step: int | None = None) -> tuple[int, State, Any]:
    """(step, state, position of the data) of a checkpoint, by default the newest.

    Raises:
      UserError: there is none, or it is of a run with other trained leaves, another optimiser or other processes.
    """
    step, found, extra = store.restore(arrays(like), step)
    if len(extra["data"]) != jax.process_count():
        raise UserError(
            f"resume: got a checkpoint of {len(extra['data'])} processes for {jax.process_count()}, expected as many: "
            "each goes on with its own part of the data"
        )
    position = extra["data"][jax.process_index()]
    if isinstance(position, dict) and set(position) == {"base64"}:
        position = base64.b64decode(position["base64"])
    return step, from_arrays(like, found), position
