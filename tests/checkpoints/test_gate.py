"""Adapters with gates on disk: the round trip, fp32 leaves in a bf16 adapter, and files that do not fit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from molora_jax.adapters import adapter as adapters
from molora_jax.adapters import gate
from molora_jax.adapters.adapter import Adapter, GateGroup, LoRAWeights
from molora_jax.adapters.gate import GateConfig
from molora_jax.checkpoints import gate as gates
from molora_jax.checkpoints import peft
from molora_jax.config import UserError
from tests import golden

Q, V, UP = ("layers", "attn", "q_proj"), ("layers", "attn", "v_proj"), ("layers", "mlp", "up_proj")
SIZES = {Q: (36, 36), V: (12, 36), UP: (44, 36)}
SMALL = GateConfig(states=3, taps=2, hidden=5)


@pytest.fixture(scope="module")
def base():
    return golden.params("llama_tied")


@pytest.fixture(scope="module")
def cfg(base):
    return base[0]


def core(config, heads, seed=0, dtype=np.float32):
    """Random leaves of the shapes and dtypes that `gate.init` gives."""
    rng, tree = np.random.default_rng(seed), gate.abstract(config, d_in=36, rank=4, heads=heads, dtype=dtype)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), tree)


def gated(config=SMALL, dtype=ml_dtypes.bfloat16) -> Adapter:
    """Three sites of two layers; q and v share a core, up has one of its own in the second layer alone."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)
    sites = {
        path: tuple(LoRAWeights(a=draw(4, d_in), b=draw(d_out, 4), alpha=8) for _ in range(2))
        for path, (d_out, d_in) in SIZES.items()
    }
    shared = GateGroup(sites=(Q, V), cores=tuple(core(config, 2, seed, dtype) for seed in range(2)))
    own = GateGroup(sites=(UP,), cores=(None, core(config, 1, 3, dtype)))
    return Adapter(name="x", sites=sites, gate=config, gates=(shared, own))


def equal(got, want):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


def assert_same(got: Adapter, want: Adapter):
    assert (got.gate, [group.sites for group in got.gates]) == (want.gate, [group.sites for group in want.gates])
    for one, other in zip(got.gates, want.gates, strict=True):
        jax.tree.map(equal, one.cores, other.cores)
    for (path, layer, one), (path2, layer2, other) in zip(got.weights(), want.weights(), strict=True):
        assert (path, layer, one.scale) == (path2, layer2, other.scale)
        equal(one.a, other.a)
        equal(one.b, other.b)


CONFIGS = {
    "mamba": SMALL,
    "diagonal": dataclasses.replace(SMALL, output="diagonal", clamp=2.5),
    "of-h": dataclasses.replace(SMALL, reads="h", start="published"),
    "lstm": dataclasses.replace(SMALL, kind="lstm"),
    "toplora": GateConfig(kind="toplora", output="diagonal", activation="exp"),
    "linear": GateConfig(kind="linear", activation="bounded"),
}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_adapter_comes_back_bit_by_bit(tmp_path, cfg, name, dtype):
    adapter = gated(CONFIGS[name], dtype)
    peft.save(tmp_path / "x", cfg, adapter)
    again, report = peft.load(tmp_path / "x", cfg)
    assert_same(again, adapter)
    assert report.notes == ()
    leaves = jax.tree.leaves_with_path([group.cores for group in again.gates])
    assert {leaf.dtype.name for path, leaf in leaves if path[-2].key != "proj"} == {"float32"}


def test_casting_an_adapter_leaves_its_state_space_in_float32(tmp_path, cfg):
    """The released reader rounds A_log and dt to bf16."""
    adapter = gated(dtype=np.float32)
    peft.save(tmp_path, cfg, adapter)
    again, _ = peft.load(tmp_path, cfg, dtype=jnp.bfloat16)
    one, other = again.gates[0].cores[0], adapter.gates[0].cores[0]
    equal(one["proj"]["weight"], other["proj"]["weight"].astype(jnp.bfloat16))
    jax.tree.map(equal, (one["cell"], one["out"]), (other["cell"], other["out"]))


def test_the_folder_is_plain_lora_to_peft_and_says_what_the_gate_is(tmp_path, cfg):
    peft.save(tmp_path, cfg, gated())
    assert len(safetensors.numpy.load_file(tmp_path / peft.WEIGHTS)) == 12
    names = safetensors.numpy.load_file(tmp_path / gates.WEIGHTS)
    assert "model.layers.1.mlp.up_proj.gate.cell.A_log" in names
    assert not any(name.startswith("model.layers.0.mlp") for name in names)
    raw = json.loads((tmp_path / gates.CONFIG).read_text())
    q, v = (f"model.layers.*.self_attn.{name}" for name in ("q_proj", "v_proj"))
    assert raw["groups"] == [[q, v], ["model.layers.*.mlp.up_proj"]]
    assert (raw["kind"], raw["states"], raw["norm"]) == ("mamba", 3, True)


def test_saving_a_plain_adapter_over_a_gated_one_removes_its_gates(tmp_path, cfg):
    peft.save(tmp_path, cfg, gated())
    peft.save(tmp_path, cfg, dataclasses.replace(gated(), gate=None, gates=()))
    assert peft.load(tmp_path, cfg)[0].gates == ()


def edited(folder, *, config=None, tensors=None):
    """Changes the gate files of a folder: each argument edits a dict in place."""
    raw, arrays = json.loads((folder / gates.CONFIG).read_text()), safetensors.numpy.load_file(folder / gates.WEIGHTS)
    (config or (lambda _: None))(raw)
    (tensors or (lambda _: None))(arrays)
    (folder / gates.CONFIG).write_text(json.dumps(raw))
    safetensors.numpy.save_file(arrays, folder / gates.WEIGHTS)


A_LOG, BIAS = (f"model.layers.1.mlp.up_proj.gate.{leaf}" for leaf in ("cell.A_log", "out.bias"))
BROKEN = {
    "missing": (dict(tensors=lambda t: t.pop(A_LOG)), "cell.A_log is missing or has no place"),
    "unused": (dict(tensors=lambda t: t.update({f"{A_LOG}.x": t[BIAS]})), "cell.A_log.x"),
    "stray": (dict(tensors=lambda t: t.update(other=t[BIAS])), "got other, which belongs to no group"),
    "shape": (dict(config=lambda c: c.update(states=4)), r"expected \(8, 4\)"),
    "nan": (dict(tensors=lambda t: t.update({BIAS: t[BIAS] * np.nan})), "got NaN or infinity in out.bias"),
    "heads": (dict(config=lambda c: c["groups"][0].pop()), r"expected \(1, 1\)"),
    "module": (dict(config=lambda c: c["groups"][0].append("model.norm")), "got model.norm in a group"),
    "twice": (dict(config=lambda c: c["groups"][1].append(c["groups"][0][0])), "a site in two gate groups"),
    "kind": (dict(config=lambda c: c.update(kind="rwkv")), "expected one of mamba, gru"),
    "field": (dict(config=lambda c: c.update(depth=2)), "got depth, which no gate has"),
    "groups": (dict(config=lambda c: c.pop("groups")), "no JSON object with groups"),
    "none": (dict(config=lambda c: c.update(groups=[])), "belongs to no group"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_files_that_do_not_fit_are_refused(tmp_path, cfg, how):
    edit, line = BROKEN[how]
    peft.save(tmp_path, cfg, gated())
    edited(tmp_path, **edit)
    with pytest.raises(UserError, match=line) as caught:
        peft.load(tmp_path, cfg)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [gates.CONFIG, gates.WEIGHTS])
def test_one_file_without_the_other_is_refused(tmp_path, cfg, name):
    peft.save(tmp_path, cfg, gated())
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=gates.WEIGHTS):
        peft.load(tmp_path, cfg)


def test_what_does_not_fit_is_not_written(tmp_path, cfg):
    adapter = gated()
    bad = dataclasses.replace(adapter, gate=dataclasses.replace(SMALL, states=7))
    with pytest.raises(UserError, match="gate of layer 0 at layers.attn.q_proj: got shape"):
        peft.save(tmp_path / "x", cfg, bad)
    assert not (tmp_path / "x").exists()
    ranks = LoRAWeights(a=np.zeros((2, 36)), b=np.zeros((12, 2)), alpha=8)
    diagonal = gated(CONFIGS["diagonal"])
    mixed = dataclasses.replace(diagonal, sites=dict(diagonal.sites) | {V: (ranks, ranks)})
    with pytest.raises(UserError, match=r"got ranks \[2, 4\], expected one"):
        gates.check(mixed)
    bare = dataclasses.replace(adapter, sites=dict(adapter.sites) | {V: (None, None)})
    with pytest.raises(UserError, match="got a core where a site has no update"):
        gates.check(bare)


def test_a_gated_adapter_cannot_be_merged(base):
    line = r"^merge: got adapter 'x', whose gates \(mamba\) scale the update anew for every token, expected plain LoRA"
    with pytest.raises(UserError, match=line):
        adapters.merge(*base, gated(dtype=np.float32))
    with pytest.raises(UserError, match="^unmerge: "):
        adapters.unmerge(*base, gated(dtype=np.float32))
    plain = dataclasses.replace(gated(dtype=np.float32), gate=None, gates=())
    assert adapters.merge(*base, plain)[0] == base[0]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (dict(gate=None), "gates without a gate config"),
        (dict(gates=()), "or one without gates"),
        (dict(gates=(GateGroup(sites=(), cores=()),)), "a group without sites"),
        (dict(gates=(GateGroup(sites=(Q,), cores=(None,)),)), "got 1 gates at layers.attn.q_proj"),
        (dict(gates=(GateGroup(sites=(("head",),), cores=(None,)),)), "got 1 gates at head"),
    ],
)
def test_gates_that_no_adapter_can_have(changes, line):
    with pytest.raises(UserError, match=line):
        dataclasses.replace(gated(), **changes)
