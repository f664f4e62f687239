"""Reading the final answer off a completion.

The demanded form is that of Hard-Routed MoR-LoRA (Molavi et al. 2026): reasoning between `<think>` and `</think>`, then
`{"answer": "…"}`; the last such object counts. Models that were not trained for it answer in other ways, of which each
task accepts those that leave no doubt.
"""

import json
import re
from collections.abc import Callable
from typing import Any

INSTRUCTION = 'Think step by step between <think> and </think>, then give the final answer as {"answer": "..."}.'
_SPOKEN = re.compile(r"\banswer(?: is|:)[\s*:]*\(?([A-Za-z0-9]+)\b", re.IGNORECASE)
_NUMBER = re.compile(
    r"[\s:*_=]*(?:\\\()?\s*(\$?-?\$?\d+(?:,\d{3})*(?:\.\d+)?)"
    r"(?!\d|\.\d|,\d{3}|[eE]\d|\s*[/^+×]|\s*[-–−]\s*\d|\s*(?:\*{1,2}|x)\s*[\d($\\]|\s*\\(?:times|cdot|div)|\s+\d+\s*/)"
)
"""A number from which nothing goes on: no fraction, no sum, no product."""


def worked(reasoning: str, answer: str) -> str:
    """A completion in the demanded form; without reasoning, the object alone."""
    given = json.dumps({"answer": answer}, ensure_ascii=False)
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{given}" if reasoning else given


def reasoned(completion: str) -> bool:
    """Whether there is something between `<think>` and `</think>`."""
    found = re.search(r"<think>(.*?)</think>", completion, re.DOTALL)
    return bool(found and found[1].strip())


def from_json(completion: str) -> str | None:
    """The answer of the last JSON object with an `answer` that is a text, a number or a truth value."""
    decode = json.JSONDecoder().raw_decode
    for found in reversed(list(re.finditer(r"\{\s*\"", completion))):
        try:
            value, _ = decode(completion, found.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and (answer := _scalar(value.get("answer"))) is not None:
            return answer
    return None


def _scalar(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip() if isinstance(value, str | int | float) else None


def valid(completion: str) -> bool:
    """Whether the answer has the demanded form."""
    return from_json(completion) is not None


def boxed(completion: str) -> str | None:
    r"""Content of the last `\boxed{…}` whose braces balance."""
    for start in reversed([found.end() for found in re.finditer(r"\\boxed\{", completion)]):
        depth = 1
        for at in range(start, len(completion)):
            depth += (completion[at] == "{") - (completion[at] == "}")
            if not depth:
                return completion[start:at].strip()
    return None


def after_hashes(completion: str) -> str | None:
    """What follows the last `####` on its line, as GSM8K ends its solutions."""
    found = re.findall(r"####[ \t]*([^\n]+)", completion)
    return found[-1].strip() if found else None


def spoken_number(completion: str) -> str | None:
    """The number right after the last "answer is" or "answer:", where nothing goes on from it: no fraction, no sum."""
    parts = re.split(r"\banswer(?: is|:)", completion, flags=re.IGNORECASE)
    found = _NUMBER.match(parts[-1].split("\n")[0]) if len(parts) > 1 else None
    return found[1] if found else None


def mathematical(completion: str) -> str | None:
    r"""JSON, else `\boxed{…}`, else `#### …`, else "the answer is …"."""
    readings = (from_json, boxed, after_hashes, spoken_number)
    return next((answer for read in readings if (answer := read(completion)) is not None), None)


def one_of(*choices: str) -> Callable[[str], str | None]:
    """Reads one of a few words: JSON, else the last "answer is …", else a completion that is nothing but the word.

    In a sentence a letter counts only as the choices write it: "the answer is a frog" does not choose A.
    """

    def parse(completion: str) -> str | None:
        if (answer := from_json(completion)) is not None:
            return answer
        if said := _SPOKEN.findall(completion):
            word = said[-1] if len(said[-1]) == 1 else said[-1].lower()
            return word if word in choices else None
        alone = completion.strip().strip(".()")
        return next((form for form in (alone, alone.lower(), alone.upper()) if form in choices), None)

    return parse
