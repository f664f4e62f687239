"""Exported PEFT folders: the config follows the tensors, and what PEFT has no words for is refused."""

import dataclasses
import json

import numpy as np
import pytest

from molora_jax.adapters import adapter as adapters
from molora_jax.checkpoints import peft
from molora_jax.config import UserError
from tests import golden
from tests.checkpoints import peft_files
from tests.checkpoints.peft_files import Q_PATH, V_PATH, load


@pytest.fixture(scope="module")
def cfg():
    return golden.params("llama_tied")[0]


def each(adapter, **changes):
    """The adapter with fields of every update replaced; a callable is given the update."""
    new = lambda w: dataclasses.replace(w, **{k: v(w) if callable(v) else v for k, v in changes.items()})
    sites = {path: tuple(map(new, column)) for path, column in adapter.sites.items()}
    return dataclasses.replace(adapter, sites=sites)


CHANGES = {
    "rslora": (lambda a: each(a, rslora=True), dict(use_rslora=True)),
    "alpha": (lambda a: each(a, alpha=3.5), dict(lora_alpha=3.5)),
    "dora": (lambda a: each(a, magnitude=lambda w: np.ones(len(w.b), np.float32)), dict(use_dora=True)),
    "bias": (lambda a: each(a, bias=lambda w: np.ones(len(w.b), np.float32)), dict(lora_bias=True)),
    "sites": (
        lambda a: dataclasses.replace(a, sites={Q_PATH: (None, a.sites[Q_PATH][1])}),
        dict(target_modules=["model.layers.1.self_attn.q_proj"]),
    ),
    "saved": (
        lambda a: dataclasses.replace(a, full={("norm", "weight"): (np.ones(36, np.float32),)}),
        dict(modules_to_save=["model.norm"]),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_config_follows_the_tensors(tmp_path, cfg, change):
    config, tensors = peft_files.small(exclude_modules=["k_proj"], revision="kept")
    edit, expected = CHANGES[change]
    adapter = edit(load(tmp_path, cfg, config, tensors)[0])
    peft.save(tmp_path / "out", cfg, adapter)
    written = json.loads((tmp_path / "out" / peft.CONFIG).read_text())
    assert {key: written[key] for key in expected} == expected
    assert written["revision"] == "kept"
    again, report = peft.load(tmp_path / "out", cfg)
    assert report.notes == ()
    for (path, layer, left), (path2, layer2, right) in zip(adapter.weights(), again.weights(), strict=True):
        assert (path, layer, left.scale) == (path2, layer2, right.scale)
        for part in ("a", "b", "magnitude", "bias"):
            np.testing.assert_array_equal(getattr(left, part), getattr(right, part))


def test_scales_of_both_kinds_are_written_as_one(tmp_path, cfg):
    config, tensors = peft_files.small(rank=3)
    adapter, _ = load(tmp_path, cfg, config, tensors)
    one, other = adapter.sites[Q_PATH]
    sites = dict(adapter.sites) | {Q_PATH: (one, dataclasses.replace(other, rslora=True))}
    peft.save(tmp_path / "out", cfg, dataclasses.replace(adapter, sites=sites))
    again, _ = peft.load(tmp_path / "out", cfg)
    expected = [8 / 3, 8 / 3**0.5, 8 / 3, 8 / 3]
    np.testing.assert_allclose([weights.scale for _, _, weights in again.weights()], expected, rtol=1e-15)


def test_export_after_a_change_of_rank_loads_again(tmp_path, cfg):
    config, tensors = peft_files.small()
    adapter, _ = load(tmp_path, cfg, config, tensors)
    wide = lambda w: adapters.LoRAWeights(a=np.tile(w.a, (2, 1)), b=np.tile(w.b, (1, 2)), alpha=w.alpha)
    sites = dict(adapter.sites) | {Q_PATH: (adapter.sites[Q_PATH][0], wide(adapter.sites[Q_PATH][1]))}
    changed = adapters.Adapter(name="x", sites=sites, origin=adapter.origin | {"revision": "kept"})
    peft.save(tmp_path / "out", cfg, changed)
    written = json.loads((tmp_path / "out" / peft.CONFIG).read_text())
    assert (written["r"], written["rank_pattern"]) == (4, {"model.layers.1.self_attn.q_proj": 8})
    assert written["revision"] == "kept"
    again, _ = peft.load(tmp_path / "out", cfg)
    assert [weights.rank for _, _, weights in again.weights()] == [4, 8, 4, 4]
    assert [weights.scale for _, _, weights in again.weights()] == [2, 1, 2, 2]


def test_what_peft_cannot_express(tmp_path, cfg):
    weights = lambda f, d, **kw: adapters.LoRAWeights(a=np.ones((1, d), "f4"), b=np.ones((f, 1), "f4"), alpha=1, **kw)
    ones = np.ones(36, np.float32)
    for sites, expected in [
        ({Q_PATH: (weights(36, 36, magnitude=ones), weights(36, 36))}, "got use_dora at 1 of 2 modules"),
        ({Q_PATH: (weights(36, 36, bias=ones), weights(36, 36))}, "got lora_bias at 1 of 2 modules"),
        ({adapters.EMBED: (weights(36, 97, bias=ones),)}, "got a bias at the embedding"),
        ({("layers", "attn", "r_proj"): (weights(36, 36),)}, "got weights at layers.attn.r_proj"),
        ({Q_PATH: (None, None, weights(36, 36))}, "which layer 2 has not"),
        ({V_PATH: (weights(36, 36),)}, "expected an update of (12, 36)"),
    ]:
        with pytest.raises(UserError) as caught:
            peft.save(tmp_path / "out", cfg, adapters.Adapter(name="x", sites=sites))
        assert expected in str(caught.value)
        assert not (tmp_path / "out").exists()
