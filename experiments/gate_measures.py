"""What is measured of a gated expert: its scales, its held-out loss, the answers it gives."""

import functools

import jax
import numpy as np

from experiments import gate_training as training
from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.bank import Bank
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import Route
from molora_jax.adapters.spec import BankSpec
from molora_jax.config import ModelConfig
from molora_jax.data.testbed import verifier
from molora_jax.data.testbed.recipe import Recipe, Stream
from molora_jax.data.testbed.vocabulary import tokenizer
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.models import transformer
from molora_jax.nn.layout import Layout


def library(params, adapter: Adapter) -> Library:
    """A bank with the adapter alone, in slot 0."""
    made = Library(BankSpec.holding([adapter]), params)
    made.add(adapter)
    made.slots((adapter.name,))
    return made


def scales(cfg: ModelConfig, params, bank: Bank, tokens, layout: Layout) -> dict[str, np.ndarray]:
    """λ of the expert in slot 0 by site: [L N E] or [L N E R]."""
    route = Route.of(np.zeros(len(tokens), np.int32))
    run = lambda params, bank: transformer.apply(cfg, params, tokens, layout, bank=bank, route=route, taps=("gates",))
    return jax.device_get(jax.jit(run)(params, bank).taps["gates"])


def held_out(cfg: ModelConfig, params, bank: Bank | None, recipe: Recipe, *, rows: int, size: int) -> dict[str, float]:
    """Mean loss and greedy accuracy over the completions' tokens of the first `size` examples for validation."""
    tree, totals = {"params": params} | ({} if bank is None else {"bank": bank}), np.zeros(3)
    sums = jax.jit(functools.partial(training.loss, cfg))
    for batch in training.batches(recipe, "validation", 0, rows, size=size, epochs=1):
        found = sums(tree, batch)
        totals += [float(found.loss), float(found.extra["accuracy"]), float(found.weight)]
    return dict(loss=totals[0] / totals[2], accuracy=totals[1] / totals[2])


def exact(cfg: ModelConfig, params, lib: Library | None, recipe: Recipe, *, size: int) -> float:
    """Share of the first `size` questions for validation that greedy generation answers exactly."""
    config = EngineConfig(max_rows=32, max_length=2 * training.LENGTH)
    engine = Engine(cfg, params, config, lib and Experts(lib, cfg.vocab))
    name, words = lib and lib.names[0], tokenizer()
    questions = [Stream(recipe, "validation", 0, size)[i] for i in range(size)]
    ask = lambda text: Request(
        prompt=[*words.prefix, *words.encode(text, special=False)],
        max_new_tokens=training.LENGTH,
        stops=tuple(words.eos),
        adapter=name,
    )
    answers = engine.run([ask(question.prompt) for question in questions])
    right = [verifier.JUDGE.parse(words.decode(a.tokens)) == q.answer for a, q in zip(answers, questions, strict=True)]
    return float(np.mean(right))
