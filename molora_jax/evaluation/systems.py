"""Ways to answer a question with the same base and experts: each a system whose answers are compared."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.composition import Composition
from molora_jax.adapters.library import Library
from molora_jax.adapters.mixtures.classifier import PromptClassifier
from molora_jax.adapters.mixtures.soups import soup
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.data.tasks import registry
from molora_jax.data.token_domains import token_domains
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.typing import Bool, Params

LENGTH = 128
"""Most tokens of a prompt and its answer on the testbed."""

Owner = Mapping[str, str | None]
"""Name of the expert of each domain; None is the base."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """Who decides which expert a token has.

    Attributes:
      name: in tables.
      experts: J of them; none is the base alone.
      mixer: a router, its experts in the first slots of a bank of as many; None where each request says.
      attention: an adapter that all tokens have.
      single: name of the expert of all tokens, without a router.
      owner: the expert by domain, of each token: what an oracle knows.
      classifier: decides once, from the prompt.
    """

    name: str
    experts: tuple[Adapter, ...] = ()
    mixer: Any = None
    attention: Adapter | None = None
    single: str | None = None
    owner: Owner | None = None
    classifier: PromptClassifier | None = None

    def library(self, params: Params) -> Library:
        """The experts, and what all tokens have, in a bank for these parameters."""
        return Library.holding(self.experts, params, shared=self.attention)


BASE = System(name="base")


ORACLE = "oracle"
BOUNDS = ("base", "experts", "uniform", ORACLE)
"""What every composition lies between: the base, each expert alone, all at equal weight, each domain's own."""


def bounds(experts: Sequence[Adapter], owner: Owner, depth: int, names: Sequence[str] = BOUNDS) -> list[System]:
    """Those of `BOUNDS` that are named; of no experts, the base alone.

    Args:
      depth: L.

    Raises:
      UserError: an unknown name.
    """
    if unknown := sorted(set(names) - set(BOUNDS)):
        raise UserError(f"bounds: got {unknown[0]!r}, expected some of {', '.join(BOUNDS)}")
    experts = tuple(experts)
    found = {"base": [BASE]}
    if experts:
        found["experts"] = [System(name=f"expert {e.name}", experts=experts, single=e.name) for e in experts]
        found["uniform"] = [System(name="uniform", experts=experts, mixer=soup(len(experts), depth))]
        found[ORACLE] = [System(name=ORACLE, experts=experts, owner=owner)]
    return [system for name in BOUNDS if name in names for system in found.get(name, ())]


def composed(name: str, found: Composition) -> System:
    """The system that a composition is."""
    return System(name=name, experts=found.experts, mixer=found.mixer, attention=found.attention)


class Answerer:
    """A system on an engine: `answerer(examples)` is what it writes after each prompt, greedily.

    Args:
      rows: examples that run at once.
      length: most tokens of a prompt and its answer.
    """

    def __init__(self, model: Model, system: System, *, rows: int = 64, length: int = LENGTH):
        self.model, self.system = model, system
        config = EngineConfig(max_rows=rows, max_length=length, block=length)
        self.engine = Engine(model.cfg, model.params, config, _experts(model, system))

    def __call__(self, examples: Sequence[Example], most: Sequence[int] | None = None) -> list[str]:
        """Answers end with the end-of-text token, or where there is no room for more.

        Args:
          most: tokens of each example's answer; by default what `length` leaves it.

        Raises:
          UserError: a prompt that leaves no room.
        """
        tokenizer, length = self.model.tokenizer, self.engine.config.max_length
        most = [length] * len(examples) if most is None else most
        prompts = [tokenizer.encode(example.prompt) for example in examples]
        for example, prompt in zip(examples, prompts, strict=True):
            if len(prompt) >= length:
                raise UserError(f"{example.id}: got a prompt of {len(prompt)} tokens, expected fewer than {length}")
        choices = _choices(self.model, self.system, examples, prompts)
        requests = [
            Request(prompt=p, max_new_tokens=min(limit, length - len(p)), stops=tokenizer.eos, **how)
            for p, limit, how in zip(prompts, most, choices, strict=True)
        ]
        return [tokenizer.decode(event.tokens) for event in self.engine.run(requests)]


def answers(
    model: Model, system: System, examples: Sequence[Example], most: Sequence[int] | None = None, **how
) -> list[str]:
    """What a system writes after each prompt, `most` tokens of each; `how` is for `Answerer`."""
    return Answerer(model, system, **how)(examples, most)


def _experts(model: Model, system: System) -> Experts | None:
    if not system.experts:
        return None
    return Experts(system.library(model.params), model.cfg.vocab, router=system.mixer)


def _choices(model: Model, system: System, examples, prompts) -> list[dict[str, Any]]:
    """What each request says of its experts."""
    if system.single is not None:
        return [dict(adapter=system.single)] * len(examples)
    if system.owner is not None:
        return [dict(route=_owned(model, system.owner, example)) for example in examples]
    if system.classifier is not None:
        names = [expert.name for expert in system.experts]
        return [dict(adapter=names[i]) for i in classified(model, system.classifier, prompts)]
    return [{}] * len(examples)


def _owned(model: Model, owner: Owner, example: Example) -> list[str | None]:
    """The expert of each token of the example as it should be answered; the base's where nobody owns its domain."""
    return [owner.get(domain) for domain in token_domains(model.tokenizer, example)]


def classified(model: Model, classifier: PromptClassifier, prompts: Sequence[Sequence[int]]) -> list[int]:
    """The expert's number that a prompt classifier gives each prompt."""
    width = max(map(len, prompts))
    tokens = np.array([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
    valid = np.array([[True] * len(prompt) + [False] * (width - len(prompt)) for prompt in prompts])
    embed = model.params["embed"]["weight"]
    return np.asarray(classifier.ids(embed, jnp.asarray(tokens), jnp.asarray(valid))).tolist()


def right(examples: Sequence[Example], written: Sequence[str]) -> Bool[np.ndarray, "n"]:
    """Which of the answers are, by each example's own verifier."""
    return np.array(registry.verify(examples, written), bool)
