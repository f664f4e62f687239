"""Rollouts with what they earned, as the arrays of a policy-gradient update."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from molora_jax.adapters.route import LAYER, NONE, Choice, Route
from molora_jax.config import UserError
from molora_jax.training.algorithms import Algorithm
from molora_jax.training.rollout import Rollout
from molora_jax.typing import Bool, Float, Int

_ARRAYS = [
    *("tokens", "weights", "segments", "positions", "valid", "each", "share", "advantages", "logprobs"),
    *("reference", "choices"),
]


@functools.partial(jax.tree_util.register_dataclass, data_fields=_ARRAYS, meta_fields=[], drop_fields=["ids"])
@dataclasses.dataclass(frozen=True)
class Experience:
    """B rollouts, a row each, prompts in front and pads behind; a batch as `training.batch` reads it.

    The arrays are numpy's on the host, jax's inside a step; any of their rows are a part of the batch.

    Attributes:
      tokens: prompts and what followed them; pads are 0.
      weights: of the loss of each sampled token, so that the sum over the batch is the algorithm's mean; else 0.
      segments: 1 for tokens, 0 for pads.
      positions: of the token in its row, from 0; 0 for pads.
      valid: False for pads.
      each: one over all sampled tokens of the batch for these, else 0: the weights of a plain mean.
      share: 1/B of each row, which add up to the weight of a batch.
      advantages: of the rollout.
      logprobs: of the sampled tokens under the policy that drew them; None where it is the one that learns.
      reference: theirs under the policy that is to be kept close; None where there is none.
      choices: experts of the tokens, as recorded, to be used again; None where the policy is one adapter.
      ids: per row, those of its prompt.
    """

    tokens: Int[np.ndarray, "B T"]
    weights: Float[np.ndarray, "B T"]
    segments: Int[np.ndarray, "B T"]
    positions: Int[np.ndarray, "B T"]
    valid: Bool[np.ndarray, "B T"]
    each: Float[np.ndarray, "B T"]
    share: Float[np.ndarray, "B"]
    advantages: Float[np.ndarray, "B"]
    logprobs: Float[np.ndarray, "B T"] | None
    reference: Float[np.ndarray, "B T"] | None = None
    choices: Int[np.ndarray, "B T K"] | None = None
    ids: tuple[str, ...] = ()

    @property
    def sampled(self) -> Bool[np.ndarray, "B T"]:
        """Which tokens the policy drew, the stop token included."""
        return self.each > 0

    def rows(self, index) -> "Experience":
        """Some of the rows as a batch of their own, their weights as they are."""
        ids = tuple(np.array(self.ids, object)[index]) if self.ids else ()
        return dataclasses.replace(jax.tree.map(lambda leaf: leaf[index], self), ids=ids)


def experience(
    how: Algorithm,
    rollouts: Sequence[Rollout],
    advantages: Float[np.ndarray, "B"],
    *,
    length: int,
    most: int,
    counts: Bool[np.ndarray, "B"] | None = None,
    choices: Sequence[Int[np.ndarray, "T K"]] | None = None,
    ids: Sequence[str] = (),
) -> Experience:
    """The batch of some rollouts.

    Args:
      length: T.
      most: tokens that a rollout could have at most, by which `mean="most"` divides.
      counts: whether a rollout is in the loss, as one that was cut may not be; in its denominator it stays.
      choices: of each rollout, as `rollout.chosen` gives them.

    Raises:
      UserError: a rollout that is longer than a row.
    """
    shape = (len(rollouts), length)
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    logprobs, sampled = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for row, rollout in enumerate(rollouts):
        start, stop = len(rollout.prompt), len(rollout.prompt) + len(rollout.tokens)
        if stop > length:
            raise UserError(f"rollouts: got one of {stop} tokens for rows of {length}, expected no more: raise length")
        tokens[row, :stop] = [*rollout.prompt, *rollout.tokens]
        positions[row, :stop] = np.arange(stop)
        logprobs[row, start:stop], sampled[row, start:stop] = rollout.logprobs, True
    lengths = np.array([len(r.prompt) + len(r.tokens) for r in rollouts])
    valid = np.arange(length) < lengths[:, None]
    kept = np.ones(len(rollouts), bool) if counts is None else np.asarray(counts)
    return Experience(
        tokens=tokens,
        weights=_weights(how, sampled, most) * kept[:, None].astype(np.float32),
        segments=valid.astype(np.int32),
        positions=positions,
        valid=valid,
        each=(sampled / sampled.sum()).astype(np.float32),
        share=np.full(len(rollouts), 1 / len(rollouts), np.float32),
        advantages=np.asarray(advantages, np.float32),
        logprobs=logprobs,
        choices=None if choices is None else _padded(choices, length),
        ids=tuple(ids),
    )


def replayed(batch: Experience) -> Route:
    """The experts that the tokens had when they were drawn, one decision a layer (K = L): what acted is what learns."""
    return Route({LAYER: Choice(ids=batch.choices.reshape(-1, batch.choices.shape[-1]).T)})


def _weights(how: Algorithm, sampled: Bool[np.ndarray, "B T"], most: int) -> Float[np.ndarray, "B T"]:
    """Of each sampled token in the algorithm's mean."""
    own, rollouts = sampled.sum(1, keepdims=True), len(sampled)
    parts = {"rollout": own * rollouts, "most": np.full_like(own, most * rollouts), "token": own.sum(keepdims=True)}
    return (sampled / np.broadcast_to(parts[how.mean], own.shape)).astype(np.float32)


def _padded(choices: Sequence[Int[np.ndarray, "T K"]], length: int) -> Int[np.ndarray, "B T K"]:
    found = np.full((len(choices), length, choices[0].shape[1]), NONE, np.int32)
    for row, own in enumerate(choices):
        found[row, : len(own)] = own
    return found
