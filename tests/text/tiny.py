"""Tiny tokenizers of the kinds that the model families use, trained on a few lines and written as HF folders."""

import collections
import json
import pathlib

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "  Two spaces  inside,\n\ttabs and\r\nlines.   ",
    "Der Fuchs überquert die Straße; où est la forêt ? naïve café",
    "Быстрая лисица прыгает через ленивую собаку.",
    "すばしこい茶色の狐はのろまな犬を飛び越える。敏捷的棕色狐狸跳过懒狗",
    "family 👩‍👩‍👧 flags 🇫🇷🇯🇵 thumbs 👍🏽 plain 😀😀 zero 0️⃣",
    "def f(x): return x**2 + 1  # 3.14 <= 2_000",
] * 3
BYTE_LEVEL_SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
SENTENCEPIECE_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as Llama 3 and Qwen have; `é` and ` sp` are added tokens that the byte alphabet could misread."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=BYTE_LEVEL_SPECIAL,
        show_progress=False,
    )
    tok.train_from_iterator(TEXT, trainer)
    tok.add_tokens(["é", " sp", "日本"])
    return tok


def sentencepiece(decoder: str = "llama") -> tokenizers.Tokenizer:
    """BPE over `▁` with byte fallback. `decoder`: `llama` strips one leading space, `gemma` none, or `metaspace`."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    # the library's own limit takes any of the characters that are equally frequent, others in each process
    counts = collections.Counter("".join(TEXT[:4]).replace(" ", "▁"))
    alphabet = sorted(counts, key=lambda char: (-counts[char], char))[:60]
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False, limit_alphabet=60, initial_alphabet=alphabet)
    tok.train_from_iterator(TEXT[:4], trainer)
    model = json.loads(tok.to_str())["model"]
    names = SENTENCEPIECE_SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + list(model["vocab"])
    tok = tokenizers.Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [normalizers.Replace(" ", "▁")]
    tok.normalizer = normalizers.Sequence(spaces if decoder == "gemma" else [normalizers.Prepend("▁"), *spaces])
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tok.decoder = {
        "llama": decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)]),
        "gemma": decoders.Sequence(chain),
        "metaspace": decoders.Metaspace(prepend_scheme="always"),
    }[decoder]
    tok.add_special_tokens(SENTENCEPIECE_SPECIAL)
    tok.add_tokens([" sp"])
    return tok


def with_bos(tok: tokenizers.Tokenizer, bos: str) -> tokenizers.Tokenizer:
    """The same tokenizer, whose `tokenizer.json` puts BOS before a text."""
    tok.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tok.token_to_id(bos))]
    )
    return tok


def write(folder: pathlib.Path, tok: tokenizers.Tokenizer | None, **files: dict) -> pathlib.Path:
    """Writes `tokenizer.json` and `{name}.json` for every further file."""
    folder.mkdir(parents=True, exist_ok=True)
    if tok is not None:
        tok.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), "utf-8")
    return folder
