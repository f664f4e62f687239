"""The systems of a comparison of retrievers, one after the other."""

import functools
import pathlib
from collections.abc import Callable, Iterator

from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.multihop.question import Question
from molora_jax.retrieval import comparison, recipe
from molora_jax.retrieval.attention import AttentionConfig, AttentionRanker
from molora_jax.retrieval.comparison import Inputs
from molora_jax.retrieval.report import Report
from molora_jax.retrieval.sentence import SentenceEncoder
from molora_jax.retrieval.slates import Beside

HEADS_ROWS = 10
"""Training questions of each set on which the heads are chosen whose attention ranks."""

Sets = dict[str, list[Question]]
"""Questions by the name of their set."""


def chained(data_dir: str | pathlib.Path, seen: Inputs, train: Sets, dev: Sets, rows: int) -> tuple[Sets, Sets]:
    """The first questions of each set, and of bAbI, that train both chains, and that these are compared on.

    Raises:
      UserError: tokens for inputs, which the published chain cannot read, or no bAbI in `other` of the data folder.
    """
    if seen.pooling == "attention":
        raise UserError("chain_rows: got a published chain with pooling=attention, expected --chain_rows=0")
    few = [{name: own[:rows] for name, own in part.items()} for part in (train, dev)]
    for part, split, most in zip(few, ("train", "test"), (5, 3), strict=True):
        part["babi"] = comparison.babi(data_dir, split, most * rows)
    return few[0], few[1]


def stages(
    report: Report,
    model: Model,
    seen: Inputs,
    train: Sets,
    few: tuple[Sets, Sets] | None,
    dense: SentenceEncoder | None,
    *,
    seeds: int,
    quick: bool = False,
) -> Iterator[Callable[[], None]]:
    """What measures each of them, and adds its rows to the report.

    Args:
      few: of `chained`; None compares no chains.
      quick: only what the summary's keys name.
    """
    trained = functools.partial(report.trained, inputs=seen, seeds=seeds)
    yield lambda: trained("mara", recipe.router(seen), learn=train)
    yield lambda: trained("channels", recipe.router(seen), learn=train, blind=True)
    yield lambda: trained("bare", recipe.router(seen, bare=True), learn=train)
    if few is not None:
        yield lambda: report.chains(seen, *few, seeds)
    if quick:
        return
    if dense is not None:
        both = Inputs(seen.encoder, Beside(dense=dense, cache=seen.beside.cache), seen.pooling)
        yield lambda: report.trained("mara_dense", recipe.router(both), both, train, seeds)
    layers = min(AttentionConfig.layers, model.cfg.layers)
    heads = min(AttentionConfig.heads, layers * model.cfg.heads)
    sizes = AttentionConfig(layers=layers, heads=heads, longest=seen.encoder.config.longest)
    ranker = AttentionRanker(model.cfg, model.params, model.tokenizer, sizes)
    yield lambda: report.frozen(seen.encoder, ranker, {name: own[:HEADS_ROWS] for name, own in train.items()})
    for name, own in train.items():
        yield functools.partial(trained, "mara", recipe.router(seen), learn={name: own})
    for name, cfg in recipe.rivals(seen).items():
        yield functools.partial(trained, name, cfg, learn=train)
