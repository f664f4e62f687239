"""LoraHub: weights of whole adapters, found without gradients on a few examples."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.adapter import Adapter, LoRAWeights, refuse_gates
from molora_jax.adapters.route import LAYER, Choice, Route
from molora_jax.config import UserError
from molora_jax.typing import Array, Float


def search(
    loss: Callable[[Float[np.ndarray, "E"]], float],
    experts: int,
    *,
    steps: int = 40,
    bound: float = 1.5,
    penalty: float = 0.05,
    seed: int = 0,
) -> Float[np.ndarray, "E"]:
    """Weights in ±bound that make loss(w) + penalty·Σ|w_e| small, from zero on (Huang et al. 2023, §3.3).

    By nevergrad's NGOpt. The released code divides Σ|w_e| by E; the paper, and this, does not.

    Args:
      loss: mean loss on the examples of a model whose experts are mixed by `mixture(w, …)`, so that one program
        serves all steps.
      steps: evaluations.
    """
    try:
        import nevergrad
    except ImportError:
        raise UserError("lorahub: got no nevergrad, expected it installed: pip install 'molora_jax[train]'") from None
    space = nevergrad.p.Array(init=np.zeros(experts), lower=-bound, upper=bound)
    space.random_state.seed(seed)
    optimizer = nevergrad.optimizers.NGOpt(parametrization=space, budget=steps)
    return optimizer.minimize(lambda w: float(loss(w)) + penalty * float(np.abs(w).sum())).value


def mixture(weights: Float[Array, "E"], tokens: int) -> Route:
    """The mixture of factors that `merged` makes one adapter of, for experts in the slots that the weights are of."""
    weights = jnp.asarray(weights)
    return Route({LAYER: Choice(weights=jnp.broadcast_to(weights, (tokens, len(weights))), factored=True)})


def merged(adapters: Sequence[Adapter], weights: Sequence[float], *, name: str) -> Adapter:
    """One adapter of the summed factors, (Σ w_e s_e B_e)(Σ w_e A_e) (Huang et al. 2023, eq. 1).

    Not Σ w_e² Δ_e: there are cross terms of different adapters. Missing ranks and sites count as zero.

    Raises:
      UserError: adapters with more than plain factors, or of different bases.
    """
    if not adapters or len(adapters) != len(weights):
        raise UserError(f"lorahub: got {len(adapters)} adapters and {len(weights)} weights, expected as many, and some")
    for adapter in adapters:
        refuse_gates(adapter, "lorahub")
        plain = all(update.magnitude is None and update.bias is None for _, _, update in adapter.weights())
        if adapter.full or adapter.base or not plain:
            raise UserError(
                f"lorahub: got adapter {adapter.name!r} with DoRA, biases or whole weights, expected plain LoRA: only "
                "factors can be summed"
            )
    columns = {}
    for path in dict.fromkeys(path for adapter in adapters for path in adapter.sites):
        found = [
            (adapter.sites[path], w) for adapter, w in zip(adapters, weights, strict=True) if path in adapter.sites
        ]
        if len({len(column) for column, _ in found}) > 1:
            raise UserError(f"lorahub: got columns of different depth at {'.'.join(path)}, expected those of one base")
        by_layer = zip(*(column for column, _ in found), strict=True)
        columns[path] = tuple(_summed(updates, [w for _, w in found], path) for updates in by_layer)
    return Adapter(name=name, sites=columns)


def _summed(updates: Sequence[LoRAWeights | None], weights: Sequence[float], path) -> LoRAWeights | None:
    present = [(u, w) for u, w in zip(updates, weights, strict=True) if u is not None]
    if not present:
        return None
    shapes = {(u.b.shape[0], u.a.shape[1]) for u, _ in present}
    if len(shapes) > 1:
        raise UserError(f"lorahub: got updates of {sorted(shapes)} at {'.'.join(path)}, expected those of one base")
    (out, width), rank = shapes.pop(), max(u.rank for u, _ in present)
    a, b = np.zeros((rank, width)), np.zeros((out, rank))
    for update, weight in present:
        a[: update.rank] += weight * update.a.astype(np.float64)
        b[:, : update.rank] += weight * update.scale * update.b.astype(np.float64)
    return LoRAWeights(a=a.astype(np.float32), b=b.astype(np.float32), alpha=rank)
