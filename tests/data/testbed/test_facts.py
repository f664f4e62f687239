"""The fact world's questions follow from their supporting segments and from nothing else."""

import pytest

from molora_jax.config import UserError
from molora_jax.data.testbed.facts import WORLDS, question, read
from molora_jax.data.testbed.verifier import JUDGE


def follow(asked: str, facts: dict) -> str | None:
    """Walks a question such as `owner of boss of Ada?` through {(person, relation): person}."""
    *relations, person = asked.rstrip("?").split(" of ")
    for relation in reversed(relations):
        person = facts.get((person, relation))
    return person


def facts_of(segments):
    pairs = [(s.title, *fact.split()) for s in segments for fact in s.sentences]
    facts = {(title, relation): target for title, relation, target in pairs}
    assert len(facts) == len(pairs)
    return facts


@pytest.mark.parametrize("level", WORLDS)
def test_the_support_answers_the_question_and_each_part_of_it_is_needed(level):
    hops, leads_astray = set(), 0
    for seed in range(100):
        q = question("train", seed, level=level)
        hops.add(q.hops)
        assert len(q.segments) == WORLDS[level].segments == len({s.title for s in q.segments})
        assert len(q.supporting) == q.hops == q.question.count(" of ")
        assert follow(q.question, facts_of(q.segments)) == q.answer
        support = [q.segments[i] for i in q.supporting]
        assert follow(q.question, facts_of(support)) == q.answer
        for i in range(q.hops):
            assert follow(q.question, facts_of(support[:i] + support[i + 1 :])) is None
        for segment in q.segments:
            assert segment.supporting == bool(segment.supporting_sentences)
        told = [s.split()[1] for segment in q.segments if not segment.supporting for s in segment.sentences]
        leads_astray += bool(set(told) & {s.title for s in support})
    assert hops == set(range(WORLDS[level].hops[0], WORLDS[level].hops[1] + 1))
    assert leads_astray > 30


def test_support_lies_anywhere():
    places = [i for seed in range(200) for i in question("test", seed, level=3).supporting]
    counts = [places.count(i) for i in range(10)]
    assert min(counts) > 0.5 * sum(counts) / 10


def test_reading_chosen_segments():
    q = question("test", 5, level=2)
    chosen = (q.supporting[1], q.supporting[0])
    example = read(q, chosen)
    lines = example.prompt.split("\n")
    assert [line.strip().split(":")[0] for line in lines[:2]] == [q.segments[i].title for i in chosen]
    assert lines[2:] == [f" {q.question}", ""]
    assert example.completion.endswith(f" -> {q.answer}")
    assert JUDGE.verify([q.answer], [example.completion]) == [True]
    assert all(q.segments[i].title in read(q).prompt for i in range(len(q.segments)))
    for step in q.reasoning.split(";"):
        person, relation, target = step.split()
        assert (person, relation, target) in {(s.title, *f.split()) for s in q.segments for f in s.sentences}


def test_no_such_level():
    with pytest.raises(UserError, match="level 5, expected one of 1, 2, 3, 4"):
        question("test", 0, level=5)
