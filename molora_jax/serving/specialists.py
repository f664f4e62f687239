"""Experts for an engine from what a user types: folders by name, and who decides between them."""

import sys
from collections.abc import Sequence

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.library import Library
from molora_jax.adapters.mixtures.classifier import PromptClassifier
from molora_jax.adapters.spec import BankSpec
from molora_jax.checkpoints import composition, peft
from molora_jax.checkpoints.model import Model
from molora_jax.checkpoints.resolve import part
from molora_jax.config import UserError
from molora_jax.engine.experts import Experts
from molora_jax.serving.prompts import Prompt


def load(
    model: Model,
    adapters: Sequence[str],
    *,
    route: str = "row",
    rule: Sequence[str] = (),
    router: str | None = None,
    slots: int = 8,
) -> Experts | None:
    """The experts of `adapters`, each "name=folder", in a bank of at most `slots` of them at once; None without any.

    What was loaded is told on standard error, a line each.

    Args:
      route: "row" and "token" leave it to each request; "vocab" needs a rule, "router" a router.
      rule: "name=from-to" for a range of token ids, both ends included, or "name=<token>" for one token; "base" is no
        expert.
      router: folder of a router's checkpoint or of a composition, whose experts are those of `adapters` in their order.

    Raises:
      UserError: a flag that reads otherwise, or what loading says.
    """
    needs = {"vocab": ("rule", rule), "router": ("router", router)}
    for kind, (flag, value) in needs.items():
        if bool(value) != (route == kind):
            raise UserError(f"{flag}: got {value or 'none'}, expected --{flag} with --route={kind}, and only there")
    if not adapters:
        if route != "row":
            raise UserError(f"route: got {route} without experts, expected --adapters=name=folder,…")
        return None
    found = read(model, adapters)
    names = [adapter.name for adapter in found]
    slots = len(found) if router else min(slots, len(found))
    composed = composition.load(part(router), model, found) if router else None
    shared = composed and composed.attention
    library = Library(BankSpec.holding(found, slots=slots, dtype=_dtype(model)), model.params, shared=shared)
    for adapter in found:
        library.add(adapter)
    decides = composed and composed.mixer
    if isinstance(decides, PromptClassifier):
        raise UserError("router: got a prompt classifier, expected one for tokens: give each prompt its own adapter")
    if decides is not None:
        decides = decides.placed(library.slots(tuple(names)), slots)
    return Experts(library, model.cfg.vocab, router=decides, rule=read_rule(model, rule, names))


def read(model: Model, adapters: Sequence[str]) -> list[Adapter]:
    """The adapters of "name=folder" items, each told on standard error."""
    found = []
    for name, folder in pairs("adapters", adapters, "name=folder"):
        adapter, report = peft.load(part(folder), model.cfg, name=name)
        print(f"{name}: {str(report).splitlines()[0]}", file=sys.stderr)
        found.append(adapter)
    if "base" in (names := [adapter.name for adapter in found]):
        raise UserError(f"adapters: got the names {', '.join(names)}, expected none of them base")
    return found


def check_named(prompts: Sequence[Prompt], route: str) -> None:
    """Raises `UserError` where nothing says which expert answers: the base would, without a word."""
    if route == "token" and any(prompt.route is None for prompt in prompts):
        raise UserError("route: got a prompt without `route`, expected one in each with --route=token")
    if route == "row" and all(prompt.adapter is None and prompt.route is None for prompt in prompts):
        raise UserError(
            "adapter: got none for any prompt, expected --adapter=NAME, --adapter=base, or `adapter` in one"
        )


def resident(experts: Experts | None) -> dict[str, int]:
    """The slots of all experts, which are put into the bank for good; nothing without any."""
    if experts is None:
        return {}
    names = experts.library.names
    return dict(zip(names, experts.library.slots(names), strict=True))


def read_rule(model: Model, items: Sequence[str], names: Sequence[str]) -> dict[int, str | None]:
    """The expert of `names` (None: the base) that token ids call for; items as `load` takes them."""
    table: dict[int, str | None] = {}
    for item in items:
        name, where = _pair("rule", item, "name=from-to or name=<token>")
        if name not in (*names, "base"):
            raise UserError(f"rule: got {name!r}, expected one of {', '.join(names)} or base")
        low, dash, high = where.partition("-")
        if dash and low.isdigit() and high.isdigit():
            ids = range(int(low), int(high) + 1)
            if not ids or ids[-1] >= model.cfg.vocab:
                raise UserError(f"rule: got {where}, expected ids in ascending order, from 0 to {model.cfg.vocab - 1}")
        else:
            ids = model.tokenizer.encode(where, special=False)
            if len(ids) != 1:
                raise UserError(f"rule: got {where!r}, which is {len(ids)} tokens, expected one token, or ids as 32-64")
        taken = [token for token in ids if table.get(token, name) != name]
        if taken:
            raise UserError(f"rule: got token id {taken[0]} for {table[taken[0]]} and {name}, expected one expert")
        table |= dict.fromkeys(ids, name)
    return {token: None if name == "base" else name for token, name in table.items()}


def pairs(flag: str, items: Sequence[str], form: str) -> list[tuple[str, str]]:
    """The two sides of each item of a flag, whose left sides differ; `form` is how an item looks."""
    found = [_pair(flag, item, form) for item in items]
    if len({name for name, _ in found}) < len(found):
        raise UserError(f"{flag}: got the names {', '.join(name for name, _ in found)}, expected different ones")
    return found


def _pair(flag: str, item: str, form: str) -> tuple[str, str]:
    name, sign, value = item.partition("=")
    if not (name and sign and value):
        raise UserError(f"{flag}: got {item!r}, expected {form}")
    return name, value


def _dtype(model: Model):
    return model.params["embed"]["weight"].dtype
