"""The safetensors files of a folder: listed, read a piece at a time, and written a shard at a time."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from molora_jax.config import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_PIECE_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies: its file, its name there, and the shape and the safetensors dtype it has there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor still to be written; `make` gives its values, and is called when its shard is written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def entries(folder: Path) -> dict[str, Entry]:
    """Lists the tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

    Raises:
      UserError: no such file, a shard that is not there, a file that is cut short or is no safetensors file.
    """
    found = {}
    for file in _files(folder):
        with _open(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
                piece = handle.get_slice(name)
                found[name] = Entry(file, name, tuple(piece.get_shape()), piece.get_dtype())
    return found


def read(entry: Entry, out: np.ndarray, part: tuple[slice, ...]) -> None:
    """Copies `part` (one slice of step 1 for every axis) of a tensor into `out`, casting it to out's dtype.

    The file is mapped anew for every piece: pages of a mapping that stays open would count as memory of the process,
    a second copy of the weights in the end.
    """
    rows, *columns = part
    step = max(1, _PIECE_BYTES // max(1, out[:1].size * np.dtype(DTYPES[entry.dtype]).itemsize))
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        with _open(entry.file) as handle:
            piece = handle.get_slice(entry.name)[(slice(start, stop), *columns)]
        out[start - rows.start : stop - rows.start] = piece


def write(folder: Path, sources: Mapping[str, Source], max_shard_bytes: int) -> None:
    """Writes the tensors as one file, or as numbered shards and an index when they exceed `max_shard_bytes`.

    Weights that the folder held before are replaced once all new ones are on disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(sources, max_shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        values = {key: np.ascontiguousarray(source.make()) for key, source in shard.items()}
        _save(values, folder / f"{name}.part", "pt")
    for old in (*folder.glob("model*.safetensors"), folder / INDEX):
        old.unlink(missing_ok=True)
    for name in names:
        (folder / f"{name}.part").rename(folder / name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(source.nbytes for source in sources.values())}}
        index["weight_map"] = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def write_file(values: dict[str, np.ndarray], file: Path, *, format: str) -> None:
    """Writes one file, which takes the place of an older one when it is whole; `format` goes into its metadata."""
    part = file.with_name(f"{file.name}.part")
    _save(values, part, format)
    part.rename(file)


def _save(values: dict[str, np.ndarray], file: Path, format: str) -> None:
    file.touch()
    mode = file.stat().st_mode
    safetensors.numpy.save_file(values, file, metadata={"format": format})
    file.chmod(mode)  # safetensors lets nobody but the owner read its files


def _shards(sources: Mapping[str, Source], max_shard_bytes: int) -> list[dict[str, Source]]:
    shards, room = [{}], max_shard_bytes
    for name, source in sources.items():
        if shards[-1] and source.nbytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = source
        room -= source.nbytes
    return shards


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if pickles := sorted(folder.glob("*.bin")):
        raise UserError(
            f"{folder}: got {pickles[0].name}, a pickle, which is never loaded; expected {SINGLE}: "
            f"convert it with transformers' save_pretrained(folder, safe_serialization=True)"
        )
    raise UserError(f"{folder}: got a folder without weights, expected {SINGLE} or {INDEX}")


def _indexed(folder: Path) -> list[Path]:
    try:
        names = sorted({str(name) for name in json.loads((folder / INDEX).read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / INDEX}: got no JSON with a weight_map; download or export it again") from None
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(
            f"{folder}: got {len(names) - len(missing)} of the {len(names)} shards that {INDEX} names, "
            f"{missing[0]} is missing; download or export the folder again"
        )
    return [folder / name for name in names]


def _open(file: Path):
    try:
        return safetensors.safe_open(file, "numpy")
    except (safetensors.SafetensorError, OSError) as e:
        raise UserError(f"{file}: got no whole safetensors file ({e}); download or export it again") from None
