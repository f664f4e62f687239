"""Where a routing program has taken each request: whose turn it is, what the program remembers, who wrote what."""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.routing.program import ROUTE_DRAW, Mode, Program, Run, knob_values
from molora_jax.routing.turn import Turn, begin
from molora_jax.typing import Array, Bool, Float, Int, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Journey:
    """What a runtime keeps of routed requests, S of them; of one, without the leading S.

    Attributes:
      turn: who runs next, and under which terms.
      state: what the program remembers.
      knobs: by name; they may be changed while the request runs.
      prompt: length of the prompt, whose tokens nobody wrote.
      runs: how many there have been.
      waited: modelled seconds since the request began to wait for its next run.
      writers: the model that wrote each token, -1 for the prompt.
      entropy: of the distribution that each token was drawn from, in nats, where that is kept.
      drafts: of a program that verifies, the logits of the last K tokens, each at its position modulo K.
      lodged: whether the request has pages in each model's memory.
    """

    turn: Turn
    state: Params
    knobs: dict[str, Float[Array, "S"]]
    prompt: Int[Array, "S"]
    runs: Int[Array, "S"]
    waited: Float[Array, "S"]
    writers: Int[Array, "S T"]
    entropy: Float[Array, "S T"] | None
    drafts: Float[Array, "S K V"] | None
    lodged: Bool[Array, "S M"]


def depart(
    program: Program,
    params: Params,
    knobs: Mapping[str, Float[Array, ""]],
    seed: Int[Array, ""],
    prompt: Int[Array, ""],
    *,
    length: int,
    vocab: int,
    dtype,
    entropy: bool,
) -> Journey:
    """The journey of a new request of at most `length` tokens, `prompt` of which are there."""
    key = jax.random.key(seed)
    for part in (0, 0, ROUTE_DRAW):
        key = jax.random.fold_in(key, part)
    state, first = program.start(params, knobs, program.init(params, knobs, key))
    drafted = Mode.VERIFY in program.modes
    return Journey(
        turn=begin(first),
        state=jax.tree.map(jnp.asarray, state),
        knobs=dict(knobs),
        prompt=jnp.asarray(prompt, jnp.int32),
        runs=jnp.int32(0),
        waited=jnp.float32(0),
        writers=jnp.full((length,), -1, jnp.int8),
        entropy=jnp.zeros((length,), jnp.float32) if entropy else None,
        drafts=jnp.zeros((program.draft, vocab), dtype) if drafted else None,
        lodged=jnp.zeros((program.models,), bool),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Departures:
    """Makes the journeys of new requests, by one compiled program.

    Attributes:
      program, params: what routes them.
      length, vocab, dtype, entropy: as `depart` takes them.
    """

    program: Program
    params: Params
    length: int
    vocab: int
    dtype: np.dtype
    entropy: bool

    @property
    def _depart(self):
        sizes = dict(length=self.length, vocab=self.vocab, dtype=self.dtype, entropy=self.entropy)
        return functools.partial(depart, self.program, **sizes)

    @property
    def _example(self):
        return self.params, knob_values(self.program, {}), np.uint32(0), np.int32(1)

    @functools.cached_property
    def _compiled(self):
        return jax.jit(self._depart).lower(*self._example).compile()

    def __call__(self, seed: int, prompt: int, knobs: Mapping[str, float]) -> Journey:
        """Raises `UserError` for a knob that the program does not have."""
        return self._compiled(self.params, knob_values(self.program, knobs), np.uint32(seed), np.int32(prompt))

    def empty(self, slots: int) -> Journey:
        """The journeys of `slots` free slots; compiles nothing."""
        shapes = jax.eval_shape(self._depart, *self._example)
        return jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), shapes)


def at(turn: Turn, run: Run) -> Array:
    """Whether a request waits for `run`: for the model in this mode, or for all of them."""
    same = turn.mode == run.mode
    return same if run.mode == Mode.FUSE else same & (turn.model == run.model)


def among(turn: Turn, runs: Sequence[Run]) -> Array:
    """Whether a request waits for any of `runs`."""
    return functools.reduce(operator.or_, [at(turn, run) for run in runs])
