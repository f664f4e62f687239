"""Data and tensors of a file that `torch.save` wrote, read without torch and without running anything that is in it.

Such a file is a zip: a pickle, and beside it the bytes of every tensor. A pickle is a program for a stack machine. The
machine here knows the instructions that plain data is made of; of all that a program may call, it knows how a tensor is
put together and nothing else.
"""

import math
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from molora_jax.config import UserError

_DTYPES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False, b")": ()}
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
_TEXTS = {b"X": "<I", b"\x8c": "<B", b"\x8d": "<Q"}
_PLACES = {b"q": "<B", b"r": "<I", b"h": "<B", b"j": "<I"}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_SKIPPED = {b"\x80": 1, b"\x95": 8}  # the protocol's number; the length of a frame


class _Name(NamedTuple):
    """Something that the program would import."""

    module: str
    name: str


class _Storage(NamedTuple):
    """The bytes of one or more tensors: their dtype, file and number of elements."""

    dtype: type
    key: str
    size: int


def load(file: Path | str) -> Any:
    """What was saved: dicts, lists, tuples, strings, numbers, and tensors as arrays of their dtype.

    Raises:
      UserError: no zip of `torch.save`, one that is cut short, or one with anything else in it.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            program = next(name for name in names if name.endswith("/data.pkl"))
            root = program.removesuffix("data.pkl")
            if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
                raise UserError(f"{file}: got a big-endian file, expected a little-endian one; save it again")
            read = lambda key: archive.read(f"{root}data/{key}")
            return _Machine(archive.read(program), read).run()
    except UserError as e:
        raise UserError(f"{file}: {e}") from None
    except StopIteration:
        raise UserError(f"{file}: got a zip without data.pkl, expected what torch.save writes") from None
    except (OSError, zipfile.BadZipFile) as e:
        raise UserError(f"{file}: got no file of torch.save, torch 1.6 or later ({e})") from None
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as e:
        raise UserError(
            f"{file}: got a file of torch.save that is damaged ({e!r}); download or save it again"
        ) from None


class _Machine:
    """Runs a pickle's program, or refuses it.

    Attributes:
      read: bytes of a tensor's storage, by its key.
    """

    def __init__(self, program: bytes, read: Callable[[str], bytes]):
        self.program, self.at, self.read = program, 0, read
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[_Storage, np.ndarray] = {}

    def run(self) -> Any:
        while (op := self.take(1)) != b".":
            if op in _SKIPPED:
                self.take(_SKIPPED[op])
            elif op in _CONSTANTS:
                self.stack.append(_CONSTANTS[op])
            elif op in _NUMBERS:
                self.stack.append(self.number(_NUMBERS[op]))
            elif op in _TEXTS:
                self.stack.append(self.take(self.number(_TEXTS[op])).decode())
            elif op in _TUPLES:
                self.stack[-_TUPLES[op] :] = [tuple(self.stack[-_TUPLES[op] :])]
            elif op in b"}]":
                self.stack.append({} if op == b"}" else [])
            elif op in b"qr\x94":
                self.memo[len(self.memo) if op == b"\x94" else self.number("<B" if op == b"q" else "<I")] = self.stack[
                    -1
                ]
            elif op in b"hj":
                self.stack.append(self.memo[self.number(_PLACES[op])])
            elif op == b"(":
                self.marks.append(len(self.stack))
            elif op == b"\x8a":
                self.stack.append(int.from_bytes(self.take(self.number("<B")), "little", signed=True))
            else:
                self.build(op)
        (result,) = self.stack
        return result

    def build(self, op: bytes) -> None:
        """The instructions that combine what lies on the stack."""
        if op == b"t":
            self.stack.append(tuple(self.since_mark()))
        elif op in b"ae":
            items = [self.stack.pop()] if op == b"a" else self.since_mark()
            self.stack[-1].extend(items)
        elif op in b"su":
            items = [self.stack.pop(-2), self.stack.pop()] if op == b"s" else self.since_mark()
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif op == b"c":
            self.stack.append(_Name(self.line(), self.line()))
        elif op == b"\x93":
            self.stack.append(_Name(self.stack.pop(-2), self.stack.pop()))
        elif op == b"Q":
            self.stack.append(_storage(self.stack.pop()))
        elif op == b"R":
            args, name = self.stack.pop(), self.stack.pop()
            self.stack.append(self.call(name, args))
        elif op == b"b" and isinstance(self.stack[-2], dict):
            self.stack.pop()  # attributes of a state dict: versions of its modules
        else:
            raise UserError(f"got the instruction {op!r}, expected data and tensors alone")

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.program):
            raise IndexError("the program ends too early")
        self.at += count
        return self.program[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        return self.take(self.program.index(b"\n", self.at) + 1 - self.at)[:-1].decode()

    def since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items, self.stack[mark:] = self.stack[mark:], []
        return items

    def call(self, name: Any, args: tuple) -> Any:
        if name == ("collections", "OrderedDict") and args == ():
            return {}
        if name == ("torch._utils", "_rebuild_parameter"):
            return args[0]
        if name == ("torch._utils", "_rebuild_tensor_v2"):
            return self.tensor(*args[:4])
        called = ".".join(name) if isinstance(name, _Name) else repr(name)
        raise UserError(f"got a call of {called}, expected data and tensors alone; it was not made")

    def tensor(self, storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> np.ndarray:
        if storage not in self.storages:
            self.storages[storage] = np.frombuffer(self.read(storage.key), storage.dtype, storage.size)
        flat, count = self.storages[storage], math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if count else 0
        if min((offset, *size, *stride)) < 0 or last >= max(len(flat), 1) or count > len(flat):
            raise UserError(f"got a tensor of {size} in a storage of {len(flat)}, expected one that fits into it")
        steps = [step * flat.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(flat[offset:], size, steps, writeable=False).copy()


def _storage(reference: tuple) -> _Storage:
    kind, name, key, _, size = reference
    if kind != "storage" or name.module != "torch" or name.name not in _DTYPES:
        raise UserError(f"got a storage {'.'.join(name)}, expected one of {', '.join(_DTYPES)}")
    return _Storage(_DTYPES[name.name], key, size)
