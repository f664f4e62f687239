"""Files that are there whole or not at all, whatever happens while they are written."""

import os
from pathlib import Path


def write(path: Path, content: str | bytes) -> None:
    """Puts the content beside the path first and then in its place; makes the folder.

    Raises:
      OSError: the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(part, path)
