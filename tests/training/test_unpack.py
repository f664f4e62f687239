"""An adapter that was put into a bank comes out as it went in, and a trained one as PEFT reads it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.spec import BankSpec, new_bank, pack, unpack, write
from molora_jax.checkpoints import peft
from molora_jax.config import UserError
from tests import experts, fakes

NAME = "llama_untied"


def banked(found, *, unrolled: bool, slot: int = 1, extra=()):
    """A bank with the adapter in a slot, wider than it needs, and its model."""
    cfg, params = fakes.weights(NAME, unrolled=unrolled)
    spec = BankSpec.holding([found, *extra], slots=3)
    spec = dataclasses.replace(spec, ranks={name: rank + 2 for name, rank in spec.ranks.items()})
    return write(new_bank(spec, params), slot, pack(spec, params, found)), params, spec


def assert_same(got, want) -> None:
    assert got.sites.keys() == want.sites.keys()
    assert (got.name, got.origin) == (want.name, want.origin)
    held = lambda adapter: {(path, layer): weights for path, layer, weights in adapter.weights()}
    assert held(got).keys() == held(want).keys()
    for (path, layer), mine in held(got).items():
        theirs = held(want)[path, layer]
        assert (mine.alpha, mine.rslora) == (theirs.alpha, theirs.rslora)
        for field in ("a", "b", "bias"):
            a, b = getattr(mine, field), getattr(theirs, field)
            assert (a is None) == (b is None), (path, layer, field)
            if a is not None:
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b, strict=True)
        assert (mine.magnitude is None) == (theirs.magnitude is None)
        if mine.magnitude is not None:
            np.testing.assert_array_max_ulp(mine.magnitude, theirs.magnitude, 1)
    assert got.full.keys() == want.full.keys()
    for path, column in want.full.items():
        np.testing.assert_array_equal(got.full[path][0], column[0], strict=True)


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("kind", experts.KINDS)
def test_what_was_packed_comes_back_to_the_bit(kind, unrolled):
    found = experts.adapter(*fakes.model(NAME), kind)
    other = experts.adapter(*fakes.model(NAME), "plain")
    bank, params, spec = banked(found, unrolled=unrolled, extra=[other])
    back = unpack(bank, 1, params, found)
    assert_same(back, found)
    rows = [pack(spec, params, adapter) for adapter in (back, found)]
    jax.tree.map(np.testing.assert_array_equal, *rows)  # a DoRA's too: its magnitudes mean the same


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("share", ["matrix", "input"])
def test_gates_come_back_to_the_bit(share, unrolled):
    cfg, params = fakes.model(NAME)
    sites = ("attn.q_proj", "attn.k_proj", "mlp.down_proj", "mlp.gate_proj")
    how = dict(rank=2, sites=sites, spread=0.3, gate=GateConfig(start="published", states=3), share=share)
    found = experts.skip_first_layer(fresh(cfg, params, "gated", **how))
    found = dataclasses.replace(
        found, gates=tuple(dataclasses.replace(g, cores=(None, *g.cores[1:])) for g in found.gates)
    )
    bank, params, spec = banked(found, unrolled=unrolled, extra=[fresh(cfg, params, "other", seed=1, **how)])
    back = unpack(bank, 1, params, found)
    assert_same(back, found)
    assert back.gate == found.gate
    cores = lambda adapter: {group.sites: group.cores for group in adapter.gates}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), cores(back), cores(found))
    bare = dataclasses.replace(found, gate=None, gates=())
    with pytest.raises(UserError, match="adapter 'gated': got a bank without gates at attn.q_proj"):
        unpack(banked(bare, unrolled=unrolled)[0], 1, params, found)


def test_an_adapter_in_bf16_stays_in_bf16():
    found = experts.edit(
        experts.adapter(*fakes.model(NAME), "rslora"),
        lambda path, i, w: dataclasses.replace(w, a=w.a.astype(jnp.bfloat16), b=w.b.astype(jnp.bfloat16)),
    )
    bank, params, _ = banked(found, unrolled=False)
    assert_same(unpack(bank, 1, params, found), found)


def test_values_are_those_of_the_slot_and_peft_reads_them(tmp_path):
    found = experts.adapter(*fakes.model(NAME), "rslora")
    bank, params, _ = banked(found, unrolled=False)
    site = bank.layers["attn"]["q_proj"]
    trained = dataclasses.replace(site, b=site.b.at[:, 1].add(1.0).at[:, 0].set(7.0))
    bank = dataclasses.replace(bank, layers={"attn": bank.layers["attn"] | {"q_proj": trained}})
    back = unpack(bank, 1, params, found)
    for new, old in zip(back.sites["layers", "attn", "q_proj"], found.sites["layers", "attn", "q_proj"], strict=True):
        assert (new is None) == (old is None)
        if new is not None:
            np.testing.assert_array_equal(new.b, old.b + np.float32(1))
    cfg, _ = fakes.model(NAME)
    peft.save(tmp_path, cfg, back)
    read = peft.load(tmp_path, cfg, name=back.name)[0]
    assert_same(dataclasses.replace(read, origin={}), back)


def test_another_slot_is_refused():
    found = experts.adapter(*fakes.model(NAME), "plain")
    bank, params, _ = banked(found, unrolled=False)
    with pytest.raises(UserError, match="got rank 5 and scale 0 in the slot, expected rank 3 and scale 2 as it was"):
        unpack(bank, 0, params, found)
    other = experts.adapter(*fakes.model(NAME), "ends")
    with pytest.raises(UserError, match="at embed: got a bank without this site"):
        unpack(bank, 1, params, other)
