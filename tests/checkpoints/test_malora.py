"""Released MaLoRA checkpoints: their scales are reproduced, and what has no counterpart is refused."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import gate
from molora_jax.adapters.gate import GateConfig
from molora_jax.checkpoints import malora, peft, torch_file
from molora_jax.config import UserError
from tests import golden
from tests.checkpoints.test_gate import assert_same
from tests.numerics import assert_close

FOLDER = pathlib.Path(__file__).parents[1] / "goldens" / "malora"
KINDS = sorted(path.stem for path in FOLDER.glob("*.pt"))
SITES = {name: ("layers", "attn", name) for name in ("q_proj", "v_proj")}
run = jax.jit(gate.apply, static_argnums=0)


@pytest.fixture(scope="module")
def cfg():
    return golden.params("llama_tied")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_those_of_torch(cfg, kind):
    adapter = malora.load(FOLDER / f"{kind}.pt", cfg)
    with np.load(FOLDER / f"{kind}.npz", allow_pickle=False) as file:
        arrays = dict(file)
    x, spreads = arrays.pop("x"), []
    for group in adapter.gates:
        (path,) = group.sites
        for layer, core in enumerate(group.cores):
            want = arrays.pop(f"model.layers.{layer}.self_attn.{path[-1]}", None)
            assert (core is None) == (want is None)
            if core is None:
                continue
            update = adapter.sites[path][layer]
            h = np.einsum("btd,rd->btr", x, update.a.astype(np.float32))
            lam, _ = run(adapter.gate, core, h if adapter.gate.reads == "h" else x)
            assert_close(lam.reshape(want.shape), want, "model")
            spreads.append(np.ptp(want))
    assert len(spreads) == 3
    assert max(spreads) > 0.05
    assert not arrays


def test_updates_and_small_leaves_keep_their_bits(cfg):
    """The released reader rounds the state-space leaves to bf16."""
    adapter, raw = malora.load(FOLDER / "mamba.pt", cfg, name="m"), torch_file.load(FOLDER / "mamba.pt")
    assert adapter.name == "m"
    assert adapter.gate == GateConfig(norm=False, start="published", states=3, taps=3)
    for name, path in SITES.items():
        state, update = raw["gated_lora_states"][f"model.layers.1.self_attn.{name}"], adapter.sites[path][1]
        np.testing.assert_array_equal(update.a, state["lora_A"]["weight"])
        np.testing.assert_array_equal(update.b, state["lora_B"]["weight"])
        assert (update.a.dtype, update.scale) == (jnp.bfloat16, 2)
        group = next(group for group in adapter.gates if group.sites == (path,))
        a_log = group.cores[1]["cell"]["A_log"]
        np.testing.assert_array_equal(a_log, state["gate"]["mamba.A_log"])
        assert a_log.dtype == np.float32
        assert len(np.unique(a_log.astype(jnp.bfloat16).astype(np.float32) - a_log)) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_adapter_is_saved_and_loaded(tmp_path, cfg, kind):
    adapter = malora.load(FOLDER / f"{kind}.pt", cfg)
    peft.save(tmp_path, cfg, adapter)
    assert_same(peft.load(tmp_path, cfg)[0], adapter)


def raw(**changes):
    found = torch_file.load(FOLDER / "mamba.pt")
    found["config"] |= changes
    return found


def loaded(monkeypatch, cfg, content):
    monkeypatch.setattr(torch_file, "load", lambda file: content)
    return malora.load("x.pt", cfg)


def test_early_files_that_ignored_scalar_output_are_diagonal(monkeypatch, cfg):
    found = raw()
    for state in found["gated_lora_states"].values():
        state["gate"].pop("out.weight", None)
    adapter = loaded(monkeypatch, cfg, found)
    assert adapter.gate.output == "diagonal"
    np.testing.assert_array_equal(adapter.gates[0].cores[0]["out"]["weight"], np.eye(4)[None])


def renamed(found, new):
    states = found["gated_lora_states"]
    return found | {"gated_lora_states": {key.replace("layers.1", new): value for key, value in states.items()}}


REFUSED = {
    "type": (lambda: raw(gate_type="chunk_mamba"), "got gate_type chunk_mamba, expected one of mamba, gru"),
    "depth": (lambda: raw(n_layers=2), "got n_layers=2, expected 1"),
    "residual": (lambda: raw(residual_outer=True), "got residual_outer=True"),
    "activation": (lambda: raw(gate_activation="tanh"), "got gate_activation tanh"),
    "scale": (lambda: raw(gate_activation="sigmoid", gate_scale=3.0), "a gate_scale of 2"),
    "other-kind": (lambda: raw(gate_type="gru"), "got mamba.A_log in the gate"),
    "states": (lambda: raw(d_state=5), r"expected \(8, 5\)"),
    "layer": (lambda: renamed(raw(), "layers.7"), "layers.7.self_attn.q_proj, which a llama decoder"),
    "module": (lambda: renamed(raw(), "blocks.1"), "blocks.1.self_attn.q_proj"),
    "alpha": (lambda: {"config": dict(gate_type="mamba"), **renamed(raw(), "layers.1")} | {"config": {}}, "gate_type"),
    "nothing": (lambda: {"model": {}}, "no config and gated_lora_states"),
    "list": (lambda: [1], "no config and gated_lora_states"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_has_no_counterpart_is_refused(monkeypatch, cfg, how):
    make, line = REFUSED[how]
    content = make()
    with pytest.raises(UserError, match=rf"^x\.pt: .*{line}") as caught:
        loaded(monkeypatch, cfg, content)
    assert "\n" not in str(caught.value)


def test_another_base_is_refused():
    other = golden.params("mistral_window")[0]
    with pytest.raises(UserError, match="expected"):
        malora.load(FOLDER / "mamba.pt", other)
