"""A run of the toy model in a folder, for a test to kill: noise in its loss, and steps that take their time."""

import dataclasses
import sys
import time

import jax
import jax.numpy as jnp

from molora_jax.training.loop import LoopConfig, held_out, run
from molora_jax.training.optimiser import Group, OptimiserConfig, Schedule
from molora_jax.training.step import Trainer
from tests.training import toy

STEPS = 30


class Rows:
    """Batches of the toy, without end; `as_bytes` gives its position as bytes."""

    def __init__(self, *, as_bytes: bool = False, pause: float = 0.0, poison: int | None = None, end: int = 10**9):
        self.at, self.as_bytes, self.pause, self.poison, self.end = 0, as_bytes, pause, poison, end

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.end:
            raise StopIteration
        self.at += 1
        time.sleep(self.pause)
        batch = toy.rows(self.at)
        return dataclasses.replace(batch, weights=batch.weights * jnp.nan) if self.at == self.poison else batch

    def get_state(self):
        return str(self.at).encode() if self.as_bytes else dict(at=self.at)

    def set_state(self, state):
        self.at = int(state) if self.as_bytes else state["at"]


def noisy(tree, b, key):
    sums = toy.loss(tree, b, key)
    return dataclasses.replace(sums, loss=sums.loss * (1 + 0.1 * jax.random.normal(key)))


def trainer() -> Trainer:
    groups = (Group(name="a", paths=("adapter.*",), rate=0.1), Group(name="h", paths=("params.head.*",), rate=0.01))
    config = OptimiserConfig(groups=groups, schedule=Schedule(shape="cosine", steps=STEPS, warmup=3))
    return Trainer(toy.tree(), noisy, config, accumulate=2, seed=5)


def main(folder: str, pause: str) -> None:
    made, rows = trainer(), Rows(pause=float(pause))
    evaluate = held_out(made, lambda: [toy.rows(100), toy.rows(101)])
    config = LoopConfig(steps=STEPS, log_every=1, save_every=4, evaluate_every=10)
    run(made, rows, config, folder=folder, evaluate=evaluate, progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
