"""Programs that think in steps, commands and whole answers, against loops written by hand for each."""

import numpy as np
import pytest

from molora_jax.routing.program import Mode
from molora_jax.routing.programs.glimp_router import GlimpRouter
from molora_jax.routing.programs.relay import Relay
from molora_jax.routing.programs.rsd import RSD
from molora_jax.routing.programs.session_cascade import SessionCascade
from molora_jax.routing.programs.spec_reason import SpecReason
from molora_jax.routing.programs.speculative_thinking import AFFIRM, REFLECT, SpeculativeThinking
from tests.routing.naive_route import Sampler, generate
from tests.routing.numpy_heads import sigmoid, softmax
from tests.routing.small_models import table

VOCAB, LIMIT, STOP = 12, 60, 11
SEEDS = range(12)
DELIMITERS = (3, 4)
DELIMITER = np.isin(np.arange(VOCAB), DELIMITERS)


def talkative(read):
    """The same model, which seldom stops."""

    def less(tokens, adapters):
        logits, hidden = read(tokens, adapters)
        return logits - 2 * (np.arange(VOCAB) == STOP).astype(np.float32), hidden

    return less


MODELS = [talkative(table(seed, VOCAB, sharpness=0.8)) for seed in range(3)]


class Text:
    """The text of one request, and the way models add to it."""

    def __init__(self, seed: int):
        self.tokens, self.writers, self.sampler = [seed % VOCAB], [], Sampler(temperature=1.0, seed=seed)

    @property
    def over(self) -> bool:
        return bool(self.writers) and (self.tokens[-1] == STOP or len(self.tokens) >= LIMIT)

    def logits(self, model: int, extra=()):
        tokens = self.tokens + list(extra)
        return MODELS[model](tokens, [-1] * len(tokens))[0][-1].astype(np.float64)

    def next(self, model: int) -> int:
        return self.sampler.token(self.logits(model), len(self.tokens), model)

    def add(self, model: int) -> int:
        token = self.next(model)
        self.tokens.append(token)
        self.writers.append(model)
        return token

    def cut(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :], self.writers[len(self.writers) - count :]


def assert_same(program, seed: int, text: Text, *, params=None, knobs=None):
    got = generate(
        program,
        MODELS[: program.models],
        [seed % VOCAB],
        params=params,
        knobs=knobs,
        limit=LIMIT,
        stops=(STOP,),
        sampler=text.sampler,
    )
    assert (got.tokens, got.writers) == (text.tokens[1:], text.writers)
    for final, later in zip(got.final, got.final[1:], strict=False):
        assert final <= later  # what was streamed is never taken back
    assert got.final[-1] == len(got.tokens)
    return got


def test_glimp_router():
    closing, seen = (7, 8), set()
    for seed in SEEDS:
        text, thinking, step_model, first = Text(seed), True, 0, True
        while not text.over:
            if not thinking:
                text.add(1)
                continue
            if first:
                mass = softmax(text.logits(0))
                step_model = int(-np.sum(mass * np.log(mass)) > 2.3)
                seen.add(step_model)
            token = text.add(step_model)
            first = token in DELIMITERS
            if tuple(text.tokens[-2:]) == closing:
                thinking = False
        assert_same(GlimpRouter(closing), seed, text, params=dict(delimiter=DELIMITER), knobs=dict(threshold=2.3))
        seen.add(f"thinking {thinking}")
    assert seen == {0, 1, "thinking True", "thinking False"}


@pytest.mark.parametrize("sentences", [1, 2])
def test_speculative_thinking(sentences):
    cue = np.zeros(VOCAB, np.int32)
    cue[[5, 6, 7]] = AFFIRM, REFLECT, REFLECT
    taken_over = for_good = 0
    for seed in SEEDS:
        text, reflections, first = Text(seed), 0, True
        while not text.over:
            token = text.add(0)
            mark = cue[token] if first else 0
            first = token in DELIMITERS
            if not mark:
                continue
            reflections += mark == REFLECT
            taken_over += 1
            for_good += reflections >= 2
            left = sentences
            while not text.over and (left > 0 or reflections >= 2):
                token = text.add(1)
                reflections += first and cue[token] == REFLECT
                first = token in DELIMITERS
                left -= first
        knobs = dict(sentences=sentences, reflections=2)
        assert_same(SpeculativeThinking(), seed, text, params=dict(delimiter=DELIMITER, cue=cue), knobs=knobs)
    assert 0 < for_good < taken_over


def scripted(script: dict[int, int]):
    """A model that writes the token of each position, whatever came before."""

    def read(tokens, adapters):
        logits = np.zeros((len(tokens), VOCAB), np.float32)
        for i in range(len(tokens)):
            logits[i, script.get(i + 1, 0)] = 9
        return logits, np.zeros((len(tokens), 1), np.float32)

    return read


def command(tokens: list[int], digits: np.ndarray) -> int:
    """n of a `9 … 8 10` that ends here, found by looking back from its end; 0 if there is none."""
    if tokens[-2:] != [8, 10] or 9 not in tokens:
        return 0
    inside = tokens[len(tokens) - tokens[::-1].index(9) : -2]
    if any(inside[i : i + 2] == [8, 10] for i in range(len(inside))):
        return 0
    number = 0
    for token in inside:
        if digits[token] >= 0:
            number = min(10 * number + int(digits[token]), 12)
    return number


def test_relay():
    digits = np.full(VOCAB, -1, np.int32)
    digits[[0, 1, 2]] = 0, 1, 2
    lengths = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        scripts = rng.choice([9, 8, 10, 10, 1, 2, 7], LIMIT), rng.choice([3, 4, 0], LIMIT)
        tokens, writers = [5], []
        while len(tokens) < LIMIT:
            tokens.append(int(scripts[0][len(tokens)]))
            writers.append(0)
            n = command(tokens, digits)
            lengths.append(n)
            for _ in range(min(n, LIMIT - len(tokens))):
                tokens.append(int(scripts[1][len(tokens)]))
                writers.append(1)
        models = [scripted(dict(enumerate(script))) for script in scripts]
        got = generate(Relay((9,), (8, 10)), models, [5], params=dict(digits=digits), knobs=dict(most=12), limit=LIMIT)
        assert (got.tokens, got.writers) == (tokens[1:], writers)
    assert {0, 1, 2, 12} <= set(lengths)


def test_relay_reads_its_number_and_ignores_what_is_none():
    digits = np.full(VOCAB, -1, np.int32)
    digits[[1, 2]] = 1, 2
    program = Relay((9,), (8, 10))
    writes = lambda *tokens: scripted(dict(enumerate(tokens, 1)))
    runs = lambda *tokens: (
        generate(program, [writes(*tokens), scripted({})], [5], params=dict(digits=digits), limit=24).writers
    )
    assert runs(9, 1, 2, 8, 10) == [0] * 5 + [1] * 12 + [0] * 6
    assert runs(9, 7, 2, 8, 10)[5:9] == [1, 1, 0, 0]
    assert 1 not in runs(9, 8, 10)  # no number
    assert 1 not in runs(2, 8, 10)  # no opening
    assert 1 not in runs(9, 2, 8, 7, 10)  # no closing
    assert runs(9, 2, 9, 1, 8, 10)[6:9] == [1, 0, 0]  # a new opening starts anew


def grade_by_digit(text: Text) -> float:
    return float(np.argmax(text.logits(1, (2, 9))[[5, 6, 7, 8]]))


def grade_by_reward(text: Text) -> float:
    logits = text.logits(2, (2, 9))
    return float(sigmoid(logits[6] - logits[5]))


GRADED = {
    "spec_reason": (SpecReason((2, 9), digits=(5, 6, 7, 8), longest=7), grade_by_digit, 2.0),
    "rsd": (RSD((2, 9), digits=(6, 5), longest=7), grade_by_reward, 0.5),
}


@pytest.mark.parametrize("name", GRADED)
def test_steps_that_are_graded(name):
    program, grade, threshold = GRADED[name]
    accepted = rejected = 0
    scorer = program.scorer
    for seed in SEEDS:
        text = Text(seed)
        while not text.over:
            length = 0
            while True:
                token = text.add(0)
                length += 1
                if token in DELIMITERS or text.over or length >= 7:
                    break
            if grade(text) >= threshold:
                accepted += 1
                continue
            rejected += 1
            text.cut(length)
            for _ in range(7):
                if text.add(1) in DELIMITERS or text.over:
                    break
        got = assert_same(program, seed, text, params=dict(delimiter=DELIMITER), knobs=dict(threshold=threshold))
        assert {model for model, mode in got.runs if mode == Mode.SCORE} == {scorer}
    assert accepted > 5
    assert rejected > 5


def test_session_cascade():
    stands = set()
    for seed in SEEDS:
        text = Text(seed)
        for model in range(3):
            total = 0.0
            while not text.over:
                logits = text.logits(model)
                token = text.add(model)
                total += logits[token] - np.log(np.sum(np.exp(logits)))
            if model == 2 or total / len(text.writers) >= -2.3:
                stands.add(model)
                break
            text.cut(len(text.writers))
        got = assert_same(SessionCascade(models=3), seed, text, knobs=dict(threshold=-2.3))
        assert len(set(got.writers)) == 1
    assert stands == {0, 1, 2}
