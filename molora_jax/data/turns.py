"""Prompts of two domains: a question of one benchmark with its answer, and then one of another."""

from collections.abc import Sequence

from molora_jax.data.example import Example, Span

JOIN = "+"
"""Between the names of the two benchmarks."""
_GAP = "\n\n"


def turns(before: Sequence[Example], asked: Sequence[Example]) -> list[Example]:
    """Each question of `asked` after a worked one of `before`, which are taken in turn.

    What is answered, and judged, is the second question; its spans tell which tokens belong to which domain. The mixed
    prompts of Molavi et al. 2026 (released code) also combine questions of two of its benchmarks.
    """
    return [_turn(before[i % len(before)], example) for i, example in enumerate(asked)]


def _turn(before: Example, asked: Example) -> Example:
    told = before.prompt + before.completion + _GAP
    whole = len(told + asked.prompt + asked.completion)
    return Example(
        id=f"{before.id}{JOIN}{asked.id}",
        task=asked.task,
        prompt=told + asked.prompt,
        completion=asked.completion,
        answer=asked.answer,
        split=asked.split,
        spans=(Span(start=0, stop=len(told), domain=before.task), Span(start=len(told), stop=whole, domain=asked.task)),
    )
