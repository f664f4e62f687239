"""Answers of several tasks at once, each judged by its own verifier."""

from molora_jax.data.example import Example
from molora_jax.data.tasks import registry


def example(task: str, answer: str) -> Example:
    return Example(id=task, task=task, prompt="?", completion="", answer=answer, split="test")


def test_answers_of_mixed_tasks_keep_their_order():
    asked = [example("calc", "7"), example("arc", "B"), example("calc", "7"), example("list+text", "1 2 | a b")]
    asked += [example("arc", "B"), example("calc", "8")]
    written = ["3+4=7 ->7", '{"answer": "B"}', '{"answer": "7"}', "-> 1 2 | -> a b", '{"answer": "C"}', "->7"]
    assert registry.verify(asked, written) == [True, True, False, True, False, False]
    assert registry.verify([], []) == []
