"""Bases of the testbed, trained from nothing on its stream: what the two are, how they are made and how written."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from molora_jax.checkpoints import hf
from molora_jax.config import ModelConfig, UserError
from molora_jax.data.batch import Batch
from molora_jax.data.document import Mapped, from_example
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.data.testbed import vocabulary
from molora_jax.data.testbed.recipe import PRETRAINING, Recipe, Stream
from molora_jax.models import transformer
from molora_jax.training import loop
from molora_jax.training.batch import layout
from molora_jax.training.objective import Sums, next_token_loss
from molora_jax.training.optimiser import Group, OptimiserConfig, Schedule
from molora_jax.training.step import Trainer
from molora_jax.typing import Array, Params

LENGTH = 128
"""Tokens of a row, and the longest that a base is made for is twice that."""
RECORD = "testbed.json"
_ENDLESS = 1 << 40
"""Examples of the stream; none is seen twice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """A base and the run that makes it.

    Attributes:
      width, layers, mlp_width, heads: D, L, F and H of a Llama whose heads have keys and values of their own.
      steps: updates.
      rows: rows of `LENGTH` tokens in a batch.
      rate: peak learning rate of AdamW.
      warmup, fall: steps of its linear rise in the beginning and its linear fall in the end.
      decay: weight decay.
      prompt_weight: of the loss on prompts, whose tokens are mostly drawn at random.
      seed: of the parameters, the stream and its order.
      recipe: what the stream consists of.
    """

    width: int
    layers: int
    mlp_width: int
    heads: int
    steps: int
    rows: int = 8
    rate: float = 4e-3
    warmup: int = 200
    fall: int = 1000
    decay: float = 0.01
    prompt_weight: float = 0.1
    seed: int = 0
    recipe: Recipe = PRETRAINING

    @property
    def model(self) -> ModelConfig:
        if self.width % self.heads:
            raise UserError(f"base: got {self.heads} heads for width {self.width}, expected a divisor")
        head_width = self.width // self.heads
        return ModelConfig(
            family="llama",
            vocab=vocabulary.tokenizer().vocab,
            layers=self.layers,
            width=self.width,
            mlp_width=self.mlp_width,
            heads=self.heads,
            kv_heads=self.heads,
            head_width=head_width,
            windows=(0,) * self.layers,
            max_positions=2 * LENGTH,
            attn_scale=head_width**-0.5,
        )


BASES = {
    "small": Base(width=80, layers=3, mlp_width=208, heads=4, steps=8000),
    "large": Base(width=128, layers=5, mlp_width=320, heads=8, steps=10000, rate=2e-3, fall=2500),
}


def pretrain(base: Base, *, folder: Path | None = None, progress: bool = True) -> Params:
    """Trains a base to the end; layers come stacked, as fp32.

    Args:
      folder: of the run's checkpoints and metrics; a run that was killed goes on from there. None keeps nothing.

    Raises:
      UserError: as `loop.run` does.
    """
    cfg = base.model
    params = transformer.init(cfg, base.seed)
    unrolls = jax.default_backend() == "cpu"  # faster there by a tenth, as in decoding
    trainer = _trainer(base, cfg, transformer.unstack(params) if unrolls else params)
    config = loop.LoopConfig(steps=base.steps, log_every=50, save_every=200, keep_last=1)
    state = loop.run(trainer, _batches(base), config, folder=folder, progress=progress)
    params = trainer.tree(state)["params"]
    return _stack(params) if unrolls else params


def _trainer(base: Base, cfg: ModelConfig, params: Params) -> Trainer:
    group = Group(name="all", paths=("params.*",), rate=base.rate, decay=base.decay)
    fall = min(base.fall, base.steps)
    warmup = min(base.warmup, base.steps - fall)
    hold = base.steps - warmup - fall
    schedule = Schedule(shape="linear", steps=base.steps, warmup=warmup, hold=hold, end=0.02)
    config = OptimiserConfig(groups=(group,), schedule=schedule, b2=0.98)
    return Trainer({"params": params}, functools.partial(_loss, cfg), config, seed=base.seed)


def _loss(cfg: ModelConfig, tree: Any, batch: Batch, key: Array) -> Sums:
    out = transformer.apply(cfg, tree["params"], batch.tokens.reshape(-1), layout(batch))
    return next_token_loss(cfg, tree["params"], out.hidden, batch)


def _batches(base: Base) -> Batches:
    document = functools.partial(from_example, vocabulary.tokenizer(), prompt_weight=base.prompt_weight)
    source = Mapped(Stream(base.recipe, "train", base.seed, _ENDLESS), document)
    return Batches({"testbed": source}, Spec(rows=base.rows, length=LENGTH, seed=base.seed, shuffle=False))


def _stack(params: Params) -> Params:
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
    return params | {"layers": layers}


def write(folder: Path, cfg: ModelConfig, params: Params) -> None:
    """Writes a base as a HF folder that needs nothing else: weights in bf16, and the testbed's tokenizer.

    Raises:
      UserError: the folder cannot be written to.
    """
    try:
        hf.save(folder, cfg, params, dtype=jnp.bfloat16)
        for file in vocabulary.FOLDER.glob("*.json"):
            shutil.copyfile(file, folder / file.name)
    except OSError as e:
        raise UserError(f"{folder}: got {e.strerror!r} writing there, expected a folder with room") from None


def settings(base: Base) -> dict[str, Any]:
    """All that makes a base, as JSON values."""
    return dataclasses.asdict(base) | dict(recipe=dataclasses.asdict(base.recipe))


def record(folder: Path, **facts: Any) -> None:
    """Writes facts of a base (the command, the settings, what it can do) to `testbed.json`, beside those there."""
    path = folder / RECORD
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | facts, indent=1) + "\n")
