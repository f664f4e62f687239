"""A policy in training as the engine plays it, its values swapped after every update."""

import time
from collections.abc import Sequence
from typing import Any

from molora_jax.config import ModelConfig
from molora_jax.data.example import Example
from molora_jax.data.tasks import registry
from molora_jax.data.tasks.reward import Reward
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.training.policy import Policy
from molora_jax.training.rollout import Rollout, rollouts

PAGE = 8
"""Tokens of a KV page: prompts are short, and their rollouts share only whole pages."""


class Actor:
    """Plays prompts with the values that `sync` gave it last; no new version of them compiles anything.

    Args:
      policy: what is played; a router's choices are recorded.
      rows: rollouts at once.
      length: most tokens of a prompt and what follows it.
      most: most tokens that follow it.

    Attributes:
      seconds: spent in rollouts so far.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        tokenizer: Tokenizer,
        policy: Policy,
        *,
        rows: int,
        length: int,
        most: int,
    ):
        self.tokenizer, self.most, self.policy, self.seconds = tokenizer, most, policy, 0.0
        config = EngineConfig(max_rows=rows, max_length=length, page_size=PAGE, block=length, trace=policy.routed)
        self.engine = Engine(cfg, policy.tree["params"], config, policy.experts)
        self.sync(policy.trained(policy.tree))

    def sync(self, found: Any) -> None:
        """Plays with the values of this adapter or composition from now on."""
        self.policy.play(found)

    def play(
        self, examples: Sequence[Example], *, per_prompt: int, temperature: float = 1.0, seed: int = 0
    ) -> list[Rollout]:
        """So many rollouts of each example's prompt, in order."""
        begun = time.monotonic()
        found = rollouts(
            self.engine,
            [self.tokenizer.encode(example.prompt) for example in examples],
            per_prompt=per_prompt,
            max_new_tokens=self.most,
            stops=self.tokenizer.eos,
            temperature=temperature,
            adapter=self.policy.adapter,
            seed=seed,
        )
        self.seconds += time.monotonic() - begun
        return found

    def judged(
        self, examples: Sequence[Example], found: Sequence[Rollout], reward: Reward
    ) -> tuple[list[bool], list[float]]:
        """(whether it is right, what it earns) of each rollout of these examples, which are of one benchmark."""
        each = len(found) // len(examples)
        answers = [example.answer for example in examples for _ in range(each)]
        texts = [self.tokenizer.decode(rollout.tokens) for rollout in found]
        judge = registry.judge(examples[0])
        return judge.verify(answers, texts), judge.rewards(answers, texts, reward)

    def solves(self, examples: Sequence[Example], reward: Reward, *, temperature: float) -> dict[str, float]:
        """Over some problems: how many are right of how many, answered greedily, and what they earn.

        "sampled" tells it of answers at `temperature`, which are what reinforcement improves.
        """
        found = self.play(examples, per_prompt=1, temperature=0.0)
        right, earned = self.judged(examples, found, reward)
        sampled, _ = self.judged(examples, self.play(examples, per_prompt=1, temperature=temperature), reward)
        count, total = len(examples), float(sum(right))
        return dict(
            accuracy=total / count,
            right=total,
            problems=count,
            sampled=sum(sampled) / count,
            sampled_right=float(sum(sampled)),
            reward=sum(earned) / count,
            length=sum(len(rollout.tokens) for rollout in found) / count,
        )
