"""One training step: a jitted, donated function of the state and a batch, over the trained leaves alone."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from molora_jax import sharding
from molora_jax.config import UserError
from molora_jax.data.batch import Batch
from molora_jax.training.objective import Sums
from molora_jax.training.optimiser import OptimiserConfig, optimiser
from molora_jax.training.partition import Leaves, Partition, matches, partition
from molora_jax.training.placement import Placement
from molora_jax.typing import Array, Bool, Int

Loss = Callable[[Any, Batch, Array], Sums]
"""loss(tree, batch, key): pure; `tree` is the one that was partitioned, `key` is for whatever is random."""

Metrics = dict[str, Array]

LOW_PRECISION = ("params.*", "bank.*.[ab]", "bank.whole.*")
"""Leaves that bf16 compute applies to; scales, norms of DoRA, routers and gates keep what their maths needs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """All that a step changes, and all that a checkpoint needs of it. Passed in, returned, donated.

    Attributes:
      step: updates so far.
      trained: masters in fp32 (or wider), by path.
      optimiser: of optax, for the trained leaves alone.
      key: random key of the run; each step and microbatch folds its number in.
      halted: a loss or gradient was not finite: no step changes anything from then on.
    """

    step: Int[Array, ""]
    trained: Leaves
    optimiser: Any
    key: Array
    halted: Bool[Array, ""]


class Trainer:
    """A model taken apart for training: `state`, then `step(state, batch)` again and again, `tree(state)` in the end.

    Args:
      tree: the model, as {"params": …, "bank": …, "router": …}; it stays as it is, and what is frozen is shared.
      loss: of that tree.
      config: which leaves train, and how.
      accumulate: microbatches that a batch is cut into, along its rows; the gradient is that of the whole batch, each
        token counting the same wherever it lies.
      dtype: computes with `LOW_PRECISION` leaves in this dtype; None: with each in its own.
      place: on a mesh of devices; None: on the default one. Every process gives its own rows of the batches.

    Attributes:
      partition: how the leaves go together.
      frozen: the leaves that no step touches.
      place: as it was given.
    """

    def __init__(
        self,
        tree: Any,
        loss: Loss,
        config: OptimiserConfig,
        *,
        accumulate: int = 1,
        dtype=None,
        seed=0,
        place: Placement | None = None,
    ):
        compute = None if dtype is None else (dtype, matches(LOW_PRECISION))
        self.partition, self._trained, self.frozen = partition(tree, config.trains, compute=compute)
        self.config, self.place, self._rows = config, place, accumulate
        update = optimiser(config, self._trained)
        first = functools.partial(_first, update, seed)
        state, numbers = {}, {}
        if place is not None:
            self._trained, self.frozen = place.leaves(self._trained), place.leaves(self.frozen)
            like, whole = jax.eval_shape(first, self._trained), sharding.whole(place.mesh)
            shardings = place.state(like, self._trained)
            state, numbers = dict(out_shardings=shardings), dict(out_shardings=whole)
        self._init = jax.jit(first, **state)
        run = functools.partial(_step, self.partition, loss, update, accumulate)
        self._step = jax.jit(run, donate_argnums=0, **(state and dict(out_shardings=(shardings, whole))))
        self._sums = jax.jit(functools.partial(_sums, self.partition, loss), **numbers)

    def init(self) -> State:
        """The state before the first step; each call gives buffers of its own."""
        with self._mesh():
            return self._init(self._trained)

    def step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """The state after one update, and "loss", "weight", "grad_norm", "finite" and the loss's extras as averages.

        `state` is donated. Where the loss or the gradient is not finite, "finite" is False and the state is unchanged
        but for `halted`.
        """
        rows = batch.tokens.shape[0]
        if rows % self._rows:
            raise UserError(f"step: got {rows} rows for {self._rows} microbatches, expected a multiple")
        with self._mesh():
            return self._step(state, self.frozen, self._placed(batch))

    def sums(self, state: State, batch: Batch) -> Sums:
        """The loss of a batch as it is, without a gradient; with the key of step 0, so that it repeats."""
        with self._mesh():
            return self._sums(state.trained, self.frozen, self._placed(batch))

    def _mesh(self):
        """The kernels have to know over how many devices they are cut."""
        return contextlib.nullcontext() if self.place is None else jax.set_mesh(self.place.mesh)

    def _placed(self, batch: Batch) -> Batch:
        return batch if self.place is None else self.place.batch(batch)

    def computed(self, state: State) -> Any:
        """The model as a step computes with it: masters in the dtype that it has for them."""
        return self.partition.join(state.trained, self.frozen)

    def tree(self, state: State) -> Any:
        """The model as it is now, with the masters in their full precision."""
        leaves = {**self.frozen, **state.trained}
        return self.partition.tree.unflatten([leaves[path] for path in self.partition.paths])


def _first(update, seed: int, trained: Leaves) -> State:
    trained = jax.tree.map(jnp.copy, trained)
    step, halted = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    return State(step, trained, update.init(trained), jax.random.key(seed), halted)


def _sums(parts: Partition, loss: Loss, trained, frozen, batch) -> Sums:
    return loss(parts.join(trained, frozen), batch, jax.random.key(0))


def _step(parts: Partition, loss: Loss, update, accumulate: int, state: State, frozen: Leaves, batch: Batch):
    key = jax.random.fold_in(state.key, state.step)

    def total(trained, part, number):
        sums = loss(parts.join(trained, frozen), part, jax.random.fold_in(key, number))
        return sums.loss, sums

    gradient = lambda part, number: jax.grad(total, has_aux=True)(state.trained, part, number)
    grads, sums = gradient(batch, 0) if accumulate == 1 else _accumulated(gradient, batch, accumulate)
    weight = jnp.where(sums.weight > 0, sums.weight, 1)  # a batch of pads has no gradient, and no NaN either
    grads, means = jax.tree.map(lambda leaf: leaf / weight, (grads, sums))
    return _updated(update, state, grads, means, sums.weight)


def _accumulated(gradient, batch: Batch, parts: int) -> tuple[Leaves, Sums]:
    """Sums over microbatches, one after the other."""
    cut = jax.tree.map(lambda leaf: leaf.reshape(parts, leaf.shape[0] // parts, *leaf.shape[1:]), batch)
    first = jax.tree.map(lambda leaf: leaf[0], cut)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(gradient, first, 0))

    def add(total, part):
        return jax.tree.map(jnp.add, total, gradient(*part)), None

    return jax.lax.scan(add, empty, (cut, jnp.arange(parts)))[0]


def _updated(update, state: State, grads: Leaves, means: Sums, weight: Array) -> tuple[State, Metrics]:
    norm = jnp.sqrt(sum(jnp.sum(g.astype(_wide(g)) ** 2) for g in grads.values()))
    finite = jnp.isfinite(means.loss) & jnp.isfinite(norm)
    go = finite & ~state.halted
    changes, moments = update.update(grads, state.optimiser, state.trained)
    new = {path: leaf + changes[path].astype(leaf.dtype) for path, leaf in state.trained.items()}
    kept = lambda new, old: jax.tree.map(lambda n, o: jnp.where(go, n, o), new, old)
    state = State(
        step=state.step + go,
        trained=kept(new, state.trained),
        optimiser=kept(moments, state.optimiser),
        key=state.key,
        halted=~go,
    )
    metrics = dict(loss=means.loss, weight=weight, grad_norm=norm, finite=finite) | means.extra
    return state, metrics


def _wide(leaf: Array):
    return jnp.promote_types(leaf.dtype, jnp.float32)
