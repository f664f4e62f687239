"""The tensors of a PEFT file: which module of the decoder and which part of its adapter each name stands for."""

import dataclasses
import re
from collections.abc import Iterable

import jax

from molora_jax.adapters.adapter import EMBED, HEAD, Path
from molora_jax.config import ModelConfig, UserError
from molora_jax.models import families, transformer

_ROOT = "base_model.model."
_WRAPPERS = re.compile(r"(?:(?:base_model|model|language_model|module|_orig_mod|_fsdp_wrapped_module)\.)*")
"""What wraps a decoder puts its name before the modules'; any other prefix belongs to some other network."""

_ADAPTER = r"(?:\.(?P<adapter>[^.]+))?"
_FORMS = [  # the adapter's name, which PEFT leaves out of its files, may stand inside
    (re.compile(rf"(?P<module>.+?)\.{form}"), part)
    for form, part in [
        (rf"lora_A{_ADAPTER}\.weight", "a"),
        (rf"lora_B{_ADAPTER}\.weight", "b"),
        (rf"lora_B{_ADAPTER}\.bias", "bias"),
        (rf"lora_embedding_A{_ADAPTER}", "embedding_a"),
        (rf"lora_embedding_B{_ADAPTER}", "embedding_b"),
        (r"lora_magnitude_vector(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?", "magnitude"),
        (r"base_layer\.(?P<leaf>weight|bias)", "base"),
        (rf"modules_to_save{_ADAPTER}\.(?P<leaf>weight|bias)", "full"),
        (r"(?P<leaf>weight|bias)", "own"),
    ]
]
_SUFFIXES = {
    "a": "lora_A.weight",
    "b": "lora_B.weight",
    "bias": "lora_B.bias",
    "embedding_a": "lora_embedding_A",
    "embedding_b": "lora_embedding_B",
    "magnitude": "lora_magnitude_vector",
}


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of the decoder that has parameters.

    Attributes:
      path: in the parameter tree, without a leaf.
      layer: its number; 0 outside the layers.
      name: in transformers, as `model.layers.0.self_attn.q_proj`.
      shapes: of its parameters, by leaf.
    """

    path: Path
    layer: int
    name: str
    shapes: dict[str, tuple[int, ...]]

    @property
    def adaptable(self) -> bool:
        """Whether it is a projection or the embedding, and no norm."""
        return len(self.shapes["weight"]) == 2

    @property
    def linear(self) -> tuple[int, int]:
        """F and D of the projection; those of one-hot tokens for the embedding."""
        shape = self.shapes["weight"]
        return shape[::-1] if self.path == EMBED else shape

    def part(self, part: str) -> str:
        """`a` and `b` have other names at the embedding."""
        return f"embedding_{part}" if self.path == EMBED and part in ("a", "b") else part


def modules(cfg: ModelConfig) -> dict[str, Module]:
    """Every module with parameters, by its name without the leading `model.`; the head also where it is tied."""
    found = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(transformer.abstract(cfg)):
        path = tuple(key.key for key in keys)
        name, stacked = families.hf_name(cfg, path).removesuffix(f".{path[-1]}"), path[0] == "layers"
        for layer in range(cfg.layers if stacked else 1):
            module = Module(path[:-1], layer, name.format(layer), {})
            module = found.setdefault(module.name.removeprefix("model."), module)
            module.shapes[path[-1]] = leaf.shape[1:] if stacked else leaf.shape
    if cfg.tied:
        name = families.hf_name(cfg, (*HEAD, "weight")).removesuffix(".weight")
        found[name] = Module(HEAD, 0, name, dict(found["embed_tokens"].shapes))
    return found


def tensor(module: Module, part: str, leaf: str = "") -> str:
    """The name that PEFT gives a tensor.

    Args:
      part: `a`, `b`, `bias` or `magnitude` of an update; with a leaf `own`, the module's own parameter, or
        `base_layer`, the same where the module has an update.
    """
    suffix = _SUFFIXES.get(module.part(part)) or (f"base_layer.{leaf}" if part == "base_layer" else leaf)
    return f"{_ROOT}{module.name}.{suffix}"


@dataclasses.dataclass(frozen=True)
class Index:
    """The names of a file, understood.

    Attributes:
      tensors: (key of the module, part) to the name in the file; parts as in `tensor`, `own` and so on with `.leaf`.
      unused: names that belong to no module of the decoder.
      prefix: what stands before `layers.` and the like.
    """

    tensors: dict[tuple[str, str], str]
    unused: list[str]
    prefix: str

    @property
    def repaired(self) -> bool:
        """Whether PEFT would have overlooked every tensor of the body."""
        return self.prefix != f"{_ROOT}model."

    def names(self, module: Module) -> tuple[str, ...]:
        """The module's name in transformers, and the one under which the adapter's own model knew it."""
        own = self.prefix.removeprefix(_ROOT) + module.name.removeprefix("model.")
        return (module.name,) if own == module.name or module.path == HEAD else (module.name, own)


def index(names: Iterable[str], known: dict[str, Module], where: str) -> Index:
    """Sorts the tensor names of a file.

    Raises:
      UserError: two adapters, or two copies of one, lie in the file.
    """
    tensors, unused, prefixes, adapters = {}, [], set(), set()
    for name in sorted(names):
        key, part, adapter, prefix = _parse(name, known)
        if key is None:
            unused.append(name)
            continue
        if (key, part) in tensors:
            raise UserError(f"{where}: got both {tensors[key, part]} and {name}, expected one; remove the other")
        tensors[key, part] = name
        adapters |= {adapter} - {None}
        prefixes |= {prefix} if key != "lm_head" else set()
    if len(adapters) > 1:
        raise UserError(f"{where}: got adapters {', '.join(sorted(adapters))} in one file, expected one; split it")
    if len(prefixes) > 1:
        raise UserError(
            f"{where}: got tensors under {' and '.join(repr(p) for p in sorted(prefixes))}, expected one prefix: "
            f"{_ROOT}model."
        )
    return Index(tensors, unused, prefixes.pop() if prefixes else f"{_ROOT}model.")


def _parse(name: str, known: dict[str, Module]) -> tuple[str | None, str, str | None, str]:
    """Key of the module, part, adapter's name, prefix; the key is None for what no module of the decoder has."""
    for form, part in _FORMS:
        if match := form.fullmatch(name):
            groups = match.groupdict()
            key = _key(groups["module"], known)
            if key is None or part.removeprefix("embedding_") in ("a", "b") and part != known[key].part(part[-1]):
                continue
            part = part.removeprefix("embedding_") + (f".{groups['leaf']}" if "leaf" in groups else "")
            return key, part, groups.get("adapter"), groups["module"].removesuffix(key)
    return None, "", None, ""


def _key(module: str, known: dict[str, Module]) -> str | None:
    """`layers.0.self_attn.q_proj` of `base_model.model.model.layers.0.self_attn.q_proj`."""
    parts = module.split(".")
    keys = (".".join(parts[i:]) for i in range(len(parts)))
    key = next((key for key in keys if key in known), None)
    return key if key is not None and _WRAPPERS.fullmatch(module.removesuffix(key)) else None
