"""What encoding once costs and loses against the published chain, which encodes anew behind every anchor."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from molora_jax.data.multihop.question import Question
from molora_jax.retrieval import comparison, published, training
from molora_jax.retrieval.comparison import Inputs
from molora_jax.retrieval.mara import MaraConfig
from molora_jax.retrieval.training import TrainingConfig


def compare(
    add: Callable[..., None],
    inputs: Inputs,
    cfg: MaraConfig,
    config: TrainingConfig,
    learn: Mapping[str, Sequence[Question]],
    test: Mapping[str, Sequence[Question]],
    *,
    seeds: int,
) -> dict[str, float]:
    """Trains and runs both chains on the same questions, and adds a row for each set and for all together.

    Both routers read encodings alone, and have the passes of `config`. The published one is trained behind anchors that
    it picks itself, once it has been trained behind those that the first of ours picks.

    Returns:
      `encode_once_cost_ratio`, encoder tokens × layers of the published chain, every row in full, over ours; and
      `encode_once_recall_gap`, points of recall, the mean of recall@2 and recall@4, that ours is better by.
    """
    encoder, passes = inputs.encoder, config.passes
    mine = [question for own in learn.values() for question in own]
    once = dataclasses.replace(cfg, chained=True)
    ours = comparison.fit(once, inputs.slates(mine, bare=True), config, seeds)
    picked = training.chains(once, ours[0].params, inputs.slates(mine, bare=True), passes=passes)
    anchors = [chain.ranking[: chain.picks - 1] for chain in picked]
    again, alone = dataclasses.replace(cfg, chained=False), dataclasses.replace(config, passes=1)
    first = comparison.fit(again, published.slates(encoder, mine, anchors, inputs.pool), alone, 1)[0].params
    picked = [published.run(encoder, again, first, question, inputs.pool, passes=passes) for question in mine]
    anchors = [chain.ranking[: chain.picks - 1] for chain in picked]
    theirs = comparison.fit(again, published.slates(encoder, mine, anchors, inputs.pool), alone, seeds)
    figures, costs = [], []
    for name, own in test.items():
        found = comparison.ranked(once, ours, inputs.slates(own, bare=True), passes)
        rank = functools.partial(published.run, encoder, again, pool=inputs.pool, passes=passes)
        each = [[rank(one.params, question) for question in own] for one in theirs]
        spent = [_published_cost(inputs, q, chain.ranking[:passes]) for q, chain in zip(own, each[0], strict=True)]
        saved = inputs.cost(own, bare=True)
        pair = [_quality(own, chains) for chains in (found, each)]
        figures.append(pair)
        costs.append((len(own) * saved, sum(spent)))
        _row(add, name, pair, (saved, float(np.mean(spent))))
    pair = [np.concatenate(part) for part in zip(*figures, strict=True)]
    total = [float(sum(part)) / len(pair[0]) for part in zip(*costs, strict=True)]
    _row(add, comparison.POOLED, pair, total)
    return dict(
        encode_once_cost_ratio=total[1] / total[0], encode_once_recall_gap=100 * float(np.mean(pair[0] - pair[1]))
    )


def _row(add, name: str, pair: Sequence[np.ndarray], cost: Sequence[float]) -> None:
    ours, theirs = ({"recall": part} for part in pair)
    facts = dict(
        once=float(pair[0].mean()), published=float(pair[1].mean()), gap=comparison.gap(ours, theirs, "recall")
    )
    add(system="chain", set=name, n=len(pair[0]), **facts, cost=cost[0], published_cost=cost[1])


def _quality(questions: Sequence[Question], runs) -> np.ndarray:
    """Mean of recall@2 and recall@4 of each question, over the seeds."""
    table = comparison.values(questions, [[chain.ranking for chain in own] for own in runs])
    return (table["recall@2"] + table["recall@4"]) / 2


def _published_cost(inputs: Inputs, question: Question, picked: Sequence[int]) -> int:
    return published.cost(inputs.encoder, question, inputs.lengths(question), picked)
