"""Experts from what a user types, down to the tokens that they give."""

import numpy as np
import pytest

from molora_jax.adapters.router import new_router
from molora_jax.checkpoints import peft
from molora_jax.checkpoints import router as routers
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.serving import specialists
from molora_jax.serving.prompts import Prompt
from molora_jax.text.tokenizer import Tokenizer
from tests import experts, fakes
from tests.text import tiny

NAME = "llama_tied"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    folder = tiny.write(tmp_path_factory.mktemp("tokenizer"), tiny.byte_level())
    return Model(*fakes.model(NAME), Tokenizer.load(folder))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root, (cfg, params) = tmp_path_factory.mktemp("adapters"), fakes.model(NAME)
    for kind in ("plain", "rslora"):
        peft.save(root / kind, cfg, experts.adapter(cfg, params, kind))
    return {kind: str(root / kind) for kind in ("plain", "rslora")}


def test_folders_become_named_experts(model, folders, capsys):
    found = specialists.load(model, [f"a={folders['plain']}", f"b={folders['rslora']}"], slots=1)
    assert found.library.names == ("a", "b")
    assert found.library.spec.slots == 1
    assert "a: " in capsys.readouterr().err
    slot = found.library.acquire("b")
    want = experts.adapter(*fakes.model(NAME), "rslora").sites["layers", "attn", "q_proj"][1]
    np.testing.assert_array_equal(found.library.bank.layers["attn"]["q_proj"].a[1, slot], want.a)


def test_without_adapters_there_is_nothing(model):
    assert specialists.load(model, []) is None


def test_somebody_must_be_named():
    plain, named, routed = Prompt("a"), Prompt("a", "x"), Prompt("a", route=("x",))
    specialists.check_named([plain, named], "row")
    specialists.check_named([routed, routed], "token")
    with pytest.raises(UserError, match="adapter: got none for any prompt"):
        specialists.check_named([plain, plain], "row")
    with pytest.raises(UserError, match="route: got a prompt without `route`"):
        specialists.check_named([routed, named], "token")


def test_a_rule_reads_ranges_and_tokens(model, folders):
    both = [f"a={folders['plain']}", f"b={folders['rslora']}"]
    rule = ["a=30-33", "b=<|im_end|>", "base=5-5"]
    found = specialists.load(model, both, route="vocab", rule=rule)
    slots, end = found.library.resident, model.tokenizer.encode("<|im_end|>", special=False)[0]
    table = found.adapters.rule
    assert [table[i] for i in (29, 30, 33, 34, end, 5)] == [-3, slots["a"], slots["a"], -3, slots["b"], -1]


def test_a_router_comes_with_its_experts_in_their_order(model, folders, tmp_path):
    order = [f"a={folders['rslora']}", f"b={folders['plain']}"]
    kinds = [peft.load(folders[kind], model.cfg)[0] for kind in ("rslora", "plain")]
    routers.save(tmp_path, new_router(model.cfg.width, 2, seed=3), kinds, model.params)
    found = specialists.load(model, order, route="router", router=str(tmp_path))
    want = [found.library.resident[name] for name in ("a", "b")]
    np.testing.assert_array_equal(found.router.placement.slots, want)
    with pytest.raises(UserError, match="expert"):
        specialists.load(model, order[::-1], route="router", router=str(tmp_path))


BAD = {
    "no sign": (["a"], {}, "adapters: got 'a', expected name=folder"),
    "one name twice": (["a=P", "a=R"], {}, "adapters: got the names a, a, expected different ones"),
    "the base's name": (["base=P"], {}, "got the names base, expected none of them base"),
    "a rule without its route": (["a=P"], dict(rule=["a=1-2"]), "expected --rule with --route=vocab, and only there"),
    "a route without its rule": (["a=P"], dict(route="vocab"), "rule: got none, expected --rule with --route=vocab"),
    "a router without its folder": (["a=P"], dict(route="router"), "router: got none, expected --router"),
    "a route without experts": ([], dict(route="token"), "route: got token without experts"),
    "an unknown name": (["a=P"], dict(route="vocab", rule=["c=1-2"]), "rule: got 'c', expected one of a or base"),
    "two tokens": (["a=P"], dict(route="vocab", rule=["a=quick fox"]), "tokens, expected one token, or ids as 32-64"),
    "two experts for one id": (
        ["a=P", "b=R"],
        dict(route="vocab", rule=["a=1-4", "b=4-6"]),
        "rule: got token id 4 for a and b, expected one expert",
    ),
    "beyond the vocabulary": (["a=P"], dict(route="vocab", rule=["a=90-99"]), "rule: got 90-99, .* from 0 to 96"),
    "a range from above": (
        ["a=P"],
        dict(route="vocab", rule=["a=64-32"]),
        "rule: got 64-32, expected ids in asc",
    ),
    "no such folder": (["a=/nowhere"], {}, "nowhere"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_flag_is_one_line(case, model, folders):
    adapters, flags, message = BAD[case]
    fill = lambda item: item.replace("=P", f"={folders['plain']}").replace("=R", f"={folders['rslora']}")
    with pytest.raises(UserError, match=message) as caught:
        specialists.load(model, list(map(fill, adapters)), **flags)
    assert "\n" not in str(caught.value)
