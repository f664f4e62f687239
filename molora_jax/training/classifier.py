"""Training of the prompt classifier, the baseline that gives a whole prompt one expert."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.mixtures.classifier import PromptClassifier, classifier
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.document import Document
from molora_jax.data.example import Example
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.training import loop
from molora_jax.training.objective import Sums
from molora_jax.training.optimiser import Group, OptimiserConfig, Schedule
from molora_jax.training.owned import Owned, OwnedBatches
from molora_jax.training.step import Trainer
from molora_jax.typing import Array


def train(
    model: Model,
    examples: Sequence[Example],
    owner: Mapping[str, str],
    experts: Sequence[str],
    *,
    hidden: int = 64,
    steps: int = 300,
    rows: int = 64,
    rate: float = 1e-2,
    seed: int = 0,
) -> PromptClassifier:
    """One that knows each example's expert by its prompt, by cross-entropy.

    Args:
      owner: name of the expert of each task.
      experts: names, in the order of the classifier's scores.

    Raises:
      UserError: a task without an expert.
    """
    if missing := sorted({e.task for e in examples if owner.get(e.task) not in experts}):
        raise UserError(f"classifier: got no expert of {missing[0]}, expected one of {', '.join(experts)}")
    slots = {example.id: experts.index(owner[example.task]) for example in examples}
    found = classifier(model.cfg.width, len(experts), hidden=hidden, seed=seed)
    documents = [_prompt(model, example) for example in examples]
    length = max(map(len, documents))
    tree = {"embed": model.params["embed"]["weight"], "classifier": found.params}
    config = OptimiserConfig(
        groups=(Group(name="classifier", paths=("classifier.*",), rate=rate),),
        schedule=Schedule(shape="cosine", steps=steps, warmup=min(10, steps - 1)),
    )
    trainer = Trainer(tree, _loss(found), config, seed=seed)
    batches = Batches({"prompts": documents}, Spec(rows=rows, length=length, seed=seed, packed=False))
    state = loop.run(
        trainer, OwnedBatches(batches, slots), loop.LoopConfig(steps=steps, log_every=steps), progress=False
    )
    params = jax.tree.map(np.asarray, trainer.tree(state)["classifier"])
    return dataclasses.replace(found, params=jax.tree.map(jnp.asarray, params))


def _prompt(model: Model, example: Example) -> Document:
    tokens = np.asarray(model.tokenizer.encode(example.prompt), np.int32)
    return Document(example.id, tokens, np.ones(len(tokens), np.float32))


def _loss(found: PromptClassifier):
    def of(tree: dict[str, Any], batch: Owned, key: Array) -> Sums:
        decider = dataclasses.replace(found, params=tree["classifier"])
        valid = batch.valid
        log_p = jax.nn.log_softmax(decider.scores(tree["embed"], batch.tokens, valid), axis=-1)
        real = jnp.any(valid, axis=1)
        own = jnp.max(batch.experts, axis=1)  # the one expert of the row; pads have -1
        picked = jnp.take_along_axis(log_p, jnp.maximum(own, 0)[:, None], axis=1)[:, 0]
        right = (jnp.argmax(log_p, axis=-1) == own) & real
        return Sums(
            -jnp.sum(jnp.where(real, picked, 0)), jnp.sum(real).astype(log_p.dtype), {"accuracy": 1.0 * jnp.sum(right)}
        )

    return of
