"""Batches of a policy's own rollouts: played by the engine, judged, rewarded, and compared with the trainer."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.data.tasks.reward import Reward
from molora_jax.training.actor import Actor
from molora_jax.training.algorithms import Algorithm, advantages, equal, overlong
from molora_jax.training.experience import Experience, experience
from molora_jax.training.prompts import Prompts
from molora_jax.training.rollout import Rollout
from molora_jax.training.step import State
from molora_jax.typing import Array, Bool, Float

AGREEMENT = {"float32": 2e-5, "bfloat16": 5e-2}
"""How far log-probabilities of the engine and of the trainer may lie apart, as a fraction of the largest of them (of 1,
where none is larger): two ways to run a decoder, by the dtype of the base (the wider or the narrower of these)."""
REFILLS = 3
"""Further draws of prompts at most, for groups that have something to learn from."""

STRIDE = 16
"""Rows of a batch have a multiple of so many tokens."""

Scores = Callable[[Any, Experience], Float[Array, "B T"]]
"""(tree, batch) to the log-probabilities of the sampled tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """What a batch consists of.

    Attributes:
      how: the algorithm.
      prompts: P of a batch.
      per_prompt: G rollouts of each.
      temperature: of the rollouts.
      reward: for completions.
      overlong: last tokens of a rollout's most over which DAPO's penalty grows; 0 for none.
      mask_truncated: rollouts that were cut at their limit are not learnt from.
      shuffled: rewards are permuted within the batch: a control, from which nothing can be learnt.
      beta: whether there is a reference is whether this is positive.
      updates: that a batch is cut into.
      seed: of rollouts and permutations.
    """

    how: Algorithm
    prompts: int
    per_prompt: int
    temperature: float
    reward: Reward
    overlong: int
    mask_truncated: bool
    shuffled: bool
    beta: float
    updates: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Round:
    """A batch and what is to be told of it.

    Attributes:
      experience: the batch.
      facts: numbers by name.
    """

    experience: Experience
    facts: dict[str, float]

    @property
    def valid(self) -> Bool[np.ndarray, "B T"]:
        return self.experience.valid

    @property
    def ids(self) -> tuple[str, ...]:
        return self.experience.ids


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Prompts with the rollouts of each, G of them, and what those earned."""

    examples: list[Example]
    rollouts: list[list[Rollout]]
    right: Bool[np.ndarray, "P G"]
    rewards: Float[np.ndarray, "P G"]

    def __add__(self, other: "_Groups") -> "_Groups":
        joined = lambda name: np.concatenate([getattr(self, name), getattr(other, name)])
        lists = (self.examples + other.examples, self.rollouts + other.rollouts)
        return _Groups(*lists, joined("right"), joined("rewards"))

    def take(self, index: Sequence[int]) -> "_Groups":
        """Some of them."""
        pick = lambda values: [values[i] for i in index]
        return _Groups(pick(self.examples), pick(self.rollouts), self.right[index], self.rewards[index])


class Collector:
    """Draws batches for `training.loop`; where it is in its prompts is all that it must remember.

    Args:
      trained: what of a state the engine plays.
      tree: that of a state, for `scores`.
      start: the tree that is the reference.
      dtype: of the base.
    """

    def __init__(
        self,
        how: Drawing,
        actor: Actor,
        prompts: Prompts,
        *,
        trained: Callable[[State], Any],
        tree: Callable[[State], Any],
        start: Any,
        scores: Scores,
        dtype,
    ):
        self.how, self.actor, self.prompts = how, actor, prompts
        self._trained, self._tree, self._start, self._scores = trained, tree, start, scores
        self._tolerance = AGREEMENT["float32" if np.dtype(dtype).itemsize >= 4 else "bfloat16"]

    def get_state(self) -> dict[str, int]:
        """Where in the prompts it is, by which rollouts are seeded too."""
        return self.prompts.get_state()

    def set_state(self, state: Any) -> None:
        """Goes there."""
        self.prompts.set_state(state)

    def draw(self, state: State) -> Round:
        """Rollouts of the policy as it is in `state`.

        Raises:
          UserError: the engine gave the tokens other probabilities than the trainer does.
        """
        self.actor.sync(self._trained(state))
        drawn, refills = self._drawn()
        groups = self._chosen(drawn)
        found = [rollout for own in groups.rollouts for rollout in own]
        batch = experience(
            self.how.how,
            found,
            advantages(self.how.how, groups.rewards).reshape(-1),
            length=_padded(max(len(r.prompt) + len(r.tokens) for r in found)),
            most=self.actor.most,
            counts=[r.finished for r in found] if self.how.mask_truncated else None,
            choices=self.actor.policy.choices(found),
            ids=[example.id for example in groups.examples for _ in range(self.how.per_prompt)],
        )
        tree = self._tree(state)
        # Ratios are of the trainer to itself: what the engine rounds otherwise is no change of the policy.
        own = None if self.how.updates == 1 else self._scores(tree, batch)
        facts = _told(drawn) | dict(refills=float(refills)) | self._compared(tree, batch, own)
        batch = dataclasses.replace(batch, logprobs=own)
        if self.how.beta:
            batch = dataclasses.replace(batch, reference=self._scores(self._start, batch))
        return Round(batch, facts)

    def _drawn(self) -> tuple[_Groups, int]:
        """All groups that were sampled, and how often more of them were."""
        drawn, refills = self._sampled(), 0
        while self.how.how.refilled and refills < REFILLS and np.sum(~equal(drawn.rewards)) < self.how.prompts:
            drawn, refills = drawn + self._sampled(), refills + 1
        return drawn, refills

    def _chosen(self, drawn: _Groups) -> _Groups:
        """As many as a batch has: those with something to learn from first."""
        return drawn.take(np.argsort(equal(drawn.rewards), kind="stable")[: self.how.prompts])

    def _sampled(self) -> _Groups:
        how, at = self.how, self.prompts.at
        examples = self.prompts.take(how.prompts)
        seeds = np.random.SeedSequence([how.seed, at]).generate_state(2)
        shape = (how.prompts, how.per_prompt)
        found = self.actor.play(examples, per_prompt=shape[1], temperature=how.temperature, seed=int(seeds[0]))
        right, earned = self.actor.judged(examples, found, how.reward)
        rewards = np.array(earned)
        if how.overlong:
            rewards += overlong([len(r.tokens) for r in found], self.actor.most, how.overlong)
        if how.shuffled:
            rewards = np.random.default_rng(seeds[1]).permutation(rewards)
        rows = [found[i : i + shape[1]] for i in range(0, len(found), shape[1])]
        return _Groups(examples, rows, np.array(right).reshape(shape), rewards.reshape(shape))

    def _compared(self, tree: Any, batch: Experience, own: Array | None) -> dict[str, float]:
        """Rollouts as the trainer sees them: against the engine, and against the reference.

        Args:
          own: the trainer's log-probabilities of the batch where it has them; else the first rollout of every prompt is
            scored.
        """
        probe = batch if own is not None else batch.rows(slice(None, None, self.how.per_prompt))
        own = np.asarray(self._scores(tree, probe) if own is None else own)
        gap, scale = np.abs(own - probe.logprobs).max(), max(1.0, np.abs(own).max())
        if not gap <= self._tolerance * scale:
            raise UserError(
                f"rollouts: got log-probabilities that lie {gap:.2g} from the trainer's, expected "
                f"{self._tolerance * scale:.2g} at most: the engine plays another policy than the one that trains"
            )
        found = dict(logprob_gap=float(gap))
        if not self.how.beta:  # otherwise the loss tells it, of the whole batch
            away = np.clip(np.asarray(self._scores(self._start, probe)) - own, -20, 20)
            found["kl"] = float(np.sum((np.exp(away) - away - 1)[probe.sampled]) / probe.sampled.sum())
        return found


def _padded(longest: int) -> int:
    """T of a batch: its longest row, made a multiple of `STRIDE`, so that few programs are compiled."""
    return -(-longest // STRIDE) * STRIDE


def _told(drawn: _Groups) -> dict[str, float]:
    found = [rollout for own in drawn.rollouts for rollout in own]
    logprobs = np.concatenate([rollout.logprobs for rollout in found])
    return dict(
        reward=float(drawn.rewards.mean()),
        accuracy=float(drawn.right.mean()),
        length=float(np.mean([len(rollout.tokens) for rollout in found])),
        entropy=float(-logprobs.mean()),  # of the tokens' distributions, estimated by the tokens
        truncated=float(np.mean([not rollout.finished for rollout in found])),
        equal_groups=float(equal(drawn.rewards).mean()),
    )
