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

STEP = 64
"""Sequences are padded to a multiple of it, so that few programs are compiled."""


def choose(engine: RoutedEngine, requests: Sequence[Request], share: float) -> Calibration:
    """The threshold at which the large model writes nearly `share` of the tokens of `requests`, which are run.

    The router scores every token of the small model's own answers; where the large model has written, the small one
    goes on differently, so that the realised share is near the one promised, not equal to it.

    Raises:
      UserError: a program that does not compare each token of the small model with one threshold, or a bad share.
    """
    program = engine.program
    if type(program).score is Program.score:
        raise UserError(
            f"share: got {share} for {type(program).__name__}, expected a program with one threshold for every token "
            "(deferral, CITER, Co-LLM, critical tokens, R2R): set its knobs instead"
        )
    if not 0 <= share <= 1:
        raise UserError(f"share: got {share}, expected 0 to 1")
    never = -np.inf if program.below else np.inf
    alone = [dataclasses.replace(each, knobs={**each.knobs, "threshold": never}) for each in requests]
    model, weights = engine.fleet.cfgs[program.hidden_of], engine.weights.models[program.hidden_of]
    found = []
    for request, event in zip(alone, engine.run(alone), strict=True):
        found.append(scores(program, engine.weights.program, model, weights, request.prompt, event.tokens))
    budget = max(requests[0].knobs.get("budget", program.knobs.get("budget", 1)), 1)
    return calibrate(np.concatenate(found), share, below=program.below, budget=budget)


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
