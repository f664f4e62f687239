"""The threshold for a wanted share of the large model's tokens, from what the small one writes by itself."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from molora_jax.config import ModelConfig, UserError
from molora_jax.engine.request import Request
from molora_jax.engine.routed import RoutedEngine
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.routing import signals
from molora_jax.routing.calibration import Calibration, calibrate
from molora_jax.routing.program import Program
from molora_jax.typing import Array, Float, Int, Params

ROUNDS, CLOSE = 8, 0.02
"""Most thresholds that are tried, and how near to the wanted share is near enough."""

SLACK = 1e-3
"""How far below the lowest score a threshold lies that routes every token, as a fraction of it, or of 1."""
STEP = 64
"""Sequences are padded to a multiple of it, so that few programs are compiled."""


def check(program: Program, share: float) -> None:
    """Whether a threshold can be chosen at all, to be asked before anything is compiled.

    Raises:
      UserError: a program that does not compare each token of the small model with one threshold, or a bad share.
    """
    if type(program).score is Program.score:
        raise UserError(
            f"share: got {share} for {type(program).__name__}, expected a program with one threshold for every token "
            "(deferral, CITER, Co-LLM, critical tokens, R2R): set its knobs instead"
        )
    if not 0 <= share <= 1:
        raise UserError(f"share: got {share}, expected 0 to 1")


def choose(engine: RoutedEngine, requests: Sequence[Request], share: float, *, close: float = CLOSE) -> Calibration:
    """The threshold at which the large model writes nearly `share` of the tokens of `requests`, and what it wrote.

    The first one comes from the router's scores of the small model's own answers. But after a token of the large model
    the small one is in a text that it would not have written, and its scores are others; so the requests are run with
    that threshold, what came of them is scored anew, and so on, by bisection where that leads astray.

    Args:
      close: how near to the wanted share is near enough; after `ROUNDS` thresholds the nearest is taken.

    Raises:
      UserError: as `check` does.
    """
    program = engine.program
    check(program, share)
    budget = max(requests[0].knobs.get("budget", program.knobs.get("budget", 1)), 1)
    sign = -1 if program.below else 1  # below, scores and thresholds are negated, so that high ones are routed
    texts, pool, tried = _run(engine, requests, sign * np.inf)[0], np.empty(0), []
    low, high = -np.inf, np.inf  # thresholds with too high and too low a share
    for _ in range(ROUNDS):
        found = np.concatenate([_own_scores(engine, each, text) for each, text in zip(requests, texts, strict=True)])
        pool = np.unique(np.append(pool, sign * found))
        value = sign * calibrate(found, share, below=program.below, budget=budget).threshold
        if not low < value < high:
            edges = _edges(pool)
            between = edges[(edges > low) & (edges < high)]
            if not between.size:
                break
            value = float(between[between.size // 2])
        texts, realised = _run(engine, requests, sign * value)
        tried.append(Calibration(sign * value, realised))
        if abs(realised - share) <= close:
            break
        low, high = (value, high) if realised > share else (low, value)
    return min(tried, key=lambda each: abs(each.share - share))


def _edges(pool: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Thresholds half way between ascending scores, and one below them all; none is a score, which rounding decides."""
    below = pool[0] - SLACK * max(1.0, abs(pool[0]))
    return np.append(below, (pool[1:] + pool[:-1]) / 2)


def _run(engine: RoutedEngine, requests: Sequence[Request], threshold: float) -> tuple[list[list[int]], float]:
    """The answers, and the large model's share of their tokens."""
    events = engine.run([dataclasses.replace(each, knobs={**each.knobs, "threshold": threshold}) for each in requests])
    writers = np.concatenate([event.writers for event in events])
    return [event.tokens for event in events], float(np.mean(writers != engine.program.hidden_of))


def _own_scores(engine: RoutedEngine, request: Request, text: Sequence[int]) -> Float[np.ndarray, "N"]:
    program, params = engine.program, engine.weights.program
    own = engine.fleet.cfgs[program.hidden_of], engine.weights.models[program.hidden_of]
    return scores(program, params, *own, request.prompt, text)


def scores(
    program: Program, params: Params, cfg: ModelConfig, weights: Params, prompt: Sequence[int], answer: Sequence[int]
) -> Float[np.ndarray, "N"]:
    """The router's score of each token of an answer, in one pass of the model that wrote it."""
    length = len(prompt) + len(answer)
    tokens = np.zeros(-(-length // STEP) * STEP, np.int32)
    tokens[:length] = [*prompt, *answer]
    return np.asarray(_scores(program, cfg, params, weights, tokens, np.int32(length)))[len(prompt) - 1 : length - 1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scores(program: Program, cfg: ModelConfig, params: Params, weights: Params, tokens: Int[Array, "T"], length):
    """Score of the token after each position; those at the end and in the padding mean nothing."""
    valid = np.arange(tokens.shape[0]) < length
    hidden = transformer.apply(cfg, weights, tokens, dense(1, tokens.shape[0], valid=valid[None])).hidden

    def score(hidden: Float[Array, "D"], token: Int[Array, ""]) -> Float[Array, ""]:
        logits = transformer.logits(cfg, weights, hidden[None])[0]
        sig = signals.measure(program, logits=logits, token=token, recent=None, hidden=hidden)
        return program.score(params, sig)

    return jax.lax.map(lambda each: score(*each), (hidden, jax.numpy.roll(tokens, -1)), batch_size=STEP)
