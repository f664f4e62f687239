"""More experts than slots: swapped without compiling, the longest unused first, never one in use."""

import jax
import numpy as np
import pytest

from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.library import Library
from molora_jax.adapters.spec import BankSpec
from molora_jax.compilation import counted
from molora_jax.config import UserError
from tests import fakes

NAME = "llama_tied"
NAMES = ("weight", "lora", "a.b/ c", "", "mlp.q_proj")


def expert(name: str, seed: int = 0, rank: int = 2):
    return fresh(*fakes.model(NAME), name, rank=rank, sites=("attn.q_proj",), seed=seed, spread=1.0)


def library(slots: int = 2) -> Library:
    made = Library(BankSpec(slots=slots, ranks={"attn.q_proj": 3}), fakes.model(NAME)[1])
    for seed, name in enumerate(NAMES):
        made.add(expert(name, seed, rank=1 + seed % 3))
    return made


def content(lib: Library, slot: int) -> np.ndarray:
    return np.asarray(lib.bank.layers["attn"]["q_proj"].b[:, slot])


def want(seed: int) -> np.ndarray:
    column = expert("", seed, rank=1 + seed % 3).sites["layers", "attn", "q_proj"]
    return np.stack([np.pad(w.b.T, ((0, 3 - w.rank), (0, 0))) for w in column])


def test_names_are_any_strings_in_their_order():
    assert library().names == NAMES


def test_the_longest_unused_expert_makes_room():
    lib = library()
    first, second = lib.acquire("lora"), lib.acquire("")
    np.testing.assert_array_equal(content(lib, first), want(1))
    np.testing.assert_array_equal(content(lib, second), want(3))
    assert lib.acquire("weight") is None  # both are in use
    lib.release(second)
    lib.release(first)
    assert lib.acquire("lora") == first  # still there, and now the last used
    lib.release(first)
    assert lib.acquire("weight") == second
    np.testing.assert_array_equal(content(lib, second), want(0))
    assert lib.resident == {"lora": first, "weight": second}
    assert lib.swaps == 3


def test_a_swap_compiles_nothing():
    lib = library()
    lib.release(lib.acquire("lora"))
    with counted() as count:
        for name in NAMES * 2:
            lib.release(lib.acquire(name))
        lib.add(expert("new", 9))
        lib.acquire("new")
    jax.block_until_ready(lib.bank)
    assert count.programs == 0


def test_a_new_version_leaves_the_one_in_use_alone():
    lib = library()
    old = lib.acquire("lora")
    lib.add(expert("lora", 7))
    new = lib.acquire("lora")
    assert new != old
    np.testing.assert_array_equal(content(lib, old), want(1))
    assert lib.held_digest(old) != lib.held_digest(new) == lib.digest("lora")
    lib.release(old)
    assert lib.acquire("weight") == old  # what nobody can ask for any more goes first


def test_a_removed_expert_runs_to_its_end():
    lib = library()
    slot = lib.acquire("lora")
    lib.remove("lora")
    np.testing.assert_array_equal(content(lib, slot), want(1))
    with pytest.raises(UserError, match="got 'lora', expected one of 'weight', 'a.b/ c'"):
        lib.acquire("lora")
    lib.release(slot)
    assert lib.resident == {}


def test_an_expert_that_does_not_fit_changes_nothing():
    lib = library()
    slot, digest = lib.acquire("lora"), lib.digest("lora")
    with pytest.raises(UserError, match="got rank 4 at attn.q_proj, expected at most 3"):
        lib.add(expert("lora", rank=4))
    assert lib.digest("lora") == digest
    np.testing.assert_array_equal(content(lib, slot), want(1))


def test_experts_for_good_must_all_fit():
    with pytest.raises(UserError, match="got 3 experts for a router, expected at most 2"):
        library().slots(NAMES[:3])


def test_experts_that_can_never_be_there_together_are_refused():
    lib = library(slots=2)
    lib.check(NAMES[:2])
    with pytest.raises(UserError, match="got 'a.b/ c', 'lora', 'weight' for one request, expected at most 2 experts"):
        lib.check(NAMES[:3])
    lib.slots(("weight",))
    lib.check(("weight", "lora"))
    with pytest.raises(UserError, match="expected at most 1 experts beside the 1 that a rule or a router holds"):
        lib.check(("lora", ""))
    lib.slots(("lora",))
    lib.check(("lora", "weight"))
    lib.add(expert("lora", seed=9))  # the version that is held for good is another one now
    with pytest.raises(UserError, match="got 'lora' for one request, expected at most 0"):
        lib.check(("lora",))
    with pytest.raises(UserError, match="got 'nobody'"):
        lib.check(("nobody",))


def test_a_bank_has_slots():
    with pytest.raises(UserError, match="got 0 slots"):
        BankSpec(slots=0, ranks={})
