"""Router checkpoints: what is written is read, and what it was trained with is asked for."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters.digest import adapter_digest, base_digest
from molora_jax.adapters.mixtures.arrow import arrow
from molora_jax.adapters.mixtures.classifier import classifier
from molora_jax.adapters.mixtures.mole import mole
from molora_jax.adapters.mixtures.phatgoose import phatgoose
from molora_jax.adapters.mixtures.soups import soup
from molora_jax.adapters.mixtures.xlora import xlora
from molora_jax.adapters.route import NONE
from molora_jax.adapters.router import new_router
from molora_jax.adapters.selection import Rule
from molora_jax.checkpoints import router as checkpoint
from molora_jax.config import UserError
from molora_jax.models import transformer
from tests.adapters.routing import identical, world

WIDTHS = {"attn.q_proj": 5, "mlp.up_proj": 4}


def kinds():
    _, _, adapters, _ = world()
    return {
        "router": new_router(5, 3, rule=Rule("top_k", k=2), hidden=4, bias=True, layers=2, pooling="scores"),
        "by site": new_router(WIDTHS, 3, rule=Rule("soft", factored=True)),
        "arrow": arrow(adapters, k=2, temperature=0.5),
        "mole": dataclasses.replace(mole(WIDTHS, 3, 2), temperature=jnp.float32(0.3)),
        "phatgoose": phatgoose(WIDTHS, 3, 2),
        "soup": soup(3, 2),
        "xlora": xlora(5, 3, 2, sites=tuple(WIDTHS), k=2),
        "classifier": classifier(5, 3),
    }


@pytest.mark.parametrize("name", kinds())
def test_what_is_saved_is_loaded(name, tmp_path):
    _, params, adapters, _ = world()
    router = kinds()[name]
    checkpoint.save(tmp_path, router, adapters, params)
    again = checkpoint.load(tmp_path, adapters, params)
    assert type(again) is type(router)
    assert jax.tree.structure(again) == jax.tree.structure(router)
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(router), strict=True):
        assert np.asarray(got).dtype == np.asarray(want).dtype or np.ndim(want) == 0
        identical(got, np.asarray(want, np.asarray(got).dtype))


def test_an_expert_may_be_the_base(tmp_path):
    _, params, adapters, _ = world()
    experts = [adapters[0], None, adapters[2]]
    checkpoint.save(tmp_path, new_router(5, 3), experts, params)
    identical(checkpoint.load(tmp_path, experts, params).placement.slots, [0, NONE, 2])
    with pytest.raises(UserError, match=r"got e1 of content \w+ as expert 1, expected \(base\)"):
        checkpoint.load(tmp_path, adapters, params)


def edited(adapter):
    path, column = next(iter(adapter.sites.items()))
    changed = dataclasses.replace(column[1], b=column[1].b + np.float32(1e-6))
    return dataclasses.replace(adapter, sites=dict(adapter.sites) | {path: (column[0], changed, *column[2:])})


def test_other_experts_orders_and_bases_are_errors(tmp_path):
    cfg, params, (a, b, c), _ = world()
    checkpoint.save(tmp_path, new_router(5, 3), (a, b, c), params)
    cases = [
        ((b, a, c), "got the experts e1, e0, e2, expected the order it was trained with: e0, e1, e2"),
        ((a, b), r"got 2 experts \(e0, e1\), expected the 3 it knows: e0, e1, e2"),
        ((a, edited(b), c), r"got e1 of content \w+ as expert 1, expected e1 of content \w+: it is another"),
        ((a, b, b), r"got e1 of content \w+ as expert 2, expected e2 of content"),
    ]
    for experts, message in cases:
        with pytest.raises(UserError, match=message) as error:
            checkpoint.load(tmp_path, experts, params)
        assert "\n" not in str(error.value)
    other = transformer.init(cfg, seed=1)
    with pytest.raises(UserError, match=f"got a base of content {base_digest(other)}, expected {base_digest(params)}"):
        checkpoint.load(tmp_path, (a, b, c), other)
    renamed = dataclasses.replace(a, name="another name")  # a name is but a label
    checkpoint.load(tmp_path, (renamed, b, c), params)
    with pytest.raises(UserError, match="got 2 experts to save it with, expected its 3"):
        checkpoint.save(tmp_path, new_router(5, 3), (a, b), params)


def test_files_that_are_no_router(tmp_path):
    _, params, adapters, _ = world()
    load = lambda: checkpoint.load(tmp_path, adapters, params)
    with pytest.raises(UserError, match="got no router, expected router.json"):
        load()
    (tmp_path / "router.pth").write_bytes(b"")
    with pytest.raises(UserError, match="router.pth, a pickle, which is never loaded"):
        load()
    checkpoint.save(tmp_path, new_router(5, 3), adapters, params)
    config = json.loads((tmp_path / "router.json").read_text())
    changes = [
        ({"kind": "oracle"}, "kind 'oracle', expected"),
        ({"sizes": config["sizes"] | {"params/out/weight": [4, 5]}}, r"shape \[3, 5\], expected \[4, 5\]"),
        ({"settings": {"rule": {}}}, r"got settings \['rule'\], expected"),
        ({"format": "other"}, "got format 'other'"),
    ]
    for change, message in changes:
        (tmp_path / "router.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=message):
            load()
    (tmp_path / "router.json").write_text("[]")
    with pytest.raises(UserError, match="got no router's JSON"):
        load()
    (tmp_path / "router.json").write_text(json.dumps(config))
    (tmp_path / "router.safetensors").write_bytes(b"1234")
    with pytest.raises(UserError, match="got no whole safetensors file"):
        load()


def test_digests_tell_contents_and_nothing_else():
    cfg, params, (a, b, _), _ = world()
    assert adapter_digest(a) != adapter_digest(b)
    assert adapter_digest(a) != adapter_digest(edited(a))
    turned = dataclasses.replace(a, name="x", sites=dict(reversed(a.sites.items())), origin={"r": 1})
    assert adapter_digest(turned) == adapter_digest(a)
    louder = {
        path: tuple(dataclasses.replace(w, alpha=w.alpha * 2) for w in column) for path, column in a.sites.items()
    }
    assert adapter_digest(dataclasses.replace(a, sites=louder)) != adapter_digest(a)
    unrolled = transformer.unstack(dict(params))
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    assert base_digest(params) == base_digest(unrolled) == base_digest(half)
    moved = params | {"layers": jax.tree.map(lambda w: w.at[-1].add(0.1), params["layers"])}
    assert base_digest(moved) != base_digest(params)
