"""What a router is trained on: which segments are evidence, in every pass of a chain.

`keep` is true where a candidate counts: not at pads, and where said not at anchors already chosen.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from molora_jax.config import UserError
from molora_jax.retrieval.mara import Scores
from molora_jax.typing import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the terms; the defaults are the published ones.

    Attributes:
      pos_weight: of evidence in the cross-entropies.
      slots: of the global head's cross-entropy.
      hinge: of the margin between evidence and the rest.
      margin: of the hinge.
      listwise: of the cross-entropy over a question's candidates.
      earlier: of every pass but the last, whose weight is 1; the weights are divided by their sum.
    """

    pos_weight: float = 8.0
    slots: float = 0.5
    hinge: float = 0.5
    margin: float = 1.0
    listwise: float = 0.0
    earlier: float = 0.5


def bce(
    logits: Float[Array, "B G"], gold: Bool[Array, "B G"], keep: Bool[Array, "B G"], pos_weight: float
) -> Float[Array, ""]:
    """-mean over what counts in the batch of w y log σ(x) + (1 - y) log σ(-x); 0 where nothing counts."""
    x = jnp.where(keep, logits, 0)
    terms = jnp.where(gold, pos_weight * jax.nn.softplus(-x), jax.nn.softplus(x))
    return jnp.sum(jnp.where(keep, terms, 0)) / jnp.maximum(jnp.sum(keep), 1)


def hinge(
    logits: Float[Array, "B G"], gold: Bool[Array, "B G"], keep: Bool[Array, "B G"], margin: float
) -> Float[Array, ""]:
    """Mean over a question's pairs of max(0, margin - x_pos + x_neg), then over the questions that have pairs."""
    x = jnp.where(keep, logits, 0)
    pairs = (gold & keep)[:, :, None] & (~gold & keep)[:, None, :]
    terms = jnp.where(pairs, jax.nn.relu(margin - x[:, :, None] + x[:, None, :]), 0)
    count = jnp.sum(pairs, axis=(1, 2))
    return jnp.sum(jnp.sum(terms, axis=(1, 2)) / jnp.maximum(count, 1)) / jnp.maximum(jnp.sum(count > 0), 1)


def listwise(logits: Float[Array, "B G"], gold: Bool[Array, "B G"], keep: Bool[Array, "B G"]) -> Float[Array, ""]:
    """Cross-entropy of the softmax over a question's candidates with the uniform distribution over its evidence.

    ListNet's top-one loss (Cao et al. 2007, §4), mean over the questions that have evidence left.
    """
    x = jnp.where(keep, logits, jnp.finfo(logits.dtype).min)
    logp = jnp.where(gold & keep, jax.nn.log_softmax(x, axis=1), 0)
    count = jnp.sum(gold & keep, axis=1)
    return -jnp.sum(jnp.sum(logp, axis=1) / jnp.maximum(count, 1)) / jnp.maximum(jnp.sum(count > 0), 1)


def chosen(anchors: Int[Array, "B A"], count: int) -> Bool[Array, "B G"]:
    """True at the anchors among `count` candidates; -1 is none."""
    return jnp.any(anchors[:, :, None] == jnp.arange(count), axis=1)


def chain(
    cfg: LossConfig,
    passes: Sequence[Scores],
    anchors: Int[Array, "B A"],
    gold: Bool[Array, "B G"],
    valid: Bool[Array, "B G"],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """(loss, its terms) of a chain, as published: Σ_k w_k (BCE + slots · BCE + hinge · hinge) / Σ_k w_k.

    Pass k (from 0) was made with the first k of `anchors`. Both cross-entropies and the listwise term leave them out;
    the hinge counts them, as in the released code, which keeps a pick above the distractors in later passes.

    Raises:
      UserError: no pass, or fewer anchors than the passes were made with.
    """
    if not 1 <= len(passes) <= anchors.shape[1] + 1:
        raise UserError(f"loss: got {len(passes)} passes and {anchors.shape[1]} anchors, expected 1 to one more")
    weights = [cfg.earlier] * (len(passes) - 1) + [1.0]
    terms = {name: jnp.zeros(()) for name in ("local", "slots", "hinge", "listwise")}
    for k, (scores, weight) in enumerate(zip(passes, weights, strict=True)):
        keep = valid & ~chosen(anchors[:, :k], gold.shape[1])
        own = dict(local=bce(scores.local, gold, keep, cfg.pos_weight))
        if cfg.hinge:
            own["hinge"] = hinge(scores.local, gold, valid, cfg.margin)
        if cfg.listwise:
            own["listwise"] = listwise(scores.local, gold, keep)
        if scores.slots is not None:
            own["slots"] = bce(scores.slots, gold, keep, cfg.pos_weight)
        terms |= {name: terms[name] + weight / sum(weights) * value for name, value in own.items()}
    share = dict(local=1.0, slots=cfg.slots, hinge=cfg.hinge, listwise=cfg.listwise)
    return sum(share[name] * value for name, value in terms.items()), terms
