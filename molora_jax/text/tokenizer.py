"""Text to token ids and back, by the tokenizer files of a HF folder."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import tokenizers

from molora_jax.config import UserError

Json = dict[str, Any]
_OLDER_FORMS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer and what its model's files say about special tokens.

    Attributes:
      backend: the algorithm.
      vocab: one more than the largest token id; a model's embedding may have more rows.
      bos: beginning of text, or None.
      eos: every token that ends an answer: the tokenizer's own first, then those of the model's configs.
      pad: padding, or None.
      prefix, suffix: what `encode(..., special=True)` puts around a text, usually (bos,) or () and ().
      special: ids that `decode` leaves out.
      chat_template: Jinja source, or None when the model has none.
    """

    backend: tokenizers.Tokenizer
    vocab: int
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    special: frozenset[int]
    chat_template: str | None

    @classmethod
    def load(cls, folder: pathlib.Path) -> "Tokenizer":
        """Reads a HF folder: `tokenizer.json` (or an older form, through transformers) and the configs beside it.

        A flag `add_bos_token` or `add_eos_token` in `tokenizer_config.json` outweighs what `tokenizer.json` does;
        truncation and padding saved in `tokenizer.json` are off.

        Raises:
          UserError: no tokenizer in the folder, a file that cannot be read, files that contradict each other.
        """
        folder = pathlib.Path(folder)
        backend = _backend(folder)
        backend.no_truncation()
        backend.no_padding()
        files = _Files.read(folder)
        _register(backend, files, folder)
        bos = _named(backend, files, "bos", folder)
        named_eos = _named(backend, files, "eos", folder)
        pad = _named(backend, files, "pad", folder)
        if pad is None:
            pad = next((i for i in files.ids("pad") if i >= 0), None)
        if bos is None and not files.tokenizer_config:
            bos = next(iter(files.ids("bos")), None)
        eos = dict.fromkeys(([] if named_eos is None else [named_eos]) + files.ids("eos"))
        prefix, suffix = _affixes(backend, files.tokenizer_config, bos, named_eos)
        return cls(
            backend=backend,
            vocab=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
            bos=bos,
            eos=tuple(eos),
            pad=pad,
            prefix=prefix,
            suffix=suffix,
            special=frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special),
            chat_template=_chat_template(folder, files.tokenizer_config),
        )

    @property
    def bos_token(self) -> str | None:
        """Text of `bos`, for chat templates."""
        return None if self.bos is None else self.backend.id_to_token(self.bos)

    @property
    def eos_token(self) -> str | None:
        """Text of the first `eos`, for chat templates."""
        return self.backend.id_to_token(self.eos[0]) if self.eos else None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; names of special tokens inside it become those tokens.

        With `special`, `prefix` and `suffix` are put around it, each unless the text has it there already (a rendered
        chat template begins with BOS).
        """
        try:
            ids = self.backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise UserError(f"tokenizer: got {text!r:.80}, expected a string of valid Unicode to encode") from None
        if not special:
            return ids
        prefix, suffix = list(self.prefix), list(self.suffix)
        if ids[: len(prefix)] != prefix:
            ids = prefix + ids
        return ids if ids[len(ids) - len(suffix) :] == suffix else ids + suffix

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD, ids without a token nothing."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)


@dataclasses.dataclass(frozen=True)
class _Files:
    """The JSON files beside a tokenizer; those that are missing are empty."""

    tokenizer_config: Json
    special_tokens_map: Json
    added_tokens: Json
    config: Json
    generation_config: Json

    @classmethod
    def read(cls, folder: pathlib.Path) -> "_Files":
        return cls(**{field.name: _read_json(folder / f"{field.name}.json") for field in dataclasses.fields(cls)})

    def ids(self, role: str) -> list[int]:
        """What the model's configs give as `{role}_token_id`: an int, a list, null or nothing."""
        found = []
        for config in (self.config, self.generation_config):
            value = config.get(f"{role}_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
        return found


def _read_json(path: pathlib.Path) -> Json:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as e:
        raise UserError(f"tokenizer: cannot read {path}: {e}; fetch the file again") from None
    if not isinstance(value, dict):
        raise UserError(f"tokenizer: got a {type(value).__name__} in {path}, expected a JSON object")
    return value


def _backend(folder: pathlib.Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the package raises no narrower class
            raise UserError(f"tokenizer: cannot read {path}: {_line(e)}; fetch the file again") from None
    if not any(any(folder.glob(form)) for form in _OLDER_FORMS):
        raise UserError(f"tokenizer: found none in {folder}, expected a folder with tokenizer.json")
    try:
        import transformers  # only here: it takes seconds to import
    except ImportError:
        raise UserError(
            f"tokenizer: {folder} has no tokenizer.json, older forms need transformers: pip install 'molora_jax[hf]'"
        ) from None
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return loaded.backend_tokenizer
    except Exception as e:  # whatever reading a foreign format raises
        raise UserError(f"tokenizer: transformers cannot read the one in {folder}: {_line(e)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _text(token: str | Json | None) -> str | None:
    """A token as the files write it, a string or a dict of its fields, as a string."""
    return token.get("content") if isinstance(token, dict) else token


def _register(backend: tokenizers.Tokenizer, files: _Files, folder: pathlib.Path) -> None:
    """Adds the tokens that only the files beside `tokenizer.json` know, and marks the special ones as such."""
    declared = {int(i): {"content": text} for text, i in files.added_tokens.items()}
    declared |= {int(i): fields for i, fields in files.tokenizer_config.get("added_tokens_decoder", {}).items()}
    present = backend.get_added_tokens_decoder()  # once: it is made anew at every call
    for i, fields in sorted(declared.items()):
        known = present.get(i)
        if known is None or known.special < fields.get("special", False):
            backend.add_tokens([tokenizers.AddedToken(**{k: fields[k] for k in _TOKEN_FIELDS if k in fields})])
        if (got := backend.token_to_id(fields["content"])) != i:
            raise UserError(
                f"tokenizer: token {fields['content']!r} of {folder} is {i} in added_tokens.json or "
                f"tokenizer_config.json but {got} in the tokenizer; take all files from one model"
            )
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in _named_texts(files):
        token = added.get(text) or tokenizers.AddedToken(text, normalized=False)
        if not token.special and backend.token_to_id(text) is not None:
            token.special = True
            backend.add_special_tokens([token])


def _named_texts(files: _Files) -> list[str]:
    """All special tokens that the files name: `bos_token` and the like, and the lists of further ones."""
    tokens = []
    for config in (files.special_tokens_map, files.tokenizer_config):
        tokens += [config.get(f"{role}_token") for role in ("bos", "eos", "pad", "unk")]
        for key in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"):
            more = config.get(key) or []
            tokens += more.values() if isinstance(more, dict) else more
    return [text for text in map(_text, tokens) if text]


def _named(backend: tokenizers.Tokenizer, files: _Files, role: str, folder: pathlib.Path) -> int | None:
    """Id of `{role}_token`; an explicit null in `tokenizer_config.json` means that there is none."""
    key = f"{role}_token"
    text = _text(files.tokenizer_config.get(key, files.special_tokens_map.get(key)))
    if text is None:
        return None
    if (token := backend.token_to_id(text)) is None:
        raise UserError(f"tokenizer: {key} is {text!r} in {folder}, which is not in its vocabulary; mend {key} there")
    return token


def _affixes(
    backend: tokenizers.Tokenizer, config: Json, bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that belong before and after a text."""
    body, whole = (backend.encode("a", add_special_tokens=flag).ids for flag in (False, True))
    start = next(k for k in range(len(whole)) if whole[k : k + len(body)] == body) if body else len(whole)
    prefix, suffix = whole[:start], whole[start + len(body) :]
    if (add := config.get("add_bos_token")) is not None:
        prefix = ([bos] if add and bos is not None else []) + [i for i in prefix if i != bos]
    if (add := config.get("add_eos_token")) is not None:
        suffix = [i for i in suffix if i != eos] + ([eos] if add and eos is not None else [])
    return tuple(prefix), tuple(suffix)


def _chat_template(folder: pathlib.Path, config: Json) -> str | None:
    """`chat_template.jinja`, else `tokenizer_config.json`'s, else `chat_template.json`'s; of named ones the default."""
    if (path := folder / "chat_template.jinja").exists():
        return path.read_text("utf-8")
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        if "default" not in template:
            raise UserError(
                f"tokenizer: got chat templates {', '.join(template)} in {folder}, expected one named default"
            )
        return template["default"]
    return template
