"""Tokenizers rebuilt from the vocabulary that a GGUF file carries in its metadata."""

import collections
import enum
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from molora_jax.config import UserError

Metadata = Mapping[str, Any]
_SPACE = "▁"


class Kind(enum.IntEnum):
    """`tokenizer.ggml.token_type`: what an entry of the vocabulary is (llama.cpp, `enum llama_token_type`)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# How text is cut before the merges, by `tokenizer.ggml.pre`; the expressions are those the vocabularies were made with.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _LLAMA3.replace("{1,3}", "")}
_GPT2 = ("gpt-2", "default")
_TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def build(meta: Metadata) -> Tokenizer:
    """The tokenizer of a GGUF's metadata: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).

    Control tokens become special tokens, user-defined ones plain added tokens. Where the metadata asks for a token
    at the beginning or end of every text, encoding with special tokens adds it.

    Raises:
      UserError: another kind of vocabulary, an unknown `tokenizer.ggml.pre`, or arrays that do not fit together.
    """
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise UserError("GGUF: got a file without tokenizer.ggml.tokens, expected one that carries its vocabulary")
    kinds = meta.get("tokenizer.ggml.token_type") or [Kind.NORMAL] * len(tokens)
    _check(meta, tokens, kinds)
    match meta.get("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer = _byte_level(meta, tokens)
        case "llama":
            tokenizer = _sentencepiece(meta, tokens, kinds)
        case other:
            raise UserError(f"GGUF: got tokenizer.ggml.model {other!r}, expected 'gpt2' or 'llama'")
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == Kind.CONTROL]
    plain = [t for t, kind in zip(tokens, kinds, strict=True) if kind == Kind.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    # A run of spaces was respelled for the model, and is no entry any more.
    known = tokenizer.get_vocab(with_added_tokens=True)
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain if t in known])
    _add_affixes(tokenizer, meta)
    return tokenizer


def _check(meta: Metadata, tokens: list[str], kinds: list[int]) -> None:
    for name, array in (("token_type", kinds), ("scores", meta.get("tokenizer.ggml.scores") or tokens)):
        if len(array) != len(tokens):
            raise UserError(f"GGUF: got {len(array)} tokenizer.ggml.{name} for {len(tokens)} tokens, expected as many")
    token, count = collections.Counter(tokens).most_common(1)[0]
    if count > 1:
        raise UserError(f"GGUF: got {token!r} {count} times in tokenizer.ggml.tokens, expected every token once")
    for role in (*_ROLES.values(), "eot", "eom"):
        i = meta.get(f"tokenizer.ggml.{role}_token_id", 0)
        if not 0 <= i < len(tokens):
            raise UserError(f"GGUF: got tokenizer.ggml.{role}_token_id {i}, expected one below {len(tokens)}")


def configs(meta: Metadata) -> tuple[dict, dict]:
    """`tokenizer_config.json` and `generation_config.json` of a GGUF's metadata.

    A generation ends at the end-of-text token, and at the tokens that the metadata names as end of a turn or message.
    """
    ids = {role: meta.get(f"tokenizer.ggml.{key}_token_id") for role, key in _ROLES.items()}
    tokens = meta["tokenizer.ggml.tokens"]
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokenizer |= {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    tokenizer |= {"add_bos_token": _adds(meta, "bos"), "add_eos_token": _adds(meta, "eos")}
    if template := meta.get("tokenizer.chat_template"):
        tokenizer["chat_template"] = template
    ends = [ids["eos"], *(meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    kinds = meta.get("tokenizer.ggml.token_type") or ()
    controls = (i for i, kind in enumerate(kinds) if kind == Kind.CONTROL)
    ends += [i for i in controls if tokens[i] in _TURN_ENDS]  # many files name the end of a text alone
    ends = list(dict.fromkeys(i for i in ends if i is not None))
    generation = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    generation |= {f"{role}_token_id": ids[role] for role in ("bos", "pad") if ids[role] is not None}
    return tokenizer, generation


def _adds(meta: Metadata, role: str) -> bool:
    """Whether every text gets the token; files older than the flag mean what llama.cpp does for their vocabulary."""
    default = role == "bos" and (meta["tokenizer.ggml.model"] == "llama" or _SPLITS.get(_pre(meta)) == _LLAMA3)
    return bool(meta.get(f"tokenizer.ggml.add_{role}_token", default))


def _add_affixes(tokenizer: Tokenizer, meta: Metadata) -> None:
    ends = {role: meta.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos") if _adds(meta, role)}
    used = {role: (meta["tokenizer.ggml.tokens"][i], i) for role, i in ends.items() if i is not None}
    if not used:
        return
    before, after = ([used[role][0]] if role in used else [] for role in ("bos", "eos"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{t}:1" for t in before), "$B:1", *(f"{t}:1" for t in after)],
        special_tokens=list(used.values()),
    )


def _pre(meta: Metadata) -> str:
    """How text is cut before the merges; files older than the key are known by what else they hold."""
    if pre := meta.get("tokenizer.ggml.pre"):
        return pre
    if str(meta.get("general.architecture")).startswith("qwen"):
        return "qwen2"
    return "llama-bpe" if "<|begin_of_text|>" in meta["tokenizer.ggml.tokens"] else "default"


def _byte_level(meta: Metadata, tokens: list[str]) -> Tokenizer:
    """BPE over bytes written as 256 printable characters (Radford et al. 2019, §2.2)."""
    pre = _pre(meta)
    merges = [tuple(merge.partition(" ")[::2]) for merge in meta.get("tokenizer.ggml.merges", ())]
    # Vocabularies of Llama 3 hold words that no chain of merges reaches, and take a whole word first.
    whole = _SPLITS.get(pre) == _LLAMA3
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=whole))
    except Exception as e:  # tokenizers raises nothing more specific
        raise UserError(f"GGUF: got tokenizer.ggml.merges that do not fit the tokens ({e})") from None
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if pre in _SPLITS:
        cut = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    elif pre == "smollm":
        digits, to_bytes = (
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    elif pre in _GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        raise UserError(
            f"GGUF: got tokenizer.ggml.pre {pre!r}, expected one of {', '.join([*_SPLITS, 'smollm', *_GPT2])}"
        )
    return tokenizer


def _sentencepiece(meta: Metadata, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """SentencePiece BPE: spaces are written ▁, and a character outside the vocabulary is written as its bytes."""
    if meta.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise UserError("GGUF: got tokenizer.ggml.remove_extra_whitespaces, expected a vocabulary that keeps spaces")
    # Gemma's user-defined runs of spaces are stored as spaces, all other tokens with ▁.
    taken = set(tokens)
    respelled = ((t, t.replace(" ", _SPACE)) for t in tokens)
    tokens = [new if not t.strip(" ") and new not in taken else t for t, new in respelled]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == Kind.UNKNOWN), None)
    if unknown is None and (i := meta.get("tokenizer.ggml.unknown_token_id")) is not None:
        unknown = tokens[i]
    merges = _merges(tokens, kinds, meta.get("tokenizer.ggml.scores") or [-i for i in range(len(tokens))])
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    to_text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    to_spaces = [normalizers.Replace(" ", _SPACE)]
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        to_spaces.insert(0, normalizers.Prepend(_SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(to_spaces)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _merges(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that a list of scored pieces stands for: every way to join two pieces into one, best piece first.

    SentencePiece joins, again and again, the neighbours that make the piece of the highest score (Kudo & Richardson
    2018, §3.1). It takes user-defined pieces out of the text before that, so their merges come first of all.
    """
    made = {t for t, kind in zip(tokens, kinds, strict=True) if kind in (Kind.NORMAL, Kind.USER_DEFINED)}
    ranked = []
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if token not in made:
            continue
        rank = (kind != Kind.USER_DEFINED, -scores[i], i)
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in made and token[cut:] in made:
                ranked.append((*rank, len(token) - cut, token[:cut], token[cut:]))
    return [pair[-2:] for pair in sorted(ranked)]
