"""Experts that token ids call for: ranges of the vocabulary, and control tokens (Shah & Wagle 2026, MoLoRA)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.route import NONE
from molora_jax.config import UserError
from molora_jax.typing import Array, Bool, Int

KEEP = -3
"""In a table of control tokens: the token calls for no expert, and has that of the token before it."""


def ranges(named: Mapping[str | None, tuple[int, int]], vocab: int) -> dict[int, str | None]:
    """The rule that gives each token id in [low, high) an expert by name; None is the base.

    Raises:
      UserError: a range that is empty, leaves the vocabulary, or overlaps another.
    """
    last = None
    for name, (low, high) in sorted(named.items(), key=lambda item: item[1]):
        if not 0 <= low < high <= vocab:
            raise UserError(f"ranges: got [{low}, {high}) for {name!r}, expected 0 <= low < high <= {vocab}")
        if last is not None and low < last[1][1]:
            before, (start, end) = last
            raise UserError(
                f"ranges: got [{start}, {end}) for {before!r} and [{low}, {high}) for {name!r}, which both hold token "
                f"{low}, expected ranges apart from each other"
            )
        last = name, (low, high)
    return {token: name for name, (low, high) in named.items() for token in range(low, high)}


def table(rule: Mapping[int, str | None], slots: Mapping[str, int], vocab: int, other: int = NONE) -> np.ndarray:
    """[V]: the slot that each token id calls for, for `route.vocabulary_ids` or `switched`.

    Args:
      slots: of the experts, as `Library.resident`.
      other: of the token ids without a rule: `NONE`, or `KEEP` for control tokens.

    Raises:
      UserError: a token id or an expert that does not exist.
    """
    found = np.full(vocab, other, np.int32)
    for token, name in rule.items():
        if not 0 <= token < vocab:
            raise UserError(f"rule: got token id {token} for {name!r}, expected 0 to {vocab - 1}")
        if name is not None and name not in slots:
            raise UserError(f"rule: got {name!r}, expected one of {', '.join(map(repr, slots)) or 'no expert'}")
        found[token] = NONE if name is None else slots[name]
    return found


def switched(
    table: Int[Array, "V"],
    tokens: Int[Array, "B T"],
    first: Int[Array, "B"] | int = NONE,
    *,
    valid: Bool[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
) -> Int[Array, "B T"]:
    """Each token's expert where control tokens switch it: what the last one called for, its own included.

    Args:
      first: before any has.
      valid: pads call for nothing.
      segments: of packed rows, contiguous; each begins with `first`.
    """
    called = jnp.asarray(table)[tokens]
    places = jnp.arange(tokens.shape[1])
    calls = called != KEEP if valid is None else (called != KEEP) & valid
    last = jax.lax.cummax(jnp.where(calls, places, -1), axis=1)
    start = jnp.zeros_like(last)
    if segments is not None:
        begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
        start = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
    before = jnp.broadcast_to(jnp.asarray(first).reshape(-1, 1), tokens.shape)
    return jnp.where(last >= start, jnp.take_along_axis(called, jnp.maximum(last, 0), axis=1), before)
