"""A router and a reader on the questions of multi-hop sets: evidence, answers by official rules, and cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.config import UserError
from molora_jax.data.multihop.question import Question
from molora_jax.retrieval import answer, baselines, chain, comparison, metrics, training
from molora_jax.retrieval.assistant import Assistant
from molora_jax.retrieval.metrics import Score

CONTEXTS = ("mara", "bm25", "gold", "all", "none")
"""What a reader is given: the first segments of a ranking, all evidence, all segments, nothing."""


def retrieval(helper: Assistant, sets: Mapping[str, Sequence[Question]]) -> list[dict[str, Any]]:
    """A row a set, and one for each number of hops in it: recall@k and the share of questions with all evidence.

    Of all questions also how many segments the router's stop takes, how often they hold all evidence, and how many
    encoder tokens × layers a question takes.
    """
    rows = []
    for name, own in sets.items():
        chains = training.chains(helper.cfg, helper.params, helper.inputs.slates(own), passes=helper.passes)
        figures = comparison.values(own, [[one.ranking for one in chains]])
        counts = [helper.stop.count(one) for one in chains]
        whole = [set(q.supporting) <= set(c.ranking[:k]) for q, c, k in zip(own, chains, counts, strict=True)]
        more = dict(taken=float(np.mean(counts)), whole=float(np.mean(whole)), encoder=helper.inputs.cost(own))
        rows.append(dict(set=name, hops="all", n=len(own), **comparison.means(figures), **more))
        for hops in sorted({question.hops for question in own}):
            mine = np.array([question.hops == hops for question in own])
            part = comparison.means({key: value[mine] for key, value in figures.items()})
            rows.append(dict(set=name, hops=hops, n=int(mine.sum()), **part))
    return rows


def answers(
    helper: Assistant,
    sets: Mapping[str, Sequence[Question]],
    contexts: Sequence[str],
    *,
    top: int,
    order: str,
    beams: int,
    reader: Adapter | None = None,
) -> list[dict[str, Any]]:
    """A row a set and context: EM and F1 of answers, of the evidence given, and of both together, and the cost.

    Evidence is scored by segments, by MuSiQue's rule; `joint` is HotpotQA's product of both. `encoder`, `prefill` and
    `decode` are tokens × layers a question.

    Args:
      contexts: of `CONTEXTS`.
      top, order: segments of a ranking that the reader is given, and `rank` or `reading`.
      reader: an adapter of the model that all its tokens have.

    Raises:
      UserError: an unknown context, or a prompt that is longer than the model reads.
    """
    if unknown := sorted(set(contexts) - set(CONTEXTS)):
        raise UserError(f"contexts: got {unknown[0]!r}, expected some of {', '.join(CONTEXTS)}")
    rows = []
    for name, own in sets.items():
        for context in contexts:
            chosen = [tuple(picks) for picks in _chosen(helper, own, context, top, order)]
            prompts = [answer.prompt(question, picks) for question, picks in zip(own, chosen, strict=True)]
            given = answer.answers(helper.model, prompts, width=beams, reader=reader)
            said, found = answer.scores(own, given), answer.evidence(own, chosen)
            both = [metrics.joint(*pair) for pair in zip(said, found, strict=True)]
            rows.append(dict(set=name, context=context, n=len(own), **_shown(said, found, both)))
            mean = lambda part, given=given: float(np.mean([getattr(one, part) for one in given]))
            spent = helper.inputs.cost(own) if context == "mara" else 0.0
            rows[-1] |= dict(encoder=spent, prefill=mean("prefill"), decode=mean("decode"))
    return rows


def _chosen(helper: Assistant, own: Sequence[Question], context: str, top: int, order: str) -> list[Sequence[int]]:
    """Indices of the segments that the reader is given of each question."""
    if context == "mara":
        chains = training.chains(helper.cfg, helper.params, helper.inputs.slates(own), passes=helper.passes)
        return [chain.take(one.ranking, top, order) for one in chains]
    if context == "bm25":
        return [chain.take(baselines.ranking(baselines.bm25(question)), top, order) for question in own]
    picks = dict(gold=lambda q: q.supporting, all=lambda q: range(len(q.segments)), none=lambda q: ())
    return [picks[context](question) for question in own]


def _shown(said: Sequence[Score], found: Sequence[Score], both: Sequence[Score]) -> dict[str, float]:
    parts = dict(answer=metrics.mean(said), support=metrics.mean(found), joint=metrics.mean(both))
    return {f"{name}_{key}": getattr(score, key) for name, score in parts.items() for key in ("em", "f1")}
