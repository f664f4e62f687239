"""Training of a router over inputs that were computed once; the checkpoint is chosen on a slice of the training set."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.config import UserError
from molora_jax.retrieval import chain, losses, mara
from molora_jax.retrieval.chain import Chain
from molora_jax.retrieval.losses import LossConfig
from molora_jax.retrieval.mara import MaraConfig, Scores
from molora_jax.retrieval.metrics import recall_at
from molora_jax.retrieval.slates import Slate, Slates, collate
from molora_jax.training.objective import Sums
from molora_jax.training.optimiser import Group, OptimiserConfig, Schedule
from molora_jax.training.step import Trainer
from molora_jax.typing import Array, Params

ROWS = 32
"""Questions that are scored together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One run; the rates are the published ones, the sizes are for hundreds of questions.

    Attributes:
      loss: its terms.
      passes: P of the chain, the same in training and after; 1 for none.
      epochs: times that every question is seen.
      rows: B, questions of a step.
      rate, decay: peak learning rate, which rises over a tenth of the run and falls to a tenth, and weight decay.
      encoding_rate: that of what reads the encodings, the pooling and the projection; None: the same. Hundreds of
        questions cannot fill the hundreds of features of an encoding: a low rate keeps them from being learnt by heart.
      dropout: chance of a feature of the encodings to be hidden, in all of a question's candidates.
      permute: shuffles the candidates each time they are seen.
      held: share of the questions that train nothing and choose the checkpoint.
      seed: of the router, the slice, the order and whatever else is random.
    """

    loss: LossConfig = LossConfig()
    passes: int = 4
    epochs: int = 12
    rows: int = 16
    rate: float = 5e-4
    encoding_rate: float | None = None
    decay: float = 0.0
    dropout: float = 0.0
    permute: bool = True
    held: float = 0.15
    seed: int = 0

    def __post_init__(self):
        if min(self.passes, self.epochs, self.rows) < 1 or not 0 < self.held < 1 or not 0 <= self.dropout < 1:
            raise UserError(f"training: got {self}, expected at least one pass, epoch and row, and shares below 1")


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run gives.

    Attributes:
      params: at the best checkpoint.
      score: its `quality` on the slice.
      epoch: when it was taken.
      held: the questions of the slice, on which a stop may be fitted.
    """

    params: Params
    score: float
    epoch: int
    held: tuple[Slate, ...]


def train(cfg: MaraConfig, slates: Sequence[Slate], config: TrainingConfig) -> Trained:
    """Trains a router on some slates and chooses the checkpoint, of one an epoch, on the others.

    Raises:
      UserError: too few slates, a chain for a router that is not `chained`, or a loss that is not finite.
    """
    learning, held = split(slates, config)
    if config.passes > 1 and not cfg.chained:
        raise UserError(f"training: got {config.passes} passes for a router without anchors, expected chained=True")
    if cfg.slots and cfg.slots < most(slates):
        raise UserError(f"training: got {most(slates)} candidates, expected at most the {cfg.slots} of the global head")
    params = mara.init(cfg, config.seed)
    if cfg.standard:
        params = mara.standardised(params, jnp.concatenate([_features(slate) for slate in learning]))
    frozen = {"standard": params.pop("standard")} if cfg.standard else {}
    steps = config.epochs * (len(learning) // config.rows)
    schedule = Schedule(shape="cosine", steps=steps, warmup=steps // 10, end=0.1)
    reading = config.rate if config.encoding_rate is None else config.encoding_rate
    groups = (
        Group(name="encodings", paths=("router.proj", "router.pool.*"), rate=reading, decay=config.decay),
        Group(name="router", paths=("router.*",), rate=config.rate, decay=config.decay),
    )
    trainer = Trainer(
        dict(router=params, frozen=frozen),
        functools.partial(loss, cfg, config),
        OptimiserConfig(groups=groups, schedule=schedule),
        seed=config.seed,
    )
    state, best = trainer.init(), None
    for epoch in range(config.epochs):
        for batch in _epoch(learning, config, epoch):
            state, numbers = trainer.step(state, batch)
        if not numbers["finite"]:
            raise UserError(f"training: got loss {float(numbers['loss']):g} in epoch {epoch + 1}; lower the rate")
        tree = trainer.tree(state)
        score = quality(chains(cfg, tree["router"] | tree["frozen"], held, passes=config.passes), held)
        if best is None or score > best.score:
            best = Trained(jax.tree.map(jnp.copy, tree["router"] | tree["frozen"]), score, epoch + 1, tuple(held))
    return best


def split(slates: Sequence[Slate], config: TrainingConfig) -> tuple[list[Slate], list[Slate]]:
    """Those that train, and the slice of questions that chooses the checkpoint: another one for every seed."""
    ids = list(dict.fromkeys(slate.id for slate in slates))
    order = np.random.default_rng([config.seed, 1]).permutation(len(ids))
    count = round(config.held * len(ids))
    kept = {ids[i] for i in order[:count]}
    parts = [slate for slate in slates if slate.id not in kept], [slate for slate in slates if slate.id in kept]
    if len(parts[0]) < config.rows or not parts[1]:
        got = f"{len(ids)} questions, of which {count} are held out, for batches of {config.rows}"
        raise UserError(f"training: got {got}, expected enough for both")
    return parts


def loss(cfg: MaraConfig, config: TrainingConfig, tree: dict[str, Any], batch: Slates, key: Array) -> Sums:
    """The loss of a chain over encodings made once, its picks being the router's own."""
    shuffled, dropped = jax.random.split(key)
    params = tree["router"] | tree["frozen"]
    if config.permute:
        batch = permuted(batch, shuffled)
    encodings = pooled(cfg, params, batch)
    if config.dropout:
        kept = jax.random.bernoulli(dropped, 1 - config.dropout, (len(encodings), 1, encodings.shape[-1]))
        middle = params["standard"]["shift"] if cfg.standard else 0.0
        encodings = jnp.where(kept, (encodings - middle) / (1 - config.dropout), 0) + middle
    scores, anchors = scored(cfg, params, batch, encodings, config.passes)
    passes = [jax.tree.map(lambda leaf, k=k: leaf[k], scores) for k in range(config.passes)]
    value, terms = losses.chain(config.loss, passes, anchors, batch.gold, batch.valid)
    rows = batch.valid.shape[0]
    return Sums(rows * value, jnp.float32(rows), {name: rows * term for name, term in terms.items()})


def permuted(batch: Slates, key: Array) -> Slates:
    """The candidates of each question in another order, pads among them."""
    rows, count = batch.valid.shape
    order = jax.vmap(lambda k: jax.random.permutation(k, count))(jax.random.split(key, rows))
    move = jax.vmap(lambda leaf, order: leaf[order])
    found = {name: leaf if leaf is None else move(leaf, order) for name, leaf in vars(batch).items()}
    if batch.links is not None:
        found["links"] = jax.vmap(lambda leaf, order: leaf[:, order])(found["links"], order)
    return Slates(**found)


def pooled(cfg: MaraConfig, params: Params, batch: Slates):
    """Encodings [B G D] of a batch, pooled by the router where they are tokens."""
    return batch.encodings if batch.read is None else mara.pool(cfg, params, batch.encodings, batch.read)


def scored(cfg: MaraConfig, params: Params, batch: Slates, encodings, passes: int) -> tuple[Scores, Array]:
    """Scores of all passes, leaves [P B G], and the picks [B P]."""
    beside = dict(channels=batch.channels, links=batch.links)
    if not cfg.chained:
        scores = mara.score(cfg, params, encodings, batch.valid, **beside)
        return jax.tree.map(lambda leaf: leaf[None], scores), jnp.zeros((len(batch.valid), 0), jnp.int32)
    return chain.embedded(cfg, params, encodings, batch.valid, passes=passes, **beside)


def chains(cfg: MaraConfig, params: Params, slates: Sequence[Slate], *, passes: int) -> list[Chain]:
    """What the router ranks, in the order of the slates; the global head ranks nothing, and does not bound them."""
    cfg = dataclasses.replace(cfg, slots=0)
    found, count, length = [], most(slates), longest(slates)
    for start in range(0, len(slates), ROWS):
        chosen = list(slates[start : start + ROWS])
        batch = collate(chosen + [chosen[-1]] * (ROWS - len(chosen)), count, length)
        found += chain.finish(*_scored(cfg, passes, params, batch), batch.valid)[: len(chosen)]
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scored(cfg: MaraConfig, passes: int, params: Params, batch: Slates):
    scores, anchors = scored(cfg, params, batch, pooled(cfg, params, batch), passes)
    return scores.local, anchors


def quality(found: Sequence[Chain], slates: Sequence[Slate]) -> float:
    """Mean of recall@2 and recall@4: what checkpoints are chosen by."""
    golds = [np.flatnonzero(slate.gold) for slate in slates]
    pairs = list(zip(found, golds, strict=True))
    return float(np.mean([recall_at(one.ranking, gold, k) for one, gold in pairs for k in (2, 4)]))


def most(slates: Sequence[Slate]) -> int:
    """Candidates of the largest slate."""
    return max(len(slate.gold) for slate in slates)


def longest(slates: Sequence[Slate]) -> int:
    """Tokens of the longest segment; 0 where they are pooled."""
    return max((len(t) for s in slates if not isinstance(s.encodings, np.ndarray) for t in s.encodings), default=0)


def _features(slate: Slate) -> np.ndarray:
    """All vectors of a slate, [N D]."""
    return slate.encodings if isinstance(slate.encodings, np.ndarray) else np.concatenate(slate.encodings)


def _epoch(slates: Sequence[Slate], config: TrainingConfig, epoch: int) -> Iterator[Slates]:
    """Batches of every question once, but for the last few that fill none."""
    order = np.random.default_rng([config.seed, 2, epoch]).permutation(len(slates))
    count, length = most(slates), longest(slates)
    for start in range(0, len(order) - config.rows + 1, config.rows):
        yield collate([slates[i] for i in order[start : start + config.rows]], count, length)
