"""The flags of every command that continues prompts: what is asked, and how tokens are drawn."""

from collections.abc import Sequence

from absl import flags

from molora_jax.engine.request import Request
from molora_jax.serving import prompts
from molora_jax.serving.prompts import Prompt

_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; may be given several times.")
_FILE = flags.DEFINE_string("prompts_file", None, f"A prompt a line, or .jsonl with {prompts.ROW}.")
_CHAT = flags.DEFINE_bool("chat", False, "Put each prompt into the model's chat template, as the user's message.")
_SYSTEM = flags.DEFINE_string("system", None, "System message, with --chat.")
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "Most tokens to generate for a prompt.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "0 always takes the likeliest token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from so many of the likeliest tokens; 0: from all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the likeliest tokens that reach this mass.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Leave out tokens less likely than this fraction of the likeliest.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the first prompt; each next one has the next seed.")
STOP = flags.DEFINE_multi_string("stop", [], "End at this text; may be given several times.")
ROWS = flags.DEFINE_integer("batch_size", 8, "Most prompts that run at once.")
LENGTH = flags.DEFINE_integer("max_length", 2048, "Most tokens of prompt and continuation together.")


def asked(adapters: Sequence[str] = (), fallback: str | None = None) -> list[Prompt]:
    """The prompts of the flags, each with the adapter that it names; where there are none, `fallback`."""
    texts = _PROMPT.value or ([fallback] if fallback and not _FILE.value else [])
    return prompts.read_prompts(texts, _FILE.value, chat=_CHAT.value, system=_SYSTEM.value, adapters=adapters)


def read(file: str) -> list[Prompt]:
    """Those of another file, in the same form."""
    return prompts.read_prompts([], file, chat=_CHAT.value, system=_SYSTEM.value)


def template(logprobs: bool = False) -> Request:
    """How every prompt is continued."""
    return Request(
        prompt=(),
        max_new_tokens=_NEW.value,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        min_p=_MIN_P.value,
        seed=_SEED.value,
        logprobs=logprobs,
    )
