"""The slow and obvious way to run a program: one request, no cache, every model reads everything again at each run."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from molora_jax.routing import signals
from molora_jax.routing.program import (
    KEEP,
    NO_ADAPTER,
    ROUTE_DRAW,
    UNLIMITED,
    VERIFY_DRAW,
    Draft,
    Mode,
    Program,
    knob_values,
)
from tests import naive

Model = Callable[[list[int], list[int]], tuple[np.ndarray, np.ndarray]]
"""(tokens, adapter of each) to (logits [T V], hidden [T D])."""


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How tokens are drawn: greedily, or as `tests.naive` does, from the request's seed, the position and the model."""

    temperature: float = 0.0
    seed: int = 0

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        if not self.temperature:
            return np.eye(len(logits))[np.argmax(logits)]
        return naive.probabilities(logits, temperature=self.temperature)

    def token(self, logits: np.ndarray, position: int, model: int) -> int:
        if not self.temperature:
            return int(np.argmax(logits))
        sums = np.cumsum(self.probabilities(logits))
        uniform = float(jax.random.uniform(self.key(position, model, 0)))
        return int(np.searchsorted(sums, uniform * sums[-1], side="right"))

    def key(self, position: int, model: int, purpose: int):
        return _key(np.uint32(self.seed), np.int32(position), np.int32(model), np.int32(purpose))


@jax.jit
def _key(seed, position, model, purpose):
    key = jax.random.key(seed)
    for part in (position, model, purpose):
        key = jax.random.fold_in(key, part)
    return key


@dataclasses.dataclass
class Answer:
    """What came of a request: its tokens, who wrote each, the adapter each is read with, and the (model, mode) of runs.

    `final[i]` is how many tokens could be streamed after run i.
    """

    tokens: list[int]
    writers: list[int]
    adapters: list[int]
    runs: list[tuple[int, Mode]]
    final: list[int]
    finished: str


@functools.cache
def _compiled(program: Program, hook: str):
    function = functools.partial(signals.measure, program) if hook == "measure" else getattr(program, hook)
    return jax.jit(function)


class Route:
    """One request on its way; `run` takes it one run further, until `finished` says how it ended."""

    def __init__(self, program, models: Sequence[Model], prompt, *, params, knobs, limit, stops, sampler):
        self.program, self.models, self.sampler = program, models, sampler
        self.params, self.knobs = params, knob_values(program, knobs)
        self.prompt, self.limit, self.stops = len(prompt), limit, stops
        self.tokens, self.writers, self.rows = list(prompt), [-1] * len(prompt), [None] * len(prompt)
        key = sampler.key(0, 0, ROUTE_DRAW)
        self.state, first = self.call("start", program.init(params, self.knobs, key))
        self.model, self.mode = int(first.next_model), Mode(int(first.mode))
        self.adapter = NO_ADAPTER if first.adapter == KEEP else int(first.adapter)
        self.adapters = [self.adapter] * len(prompt)
        self.home, self.left, self.since, self.hold = self.model, UNLIMITED, 0, 0
        self.runs, self.final, self.finished = [], [], None

    def call(self, hook: str, *args):
        return _compiled(self.program, hook)(self.params, self.knobs, *args)

    @property
    def stopped(self) -> bool:
        return len(self.tokens) > self.prompt and (self.tokens[-1] in self.stops or len(self.tokens) >= self.limit)

    def read(self, model: int, extra: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        return self.models[model](self.tokens + list(extra), self.adapters + [self.adapter] * len(extra))

    def write(self, token: int, row: np.ndarray) -> None:
        self.tokens.append(int(token))
        self.rows.append(row)
        self.writers.append(self.model)
        self.adapters.append(self.adapter)

    def run(self) -> None:
        """One model runs in its mode, then the program decides."""
        self.runs.append((self.model, self.mode))
        modes = {Mode.DECODE: self.decode, Mode.VERIFY: self.verify, Mode.SCORE: self.score, Mode.FUSE: self.fuse}
        wrote, known = modes[self.mode]()
        self.since += wrote
        width = signals.window(self.program.patterns)
        recent = ([-1] * width + self.tokens)[len(self.tokens) :]
        nothing = {"score": np.float32(0), "accepted": np.int32(0)}
        sig = _compiled(self.program, "measure")(
            token=np.int32(self.tokens[-1]),
            recent=np.asarray(recent, np.int32),
            position=np.int32(len(self.tokens) - 1),
            since_handoff=np.int32(self.since),
            mode=np.int32(self.mode),
            stop=np.bool_(self.stopped),
            **nothing | {"span_logprobs": np.zeros(self.program.draft)} | known,
        )
        self.state, decision = self.call("step", self.state, np.int32(self.model), sig)
        self.follow(decision, wrote)

    def decode(self):
        logits, hidden = self.read(self.model)
        self.write(self.sampler.token(logits[-1], len(self.tokens), self.model), logits[-1])
        return 1, dict(logits=logits[-1], hidden=self.shown(hidden[-1]))

    def shown(self, hidden: np.ndarray) -> np.ndarray:
        return hidden if self.model == self.program.hidden_of else np.zeros_like(hidden)

    def fuse(self):
        rows, hidden = zip(*(self.read(model) for model in range(len(self.models))), strict=True)
        fused = np.asarray(self.call("fuse", self.state, np.stack([row[-1] for row in rows])))
        self.write(self.sampler.token(fused, len(self.tokens), self.model), fused)
        return 1, dict(logits=fused, hidden=hidden[self.program.hidden_of][-1])

    def score(self):
        logits, hidden = self.read(self.model, self.program.score_tokens)
        score = self.call("read", self.state, logits[-1])
        return 0, dict(logits=logits[-1], hidden=self.shown(hidden[-1]), score=score, span_logprobs=self.span(logits))

    def verify(self):
        logits, hidden = self.read(self.model)
        first = len(self.tokens) - self.hold
        held, rows = self.tokens[first:], logits[first - 1 : len(self.tokens)]
        span = self.span(logits)
        count, token = self.accept(held, rows)
        for i in range(count):
            if held[i] in self.stops:
                count = i + 1
                break
        for column in (self.tokens, self.rows, self.writers, self.adapters):
            del column[first + count :]
        self.hold = count
        shown = self.shown(hidden[first - 1 + count])
        known = dict(logits=rows[count], hidden=shown, accepted=np.int32(count), span_logprobs=span)
        if self.stopped and count:
            return 0, known
        self.write(token, rows[count])
        return 1, known

    def accept(self, held: list[int], rows: np.ndarray) -> tuple[int, int]:
        K, V, n = self.program.draft, rows.shape[1], len(held)
        wide = lambda table, height: np.concatenate([table, np.zeros((height - len(table), V))])
        mass = lambda table: np.stack([self.sampler.probabilities(row) for row in table]) if len(table) else table
        own = np.stack(self.rows[len(self.tokens) - n :]) if n else np.zeros((0, V))
        draft = Draft(
            tokens=np.asarray(held + [0] * (K - n), np.int32),
            count=np.int32(n),
            q=wide(mass(own), K),
            p=wide(mass(rows), K + 1),
            q_logits=wide(own, K),
            p_logits=wide(rows, K + 1),
        )
        key = self.sampler.key(len(self.tokens) - n, self.model, VERIFY_DRAW)
        count, token = self.call("accept", self.state, draft, key)
        return int(count), int(token)

    def span(self, logits: np.ndarray) -> np.ndarray:
        """Log-probability of each held token, the last `draft` of them, zeros in front."""
        n = min(self.hold, self.program.draft)
        out = np.zeros(self.program.draft)
        for back in range(1, n + 1):
            row = logits[len(self.tokens) - back - 1].astype(np.float64)
            out[-back] = row[self.tokens[-back]] - np.log(np.sum(np.exp(row - row.max()))) - row.max()
        return out

    def follow(self, decision, wrote: int) -> None:
        """Does what was decided."""
        asked = {field.name: int(getattr(decision, field.name)) for field in dataclasses.fields(decision)}
        drop = max(0, min(asked["drop"], self.hold + wrote))
        if asked["adapter"] != KEEP:
            self.adapter = asked["adapter"]
            if wrote and not drop:
                self.adapters[-1] = self.adapter
        for column in (self.tokens, self.rows, self.writers, self.adapters):
            del column[len(column) - drop :]
        self.hold = max(0, min(asked["hold"], self.hold + wrote - drop))
        if Mode.VERIFY in self.program.modes:
            self.hold = min(self.hold, self.program.draft)
        if self.left != UNLIMITED:
            self.left -= wrote
        self.mode = Mode(asked["mode"])
        if asked["next_model"] != self.model:
            self.home, self.model = self.model, asked["next_model"]
            self.left, self.since = max(asked["budget"], 1), 0
        elif self.left <= 0:
            self.home, self.model = self.model, self.home
            self.left, self.since, self.mode = UNLIMITED, 0, Mode.DECODE
        if self.stopped and self.mode not in (Mode.VERIFY, Mode.SCORE):
            self.hold = 0
            self.finished = "stop" if self.tokens[-1] in self.stops else "length"
        self.final.append(len(self.tokens) - self.hold - self.prompt)


def generate(
    program: Program,
    models: Sequence[Model],
    prompt: Sequence[int],
    *,
    params=None,
    knobs: Mapping[str, float] | None = None,
    limit: int,
    stops: Sequence[int] = (),
    sampler: Sampler = Sampler(),
) -> Answer:
    """Runs one request to its end; `limit` is the length, prompt included, at which it ends."""
    given = dict(params=params or {}, knobs=knobs or {}, limit=limit, stops=stops, sampler=sampler)
    route = Route(program, models, prompt, **given)
    while not route.finished:
        route.run()
        assert len(route.runs) < 100 * limit, "the program never ends"
    answer = slice(len(prompt), None)
    columns = (column[answer] for column in (route.tokens, route.writers, route.adapters))
    return Answer(*columns, route.runs, route.final, route.finished)
