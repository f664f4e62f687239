"""A policy in training as the engine plays it: one adapter over the frozen base, swapped after every update."""

import dataclasses
import time
from collections.abc import Sequence

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.library import Library
from molora_jax.adapters.spec import BankSpec
from molora_jax.config import ModelConfig
from molora_jax.data.example import Example
from molora_jax.data.tasks import registry
from molora_jax.data.tasks.reward import Reward
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.training.rollout import Rollout, rollouts
from molora_jax.typing import Params

PAGE = 8
"""Tokens of a KV page: prompts are short, and their rollouts share only whole pages."""


class Actor:
    """Plays prompts with the adapter that `sync` gave it last; no new version of it compiles anything.

    Args:
      params: of the frozen base, as the trainer has them.
      adapter: one with the name, sites and ranks of all that come.
      rows: rollouts at once.
      length: most tokens of a prompt and what follows it.
      most: most tokens that follow it.

    Attributes:
      seconds: spent in rollouts so far.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        tokenizer: Tokenizer,
        adapter: Adapter,
        *,
        rows: int,
        length: int,
        most: int,
    ):
        self.tokenizer, self.most, self.name, self.seconds = tokenizer, most, adapter.name, 0.0
        self.library = Library(BankSpec.holding([adapter], dtype=params["embed"]["weight"].dtype), params)
        config = EngineConfig(max_rows=rows, max_length=length, page_size=PAGE, block=length)
        self.engine = Engine(cfg, params, config, Experts(self.library, cfg.vocab))
        self.sync(adapter)

    def sync(self, adapter: Adapter) -> None:
        """Plays with these values from now on."""
        self.library.add(dataclasses.replace(adapter, name=self.name))

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
            adapter=self.name,
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
