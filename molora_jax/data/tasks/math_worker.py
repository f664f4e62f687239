"""The process that compares mathematical answers: reads `["expected", "given"]` a line, writes `true` or `false`."""

import json
import logging
import resource
import sys

import math_verify

_MEMORY = 4 << 30
"""Bytes of address space; a comparison that needs more fails and counts as different."""


def main() -> None:
    """Answers until the input ends. math-verify's own timeouts are off: the parent's are what counts."""
    if sys.platform == "linux":  # elsewhere the system does not enforce it
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS, (_MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard), hard)
        )
    logging.disable(logging.CRITICAL)
    equal("1/2", "\\frac{1}{2}")  # the first comparison takes seconds, which no pair should pay for
    _answer("ready")
    for line in sys.stdin:
        expected, given = json.loads(line)
        try:
            _answer("true" if equal(expected, given) else "false")
        except Exception:  # whatever a parser does on the output of a model
            _answer("false")


def equal(expected: str, given: str) -> bool:
    """Whether math-verify takes `given` for `expected`; both as LaTeX, in dollars or not."""
    parsed = [math_verify.parse(_dollars(text), parsing_timeout=None) for text in (expected, given)]
    return bool(parsed[0] and parsed[1] and math_verify.verify(*parsed, timeout_seconds=None))


def _dollars(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
