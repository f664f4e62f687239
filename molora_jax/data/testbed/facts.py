"""The fact world: who is whose boss or friend, told in segments of which a few answer a question of several hops.

Every question has a world of its own, so that nothing can be known by heart. A segment is titled by a person and tells
one or two facts about them; `owner of boss of Ada?` needs Ada's segment (`boss Ben`), then Ben's (`owner Cleo`).
Distractors tell the same kinds of facts about others, some of them about persons of the chain (`guard Ada`), so that
word overlap finds the first hop and misleads about the next.
"""

import dataclasses
import random
from collections.abc import Sequence

from molora_jax.config import UserError
from molora_jax.data.example import Example, Span
from molora_jax.data.multihop.question import Question, Segment
from molora_jax.data.testbed.prompts import ARROW, END
from molora_jax.data.testbed.splits import check, draw_until

_NAMES = """
Ada Amy Ann Ben Bob Cam Cleo Dan Dee Don Ed Ella Eve Fay Gus Hal Ida Ian Jan Jim
Joe Kay Ken Kim Lea Leo Liz Max May Meg Ned Nina Pam Pat Ray Rob Ron Sam Sue Tom
"""
NAMES = tuple(_NAMES.split())
RELATIONS = ("boss", "friend", "guard", "owner", "twin", "tutor")
FACTS = "facts"


@dataclasses.dataclass(frozen=True)
class World:
    """Sizes of the worlds of one difficulty level.

    Attributes:
      hops: least and most facts that a question needs.
      segments: persons told about.
      second: chance that a segment tells a second fact.
    """

    hops: tuple[int, int]
    segments: int
    second: float


WORLDS = {1: World((2, 2), 6, 0.2), 2: World((2, 3), 8, 0.2), 3: World((2, 4), 10, 0.2), 4: World((2, 4), 14, 0.2)}


def question(split: str, seed: int, *, level: int = 2) -> Question:
    """A question of the split with its segments in random order.

    Raises:
      UserError: no such split or level.
    """
    check(split)
    if level not in WORLDS:
        raise UserError(f"testbed: got a world of level {level}, expected one of {', '.join(map(str, WORLDS))}")
    rng = random.Random(f"{FACTS}/{split}/{seed}/{level}")
    id = f"{FACTS}/{split}/{seed}/{level}"
    return draw_until(split, lambda: _draw(rng, WORLDS[level], id, split), _canonical)


def _canonical(question: Question) -> str:
    return "\n".join([question.question, *sorted(f"{s.title}:{s.text}" for s in question.segments)])


def _draw(rng: random.Random, world: World, id: str, split: str) -> Question:
    hops = rng.randint(*world.hops)
    people = rng.sample(NAMES, world.segments + 3)
    chain, others = people[: hops + 1], people[hops + 1 :]
    relations = [rng.choice(RELATIONS) for _ in range(hops)]
    tellers = chain[:-1] + others[: world.segments - hops]
    segments = []
    for i, person in enumerate(tellers):
        told = [(relations[i], chain[i + 1])] if i < hops else []
        if not told or rng.random() < world.second:
            # a distractor often repeats a relation that the question asks for, or points back into the chain
            relation = rng.choice([r for r in RELATIONS + 2 * tuple(relations) if not told or r != told[0][0]])
            told.append((relation, rng.choice([p for p in people if p != person])))
        rng.shuffle(told)
        sentences = tuple(f"{relation} {target}" for relation, target in told)
        support = tuple(j for j, (r, t) in enumerate(told) if i < hops and (r, t) == (relations[i], chain[i + 1]))
        segments.append(Segment(title=person, sentences=sentences, supporting_sentences=support, supporting=i < hops))
    rng.shuffle(segments)
    asked = " of ".join([*reversed(relations), chain[0]])
    steps = zip(chain, relations, chain[1:], strict=False)
    return Question(
        id=id,
        dataset=FACTS,
        split=split,
        question=f"{asked}?",
        answer=chain[-1],
        type=f"{hops}hop",
        hops=hops,
        segments=tuple(segments),
        reasoning=";".join(f" {a} {relation} {b}" for a, relation, b in steps),
    )


def read(question: Question, chosen: Sequence[int] | None = None) -> Example:
    """The question after the chosen segments, in the order given (all of them in the world's order when None).

    The prompt has one line a segment, ` Ada: boss Ben, twin Kim`, then the question; the completion names each fact
    that leads to the answer.
    """
    segments = question.segments if chosen is None else [question.segments[i] for i in chosen]
    context = "".join(f" {s.title}: {', '.join(s.sentences)}{END}" for s in segments)
    prompt = f"{context} {question.question}{END}"
    completion = f"{question.reasoning}{ARROW} {question.answer}"
    return Example(
        id=question.id,
        task=FACTS,
        prompt=prompt,
        completion=completion,
        answer=question.answer,
        split=question.split,
        level=question.hops,
        spans=(Span(start=0, stop=len(prompt) + len(completion), domain=FACTS),),
    )
