"""What the kernels share: the choice of a backend, accumulation dtypes, and tables of measured choices."""

import functools
import importlib.resources
import json
import math
import re
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from absl import logging

Backend = Literal["auto", "reference", "xla", "tpu", "gpu"]
BACKENDS = ("auto", "reference", "xla", "tpu", "gpu")
KERNELS = ("tpu", "gpu")


class NotSupported(ValueError):  # noqa: N818 - the name states the fact, as NotImplemented does
    """A backend that cannot run these operands here. Its message is one line: why, and what to use instead."""


def accumulator(*dtypes) -> jnp.dtype:
    """The dtype that sums are taken in: fp32, or wider where an operand is wider."""
    return functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def target() -> tuple[str, str]:
    """(platform, device kind) that the running trace is for, as in ("tpu", "TPU v5 lite").

    It is the default device, unless an abstract mesh names another (`jax.sharding.AbstractDevice`): so are programs
    lowered ahead of time for a device that this process does not have.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None:
        device = jax.config.jax_default_device
    if not hasattr(device, "device_kind"):
        device = jax.devices(device)[0]
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    return platform, device.device_kind


@functools.cache
def warn_once(message: str) -> None:
    logging.warning("%s", message)


def choose_backend(op: str, backend: str, why_not: Mapping[str, str | None], *, interpret: bool = False) -> str:
    """The backend that will run: the asked one, or for "auto" the kernel of the platform, else "xla".

    Args:
      op: name of the operation, for messages.
      backend: one of `BACKENDS`.
      why_not: for each of `KERNELS`, why it cannot take these dtypes and static shapes; None where it can.
      interpret: the kernel runs in the Pallas interpreter, so it needs no device of its platform.

    Raises:
      NotSupported: an explicit backend that cannot run.
      ValueError: a backend that does not exist.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{op}: got backend={backend!r}, expected one of {', '.join(BACKENDS)}")
    platform, _ = target()
    if backend == "auto":
        if platform not in KERNELS:
            return "xla"
        if why_not[platform] is None:
            return platform
        warn_once(f"{op}: the {platform} kernel {why_not[platform]}; the xla path runs instead")
        return "xla"
    if backend in KERNELS:
        if why_not[backend] is not None:
            raise NotSupported(f"{op}: the {backend} kernel {why_not[backend]}; use backend='auto' or 'xla'")
        if platform != backend and not interpret:
            raise NotSupported(f"{op}: the {backend} kernel does not run on {platform}; use backend='auto' or 'xla'")
    return backend


def slug(device_kind: str) -> str:
    """File name of a device kind: "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")


@functools.cache
def tuned_table(package: str, device_kind: str) -> dict:
    """The measured choices that `package` ships for a device kind; empty where none were measured.

    The file is `tuned/<slug>.json` in the package: {"<what is chosen>": [{"dims": {name: size}, "choice": {...}}]}.
    """
    file = importlib.resources.files(package) / "tuned" / f"{slug(device_kind)}.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def tuned(package: str, what: str, *, reach: float = 4.0, **dims: int) -> dict | None:
    """The choice measured nearest to `dims` in log space, or None: then the caller's heuristic decides.

    Args:
      package: whose table is read.
      what: the key of the choice in it.
      reach: a measurement counts only if no size is off by more than this factor.
      **dims: static sizes, with the names of the table.
    """
    _, device_kind = target()
    best, best_distance = None, math.inf
    for row in tuned_table(package, device_kind).get(what, ()):
        off = [abs(math.log2(max(size, 1) / row["dims"][name])) for name, size in dims.items()]
        if max(off) <= math.log2(reach) and sum(off) < best_distance:
            best, best_distance = row["choice"], sum(off)
    return best
