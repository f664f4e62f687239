"""Training of the heads that programs route by: weighted cross-entropy on labelled tokens, to the held-out optimum."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.config import UserError
from molora_jax.routing import heads
from molora_jax.routing.heads import HeadConfig
from molora_jax.training.labels import Labels
from molora_jax.training.objective import Sums
from molora_jax.training.optimiser import Group, OptimiserConfig
from molora_jax.training.step import State, Trainer
from molora_jax.typing import Array, Bool, Float, Int, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTraining:
    """How a head is trained; the defaults are for the testbed, whose heads are small.

    Attributes:
      epochs: at most; R2R's released code takes 50.
      patience: epochs without a better held-out loss after which it ends.
      rows: tokens of a batch.
      rate, decay: of AdamW.
      held_out: share of the questions whose tokens are kept for the choice of epoch and threshold.
      recall: of the wanted tokens that the head's own threshold lets through on the held-out slice.
      seed: of the parameters, the slice and the order.
    """

    epochs: int = 40
    patience: int = 6
    rows: int = 512
    rate: float = 1e-3
    decay: float = 5e-4
    held_out: float = 0.15
    recall: float = 0.95
    seed: int = 0

    def __post_init__(self):
        if min(self.epochs, self.patience, self.rows) < 1 or not (0 < self.held_out < 1 and 0 < self.recall <= 1):
            raise UserError(f"head: got {self}, expected counts of at least 1 and shares between 0 and 1")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """A batch of labelled tokens: what a head sees, and whether it should call for them.

    Attributes:
      tokens: the small model's choices.
      weights: of each token's loss.
    """

    tokens: Int[Array, "N"]
    hidden: Float[Array, "N D"]
    top_logits: Float[Array, "N k"]
    wanted: Bool[Array, "N"]
    weights: Float[Array, "N"]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A head that has been trained.

    Attributes:
      threshold: the highest that lets `recall` of the wanted held-out tokens through.
      losses: held-out, after each epoch; the parameters are those of the lowest.
      recall, rate: at the threshold, of the wanted held-out tokens and of all of them.
    """

    cfg: HeadConfig
    params: Params
    threshold: float
    losses: list[float]
    recall: float
    rate: float


def train(
    cfg: HeadConfig,
    embedding: Float[Array, "V D"],
    labels: Labels,
    wanted: Bool[np.ndarray, "N"],
    config: HeadTraining = HeadTraining(),
) -> Trained:
    """Trains a head to give `wanted` tokens a high score (R2R, Fu et al. 2025, §4; `heads.save` writes what comes out).

    Both classes weigh the same in the loss: wanted tokens count (unwanted/wanted) times. That many questions differ in
    nothing but their last tokens is why the held-out slice consists of whole questions.

    Args:
      embedding: the small model's.
      wanted: `labels.divergent` for R2R and for Co-LLM's gate, whose scores are high where the large model is needed;
        its inverse for CITER, whose scores are high where the small one will do.

    Raises:
      UserError: a training or held-out slice without both kinds of tokens, or labels that are not of this head.
    """
    if labels.hidden.shape[1] != cfg.hidden or (cfg.kind == "r2r" and labels.top_logits.shape[1] != cfg.top_k):
        got = f"labels of width {labels.hidden.shape[1]} with {labels.top_logits.shape[1]} logits"
        raise UserError(f"head: got {got}, expected {cfg.hidden} and {cfg.top_k}, as the head takes")
    rng = np.random.default_rng(config.seed)
    held = _held_out(labels.question, config.held_out, rng)
    for name, part in dict(training=wanted[~held], held_out=wanted[held]).items():
        if part.all() or not part.any():
            raise UserError(f"head: got {part.sum()} wanted tokens of {part.size} in the {name} slice, expected some")
    weight = float(np.sum(~wanted[~held]) / np.sum(wanted[~held]))
    seen, unseen = (_tokens(labels.at(part), wanted[part], weight) for part in (~held, held))
    tree = dict(head=heads.init(cfg, config.seed), embedding=embedding)
    group = Group(name="head", paths=("head.*",), rate=config.rate, decay=config.decay)
    trainer = Trainer(tree, functools.partial(loss, cfg), OptimiserConfig(groups=(group,)), seed=config.seed)
    leaves, losses = _fit(trainer, seen, unseen, config, rng)
    params = trainer.tree(dataclasses.replace(trainer.init(), trained=leaves))["head"]
    scores = scored(cfg, params, embedding, labels.at(held))
    threshold = at_recall(scores, wanted[held], config.recall)
    through = scores >= threshold
    recall, rate = float(through[wanted[held]].mean()), float(through.mean())
    return Trained(cfg, jax.tree.map(np.asarray, params), threshold, losses, recall, rate)


def loss(cfg: HeadConfig, tree: Params, batch: Tokens, key: Array) -> Sums:
    """Σ w (log(1 + exp z) - y z) over the tokens, z being the head's logit: the cross-entropy of σ(z)."""
    del key
    z = _logits(cfg, tree["head"], tree["embedding"], batch.hidden, batch.tokens, batch.top_logits)
    each = jax.nn.softplus(z) - jnp.where(batch.wanted, z, 0)
    return Sums(jnp.sum(batch.weights * each), jnp.sum(batch.weights))


def scored(cfg: HeadConfig, params: Params, embedding: Float[Array, "V D"], labels: Labels) -> Float[np.ndarray, "N"]:
    """The head's score of each token, as a program computes it."""
    logits = _logits(cfg, params, embedding, labels.hidden, labels.token, labels.top_logits)
    return np.asarray(jax.nn.sigmoid(logits))


def at_recall(scores: Float[np.ndarray, "N"], wanted: Bool[np.ndarray, "N"], recall: float) -> float:
    """The highest threshold that at least `recall` of the wanted tokens reach: of all such, the fewest others do."""
    ordered = np.sort(scores[wanted])[::-1]
    return float(ordered[int(np.ceil(recall * len(ordered))) - 1])


@functools.partial(jax.jit, static_argnums=0)
def _logits(cfg: HeadConfig, params: Params, embedding, hidden, token, top_logits) -> Float[Array, "N"]:
    given = (hidden, embedding[token], top_logits) if cfg.kind == "r2r" else (hidden,)
    return jax.vmap(functools.partial(heads.logit, cfg, params))(*given)


def _held_out(question: Int[np.ndarray, "N"], share: float, rng: np.random.Generator) -> Bool[np.ndarray, "N"]:
    questions = rng.permutation(np.unique(question))
    return np.isin(question, questions[: max(round(share * len(questions)), 1)])


def _tokens(labels: Labels, wanted: Bool[np.ndarray, "N"], weight: float) -> Tokens:
    weights = np.where(wanted, weight, 1).astype(np.float32)
    return Tokens(labels.token, labels.hidden, labels.top_logits, wanted, weights)


def _fit(trainer: Trainer, seen: Tokens, unseen: Tokens, config: HeadTraining, rng) -> tuple[dict, list[float]]:
    """The trained leaves of the epoch with the lowest held-out loss, and the loss of each epoch."""
    state, losses, best = trainer.init(), [], {}
    size = len(seen.tokens)
    rows = min(config.rows, size)
    for _ in range(config.epochs):
        order = rng.permutation(size)
        for first in range(0, size - rows + 1, rows):
            batch = jax.tree.map(lambda column, at=order[first : first + rows]: column[at], seen)
            state, metrics = trainer.step(state, batch)
        losses.append(_held_out_loss(trainer, state, unseen))
        if not (metrics["finite"] and np.isfinite(losses[-1])):
            raise UserError(f"head: got a loss of {losses[-1]:g} in epoch {len(losses)}, expected a finite one")
        if losses[-1] == min(losses):
            best = jax.device_get(state.trained)
        elif len(losses) - 1 - int(np.argmin(losses)) >= config.patience:
            break
    return best, losses


def _held_out_loss(trainer: Trainer, state: State, unseen: Tokens) -> float:
    sums = trainer.sums(state, unseen)
    return float(sums.loss / sums.weight)
