"""A model by name, ready to run: configuration, parameters, tokenizer."""

import dataclasses

import jax
import jax.numpy as jnp

from molora_jax.checkpoints import hf
from molora_jax.checkpoints.resolve import resolve
from molora_jax.config import ModelConfig, UserError
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.typing import Params

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16, "float64": jnp.float64}


@dataclasses.dataclass(frozen=True)
class Model:
    """What `load` returns."""

    cfg: ModelConfig
    params: Params
    tokenizer: Tokenizer


def default_dtype() -> str:
    """fp32 on a CPU, whose half-precision products are slower; bf16 elsewhere."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load(name: str, *, dtype: str | None = None, stacked: bool | None = None) -> Model:
    """Loads a local folder, a .gguf file, `testbed:small`, `testbed:large`, `pypi:PACKAGE` or a hub name.

    Args:
      stacked: whether the layers lie in one array, which compiles 3 to 4 × faster. By default they are unrolled on a
        CPU, where that decodes 1.4 to 2 × faster, and stacked elsewhere.

    Raises:
      UserError: no such model, or one that cannot be read.
    """
    dtype = dtype or default_dtype()
    if dtype not in DTYPES:
        raise UserError(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    folder = resolve(name)
    tokenizer = Tokenizer.load(folder)
    stacked = jax.default_backend() != "cpu" if stacked is None else stacked
    cfg, params = hf.load(folder, dtype=DTYPES[dtype], stacked=stacked)
    return Model(cfg, params, tokenizer)
