"""The bases that the package carries."""

import dataclasses
import json

import pytest

from molora_jax.checkpoints import composition
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import TESTBED, part
from molora_jax.config import UserError
from molora_jax.data.questions import questions
from molora_jax.data.testbed.domains import DOMAINS
from molora_jax.data.testbed.recipe import COMMON
from molora_jax.evaluation import systems, testbed
from molora_jax.serving import specialists
from molora_jax.training.pretrain import BASES, settings


@pytest.fixture(scope="module")
def solved():
    easy = dataclasses.replace(COMMON, levels=(1, 2))
    return {name: testbed.by_domain(models.load(f"testbed:{name}"), 16, recipe=easy) for name in BASES}


@pytest.mark.slow
def test_the_large_base_solves_the_common_problems(solved):
    for name in DOMAINS:
        assert solved["large"][name].right >= 14, name


@pytest.mark.slow
def test_the_small_base_is_worse_but_knows_every_domain(solved):
    total = lambda name: sum(found.right for found in solved[name].values())
    assert total("small") < 0.9 * total("large")
    assert all(found.right for found in solved["small"].values())


def test_the_record_beside_the_weights_is_of_the_settings_that_make_them():
    for name, base in BASES.items():
        record = json.loads((TESTBED / name / "testbed.json").read_text())
        assert record["settings"] == json.loads(json.dumps(settings(base)))
        assert set(record["accuracy"]["common"]) == set(DOMAINS)


def test_the_package_stays_small():
    assert sum(file.stat().st_size for file in TESTBED.parent.rglob("*") if file.is_file()) < 12e6


@pytest.mark.slow
def test_the_experts_and_the_router_fit_their_base_and_each_other():
    model = models.load("testbed:large")
    experts = specialists.read(model, [f"{name}=testbed:{name}" for name in DOMAINS])
    found = composition.load(part("testbed:hard"), model, experts)
    assert found.attention is not None
    asked = [e for name in ("list", "date") for e in questions(f"testbed:{name}", "test", 12)]
    solved = lambda system: systems.right(asked, systems.answers(model, system, asked)).sum()
    assert solved(systems.composed("hard", found)) >= solved(systems.BASE) + 4


def test_a_part_that_is_not_carried():
    with pytest.raises(UserError, match="got testbed:sums, expected testbed:calc, testbed:date, testbed:hard"):
        part("testbed:sums")
