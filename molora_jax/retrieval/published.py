"""The published chain, in which every pass encodes the candidates anew behind the anchors, and what it costs.

Each pass is a question of its own, whose candidates are those not yet picked: so is it trained, with anchors given, and
so does it run, with its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from molora_jax.data.multihop.question import Question
from molora_jax.retrieval import chain, mara
from molora_jax.retrieval.chain import Chain
from molora_jax.retrieval.encode import Encoder, Encoding, Job
from molora_jax.retrieval.mara import MaraConfig
from molora_jax.retrieval.slates import Slate, jobs
from molora_jax.typing import Float, Params

Pool = Callable[[Encoding], Float[np.ndarray, "G D"]]
"""What of an encoding the router reads."""


def slates(
    encoder: Encoder, questions: Sequence[Question], anchors: Sequence[Sequence[int]], pool: Pool
) -> list[Slate]:
    """The slates of all passes, behind none of a question's anchors, the first, the first two, …, and all of them.

    Passes of which all evidence is among the anchors are left out.
    """
    found = []
    for question, picked in zip(questions, anchors, strict=True):
        for k in range(len(picked) + 1):
            left = [i for i in range(len(question.segments)) if i not in picked[:k]]
            gold = np.array([question.segments[i].supporting for i in left], bool)
            if gold.any():
                vectors = pool(encoder.encode([_job(question, picked[:k], left)])[0])
                none = np.zeros((len(left), 0), np.float32), np.zeros((len(left), len(left), 0), np.float32)
                found.append(Slate(question.id, gold, vectors, *none))
    return found


def run(encoder: Encoder, cfg: MaraConfig, params: Params, question: Question, pool: Pool, *, passes: int) -> Chain:
    """The chain of one question."""
    count, plain = len(question.segments), dataclasses.replace(cfg, slots=0)  # the global head ranks nothing

    def score(hypotheses: Sequence[tuple[int, ...]], racing: np.ndarray) -> np.ndarray:
        logits = np.zeros(racing.shape)
        for row, picked in enumerate(hypotheses):
            left = [i for i in range(count) if i not in picked]
            vectors = np.zeros((1, count, cfg.encoding), np.float32)
            vectors[0, : len(left)] = pool(encoder.encode([_job(question, picked, left)])[0])
            logits[row, left] = _local(plain, params, vectors, np.arange(count)[None] < len(left))[0, : len(left)]
        return logits

    return chain.search(score, count, passes=passes)


@functools.partial(jax.jit, static_argnums=0)
def _local(cfg: MaraConfig, params: Params, vectors, valid):
    return mara.score(cfg, params, vectors, valid).local


def _job(question: Question, picked: Sequence[int], left: Sequence[int]) -> Job:
    texts = jobs([question])[0].segments
    return Job(question.question, [texts[i] for i in left], [texts[i] for i in picked])


def cost(encoder: Encoder, question: Question, lengths: Sequence[int], picked: Sequence[int]) -> int:
    """Encoder tokens × layers of the published chain: all rows [question; anchors; candidate] in full in every pass.

    Args:
      lengths: tokens of each segment.
      picked: of all passes; the last one's pick is in no row.
    """
    prefix, total = len(encoder.prefix(Job(question.question, ()))), 0
    for k in range(len(picked)):
        total += len(lengths) * (prefix + sum(lengths[i] for i in picked[:k])) + sum(lengths)
    return int(total) * encoder.config.depths[-1]
