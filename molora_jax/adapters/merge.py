"""Several adapters combined into one, of products (exact) or of factors (what PEFT computes)."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from molora_jax.adapters.adapter import Adapter, LoRAWeights, Path, refuse_gates
from molora_jax.config import UserError
from molora_jax.typing import Float

Method = Literal["cat", "linear", "svd", "ties", "dare_linear", "dare_ties", "magnitude_prune"]
Majority = Literal["total", "frequency"]
_SPARSE = ("ties", "dare_linear", "dare_ties", "magnitude_prune")


@dataclasses.dataclass(frozen=True)
class _How:
    method: Method
    space: Literal["product", "factors"]
    rank: int | None
    density: float
    majority: Majority
    seed: int


def combine(
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    *,
    name: str,
    method: Method = "cat",
    space: Literal["product", "factors"] = "product",
    rank: int | None = None,
    density: float | None = None,
    majority: Majority = "total",
    seed: int = 0,
) -> Adapter:
    """One adapter in the place of several: of their updates Δ_e = scale_e · B_e A_e, with weights w_e.

    `cat` and `linear` give Σ w_e Δ_e exactly, as concatenated factors; `svd` the best approximation of it of the given
    rank. `magnitude_prune` keeps the largest entries of every Δ_e before summing; `dare_linear` keeps random ones and
    divides them by the density (Yu et al. 2023, §3.2). `ties` and `dare_ties` elect a sign for every entry among the
    pruned updates and average those that agree (Yadav et al. 2023, alg. 1). An adapter without a site counts as zero
    there, ranks may differ, and the adapters' own biases are combined like the updates.

    `space="factors"` is for parity with PEFT's `add_weighted_adapter`: A and B are combined separately, each with the
    weight √|w_e scale_e| (the sign goes to A). That is not the sum: it has cross terms B_i A_j, and an adapter with
    itself at 0.5 + 0.5 becomes twice its update. `cat` and `svd` are the same in both spaces. Results have scale 1, as
    PEFT's do, but unlike there also where the adapters use rsLoRA.

    Args:
      rank: of the result, in product space; by default all that is needed, and for `svd` the largest of the adapters'.
      density: share of the entries to keep, for the methods that prune.
      majority: elect the sign of the sum or of the greater number.
      seed: of the random choice; each adapter, site and layer has a stream of its own.

    Raises:
      UserError: there is no such combination: DoRA's magnitudes, gates and whole weights are no sums (one adapter
        alone at weight 1 passes through `cat` and `linear` as it is).
    """
    how = _How(method, space, rank, 1.0 if density is None else density, majority, seed)
    _check(adapters, weights, how, density)
    if len(adapters) == 1 and weights[0] == 1 and method in ("cat", "linear") and rank is None:
        return dataclasses.replace(adapters[0], name=name)
    _check_sums(adapters)
    columns: dict[Path, list] = {}
    for path in dict.fromkeys(path for adapter in adapters for path in adapter.sites):
        for layer in range(_layers(adapters, path)):
            present = [
                (index, float(weight), update)
                for index, (adapter, weight) in enumerate(zip(adapters, weights, strict=True))
                if path in adapter.sites and (update := adapter.sites[path][layer]) is not None
            ]
            update = _combine_site(present, how, f"{'.'.join(path)}.{layer}") if present else None
            columns.setdefault(path, []).append(update)
    return Adapter(name=name, sites={path: tuple(column) for path, column in columns.items()}, base=_base(adapters))


def _check(adapters: Sequence[Adapter], weights: Sequence[float], how: _How, density: float | None) -> None:
    if not adapters or len(adapters) != len(weights):
        raise UserError(f"combine: got {len(adapters)} adapters and {len(weights)} weights, expected as many, and some")
    if (density is None) == (how.method in _SPARSE) or not 0 < how.density <= 1:
        raise UserError(
            f"combine: got density={density} for {how.method}, expected a share above 0 and up to 1 for "
            f"{', '.join(_SPARSE)}, and none for the others"
        )
    if how.rank is not None and (how.rank < 1 or how.method == "cat" or how.space == "factors" and how.method != "svd"):
        raise UserError(
            f"combine: got rank={how.rank} for {how.method} of {how.space}, expected none; "
            "svd and, in product space, everything but cat can be cut to a rank of 1 or more"
        )


def _check_sums(adapters: Sequence[Adapter]) -> None:
    for adapter in adapters:
        refuse_gates(adapter, "combine")
        if any(update.magnitude is not None for _, _, update in adapter.weights()):
            raise UserError(
                f"combine: got adapter {adapter.name!r} with DoRA, expected plain updates: its magnitudes rescale the "
                "base and cannot be summed; merge it into a base, or combine those without"
            )
        if adapter.full:
            raise UserError(
                f"combine: got adapter {adapter.name!r} with whole weights for {'.'.join(next(iter(adapter.full)))}, "
                "expected updates alone: which weights to keep is not defined"
            )


def _layers(adapters: Sequence[Adapter], path: Path) -> int:
    found = {len(adapter.sites[path]) for adapter in adapters if path in adapter.sites}
    if len(found) > 1:
        raise UserError(f"combine: got adapters of {sorted(found)} layers at {'.'.join(path)}, expected one base")
    return found.pop()


def _base(adapters: Sequence[Adapter]) -> dict:
    """What the files carry of the base; it must be the same base."""
    found = {}
    for adapter in adapters:
        for path, column in adapter.base.items():
            for kept, new in zip(found.setdefault(path, column), column, strict=True):
                if (kept is None) != (new is None) or kept is not None and not np.array_equal(kept, new):
                    raise UserError(
                        f"combine: got different base weights for {'.'.join(path)} in adapter {adapter.name!r}, "
                        "expected those of one base; trained biases cannot be combined"
                    )
    return found


def _combine_site(present: list[tuple[int, float, LoRAWeights]], how: _How, where: str) -> LoRAWeights:
    shapes = {(update.b.shape[0], update.a.shape[1]) for _, _, update in present}
    if len(shapes) > 1:
        raise UserError(f"combine: got updates of {sorted(shapes)} at {where}, expected one base")
    if how.method in ("cat", "linear", "svd") and (how.space == "product" or how.method != "linear"):
        a, b = _sum(present, how)
    elif how.space == "product":
        products = [update.scale * _wide(update.b) @ _wide(update.a) for _, _, update in present]
        a, b = _factorise(_arithmetic(present, products, [w for _, w, _ in present], how, f"{where}.product"), how.rank)
    else:
        a, b = _factors(present, how, where)
    bias = None
    if any(update.bias is not None for _, _, update in present):
        zero = np.zeros(len(b))
        vectors = [zero if u.bias is None else u.scale * _wide(u.bias) for _, _, u in present]
        bias = _arithmetic(present, vectors, [w for _, w, _ in present], how, f"{where}.bias").astype(np.float32)
    return LoRAWeights(a=a.astype(np.float32), b=b.astype(np.float32), alpha=len(a), bias=bias)


def _sum(present, how: _How) -> tuple[np.ndarray, np.ndarray]:
    """Factors of Σ w Δ: all of them side by side, or the leading singular directions of their product."""
    a = np.concatenate([weight * update.scale * _wide(update.a) for _, weight, update in present])
    b = np.concatenate([_wide(update.b) for _, _, update in present], axis=1)
    rank = max(update.rank for _, _, update in present) if how.method == "svd" and how.rank is None else how.rank
    if rank is None:
        return a, b
    q_left, left = np.linalg.qr(b)
    q_right, right = np.linalg.qr(a.T)
    core_a, core_b = _factorise(left @ right.T, rank)
    return core_a @ q_right.T, q_left @ core_b


def _factorise(full: Float[np.ndarray, "F D"], rank: int | None) -> tuple[np.ndarray, np.ndarray]:
    """A [R, D] and B [F, R] of the nearest matrix of that rank (Eckart & Young 1936), or of `full` itself."""
    left, values, right = np.linalg.svd(full, full_matrices=False)
    needed = max(1, int(np.sum(values > values[0] * max(full.shape) * np.finfo(full.dtype).eps)))
    rank = needed if rank is None else min(rank, len(values))
    return right[:rank], left[:, :rank] * values[:rank]


def _factors(present, how: _How, where: str) -> tuple[np.ndarray, np.ndarray]:
    ranks = sorted({update.rank for _, _, update in present})
    if len(ranks) > 1:
        raise UserError(f"combine: got ranks {ranks} at {where}, expected equal ones for {how.method} of factors")
    scaled = [weight * update.scale for _, weight, update in present]
    roots = np.sqrt(np.abs(scaled))
    a = _arithmetic(present, [_wide(u.a) for _, _, u in present], np.copysign(roots, scaled), how, f"{where}.a")
    b = _arithmetic(present, [_wide(u.b) for _, _, u in present], roots, how, f"{where}.b")
    return a, b


def _arithmetic(present, values: list[np.ndarray], weights: Sequence[float], how: _How, where: str) -> np.ndarray:
    if how.method in ("ties", "magnitude_prune"):
        values = [prune(value, how.density) for value in values]
    elif how.method in ("dare_linear", "dare_ties") and how.density < 1:
        streams = [(how.seed, index, where) for index, _, _ in present]
        masks = [bernoulli(v.shape, how.density, stream) for v, stream in zip(values, streams, strict=True)]
        values = [value * mask / how.density for value, mask in zip(values, masks, strict=True)]
    stacked = np.stack(values)
    weighted = np.stack([weight * value for weight, value in zip(weights, values, strict=True)])
    if how.method not in ("ties", "dare_ties"):
        return weighted.sum(0)
    agree = agreement(stacked, how.majority)
    return (weighted * agree).sum(0) / np.maximum(agree.sum(0), 1)


def prune(values: np.ndarray, density: float) -> np.ndarray:
    """`values` with all but the share `density` of largest magnitude set to zero."""
    kept = np.argsort(-np.abs(values), axis=None, kind="stable")[: int(density * values.size)]
    mask = np.zeros(values.size, bool)
    mask[kept] = True
    return values * mask.reshape(values.shape)


def bernoulli(shape: tuple[int, ...], density: float, stream: tuple[int, int, str]) -> np.ndarray:
    """True with probability `density`; `stream` is a seed, the number of an adapter and the name of a place."""
    seed, index, where = stream
    return np.random.default_rng([seed, index, zlib.crc32(where.encode())]).random(shape) < density


def agreement(stacked: Float[np.ndarray, "E *S"], majority: Majority) -> np.ndarray:
    """Where an entry has the elected sign of its place; zeros have none, and a tie elects plus."""
    signs = np.sign(stacked)
    votes = (stacked if majority == "total" else signs).sum(0)
    return signs == np.where(votes >= 0, 1, -1)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)
