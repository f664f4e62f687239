"""`adapter_config.json` of PEFT: which modules it adapts, with which rank and scale, and what cannot be ignored."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from molora_jax.config import UserError

Json = dict[str, Any]
Names = tuple[str, ...]
"""The names one module goes by; a pattern matches the module when it matches one of them."""

_HARMLESS = {  # they say nothing about what the adapter computes
    *("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
    *("eva_config", "corda_config", "loftq_config", "lora_ga_config"),  # they act through init_lora_weights
    "fan_in_fan_out",  # of the base's layout; no supported decoder stores its projections transposed
}
_READ = {
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "bias"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("init_lora_weights", "ensure_weight_tying"),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_HINTS = {
    "trainable_token_indices": "retrain with modules_to_save, or merge it with PEFT's merge_and_unload",
    "init_lora_weights": "it changes the base, too; convert it with save_pretrained(..., "
    "path_initial_model_for_weight_conversion=...)",
}
_OUTSIDE_LAYERS = ("embed_tokens", "lm_head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """What an `adapter_config.json` says about the modules of a decoder; fields as there."""

    r: int
    lora_alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    bias: str
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    ensure_weight_tying: bool


def parse(raw: Json, where: str, problem: Callable[[str, str], None]) -> PeftConfig:
    """Reads the contents of an `adapter_config.json`.

    Args:
      problem: called with `"config"` and a line for a field that changes what the adapter computes and is unknown here.

    Raises:
      UserError: another kind of adapter than LoRA, a field of another type than PEFT writes, or a broken pattern.
    """
    if raw.get("peft_type") != "LORA":
        raise UserError(f"{where}: got peft_type {raw.get('peft_type')!r}, expected 'LORA', the only supported one")
    for key in sorted(raw.keys() - _READ - _HARMLESS):
        if raw[key]:
            hint = f"; {_HINTS[key]}" if key in _HINTS else ""
            problem("config", f"{where}: got {key}={raw[key]!r}, expected none: it is not supported{hint}")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        problem("config", f"{where}: got init_lora_weights={start!r}, expected none: {_HINTS['init_lora_weights']}")
    read = _Reader(raw, where)
    config = PeftConfig(
        r=read.number("r", 8, int),
        lora_alpha=read.number("lora_alpha", 8, float),
        rank_pattern=read.numbers("rank_pattern", int),
        alpha_pattern=read.numbers("alpha_pattern", float),
        **{key: bool(raw.get(key)) for key in ("use_rslora", "use_dora", "lora_bias", "ensure_weight_tying")},
        bias=raw.get("bias") or "none",
        target_modules=read.patterns("target_modules"),
        exclude_modules=read.patterns("exclude_modules"),
        layers_to_transform=read.layers("layers_to_transform"),
        layers_pattern=read.names("layers_pattern", single=True),
        modules_to_save=read.names("modules_to_save"),
    )
    if isinstance(config.target_modules, str) and (config.layers_to_transform is not None or config.layers_pattern):
        raise UserError(f"{where}: got layers_to_transform beside a pattern in target_modules, expected one of them")
    if not config.target_modules:
        raise UserError(f"{where}: got no target_modules, expected a list of names, a pattern or 'all-linear'")
    if config.bias not in ("none", "all", "lora_only"):
        raise UserError(f"{where}: got bias={config.bias!r}, expected none, all or lora_only")
    if config.use_dora and config.lora_bias:
        raise UserError(f"{where}: got use_dora and lora_bias, expected one of them: PEFT does not define both")
    return config


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Takes fields out of a config and checks their types."""

    raw: Json
    where: str

    def fail(self, key: str, expected: str):
        raise UserError(f"{self.where}: got {key}={self.raw[key]!r}, expected {expected}")

    def number(self, key: str, default: int, kind: type) -> Any:
        value = self.raw.get(key, default)
        if not _is_number(value, kind):
            self.fail(key, "a whole number above 0" if kind is int else "a number")
        return value

    def numbers(self, key: str, kind: type) -> dict[str, Any]:
        value = self.raw.get(key) or {}
        if not isinstance(value, dict) or not all(_is_number(number, kind) for number in value.values()):
            self.fail(key, "an object of patterns and numbers")
        for pattern in value:
            self.compiled(key, pattern)
        return value

    def names(self, key: str, *, single: bool = False) -> tuple[str, ...]:
        value = self.raw.get(key) or ()
        value = [value] if single and isinstance(value, str) else value
        if isinstance(value, str) or not all(isinstance(name, str) for name in value):
            self.fail(key, "a list of names")
        for name in value:
            self.compiled(key, name)
        return tuple(value)

    def patterns(self, key: str) -> str | tuple[str, ...]:
        value = self.raw.get(key)
        return self.compiled(key, value) if isinstance(value, str) else self.names(key)

    def layers(self, key: str) -> tuple[int, ...] | None:
        value = self.raw.get(key)
        value = [value] if isinstance(value, int) else value
        if value is not None and not (isinstance(value, list) and all(isinstance(layer, int) for layer in value)):
            self.fail(key, "a layer or a list of layers")
        return tuple(value) if value else None

    def compiled(self, key: str, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as e:
            raise UserError(f"{self.where}: got the pattern {pattern!r} in {key}, which cannot be read: {e}") from None
        return pattern


def _is_number(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) and value > 0 if kind is int else isinstance(value, int | float)


def targets(config: PeftConfig, names: Names) -> bool:
    """Whether PEFT puts a LoRA layer on the projection or embedding that goes by `names`.

    A list matches whole names or their ends at a dot, a string is a pattern for the whole name, and `all-linear` is
    every projection but the head; what is excluded, or is saved as a whole, is not adapted.
    """
    return any(_targets(config, name) for name in names)


def _targets(config: PeftConfig, name: str) -> bool:
    wanted, excluded = config.target_modules, config.exclude_modules
    if re.fullmatch(excluded, name) if isinstance(excluded, str) and excluded else _in_list(excluded, name):
        return False
    if any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in config.modules_to_save):
        return False
    if isinstance(wanted, str):
        return _matches(wanted, name)
    if name in wanted:
        return True
    return _in_list(wanted, name) and (config.layers_to_transform is None or _in_layers(config, name))


def _matches(pattern: str, name: str) -> bool:
    if pattern.lower() == "all-linear":
        return name.rpartition(".")[2] not in _OUTSIDE_LAYERS
    return re.fullmatch(pattern, name) is not None


def _in_list(wanted: Iterable[str], name: str) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in wanted)


def _in_layers(config: PeftConfig, name: str) -> bool:
    starts = [rf"(?:^|.*?\.){pattern}" for pattern in config.layers_pattern] or [r".*?\.[^.]*"]
    found = next((match for start in starts if (match := re.match(rf"{start}\.(\d+)\.", name))), None)
    return found is not None and int(found[1]) in config.layers_to_transform


def saves(config: PeftConfig, names: Names) -> bool:
    """Whether `modules_to_save` names the module or one that it lies in (PEFT compares the ends of names)."""
    outer = {".".join(parts[: i + 1]) for name in names if (parts := name.split(".")) for i in range(len(parts))}
    return any(name.endswith(saved) for saved in config.modules_to_save for name in outer)


def rank(config: PeftConfig, names: Names) -> int:
    """R of a module: the first pattern that matches the end of its name at a dot, else `r`."""
    return _lookup(config.rank_pattern, names, config.r)


def alpha(config: PeftConfig, names: Names) -> float:
    """α of a module, found like its rank and independently of it."""
    return _lookup(config.alpha_pattern, names, config.lora_alpha)


def _lookup(patterns: Mapping[str, Any], names: Names, default: Any) -> Any:
    return next((value for pattern, value in patterns.items() if _ends_in(pattern, names)), default)


def _ends_in(pattern: str, names: Names) -> bool:
    return any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)


def unmatched(config: PeftConfig, adaptable: Iterable[Names], every: Iterable[Names], layers: int) -> list[str]:
    """Entries of `target_modules`, `layers_to_transform` and `modules_to_save` that match nothing in the model."""
    flat = [name for names in adaptable for name in names]
    wanted = config.target_modules
    if isinstance(wanted, str):
        found = [] if any(_matches(wanted, name) for name in flat) else [f"target_modules {wanted!r}"]
    else:
        found = [f"target_modules {end!r}" for end in wanted if not any(_in_list((end,), name) for name in flat)]
    found += [f"layers_to_transform {i}" for i in config.layers_to_transform or () if not 0 <= i < layers]
    for saved in config.modules_to_save:
        alone = dataclasses.replace(config, modules_to_save=(saved,))
        found += [] if any(saves(alone, names) for names in every) else [f"modules_to_save {saved!r}"]
    return found


def unmatched_patterns(config: PeftConfig, targeted: Iterable[Names]) -> list[str]:
    """Entries of `rank_pattern` and `alpha_pattern` that match no adapted module."""
    targeted = list(targeted)
    return [
        f"{key} {pattern!r}"
        for key in ("rank_pattern", "alpha_pattern")
        for pattern in getattr(config, key)
        if not any(_ends_in(pattern, names) for names in targeted)
    ]
