"""The loop around the step: data in, numbers and checkpoints out, and an end at the first number that is not finite."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

from molora_jax import distributed
from molora_jax.checkpoints.store import Store
from molora_jax.config import UserError
from molora_jax.data.batch import Batch
from molora_jax.training import resume
from molora_jax.training.metrics import Log
from molora_jax.training.step import Metrics, State, Trainer

Evaluate = Callable[[State], Mapping[str, float]]


class Position(Protocol):
    """What knows where in its data it is."""

    def get_state(self) -> Any:
        """Where the next batch comes from: a JSON value, or bytes."""

    def set_state(self, state: Any) -> None:
        """Goes there."""


class Batches(Position, Protocol):
    """An endless iterator that knows where it is."""

    def __next__(self) -> Batch: ...


@runtime_checkable
class Draws(Position, Protocol):
    """Batches that depend on what is trained, as a policy's own rollouts do."""

    def draw(self, state: State) -> Batch:
        """The batch of the step that follows `state`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long a run is, and what happens on the way.

    Attributes:
      steps: of the whole run.
      log_every: steps between two lines of numbers.
      evaluate_every: steps between two evaluations, the start and the last step besides; 0 for none at all.
      save_every: steps between two checkpoints; every evaluation and the last step have one besides.
      keep_last: newest checkpoints that are kept; with evaluations, the best one too.
      score: the number of an evaluation that tells which is best.
      best: whether the lowest or the highest is.
    """

    steps: int
    log_every: int = 10
    evaluate_every: int = 0
    save_every: int = 0
    keep_last: int = 2
    score: str = "loss"
    best: Literal["lowest", "highest"] = "lowest"

    def __post_init__(self):
        if self.steps < 1 or self.log_every < 1 or min(self.evaluate_every, self.save_every) < 0:
            raise UserError(f"loop: got {self}, expected at least one step, and no negative number")


def run(
    trainer: Trainer,
    batches: Batches | Draws,
    config: LoopConfig,
    *,
    folder: Path | str | None = None,
    evaluate: Evaluate | None = None,
    progress: bool = True,
) -> State:
    """Trains to `config.steps`, from the newest checkpoint in `folder` where there is one.

    A run that was killed and is started again gives the same losses, bit for bit, on the same devices.

    Args:
      folder: gets "checkpoints", "metrics.jsonl" and "tensorboard"; None keeps nothing.
      evaluate: numbers of a state, as `held_out` makes it.
      progress: whether a bar is drawn.

    Raises:
      UserError: a loss or gradient is not finite, with the step and the ids of its batch; the data ended too early;
        the folder cannot be written to or is of another run. The checkpoints that there are stay.
    """
    folder, state, start = None if folder is None else Path(folder), trainer.init(), 0
    with contextlib.ExitStack() as stack:
        store = None
        if folder is not None:
            store = Store(folder / "checkpoints", keep_last=config.keep_last, best=config.best)
            stack.enter_context(store)
            if store.latest is not None:
                start, state, position = resume.restore(store, state)
                if start > config.steps:
                    raise UserError(
                        f"training: got {config.steps} steps for a run in {folder} that has made {start}, expected as "
                        "many at least; train in another folder"
                    )
                batches.set_state(position)
        first = distributed.is_first()
        log = Log(folder if first else None, steps=config.steps, start=start, progress=progress and first)
        stack.enter_context(log)
        return _Run(trainer, batches, config, store, log, evaluate).go(state, start)


class _Run:
    """One call of `run`."""

    def __init__(self, trainer: Trainer, batches, config: LoopConfig, store: Store | None, log: Log, evaluate):
        self.trainer, self.batches, self.config, self.store, self.log = trainer, batches, config, store, log
        self.evaluate = evaluate if config.evaluate_every else None
        self.unread: tuple[int, Batch, Metrics] | None = None

    def go(self, state: State, start: int) -> State:
        if self.evaluate is not None and not start:
            self._score(0, state)
        for step in range(start + 1, self.config.steps + 1):
            batch = self._next(step, state)
            state, metrics = self.trainer.step(state, batch)
            self._read()  # the step before, while the device works on this one
            self.unread = step, batch, metrics
            self._at(step, state)
        return state

    def _next(self, step: int, state: State) -> Batch:
        if isinstance(self.batches, Draws):
            return self.batches.draw(state)
        batch = next(self.batches, None)
        if batch is None:
            self._read()
            raise UserError(
                f"training: the data ended before step {step} of {self.config.steps}; "
                "give more epochs, or train for fewer steps"
            )
        return batch

    def _read(self) -> None:
        """Fetches the numbers of the step that was dispatched last, and stops if they are not finite."""
        if self.unread is None:
            return
        (step, batch, metrics), self.unread = self.unread, None
        metrics = jax.device_get(metrics)
        if not metrics.pop("finite"):
            raise UserError(
                f"training: got loss {metrics['loss']:g} and gradient norm {metrics['grad_norm']:g} at step {step}, "
                f"expected finite ones; its batch holds {_named(batch)}; nothing was updated: "
                "look at these examples, or lower the learning rates"
            )
        self.log.step(int(np.sum(batch.valid)) * jax.process_count())
        if step % self.config.log_every == 0 or step == self.config.steps:
            self.log.write(step, metrics)

    def _at(self, step: int, state: State) -> None:
        """Evaluates and saves where it is time to."""
        due = lambda every: every and (step % every == 0 or step == self.config.steps)
        evaluates = self.evaluate is not None and due(self.config.evaluate_every)
        saves = self.store is not None and (evaluates or due(self.config.save_every) or step == self.config.steps)
        if evaluates or saves or step == self.config.steps:
            self._read()
        score = self._score(step, state) if evaluates else None
        if saves:
            resume.save(self.store, step, state, self.batches.get_state(), score=score)

    def _score(self, step: int, state: State) -> float:
        """Evaluates: the number that tells which checkpoint is best."""
        values = self.evaluate(state)
        if self.config.score not in values:
            raise UserError(f"loop: got an evaluation of {sorted(values)}, expected {self.config.score!r} among it")
        score = float(values[self.config.score])
        if not np.isfinite(score):
            raise UserError(f"training: got {self.config.score} {score:g} in the evaluation at step {step}")
        self.log.write(step, values, prefix="eval_")
        return score


def _named(batch: Batch) -> str:
    ids = [str(i) for row in getattr(batch, "ids", ()) for i in (row if isinstance(row, tuple | list) else (row,))]
    return ", ".join(ids) or "rows without ids"


def held_out(trainer: Trainer, batches: Callable[[], Iterable[Batch]]) -> Evaluate:
    """An evaluation on the same batches every time: the means over all their tokens of the loss and its extras."""

    def evaluate(state: State) -> dict[str, float]:
        totals: dict[str, float] = {}
        weight = 0.0
        for batch in batches():
            sums = jax.device_get(trainer.sums(state, batch))
            weight += float(sums.weight)
            for name, value in dict(loss=sums.loss, **sums.extra).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        if not weight:
            raise UserError("evaluation: got no token that counts, expected some: check the held-out data")
        return {name: total / weight for name, total in totals.items()}

    return evaluate
