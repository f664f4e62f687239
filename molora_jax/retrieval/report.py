"""The rows of a comparison of retrievers, the keys of its summary, its table and its plot."""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from molora_jax import benchmarking
from molora_jax.data.multihop.question import Question
from molora_jax.retrieval import comparison, metrics, once, recipe
from molora_jax.retrieval.attention import AttentionRanker
from molora_jax.retrieval.comparison import POOLED, Inputs, Values
from molora_jax.retrieval.encode import Encoder
from molora_jax.retrieval.mara import MaraConfig
from molora_jax.retrieval.slates import Beside

RIVALS = ("bm25", "dense")
"""What every system is compared with, question by question."""
KEYS = ("r2", "r4", "all4")
COLUMNS = ("system", "trained_on", "set", "n", "r2", "r4", "r8", "all4", "cost", "r4_vs_bm25", "r4_vs_dense")


class Report:
    """Measures systems on the same questions.

    Args:
      add: takes a row.
      dev: the questions that are pooled, by set.
      further: others, by name, which are not.

    Attributes:
      summary: `SET_SYSTEM_FIGURE`.
    """

    def __init__(
        self,
        add: Callable[..., None],
        dev: Mapping[str, Sequence[Question]],
        further: Mapping[str, Sequence[Question]] = {},  # noqa: B006 - read alone
    ):
        self.dev, self.questions, self.summary = dev, {**dev, **further}, {}
        self._add, self._rows, self._rivals = add, [], {}

    def untrained(self, beside: Beside, seeds: int) -> None:
        """Rows of the baselines that `beside` has."""
        found = {of: comparison.untrained(own, beside, seeds) for of, own in self.questions.items()}
        for name in next(iter(found.values())):
            costs = {
                of: comparison.dense_cost(beside.dense, own) if name == "dense" else 0.0
                for of, own in self.questions.items()
            }
            self.measure(name, {of: own[name] for of, own in found.items()}, costs, trained_on="-")

    def given(self, name: str, file: str | pathlib.Path) -> None:
        """Rows of somebody else's rankings, as `comparison.given` reads them; what they cost is not known.

        Also EM and F1 of exactly those segments that are named, by MuSiQue's rule.
        """
        named = comparison.given(file, self.questions)
        for of, own in named.items():
            score = metrics.mean([metrics.paragraphs(q, ids) for q, ids in zip(self.questions[of], own, strict=True)])
            shown = dict(named=float(np.mean([len(ids) for ids in own])), support_em=score.em, support_f1=score.f1)
            self._add(system=name, set=of, n=len(own), **shown, support_recall=score.recall)
        whole = lambda of: zip(named[of], self.questions[of], strict=True)
        rankings = {of: [[comparison.completed(ids, len(q.segments)) for ids, q in whole(of)]] for of in named}
        self.measure(name, rankings, {}, trained_on="theirs")

    def frozen(self, encoder: Encoder, ranker: AttentionRanker, learn: Mapping[str, Sequence[Question]]) -> None:
        """Rows of what a model ranks by itself: cosines of last tokens, and attention by heads chosen on `learn`."""
        ranker.choose([question for own in learn.values() for question in own])
        rankers = dict(last=functools.partial(comparison.last_token, encoder), attention=ranker.rankings)
        for name, rank in rankers.items():
            found = {of: rank(own) for of, own in self.questions.items()}
            costs = {of: cost for of, (_, cost) in found.items()}
            self.measure(name, {of: [ranked] for of, (ranked, _) in found.items()}, costs, trained_on="-")

    def trained(
        self,
        name: str,
        cfg: MaraConfig,
        inputs: Inputs,
        learn: Mapping[str, Sequence[Question]],
        seeds: int,
        *,
        blind: bool = False,
    ) -> None:
        """Rows of a router, of which one is trained a seed on the questions of some sets together.

        Args:
          blind: the router sees zeros for encodings, at no encoder's cost: what its channels do alone.
        """
        bare, config = not cfg.channels, recipe.TRAINING
        see = lambda own: inputs.slates(own, bare=bare)
        if blind:
            see = lambda own: comparison.blind(inputs.slates(own))
        fits = comparison.fit(cfg, see([question for own in learn.values() for question in own]), config, seeds)
        rankings = {}
        for of, own in self.questions.items():
            runs = comparison.ranked(cfg, fits, see(own), config.passes)
            rankings[of] = [[chain.ranking for chain in chains] for chains in runs]
        trained_on = "all" if len(learn) > 1 else next(iter(learn))
        costs = {of: 0.0 if blind else inputs.cost(own, bare=bare) for of, own in self.questions.items()}
        self.measure(name, rankings, costs, trained_on=trained_on)

    def chains(
        self,
        inputs: Inputs,
        learn: Mapping[str, Sequence[Question]],
        test: Mapping[str, Sequence[Question]],
        seeds: int,
    ) -> None:
        """Rows of the chain that encodes once beside the published one (`once.compare`)."""
        bare = recipe.router(inputs, bare=True)
        self.summary |= once.compare(self._add, inputs, bare, recipe.TRAINING, learn, test, seeds=seeds)

    def measure(self, name: str, rankings: Mapping[str, Sequence], costs: Mapping[str, float], **facts: Any) -> None:
        """A row for each set, and for the pooled ones if all are there: rankings by set and seed, and what they cost.

        Args:
          costs: encoder tokens × layers a question, by set; none where they are not known.
        """
        own = {of: comparison.values(self.questions[of], each) for of, each in rankings.items()}
        spent = {of: float(cost) for of, cost in costs.items()}
        if set(self.dev) <= set(own):
            own |= comparison.merged({of: own[of] for of in self.dev})
            if spent:
                spent[POOLED] = sum(spent[of] * len(self.dev[of]) for of in self.dev) / sum(map(len, self.dev.values()))
        if name in RIVALS:
            self._rivals[name] = own
        for of, figures in own.items():
            found = comparison.means(figures)
            row = dict(system=name, **facts, set=of, n=len(figures["recall@2"]), **found, cost=spent.get(of))
            row |= self._gaps(name, of, figures)
            self._add(**row)
            self._rows.append(row)
            if facts.get("trained_on") in ("all", "-"):
                self.summary |= {f"{of}_{name}_{key}": found[key] for key in KEYS}

    def _gaps(self, name: str, of: str, figures: Values) -> dict[str, str]:
        pairs = [
            (rival, figure) for rival in self._rivals if rival != name for figure in ("recall@2", "recall@4", "all@4")
        ]
        gap = lambda rival, figure: comparison.gap(figures, self._rivals[rival][of], figure)
        return {f"{comparison.short(figure)}_vs_{rival}": gap(rival, figure) for rival, figure in pairs}

    @property
    def pooled(self) -> dict[str, float]:
        """recall@4 of each system, over the sets together."""
        return {row["system"]: row["r4"] for row in self._rows if row["set"] == POOLED}

    def table(self) -> str:
        """Markdown."""
        return table(self._rows, COLUMNS)

    def plot(self, axes) -> None:
        """recall@4 against cost, on the pooled sets."""
        for row in self._rows:
            if row["set"] == POOLED and row["trained_on"] in ("all", "-"):
                axes.scatter(row["cost"] + 1, row["r4"])
                axes.annotate(row["system"], (row["cost"] + 1, row["r4"]), fontsize=8)
        axes.set(xscale="log", xlabel="encoder tokens × layers a question, and 1", ylabel="recall@4, sets pooled")


def table(rows: Sequence[Mapping], columns: Sequence[str]) -> str:
    """Markdown; numbers up to 1 in three places, nothing where they are not known."""
    return benchmarking.markdown([columns, *([_shown(row.get(c, "")) for c in columns] for row in rows)]) + "\n"


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.3f}" if value <= 1 else f"{value:,.0f}"
