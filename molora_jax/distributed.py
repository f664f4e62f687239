"""Several processes as one program: joining them, and what they must agree on."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from molora_jax.config import UserError


def initialize(coordinator: str | None = None, processes: int | None = None, index: int | None = None) -> None:
    """Joins the processes of a run, before anything else touches jax.

    On a TPU pod, under Slurm and Open MPI the arguments are found out; elsewhere all three are given.

    Args:
      coordinator: "host:port" of process 0, which all can reach.
      processes: how many there are.
      index: of this one, from 0.

    Raises:
      UserError: some but not all are given, or the others cannot be reached.
    """
    given = [value is not None for value in (coordinator, processes, index)]
    if any(given) and not all(given):
        raise UserError(
            f"distributed: got coordinator={coordinator}, processes={processes}, index={index}, expected all three, or "
            "none where the cluster tells them"
        )
    try:
        jax.distributed.initialize(coordinator, processes, index)
    except (ValueError, RuntimeError) as e:
        reason = " ".join(str(e).split())[:200]
        raise UserError(f"distributed: got {reason!r}, expected a run of processes that reach each other") from None


def gather(value: Any) -> list[Any]:
    """A JSON value of every process, in their order, on all of them; each must call this."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(text.size)).reshape(-1)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def is_first() -> bool:
    """Whether this process is the one that writes files and talks."""
    return jax.process_index() == 0
