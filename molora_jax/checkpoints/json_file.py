"""JSON objects read from files that a user may have broken."""

import json
from pathlib import Path
from typing import Any

from molora_jax.config import UserError


def read_object(file: Path, *, expected: str) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
      UserError: no such file, where `expected` says what it should be, or it holds no JSON object.
    """
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{file}: got no such file, expected {expected}") from None
    except ValueError as e:
        raise UserError(f"{file}: got no JSON ({e}); download or export it again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file}: got a JSON {type(raw).__name__}, expected an object")
    return raw
