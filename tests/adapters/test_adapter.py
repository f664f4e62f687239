"""Merging an adapter into a base: exact, rounded once, undone, and refused where it cannot be right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import adapter as adapters
from molora_jax.adapters.adapter import EMBED, HEAD, Adapter, LoRAWeights
from molora_jax.config import UserError
from molora_jax.models import transformer
from tests import golden
from tests.checkpoints.test_hf import assert_equal, unstack

Q, OUT, DOWN = ("layers", "attn", "q_proj"), ("layers", "attn", "o_proj"), ("layers", "mlp", "down_proj")


def weights(d_out, d_in, seed=0, *, rank=3, dtype=np.float32, **kwargs) -> LoRAWeights:
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(shape).astype(dtype) / 4 for shape in ((rank, d_in), (d_out, rank)))
    return LoRAWeights(a=a, b=b, alpha=6, **kwargs)


def mixed() -> Adapter:
    """For llama_tied: another kind, rank and dtype at every place, and places left alone."""
    magnitude = np.linspace(0.5, 3, 36, dtype=np.float32)
    sites = {
        Q: (None, weights(36, 36, 1, rslora=True)),
        OUT: (weights(36, 36, 2, magnitude=magnitude), None),
        DOWN: (weights(36, 44, 3, rank=1, dtype=jnp.bfloat16), weights(36, 44, 4, rank=5)),
    }
    return Adapter(name="mixed", sites=sites)


def exact(weight, update: LoRAWeights) -> np.ndarray:
    a, b, full = (np.asarray(array).astype(np.float64) for array in (update.a, update.b, weight))
    full = full + (6 / len(a) ** 0.5 if update.rslora else 6 / len(a)) * b @ a
    if update.magnitude is None:
        return full
    return full * (update.magnitude / np.sqrt((full**2).sum(1)))[:, None]


def leaf(params, path, layer):
    for key in path:
        params = params[key]
    return np.asarray(params["weight"][layer])


def test_merging_is_the_fp64_sum_and_touches_nothing_else():
    cfg, params = golden.params("llama_tied")
    before = jax.tree.map(lambda x: np.array(x), params)
    merged_cfg, merged = adapters.merge(cfg, params, mixed())
    assert merged_cfg == cfg
    assert_equal(params, before)
    for path, column in mixed().sites.items():
        for layer, update in enumerate(column):
            if update is None:
                np.testing.assert_array_equal(leaf(merged, path, layer), leaf(params, path, layer))
            else:
                np.testing.assert_allclose(
                    leaf(merged, path, layer), exact(leaf(params, path, layer), update), atol=2e-6
                )
    for path in (("embed",), ("norm",), ("layers", "attn", "k_proj"), ("layers", "mlp_norm")):
        old, new = params, merged
        for key in path:
            old, new = old[key], new[key]
        assert old["weight"] is new["weight"]
    assert_equal(adapters.merge(cfg, unstack(params), mixed())[1], unstack(merged))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_narrow_base_is_rounded_once_and_the_loss_is_reported(dtype):
    cfg, params = golden.params("llama_tied", dtype)
    _, merged = adapters.merge(cfg, params, mixed())
    found = {(d.site, d.layer): d for d in adapters.deviations(params, merged, mixed())}
    assert found.keys() == {(path, layer) for path, layer, _ in mixed().weights()}
    for path, layer, update in mixed().weights():
        old, new = (leaf(tree, path, layer).astype(np.float64) for tree in (params, merged))
        full = exact(old, update)
        ulp = np.abs(full) * float(jnp.finfo(dtype).eps)
        assert (np.abs(new - full) <= 0.502 * ulp + 1e-7).all()
        error = np.abs(new - full).max()
        assert np.isclose(found[path, layer].weight, error / np.abs(full).max())
        assert np.isclose(found[path, layer].update, error / np.abs(full - old).max())
    losses = [d.update for d in adapters.deviations(params, merged, mixed())]
    assert losses == sorted(losses, reverse=True)
    assert 1e-5 < losses[0] < 0.05


def test_an_update_below_the_precision_of_the_base_is_reported_as_lost():
    cfg, params = golden.params("llama_tied", jnp.bfloat16)
    faint = Adapter(name="faint", sites={Q: (dataclasses.replace(weights(36, 36), alpha=1e-6), None)})
    _, merged = adapters.merge(cfg, params, faint)
    (loss,) = adapters.deviations(params, merged, faint)
    assert 0.5 < loss.update <= 1
    silent = Adapter(name="silent", sites={Q: (dataclasses.replace(weights(36, 36), alpha=0), None)})
    assert adapters.deviations(params, params, silent)[0].update == 0


def test_merging_fifty_times_from_the_base_never_drifts():
    cfg, params = golden.params("llama_tied", jnp.bfloat16)
    before = jax.tree.map(lambda x: np.array(x), params)
    first = adapters.merge(cfg, params, mixed())[1]
    for _ in range(50):
        assert_equal(adapters.merge(cfg, params, mixed())[1], first)
    assert_equal(params, before)


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_unmerging_without_the_base(dtype, bound):
    cfg, params = golden.params("llama_tied", dtype)
    plain = Adapter(name="plain", sites={Q: mixed().sites[Q], DOWN: mixed().sites[DOWN], HEAD: (weights(97, 36),)})
    cfg, merged = adapters.merge(cfg, params, plain)
    again_cfg, again = adapters.unmerge(cfg, merged, plain)
    assert again_cfg == cfg
    for path in (Q, DOWN):
        for layer in range(2):
            np.testing.assert_allclose(
                leaf(again, path, layer).astype(np.float32), leaf(params, path, layer).astype(np.float32), atol=bound
            )
    np.testing.assert_allclose(
        np.asarray(again["head"]["weight"], np.float32),
        np.asarray(params["embed"]["weight"], np.float32),
        atol=2 * bound,
    )


@pytest.mark.parametrize("field", ["full", "base", "dora"])
def test_what_cannot_be_unmerged(field):
    cfg, params = golden.params("llama_tied")
    norm = {("norm", "weight"): (np.ones(36, np.float32),)}
    adapter = mixed() if field == "dora" else Adapter(name="x", sites={Q: (weights(36, 36), None)}, **{field: norm})
    with pytest.raises(UserError, match="unmerge: got adapter .*, whose DoRA or replaced weights"):
        adapters.unmerge(cfg, params, adapter)


def test_an_adapters_bias_needs_a_bias_to_be_merged_into():
    bias = np.linspace(-1, 1, 36, dtype=np.float32)
    adapter = Adapter(name="b", sites={Q: (weights(36, 36, bias=bias), None)})
    cfg, params = golden.params("llama_bias")
    _, merged = adapters.merge(cfg, params, adapter)
    before, after = (np.asarray(tree["layers"]["attn"]["q_proj"]["bias"]) for tree in (params, merged))
    np.testing.assert_allclose(after[0], before[0] + 2 * bias, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(after[1], before[1])
    cfg, params = golden.params("llama_tied")
    with pytest.raises(UserError, match=r"at layers\.attn\.q_proj\.bias: .* lora_bias needs a projection with a bias"):
        adapters.merge(cfg, params, adapter)


@pytest.mark.parametrize("end", [EMBED, HEAD])
def test_an_update_of_one_end_of_a_tied_model_unties_it(end):
    cfg, params = golden.params("llama_tied")
    update = weights(36, 97) if end == EMBED else weights(97, 36)
    merged_cfg, merged = adapters.merge(cfg, params, Adapter(name="x", sites={end: (update,)}))
    assert merged_cfg == dataclasses.replace(cfg, tied=False)
    old = np.asarray(params["embed"]["weight"])
    delta = 2 * update.b @ update.a
    expected = (old + delta.T, old) if end == EMBED else (old, old + delta)
    for name, value in zip(("embed", "head"), expected, strict=True):
        np.testing.assert_allclose(merged[name]["weight"], value, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(merged) == jax.tree.structure(transformer.abstract(merged_cfg))
    (loss,) = adapters.deviations(params, merged, Adapter(name="x", sites={end: (update,)}))
    assert 0 < loss.update < 1e-6


def test_equal_updates_of_both_ends_keep_a_model_tied_there_and_back():
    cfg, params = golden.params("llama_tied")
    embed = weights(36, 97)
    head = dataclasses.replace(embed, a=np.ascontiguousarray(embed.b.T), b=np.ascontiguousarray(embed.a.T))
    adapter = Adapter(name="x", sites={EMBED: (embed,), HEAD: (head,)})
    merged_cfg, merged = adapters.merge(cfg, params, adapter)
    again_cfg, again = adapters.unmerge(merged_cfg, merged, adapter)
    assert cfg == merged_cfg == again_cfg
    assert np.abs(merged["embed"]["weight"] - params["embed"]["weight"]).max() > 0.1
    np.testing.assert_allclose(again["embed"]["weight"], params["embed"]["weight"], atol=1e-6)


def test_base_weights_of_a_tied_model_are_those_of_both_ends():
    cfg, params = golden.params("llama_tied")
    new = np.asarray(params["embed"]["weight"]) * 2
    sites = {Q: (weights(36, 36), None)}
    for ends in ([EMBED], [HEAD], [EMBED, HEAD]):
        adapter = Adapter(name="x", sites=sites, base={(*end, "weight"): (new,) for end in ends})
        merged_cfg, merged = adapters.merge(cfg, params, adapter)
        assert merged_cfg.tied
        np.testing.assert_array_equal(merged["embed"]["weight"], new)
    adapter = Adapter(name="x", sites=sites, base={("embed", "weight"): (new,), ("head", "weight"): (new + 1,)})
    with pytest.raises(UserError, match="adapter 'x': got base weights for the head other than for the embedding"):
        adapters.merge(cfg, params, adapter)


def test_whole_weights_replace_those_of_the_base():
    cfg, params = golden.params("llama_untied")
    norm = np.arange(36, dtype=np.float64)
    full = {("layers", "attn_norm", "weight"): (None, norm, None), ("head", "weight"): (np.ones((97, 36)),)}
    _, merged = adapters.merge(cfg, params, Adapter(name="x", sites={}, full=full))
    np.testing.assert_array_equal(merged["layers"]["attn_norm"]["weight"][1], norm.astype(np.float32), strict=True)
    np.testing.assert_array_equal(
        merged["layers"]["attn_norm"]["weight"][2], params["layers"]["attn_norm"]["weight"][2]
    )
    np.testing.assert_array_equal(merged["head"]["weight"], np.ones((97, 36)))
    expected = np.asarray(params["head"]["weight"]) + 2 * (update := weights(97, 36)).b @ update.a
    _, merged = adapters.merge(cfg, params, Adapter(name="x", sites={HEAD: (update,)}))
    np.testing.assert_allclose(merged["head"]["weight"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        (
            {Q: (weights(36, 35), None)},
            "at layers.attn.q_proj.weight: got weights for shape (36, 35), expected (36, 36)",
        ),
        ({EMBED: (weights(97, 36),)}, "got weights for shape (36, 97), expected (97, 36)"),
        ({Q: (weights(36, 36), None, None)}, "got 3 layers, expected the model's 2"),
        ({("layers", "attn", "r_proj"): (None, weights(1, 1))}, "got weights for a parameter that the model has not"),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_an_adapter_of_another_base(sites, expected, listed):
    cfg, params = golden.params("llama_tied")
    with pytest.raises(UserError) as caught:
        adapters.merge(cfg, unstack(params) if listed else params, Adapter(name="odd", sites=sites))
    assert str(caught.value).startswith("adapter 'odd'")
    assert expected in str(caught.value)


def test_parameters_of_several_processes(monkeypatch):
    cfg, params = golden.params("llama_tied")
    kind = type(params["embed"]["weight"])
    monkeypatch.setattr(kind, "is_fully_addressable", property(lambda self: False))
    with pytest.raises(UserError, match="got a parameter spread over processes"):
        adapters.merge(cfg, params, mixed())


def test_parameters_on_the_host_stay_there():
    cfg, params = golden.params("llama_tied")
    host = jax.tree.map(np.asarray, params)
    _, merged = adapters.merge(cfg, host, mixed())
    assert all(isinstance(array, np.ndarray) for array in jax.tree.leaves(merged))
    assert_equal(merged, jax.tree.map(np.asarray, adapters.merge(cfg, params, mixed())[1]))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (dict(a=np.ones((3, 4)), b=np.ones((5, 2))), "expected [R, D] and [F, R]"),
        (dict(a=np.ones(4), b=np.ones((5, 1))), "expected [R, D] and [F, R]"),
        (dict(a=np.ones((0, 4)), b=np.ones((5, 0))), "R > 0"),
        (dict(a=np.ones((1, 4)), b=np.ones((5, 1)), magnitude=np.ones(4)), "got magnitude (4,), expected (5,)"),
        (dict(a=np.ones((1, 4)), b=np.ones((5, 1)), bias=np.ones((5, 1))), "got bias (5, 1), expected (5,)"),
        (dict(a=np.ones((1, 4)), b=np.ones((5, 1)), bias=np.ones(5), magnitude=np.ones(5)), "DoRA has no lora_bias"),
    ],
)
def test_weights_that_cannot_be(fields, expected):
    with pytest.raises(UserError) as caught:
        LoRAWeights(alpha=1, **fields)
    assert expected in str(caught.value)
