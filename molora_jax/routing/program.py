"""How a developer routes: the life of ONE request among several models, in plain jnp, which the engine vmaps.

A model *runs*: it reads what it has not seen of the request's tokens and, as a rule, writes one more. Then `step` sees
the declared signals of that run and decides who runs next, in which mode, and how many of the last tokens are taken
back. Nothing here knows batches, caches or clocks.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from molora_jax.config import UserError
from molora_jax.typing import Array, Bool, Float, Int, Params

State = Any
"""What a program remembers of one request: any pytree of plain arrays (no typed keys) whose shapes never change."""

SMALL, LARGE = 0, 1
"""Indices of the models of a pair; models are numbered from the quickest to the slowest."""

UNLIMITED = 2**31 - 1
"""A budget that never runs out."""

KEEP, NO_ADAPTER = -2, -1
"""`Decision.adapter`: as before, or the base model alone."""

VERIFY_DRAW, ROUTE_DRAW = 1, 2
"""Purposes folded last into the keys that `accept` and `init` get; 0 is the sampling of tokens."""


class Mode(enum.IntEnum):
    """What a run does.

    DECODE: the model writes one token.
    VERIFY: the model reads the held tokens as a draft; `accept` says how many stay and which token follows them.
    SCORE: the model reads `score_tokens` after the request's own; `read` turns the last logits into a score; the
      appended tokens are forgotten and nothing is written.
    FUSE: every model reads the same tokens; the next one is sampled from what `fuse` makes of their logits.
    """

    DECODE = 0
    VERIFY = 1
    SCORE = 2
    FUSE = 3


class Run(NamedTuple):
    """Who runs, and how; of FUSE `model` only leads, for all of them run."""

    model: int
    mode: Mode


class TopK(NamedTuple):
    """The k highest logits, descending, and their token ids."""

    values: Float[Array, "k"]
    ids: Int[Array, "k"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Signals:
    """What `step` sees of the run that just ended; a field that the program did not declare is None.

    Distributions are the model's own (of FUSE, the fused one): before temperature and cuts. In SCORE they are those
    after the last appended token, and the fields about the token tell of the last one committed.

    Attributes:
      token: the last token committed, as a rule just written.
      position: its index in the whole sequence, prompt included.
      since_handoff: tokens that this model has written since it took over.
      mode: `Mode` of the run.
      stop: the request ends with this token (a stop token, or the length limit), unless it is taken back.
      pattern_hits: per entry of `Program.patterns`, whether the sequence now ends with it: [patterns].
      entropy: -Σ p log p, in nats.
      max_prob: highest probability.
      margin: highest probability minus the second.
      logprob: log-probability of the token.
      top_k: `Program.top_k` highest raw logits and their ids.
      hidden: last hidden state of `Program.hidden_of`, after the final norm, where the token was written from: [D].
      span_logprobs: VERIFY and SCORE: log-probability under this model of each held token, the last one last, zeros in
        front: [Program.draft].
      score: SCORE: what `read` gave.
      accepted: VERIFY: how many of the held tokens stayed.
    """

    token: Int[Array, ""] | None = None
    position: Int[Array, ""] | None = None
    since_handoff: Int[Array, ""] | None = None
    mode: Int[Array, ""] | None = None
    stop: Bool[Array, ""] | None = None
    pattern_hits: Bool[Array, "patterns"] | None = None
    entropy: Float[Array, ""] | None = None
    max_prob: Float[Array, ""] | None = None
    margin: Float[Array, ""] | None = None
    logprob: Float[Array, ""] | None = None
    top_k: TopK | None = None
    hidden: Float[Array, "D"] | None = None
    span_logprobs: Float[Array, "draft"] | None = None
    score: Float[Array, ""] | None = None
    accepted: Int[Array, ""] | None = None


NAMES = frozenset(field.name for field in dataclasses.fields(Signals))
"""The signals there are."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decision:
    """What happens next to the request; made by `decide`.

    Attributes:
      next_model: which model runs.
      drop: how many of the last tokens are taken back, before anything else. Only tokens that this run wrote or that
        were held can be.
      budget: on a hand-off, tokens that `next_model` may write before control returns by itself to the model that
        handed over; read when `next_model` changes, and at least 1.
      mode: `Mode` of the next run. A return by budget is a DECODE.
      adapter: index of the adapter that the token just written and those after it are read with, in the model's bank.
      hold: how many of the last tokens a later decision may still take back. The others are final: they are streamed,
        and a final stop token ends the request. Held ones are what VERIFY reads as its draft.
    """

    next_model: Int[Array, ""]
    drop: Int[Array, ""]
    budget: Int[Array, ""]
    mode: Int[Array, ""]
    adapter: Int[Array, ""]
    hold: Int[Array, ""]


def decide(next_model, *, drop=0, budget=UNLIMITED, mode=Mode.DECODE, adapter=KEEP, hold=0) -> Decision:
    """A decision; every argument may be a Python number or a traced scalar."""
    values = (next_model, drop, budget, mode, adapter, hold)
    return Decision(*(jnp.asarray(value, jnp.int32) for value in values))


def select(condition: Bool[Array, ""], then: Decision, otherwise: Decision) -> Decision:
    """`then` where the condition holds."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), then, otherwise)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """What `accept` sees: K is `Program.draft`; rows from `count` on (of p, from `count` + 1 on) mean nothing.

    Attributes:
      tokens: the held tokens.
      count: how many there are.
      q: the distributions they were sampled from, temperature and cuts applied (greedy: one token has it all).
      p: what the verifying model would sample from before each of them and after the last, likewise.
      q_logits, p_logits: both before temperature and cuts.
    """

    tokens: Int[Array, "K"]
    count: Int[Array, ""]
    q: Float[Array, "K V"]
    p: Float[Array, "K+1 V"]
    q_logits: Float[Array, "K V"]
    p_logits: Float[Array, "K+1 V"]


class Program:
    """Base of all programs: a frozen dataclass whose fields are static, so that they choose the compiled program.

    Attributes:
      models: M, how many models it needs.
      signals: names of the fields of `Signals` that it reads.
      modes: the modes that its decisions use.
      runs: what its decisions may ask for, in the models' order; fewer are quicker to compile.
      knobs: names and defaults of what may change per request while it runs (thresholds).
      patterns: token sequences whose occurrence at the end is the signal `pattern_hits`.
      top_k: k of the signal `top_k`.
      draft: K, most tokens that VERIFY reads as a draft.
      score_tokens: what SCORE appends; empty scores after the last token itself.
      hidden_of: the model whose hidden states are the signal `hidden`; runs of others alone show zeros, for models
        differ in width.
      below: whether `score` routes a token when it is under the threshold.
    """

    models: int = 2
    signals: frozenset[str] = frozenset()
    modes: frozenset[Mode] = frozenset({Mode.DECODE})
    knobs: Mapping[str, float] = {}
    patterns: tuple[tuple[int, ...], ...] = ()
    top_k: int = 0
    draft: int = 0
    score_tokens: tuple[int, ...] = ()
    hidden_of: int = SMALL
    below: bool = False

    @property
    def runs(self) -> tuple[Run, ...]:
        own = (Run(model, mode) for model in range(self.models) for mode in sorted(self.modes - {Mode.FUSE}))
        return (*own, *(Run(self.models - 1, mode) for mode in self.modes & {Mode.FUSE}))

    def init(self, params: Params, knobs: Params, key: Array) -> State:
        """The state of a new request; `key` is its own, whatever the batch."""
        del params, knobs, key
        return ()

    def start(self, params: Params, knobs: Params, state: State) -> tuple[State, Decision]:
        """Who runs first, right after the prompt."""
        del params, knobs
        return state, decide(SMALL)

    def step(
        self, params: Params, knobs: Params, state: State, model: Int[Array, ""], sig: Signals
    ) -> tuple[State, Decision]:
        """What happens after `model` has run."""
        raise NotImplementedError

    def score(self, params: Params, sig: Signals) -> Float[Array, ""]:
        """Of a program that routes each token of one model by a number: what it compares with its knob `threshold`."""
        raise NotImplementedError

    def accept(self, params: Params, knobs: Params, state: State, draft: Draft, key: Array):
        """VERIFY: (how many of the draft's tokens stay, the token after them)."""
        raise NotImplementedError

    def read(self, params: Params, knobs: Params, state: State, logits: Float[Array, "V"]) -> Float[Array, ""]:
        """SCORE: the score, from the logits after the last appended token."""
        raise NotImplementedError

    def fuse(self, params: Params, knobs: Params, state: State, logits: Float[Array, "M V"]) -> Float[Array, "V"]:
        """FUSE: logits to sample from, from those of all models at one position."""
        raise NotImplementedError


def check(program: Program) -> None:
    """Raises `UserError` for a program that contradicts itself."""
    name = type(program).__name__
    if unknown := program.signals - NAMES:
        raise UserError(f"{name}.signals: got {sorted(unknown)}, expected some of {', '.join(sorted(NAMES))}")
    needs = {
        "pattern_hits": bool(program.patterns),
        "top_k": program.top_k > 0,
        "accepted": Mode.VERIFY in program.modes,
        "score": Mode.SCORE in program.modes,
        "span_logprobs": program.draft > 0,
    }
    for signal, has in needs.items():
        if signal in program.signals and not has:
            raise UserError(f"{name}.signals: got {signal} without its source, expected patterns, top_k, draft or mode")
    hooks = {Mode.VERIFY: "accept", Mode.SCORE: "read", Mode.FUSE: "fuse"}
    for mode, hook in hooks.items():
        if mode in program.modes and getattr(type(program), hook) is getattr(Program, hook):
            raise UserError(f"{name}.modes: got {mode.name}, expected a method {hook} with it")
    if Mode.VERIFY in program.modes and program.draft < 1:
        raise UserError(f"{name}.draft: got {program.draft}, expected at least 1 with VERIFY")
    if any(not pattern for pattern in program.patterns):
        raise UserError(f"{name}.patterns: got an empty pattern, expected at least one token in each")


def undeclared(program: Program) -> str:
    """The line for a decision that asks for a run that the program does not declare: nothing is compiled for it."""
    runs = ", ".join(f"{run.mode.name} by model {run.model}" for run in program.runs)
    return f"{type(program).__name__}: got a decision for another run, expected one of those it declares: {runs}"


def knob_values(program: Program, given: Mapping[str, float]) -> dict[str, Float[Array, ""]]:
    """The knobs of one request: the program's defaults, overridden by `given`.

    Raises:
      UserError: a knob that the program does not have.
    """
    for name in given:
        if name not in program.knobs:
            known = ", ".join(program.knobs) or "none"
            raise UserError(f"knob {name}: {type(program).__name__} has no such knob, expected one of: {known}")
    return {name: jnp.float32(given.get(name, value)) for name, value in program.knobs.items()}
