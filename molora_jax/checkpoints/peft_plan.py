"""Checks a PEFT file against its config and a decoder: which tensor goes where, what is missing, what is left over."""

import dataclasses
import re
from collections.abc import Callable, Mapping

from molora_jax.checkpoints import peft_config, peft_names, tensors
from molora_jax.checkpoints.peft_config import Names, PeftConfig
from molora_jax.checkpoints.peft_names import Index, Module
from molora_jax.config import ModelConfig, UserError

Problem = Callable[[str, str], None]
"""Takes the kind of a problem and a line, and raises unless that kind is allowed."""

_ENDS = {"embed_tokens", "lm_head"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where everything goes; keys are those of `peft_names.modules`.

    Attributes:
      sites: rank and α of each module that gets an update.
      updates: (key, part) to the tensor's name; parts are a, b, magnitude and bias.
      full, base: (key, leaf) to the tensor's name.
      missing, unused: names.
    """

    sites: dict[str, tuple[int, float]]
    updates: dict[tuple[str, str], str]
    full: dict[tuple[str, str], str]
    base: dict[tuple[str, str], str]
    missing: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return [*self.updates.values(), *self.full.values(), *self.base.values()]


def targeted(config: PeftConfig, cfg: ModelConfig, known: Mapping[str, Module], names: Callable[[Module], Names]):
    """Keys of the modules that the config adapts; `ensure_weight_tying` adapts both ends of a tied model or none."""
    found = {k for k, module in known.items() if module.adaptable and peft_config.targets(config, names(module))}
    return _both_ends(found, config, cfg)


def saved(config: PeftConfig, cfg: ModelConfig, known: Mapping[str, Module], names: Callable[[Module], Names]):
    """Keys of the modules that `modules_to_save` replaces."""
    return _both_ends({k for k, module in known.items() if peft_config.saves(config, names(module))}, config, cfg)


def _both_ends(keys: set[str], config: PeftConfig, cfg: ModelConfig) -> set[str]:
    return keys | _ENDS if cfg.tied and config.ensure_weight_tying and keys & _ENDS else keys


def plan(
    where: str, cfg: ModelConfig, config: PeftConfig, known: Mapping[str, Module], index: Index, problem: Problem
) -> Plan:
    """Sorts the tensors of a file.

    Raises:
      UserError: nothing in the file belongs to the decoder; and whatever `problem` does not allow.
    """
    if not index.tensors:
        raise UserError(
            f"{where}: got {len(index.unused)} tensors (such as {some(index.unused)}), expected ones of "
            f"a {cfg.family} decoder with {cfg.layers} layers; load it with the base it was trained on"
        )
    wanted, whole = (kind(config, cfg, known, index.names) for kind in (targeted, saved))
    _check_names(where, cfg, config, known, index, wanted, problem)
    parts = ["a", "b", *(["magnitude"] if config.use_dora else []), *(["bias"] if config.lora_bias else [])]
    updates = {(k, p): n for (k, p), n in index.tensors.items() if k in wanted and p in parts}
    full, base = _whole(where, config, known, index, whole)
    taken = {*updates.values(), *full.values(), *base.values()}
    if unused := sorted({*index.unused, *index.tensors.values()} - taken):
        problem("unused", f"{where}: got {some(unused)}, which the config or the decoder has no place for")
    needed = {(k, p): peft_names.tensor(known[k], p) for k in wanted for p in parts}
    missing = [name for place, name in needed.items() if place not in updates]
    missing += [
        peft_names.tensor(known[key], "own", leaf)
        for key in whole
        for leaf in known[key].shapes
        if (key, leaf) not in full
    ]
    missing += [
        peft_names.tensor(known[key], "base_layer" if key in wanted else "own", "bias")
        for key in ({"all": known.keys(), "lora_only": wanted}.get(config.bias, set()) - whole)
        if "bias" in known[key].shapes and (key, "bias") not in base
    ]
    if missing := sorted(missing):
        problem("missing", f"{where}: got no {some(missing)}, which the config asks for")
    sites = {}
    for key in known:
        if key in wanted and all((key, part) in updates for part in parts):
            names = index.names(known[key])
            sites[key] = (peft_config.rank(config, names), peft_config.alpha(config, names))
    return Plan(
        sites,
        {place: name for place, name in updates.items() if place[0] in sites},
        full,
        base,
        tuple(missing),
        tuple(unused),
    )


def _check_names(where, cfg, config, known, index, wanted, problem: Problem) -> None:
    adaptable = [index.names(module) for module in known.values() if module.adaptable]
    every = [index.names(module) for module in known.values()]
    if lost := peft_config.unmatched(config, adaptable, every, cfg.layers):
        problem("targets", f"{where}: got {', '.join(lost)} in the config, which no module of the decoder matches")
    if lost := peft_config.unmatched_patterns(config, [index.names(known[key]) for key in wanted]):
        problem("patterns", f"{where}: got {', '.join(lost)} in the config, which no adapted module matches")


def _whole(where: str, config: PeftConfig, known: Mapping[str, Module], index: Index, whole: set[str]):
    """The tensors that stand in the place of the base's: for this adapter alone, and as the base's own."""
    full, base = {}, {}
    for (key, part), name in index.tensors.items():
        kind, _, leaf = part.partition(".")
        if leaf not in known[key].shapes:
            continue
        if kind == "own":
            trained = config.bias != "none" if leaf == "bias" else key in _ENDS
            kind = "full" if key in whole else "base" if trained else None
        place = {"full": full, "base": base}.get(kind)
        if place is not None and (key, leaf) in place:
            raise UserError(f"{where}: got both {place[key, leaf]} and {name}, expected one; remove the other")
        if place is not None:
            place[key, leaf] = name
    return full, base


def check_shapes(
    where: str, known: Mapping[str, Module], plan: Plan, got: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
    """Raises unless every tensor of the plan has the shape of its place, with the rank of the config, and holds floats.

    Args:
      got: shape and safetensors dtype of the tensors in the file, by name.
    """
    wanted = {}
    for (key, part), name in plan.updates.items():
        (d_out, d_in), rank = known[key].linear, plan.sites[key][0]
        wanted[name] = {"a": (rank, d_in), "b": (d_out, rank)}.get(part, (d_out,))
    for (key, leaf), name in {**plan.full, **plan.base}.items():
        wanted[name] = known[key].shapes[leaf]
    for name, (shape, dtype) in got.items():
        if dtype not in tensors.DTYPES:
            raise UserError(f"{where}: got dtype {dtype} for {name}, expected one of {', '.join(tensors.DTYPES)}")
        if shape != wanted[name]:
            why = _why(shape, wanted[name], name)
            raise UserError(f"{where}: got shape {shape} for {name}, expected {wanted[name]}: {why}")


def _why(got: tuple[int, ...], wanted: tuple[int, ...], name: str) -> str:
    if len(got) == 2 and got == wanted[::-1]:
        return "it is transposed"
    factor = re.search(r"lora_(?:embedding_)?([AB])", name)
    axis = 0 if factor and factor[1] == "A" else 1
    if factor and len(got) == len(wanted) == 2 and got[1 - axis] == wanted[1 - axis]:
        return f"its rank is {got[axis]}, and {wanted[axis]} by r and rank_pattern of the config; mend the config"
    return "the adapter was made for another base, or one of another vocabulary"


def some(names) -> str:
    """The first few names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
