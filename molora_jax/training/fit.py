"""An adapter trained on examples in memory, for comparisons that train many; `sft.run` is the one for a run to keep."""

import functools

from molora_jax.adapters.adapter import Adapter
from molora_jax.checkpoints.model import Model
from molora_jax.data.document import Mapped, Source, from_example
from molora_jax.data.example import Example
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.training import loop, sft, specialist
from molora_jax.training.settings import SFTConfig
from molora_jax.training.specialist import AdapterConfig


def fit(
    model: Model,
    examples: Source[Example],
    name: str,
    config: AdapterConfig,
    *,
    steps: int,
    rate: float,
    rows: int = 8,
    length: int = 128,
    seed: int = 0,
) -> Adapter:
    """A new adapter of that name and kind, trained on the examples with the defaults of `settings.SFTConfig`.

    Raises:
      UserError: an example of more than `length` tokens.
    """
    how = dict(rows=rows, length=length, steps=steps, rate=rate, warmup=min(10, steps - 1), seed=seed)
    settings = SFTConfig(adapter=config, **how)
    fresh = specialist.new(model.cfg, model.params, config, name, seed=seed)
    made = sft.trainer(model, fresh, settings)
    documents = Mapped(examples, functools.partial(from_example, model.tokenizer))
    batches = Batches({"examples": documents}, Spec(rows=rows, length=length, seed=seed))
    state = loop.run(made, batches, loop.LoopConfig(steps=steps, log_every=steps), progress=False)
    return specialist.trained(made.tree(state), fresh)
