"""What PEFT would write for an adapter: the names of its tensors, and a config that follows them."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from molora_jax.adapters.adapter import Adapter, LoRAWeights
from molora_jax.checkpoints import peft_config, peft_names, peft_plan
from molora_jax.checkpoints.peft_config import Json
from molora_jax.checkpoints.peft_names import Module
from molora_jax.config import ModelConfig, UserError

_DEFAULTS = dict(
    peft_type="LORA",
    task_type="CAUSAL_LM",
    base_model_name_or_path=None,
    inference_mode=True,
    init_lora_weights=True,
    lora_dropout=0.0,
    fan_in_fan_out=False,
)
_PARTS = ("a", "b", "magnitude", "bias")


def values(adapter: Adapter, known: Mapping[str, Module]) -> dict[str, np.ndarray]:
    """The tensors of the file, by name.

    Raises:
      UserError: a site or a shape that the decoder has not.
    """
    places = {(module.path, module.layer): module for module in known.values()}
    found = {}
    for path, layer, weights in adapter.weights():
        module = _module(places, path, layer, adapter)
        if (weights.b.shape[0], weights.a.shape[1]) != module.linear:
            raise UserError(
                f"adapter {adapter.name!r}: got A {weights.a.shape} and B {weights.b.shape} at {module.name}, "
                f"expected an update of {module.linear}"
            )
        for part in _PARTS:
            if (value := getattr(weights, part)) is not None:
                found[peft_names.tensor(module, part)] = np.ascontiguousarray(value)
    adapted = {(path, layer) for path, layer, _ in adapter.weights()}
    for path, layer, value, part in _whole(adapter):
        module = _module(places, path[:-1], layer, adapter)
        if value.shape != module.shapes.get(path[-1]):
            raise UserError(
                f"adapter {adapter.name!r}: got shape {value.shape} for {module.name}, expected that of the decoder"
            )
        part = "base_layer" if part == "base" and (path[:-1], layer) in adapted else "own"
        found[peft_names.tensor(module, part, path[-1])] = np.ascontiguousarray(value)
    return found


def _module(places, path, layer: int, adapter: Adapter) -> Module:
    if (path, layer) not in places:
        raise UserError(f"adapter {adapter.name!r}: got weights at {'.'.join(path)}, which layer {layer} has not")
    return places[path, layer]


def _whole(adapter: Adapter):
    for part, columns in (("full", adapter.full), ("base", adapter.base)):
        for path, column in columns.items():
            yield from ((path, layer, value, part) for layer, value in enumerate(column) if value is not None)


def config(adapter: Adapter, cfg: ModelConfig, known: Mapping[str, Module]) -> Json:
    """The `adapter_config.json`: the one it was read from where that describes the tensors, else one that does.

    Raises:
      UserError: PEFT's format has no words for the adapter.
    """
    if adapter.origin and _describes(adapter, cfg, known):
        return dict(adapter.origin)
    names = {(module.path, module.layer): module.name for module in known.values()}
    sites = {names[path, layer]: weights for path, layer, weights in adapter.weights()}
    fields = _kinds(adapter, sites) | _ranks(sites)
    full = {names[path[:-1], layer] for path, layer, _, part in _whole(adapter) if part == "full"}
    fields |= dict(
        target_modules=sorted(sites),
        modules_to_save=sorted(full) or None,
        bias=_bias(adapter, sites, names),
        exclude_modules=None,
        layers_to_transform=None,
        layers_pattern=None,
        ensure_weight_tying=False,
    )
    return _DEFAULTS | dict(adapter.origin) | fields


def _describes(adapter: Adapter, cfg: ModelConfig, known: Mapping[str, Module]) -> bool:
    """Whether the config that the adapter was read from still says what its tensors are."""
    read = peft_config.parse(dict(adapter.origin), "origin", lambda *_: None)
    names = lambda module: (module.name,)
    sites = {(path, layer): weights for path, layer, weights in adapter.weights()}
    full = {(path, layer) for path, layer, _, part in _whole(adapter) if part == "full"}
    biases = any(part == "base" and path[-1] == "bias" for path, _, _, part in _whole(adapter))
    keys = lambda kind: {(known[key].path, known[key].layer) for key in kind(read, cfg, known, names)}
    whole = {(*place, leaf) for place in keys(peft_plan.saved) for leaf in _leaves(known, place)}
    if keys(peft_plan.targeted) != sites.keys() or whole != {(path[:-1], layer, path[-1]) for path, layer in full}:
        return False
    for module in known.values():
        weights = sites.get((module.path, module.layer))
        if weights is not None and not _fits(weights, read, names(module)):
            return False
    return biases == (read.bias != "none" and any("bias" in module.shapes for module in known.values()))


def _leaves(known: Mapping[str, Module], place) -> set[str]:
    return set(next(module.shapes for module in known.values() if (module.path, module.layer) == place))


def _fits(weights: LoRAWeights, read: peft_config.PeftConfig, names) -> bool:
    return (
        weights.rank == peft_config.rank(read, names)
        and weights.alpha == peft_config.alpha(read, names)
        and weights.rslora == read.use_rslora
        and (weights.magnitude is not None) == read.use_dora
        and (weights.bias is not None) == read.lora_bias
    )


def _kinds(adapter: Adapter, sites: Mapping[str, LoRAWeights]) -> Json:
    """The switches that PEFT has only for all modules at once."""
    fields = {}
    for key, part in (("use_dora", "magnitude"), ("lora_bias", "bias")):
        having = sum(getattr(weights, part) is not None for weights in sites.values())
        if having not in (0, len(sites)):
            raise UserError(
                f"adapter {adapter.name!r}: got {key} at {having} of {len(sites)} modules, expected all or none"
            )
        fields[key] = having > 0
    if fields["lora_bias"] and "model.embed_tokens" in sites:
        raise UserError(f"adapter {adapter.name!r}: got a bias at the embedding, expected none: PEFT has no such thing")
    return fields


def _ranks(sites: Mapping[str, LoRAWeights]) -> Json:
    """The commonest rank and α, and a pattern for each module that has another one."""
    rslora = all(weights.rslora for weights in sites.values())
    ranks = {name: weights.rank for name, weights in sites.items()}
    alphas = {
        name: weights.alpha if weights.rslora == rslora else weights.scale * weights.rank
        for name, weights in sites.items()
    }
    fields = {"use_rslora": rslora}
    for key, pattern, found in (("r", "rank_pattern", ranks), ("lora_alpha", "alpha_pattern", alphas)):
        usual = Counter(found.values()).most_common(1)[0][0]
        fields[key], fields[pattern] = usual, {name: value for name, value in found.items() if value != usual}
    return fields


def _bias(adapter: Adapter, sites: Mapping[str, LoRAWeights], names) -> str:
    trained = {
        names[path[:-1], layer] for path, layer, _, part in _whole(adapter) if part == "base" and path[-1] == "bias"
    }
    return "none" if not trained else "lora_only" if trained <= sites.keys() else "all"
