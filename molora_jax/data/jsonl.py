"""A user's own training data: a JSONL file of prompts with completions, or of conversations."""

import pathlib
from typing import Any

from molora_jax.config import UserError
from molora_jax.data.document import Document, from_messages, from_pair, too_long
from molora_jax.data.rows import Report, RowError, field, read
from molora_jax.text.tokenizer import Tokenizer


def load(
    path: str | pathlib.Path,
    tokenizer: Tokenizer,
    *,
    length: int,
    prompt_weight: float = 0.0,
    strict: bool = False,
    report: Report | None = None,
) -> list[Document]:
    """Documents of the lines of a file.

    A line is `{"prompt": "…", "completion": "…"}` or `{"messages": [{"role": "user", "content": "…"}, …]}`, with an
    optional `id`; both kinds may be mixed. Conversations go through the tokenizer's chat template. Lines of more than
    `length` tokens count as malformed: they are skipped, logged and reported, or with `strict` an error.

    Raises:
      UserError: the file cannot be read or has no usable line, or with `strict` a line is malformed.
    """
    path = pathlib.Path(path)
    if path.suffix != ".jsonl":
        raise UserError(f"data: got {path}, expected a file that ends in .jsonl")

    def convert(row: Any, line: int) -> Document:
        id = str(row.get("id", f"{path.stem}/{line}")) if isinstance(row, dict) else ""
        try:
            if isinstance(row, dict) and "messages" in row:
                document = from_messages(tokenizer, id, field(row, "messages", list), prompt_weight=prompt_weight)
            else:
                prompt, completion = field(row, "prompt", str), field(row, "completion", str)
                document = from_pair(tokenizer, id, prompt, completion, prompt_weight=prompt_weight)
        except UserError as e:
            raise RowError(str(e)) from None
        if len(document) > length:
            raise RowError(too_long(document, length))
        return document

    report = Report() if report is None else report
    documents = read(path, convert, report, strict=strict)
    if not documents:
        why = f"; the first problem: {report.skipped[0]}" if report.skipped else ""
        raise UserError(f"data: {path} has no usable line{why}")
    return documents
