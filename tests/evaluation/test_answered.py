"""Answers kept in a folder: asked once, read the second time, asked anew when anything that decides them changes."""

import dataclasses
import json

import numpy as np
import pytest

from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.mixtures.soups import soup
from molora_jax.checkpoints import model as models
from molora_jax.config import UserError
from molora_jax.data.questions import questions
from molora_jax.evaluation import answered, comparison, systems
from molora_jax.evaluation.systems import BASE, System


@pytest.fixture(scope="module")
def world():
    model = models.load("testbed:small")
    experts = tuple(fresh(model.cfg, model.params, n, rank=2, seed=i, spread=0.2) for i, n in enumerate("ab"))
    return model, experts, questions("testbed:calc", "test", 3)


def test_a_system_is_asked_once(world, tmp_path, monkeypatch):
    model, _, asked = world
    first = answered.right(model, BASE, asked, [5, 1, 5], tmp_path, rows=3)
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    assert [answer["id"] for answer in kept["answers"]] == [example.id for example in asked]
    lengths = [len(model.tokenizer.encode(answer["text"], special=False)) for answer in kept["answers"]]
    assert lengths[1] == 1
    assert max(lengths) <= 5
    want = [dataclasses.replace(e, answer="?") for e in asked]
    assert not answered.right(model, BASE, want, [5, 1, 5], None, rows=3)[0].any()
    monkeypatch.setattr(systems, "answers", lambda *_, **__: pytest.fail("asked again"))
    second = answered.right(model, BASE, asked, [5, 1, 5], tmp_path, rows=3)
    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1]


def test_what_decides_an_answer_is_in_the_digest(world):
    model, experts, asked = world
    system = System(name="x", experts=experts, mixer=soup(2, model.cfg.layers))
    (path, column), *_ = experts[0].sites.items()
    moved = dataclasses.replace(column[0], a=column[0].a + 1)
    other = dataclasses.replace(experts[0], sites=experts[0].sites | {path: (moved, *column[1:])})
    weight = {"weight": np.asarray(system.mixer.params["weight"]) * 2}
    changed = [
        dataclasses.replace(system, experts=(other, experts[1])),
        dataclasses.replace(system, experts=experts[::-1]),
        dataclasses.replace(system, mixer=dataclasses.replace(system.mixer, params=weight)),
        dataclasses.replace(system, mixer=None, single="a"),
        dataclasses.replace(system, mixer=None, owner={"calc": "a"}),
        dataclasses.replace(system, attention=experts[0]),
    ]
    digest = lambda system, examples=asked, most=None, **how: answered.digest(model, system, examples, most, how)
    found = [digest(system), *map(digest, changed)]
    found += [digest(system, asked[:2]), digest(system, most=[1, 2, 3]), digest(system, length=7)]
    assert len(set(found)) == len(found)
    assert digest(dataclasses.replace(system, name="y")) == found[0]


def test_a_comparison_limits_each_set(world, tmp_path):
    model, _, asked = world
    sets = {"long": asked[:2], "short": asked[2:]}
    comparison.compare(model, [BASE], sets, most=comparison.limits(["4", "short=2"], sets, 9), kept=tmp_path, rows=3)
    (path,) = tmp_path.iterdir()
    written = [answer["text"] for answer in json.loads(path.read_text())["answers"]]
    counts = [len(model.tokenizer.encode(text, special=False)) for text in written]
    assert max(counts) <= 4
    assert counts[2] <= 2
    assert written == systems.answers(model, BASE, asked, [4, 4, 2], rows=3)


def test_limits():
    assert comparison.limits([], ["a", "b"], 9) == {"a": 9, "b": 9}
    assert comparison.limits(["b=2", "5"], ["a", "b"], 9) == {"a": 5, "b": 2}
    for item in ("c=2", "0", "many", "a=-1"):
        with pytest.raises(UserError, match=f"max_new_tokens: got '{item}', expected N, or NAME=N of a, b; N from 1"):
            comparison.limits([item], ["a", "b"], 9)
