"""New adapters, to train."""

from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np

from molora_jax.adapters import gate as gates
from molora_jax.adapters.adapter import Adapter, GateGroup, LoRAWeights, Path
from molora_jax.adapters.bank_gates import READS
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.spec import projection_shape
from molora_jax.config import ModelConfig, UserError
from molora_jax.typing import Params

ALL_LINEAR = (
    "attn.q_proj",
    "attn.k_proj",
    "attn.v_proj",
    "attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def fresh(
    cfg: ModelConfig,
    params: Params,
    name: str,
    *,
    rank: int | Mapping[str, int],
    sites: Sequence[str] = ALL_LINEAR,
    alpha: float | None = None,
    rslora: bool = False,
    seed: int = 0,
    spread: float = 0.0,
    gate: GateConfig | None = None,
    share: Literal["matrix", "input", "layer"] = "matrix",
) -> Adapter:
    """An adapter with A from U(-1/√D, 1/√D), He's uniform rule with negative slope √5, and B from N(0, spread²).

    With the default spread of 0 it changes nothing yet (Hu et al. 2021, §4.1).

    Args:
      rank: of all sites, or of each.
      sites: projections of every layer, "attn.q_proj" and so on, "embed" or "head".
      alpha: by default twice the rank.
      gate: scales every update token by token; needs one rank at all sites.
      share: which matrices listen to one core of the gate: each has its own, those that read the same input share one,
        or all of a layer do.
    """
    if not sites:
        raise UserError("adapter: got no sites, expected at least one, as attn.q_proj")
    rng = np.random.default_rng(seed)
    columns: dict[Path, tuple[LoRAWeights, ...]] = {}
    for site in sites:
        out, width = projection_shape(params, site)
        r = rank if isinstance(rank, int) else rank[site]
        ends = site in ("embed", "head")
        path = (site,) if ends else ("layers", *site.split("."))
        columns[path] = tuple(
            LoRAWeights(
                a=rng.uniform(-(width**-0.5), width**-0.5, (r, width)).astype(np.float32),
                b=(rng.standard_normal((out, r)) * spread).astype(np.float32),
                alpha=2.0 * r if alpha is None else alpha,
                rslora=rslora,
            )
            for _ in range(1 if ends else cfg.layers)
        )
    if gate is None:
        return Adapter(name=name, sites=columns)
    groups = tuple(_gates(cfg, columns, gate, group, seed + i) for i, group in enumerate(_groups(sites, share)))
    return Adapter(name=name, sites=columns, gate=gate, gates=groups)


def _groups(sites: Sequence[str], share: str) -> list[list[str]]:
    key = {"matrix": lambda site: site, "input": READS.get, "layer": lambda site: "layer"}[share]
    found: dict[str, list[str]] = {}
    for site in sorted(sites, key=tuple(READS).index):  # the first one's input is what a group reads
        found.setdefault(key(site), []).append(site)
    return list(found.values())


def _gates(cfg: ModelConfig, columns, gate: GateConfig, sites: Sequence[str], seed: int) -> GateGroup:
    paths = tuple(("layers", *site.split(".")) for site in sites)
    first = columns[paths[0]][0]
    sizes = dict(d_in=first.a.shape[1], rank=first.rank, heads=len(paths))
    keys = jax.random.split(jax.random.key(seed), cfg.layers)
    return GateGroup(sites=paths, cores=tuple(jax.tree.map(np.asarray, gates.init(gate, key, **sizes)) for key in keys))
