"""What a system wrote and whether it was right, kept in a folder so that a long evaluation goes on where it stopped."""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from molora_jax import files
from molora_jax.adapters.digest import adapter_digest, base_digest, tree_digest
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.evaluation import systems
from molora_jax.evaluation.systems import System
from molora_jax.typing import Bool


def right(
    model: Model, system: System, examples: Sequence[Example], most: Sequence[int] | None, kept: Path | None, **how
) -> tuple[Bool[np.ndarray, "n"], float]:
    """Which of the questions a system answers rightly, and the seconds that it took, compilation included.

    Args:
      most: tokens of each answer, as for `systems.Answerer`.
      kept: folder that gets `SYSTEM-DIGEST.json`, of which the digest is of the base, the system, the questions and how
        they are asked; a file that is there is read, and nothing is asked.
      how: for `systems.Answerer`.

    Raises:
      UserError: the folder cannot be written to.
    """
    path = kept and kept / f"{system.name.replace(' ', '_')}-{digest(model, system, examples, most, how)}.json"
    if path and path.exists():
        found = json.loads(path.read_text())
        return np.array([answer["right"] for answer in found["answers"]], bool), found["seconds"]
    begun = time.perf_counter()
    written = systems.answers(model, system, examples, most, **how)
    verdicts = systems.right(examples, written)
    seconds = round(time.perf_counter() - begun, 2)
    if path:
        rows = zip(examples, verdicts.tolist(), written, strict=True)
        answers = [dict(id=example.id, right=verdict, text=text) for example, verdict, text in rows]
        _write(path, dict(system=system.name, seconds=seconds, answers=answers))
    return verdicts, seconds


def digest(model: Model, system: System, examples: Sequence[Example], most: Sequence[int] | None, how: dict) -> str:
    """Of all that decides what is written and what is right."""
    experts = [[expert.name, adapter_digest(expert)] for expert in system.experts]
    attention = None if system.attention is None else adapter_digest(system.attention)
    chosen = [system.single, dict(system.owner or {}), tree_digest((system.mixer, system.classifier))]
    asked = [[e.id, e.task, e.prompt, e.completion, e.answer] for e in examples]
    base = [repr(model.cfg), base_digest(model.params), model.tokenizer.backend.to_str()]
    whole = [base, experts, attention, chosen, asked, most and list(most), how]
    return hashlib.blake2b(json.dumps(whole).encode(), digest_size=8).hexdigest()


def _write(path: Path, values: dict) -> None:
    try:
        files.write(path, json.dumps(values, indent=1))
    except OSError as e:
        raise UserError(f"evaluate: got {e.strerror!r} writing to {path}, expected a folder with room") from None
