"""Combined adapters against entry-by-entry references, and against PEFT's where it combines factors."""

import dataclasses
import json
import math

import ml_dtypes
import numpy as np
import pytest

from molora_jax.adapters import adapter as adapters
from molora_jax.adapters import merge
from molora_jax.adapters.adapter import EMBED, Adapter, LoRAWeights
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.gate import GateConfig
from molora_jax.checkpoints import peft
from molora_jax.config import UserError
from tests import golden
from tests.checkpoints import peft_files

Q, V = ("layers", "attn", "q_proj"), ("layers", "attn", "v_proj")
DENSITY = dict(ties=0.4, dare_linear=0.4, dare_ties=0.4, magnitude_prune=0.4)
METHODS = ["cat", "linear", "svd", *DENSITY]


def update(d_out, d_in, rank, seed, dtype=np.float32, **kwargs) -> LoRAWeights:
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((rank, d_in), (d_out, rank)))
    return LoRAWeights(a=a, b=b, **{"alpha": 5} | kwargs)


def three() -> list[Adapter]:
    """Other ranks, scales, kinds and sites in each; V of layer 1 is in none."""
    bias = np.linspace(-1, 2, 6, dtype=np.float32)
    return [
        Adapter(name="x", sites={Q: (update(6, 9, 2, 1), update(6, 9, 1, 2))}),
        Adapter(
            name="y",
            sites={Q: (update(6, 9, 3, 3, rslora=True, alpha=4, bias=bias), None), V: (update(4, 9, 2, 4), None)},
        ),
        Adapter(name="z", sites={Q: (update(6, 9, 2, 5, ml_dtypes.bfloat16), update(6, 9, 2, 6, bias=-2 * bias))}),
    ]


WEIGHTS = (0.7, -0.4, 1.3)


def product(update: LoRAWeights) -> np.ndarray:
    scale = update.alpha / (math.sqrt(len(update.a)) if update.rslora else len(update.a))
    return scale * update.b.astype(np.float64) @ update.a.astype(np.float64)


def kept(shape, density) -> np.ndarray:
    return (np.arange(np.prod(shape)) * 7 % 10 < round(10 * density)).reshape(shape)


def reference(method, values, weights, density, majority="total") -> np.ndarray:
    """One entry at a time: what is left of each value, who wins the vote, and the sum or the mean of the winners."""
    left = []
    for value in values:
        order = sorted(range(value.size), key=lambda i, v=value: -abs(v.flat[i]))[: int(density * value.size)]
        if method in ("ties", "magnitude_prune"):
            left.append([value.flat[i] if i in order else 0.0 for i in range(value.size)])
        elif method.startswith("dare"):
            left.append([value.flat[i] * kept(value.shape, density).flat[i] / density for i in range(value.size)])
        else:
            left.append(list(value.flat))
    out = np.zeros(values[0].shape)
    for i in range(out.size):
        column = [entries[i] for entries in left]
        if "ties" in method:
            votes = sum(column) if majority == "total" else sum(np.sign(x) for x in column)
            winners = [w * x for w, x in zip(weights, column, strict=True) if x != 0 and (x > 0) == (votes >= 0)]
            out.flat[i] = sum(winners) / max(1, len(winners))
        else:
            out.flat[i] = sum(w * x for w, x in zip(weights, column, strict=True))
    return out


@pytest.fixture
def regular_choice(monkeypatch):
    monkeypatch.setattr(merge, "bernoulli", lambda shape, density, stream: kept(shape, density))


@pytest.mark.usefixtures("regular_choice")
@pytest.mark.parametrize("majority", ["total", "frequency"])
@pytest.mark.parametrize("method", METHODS)
def test_products_are_combined_exactly(method, majority):
    density = DENSITY.get(method)
    rank = 20 if method == "svd" else None
    found = merge.combine(three(), WEIGHTS, name="c", method=method, density=density, majority=majority, rank=rank)
    assert found.name == "c"
    assert found.sites[V][1] is None
    for path, layer in ((Q, 0), (Q, 1), (V, 0)):
        there = [(e, a.sites[path][layer]) for e, a in enumerate(three()) if path in a.sites and a.sites[path][layer]]
        weights = [WEIGHTS[e] for e, _ in there]
        args = (weights, density or 1.0, majority)
        got = found.sites[path][layer]
        assert got.a.dtype == got.b.dtype == np.float32
        expected = reference(method, [product(update) for _, update in there], *args)
        np.testing.assert_allclose(product(got), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        if path == V:
            assert got.bias is None
            continue
        vectors = [(product(u) @ np.zeros(9)) + (0 if u.bias is None else u.scale * u.bias) for _, u in there]
        np.testing.assert_allclose(got.scale * got.bias, reference(method, vectors, *args), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("regular_choice")
def test_factors_are_combined_as_in_peft():
    with np.load(peft_files.FOLDER / "merges.npz") as file:
        data = dict(file)
    cases, weights = json.loads(data["cases"].item()), data["weights"]
    sites = {"v_proj": V, "k_proj": ("layers", "attn", "k_proj")}
    given = [
        Adapter(
            name=str(e),
            sites={
                path: (LoRAWeights(a=data[f"{site}/{e}/a"], b=data[f"{site}/{e}/b"], alpha=alpha), None)
                for site, path in sites.items()
            },
        )
        for e, alpha in enumerate(data["alphas"])
    ]
    for i, case in enumerate(cases):
        kind, rank = case["combination_type"].removesuffix("_svd"), case.get("svd_rank")
        options = dict(density=case.get("density"), majority=case.get("majority_sign_method", "total"))
        space = "product" if rank else "factors"
        found = merge.combine(given, weights, name="c", method=kind, space=space, rank=rank, **options)
        for site, path in sites.items():
            got, none = found.sites[path]
            assert none is None
            for part in ("a", "b", "product"):
                if f"{i}/{site}/{part}" in data:
                    expected = data[f"{i}/{site}/{part}"]
                    value = product(got) if part == "product" else getattr(got, part)
                    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=2e-6 * np.abs(expected).max())
    assert len(cases) == 14


@pytest.mark.parametrize("method", ["cat", "linear", "svd"])
def test_rslora_alone_at_weight_one_is_itself(method):
    alone = Adapter(name="x", sites={Q: (update(6, 9, 4, 1, rslora=True, alpha=16), None)})
    found = merge.combine([alone], [1.0], name="c", method=method)
    np.testing.assert_allclose(product(found.sites[Q][0]), product(alone.sites[Q][0]), rtol=1e-4, atol=1e-5)
    doubled = merge.combine([alone, alone], [0.5, 1.5], name="c", method=method)
    np.testing.assert_allclose(product(doubled.sites[Q][0]), 2 * product(alone.sites[Q][0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["cat", "linear"])
@pytest.mark.parametrize("name", peft_files.names())
def test_every_kind_alone_at_weight_one_keeps_its_bytes(tmp_path, name, method):
    cfg, _ = golden.params(peft_files.logits(name)[0])
    adapter, _ = peft.load(peft_files.FOLDER / name, cfg)
    peft.save(tmp_path, cfg, merge.combine([adapter], [1], name="other", method=method))
    assert (tmp_path / peft.WEIGHTS).read_bytes() == (peft_files.FOLDER / name / peft.WEIGHTS).read_bytes()


def test_an_adapter_with_itself_in_halves_is_itself_in_products_and_twice_itself_in_factors():
    adapter = Adapter(name="x", sites={Q: (update(6, 9, 3, 1),)})
    for space, times in (("product", 1), ("factors", 2)):
        found = merge.combine([adapter, adapter], [0.5, 0.5], name="c", method="linear", space=space)
        np.testing.assert_allclose(
            product(found.sites[Q][0]), times * product(adapter.sites[Q][0]), rtol=1e-4, atol=1e-5
        )


def test_the_adapters_own_bias_is_kept():
    bias = np.linspace(-1, 2, 6, dtype=np.float32)
    adapter = Adapter(name="x", sites={Q: (update(6, 9, 2, 1, bias=bias, rslora=True),)})
    other = Adapter(name="y", sites={Q: (update(6, 9, 2, 2),)})
    for method in ("cat", "linear", "svd"):
        (found,) = merge.combine([adapter, other], [2.0, 1.0], name="c", method=method).sites[Q]
        np.testing.assert_allclose(found.scale * found.bias, 2 * 5 / math.sqrt(2) * bias, rtol=1e-6)


@pytest.mark.parametrize(("weights", "method"), [([1, 1], "cat"), ([0.5], "linear"), ([1], "svd")])
def test_magnitudes_are_not_summed(weights, method):
    dora = Adapter(name="d", sites={Q: (update(6, 9, 2, 1, magnitude=np.ones(6, np.float32)),)})
    with pytest.raises(UserError, match="got adapter 'd' with DoRA"):
        merge.combine([dora] * len(weights), weights, name="c", method=method)


@pytest.mark.parametrize(("rank", "expected"), [(None, 3), (1, 1), (4, 4), (99, 6)])
def test_svd_is_the_nearest_of_its_rank(rank, expected):
    (found,) = merge.combine(three(), WEIGHTS, name="c", method="svd", rank=rank).sites[Q][:1]
    assert found.rank == expected
    full = sum(w * product(a.sites[Q][0]) for w, a in zip(WEIGHTS, three(), strict=True))
    tail = np.linalg.svd(full)[1][expected:]
    np.testing.assert_allclose(np.linalg.norm(full - product(found)), np.sqrt((tail**2).sum()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_a_rank_cuts_what_is_otherwise_exact(method):
    options = dict(name="c", method=method, density=DENSITY.get(method))
    whole, cut = (merge.combine(three(), WEIGHTS, rank=rank, **options).sites[Q][0] for rank in (None, 2))
    assert cut.rank == 2
    left, values, right = np.linalg.svd(product(whole))
    np.testing.assert_allclose(product(cut), left[:, :2] * values[:2] @ right[:2], rtol=1e-4, atol=1e-5)


def test_a_sum_that_cancels_is_an_update_of_zero():
    adapter = Adapter(name="x", sites={Q: (update(6, 9, 3, 1),)})
    for method in ("cat", "ties", "svd"):
        options = dict(name="c", method=method, density=1.0 if method == "ties" else None)
        (found,) = merge.combine([adapter, adapter], [1, -1], **options).sites[Q]
        np.testing.assert_allclose(product(found), 0, atol=1e-5)


def test_dare_drops_at_random_without_bias():
    adapter = Adapter(name="x", sites={Q: (update(6, 9, 2, 1), update(6, 9, 2, 1))})
    draw = lambda seed: merge.combine(
        [adapter, adapter], [1, 1], name="c", method="dare_linear", density=0.5, seed=seed
    )
    first, full = draw(0), 2 * product(adapter.sites[Q][0])
    np.testing.assert_array_equal(first.sites[Q][0].b, draw(0).sites[Q][0].b)
    shares = np.round(product(first.sites[Q][0]) / full, 4)
    assert set(np.unique(shares)) == {0, 1, 2}  # dropped in both, in one or in none: the adapters' choices differ
    assert not np.allclose(product(first.sites[Q][0]), product(first.sites[Q][1]))
    mean = np.mean([product(draw(seed).sites[Q][0]) / full for seed in range(200)], axis=0)
    assert np.abs(mean - 1).max() < 5 * math.sqrt(0.5 / 200)


@pytest.mark.parametrize("method", ["dare_linear", "ties", "dare_ties", "magnitude_prune"])
def test_a_density_of_one_keeps_everything(method):
    (found,) = merge.combine(three(), WEIGHTS, name="c", method=method, density=1).sites[V][:1]
    np.testing.assert_allclose(product(found), -0.4 * product(three()[1].sites[V][0]), rtol=1e-5, atol=1e-5)


def test_a_combination_is_an_adapter_like_any_other(tmp_path):
    cfg, params = golden.params("llama_tied")
    given = [peft.load(peft_files.FOLDER / name, cfg)[0] for name in ("plain", "bfloat16", "embeddings")]
    combined = merge.combine(given, (0.5, 0.5, 1.0), name="c")
    peft.save(tmp_path, cfg, combined)
    again, report = peft.load(tmp_path, cfg)
    assert len(report.sites) == 16
    _, merged = adapters.merge(cfg, params, again)
    for path, layer in ((("layers", "mlp", "gate_proj"), 1), (("layers", "attn", "o_proj"), 0)):
        old, new = (tree[path[0]][path[1]][path[2]]["weight"][layer] for tree in (params, merged))
        there = zip((0.5, 0.5, 1.0), given, strict=True)
        total = sum(w * product(a.sites[path][layer]) for w, a in there if path in a.sites and a.sites[path][layer])
        np.testing.assert_allclose(new - old, total, rtol=1e-4, atol=1e-5)
    table = np.asarray(merged["embed"]["weight"]) - np.asarray(params["embed"]["weight"])
    np.testing.assert_allclose(table, product(given[2].sites[EMBED][0]).T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        ({}, dict(weights=[1]), "got 3 adapters and 1 weights"),
        ({}, dict(method="ties"), "got density=None for ties"),
        ({}, dict(method="ties", density=0), "got density=0 for ties"),
        ({}, dict(method="cat", density=0.5), "got density=0.5 for cat"),
        ({}, dict(method="cat", rank=2), "got rank=2 for cat of product"),
        ({}, dict(method="svd", rank=0), "got rank=0 for svd"),
        ({}, dict(method="linear", space="factors", rank=2), "got rank=2 for linear of factors"),
        ({}, dict(method="linear", space="factors"), "got ranks [2, 3] at layers.attn.q_proj.0"),
        (dict(full={("norm", "weight"): (np.ones(9),)}), {}, "with whole weights for norm.weight"),
        (dict(sites={Q: (update(6, 9, 1, 1),)}), {}, "got adapters of [1, 2] layers at layers.attn.q_proj"),
        (dict(sites={Q: (update(6, 8, 1, 1), None)}), {}, "got updates of [(6, 8), (6, 9)] at layers.attn.q_proj.0"),
    ],
)
def test_combinations_that_do_not_exist(change, options, expected):
    x, y, z = three()
    with pytest.raises(UserError) as caught:
        merge.combine([dataclasses.replace(x, **change), y, z], **dict(weights=WEIGHTS, name="c") | options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_base_weights_are_kept_if_they_are_those_of_one_base():
    x, y, z = three()
    table = {("embed", "weight"): (np.ones((3, 2)),)}
    x, y = dataclasses.replace(x, base=table), dataclasses.replace(y, base=table)
    assert merge.combine([x, y, z], WEIGHTS, name="c").base == table
    z = dataclasses.replace(z, base={("embed", "weight"): (np.zeros((3, 2)),)})
    with pytest.raises(UserError, match=r"got different base weights for embed\.weight in adapter 'z'"):
        merge.combine([x, y, z], WEIGHTS, name="c")


def test_gates_are_no_sums():
    gated = fresh(*golden.params("llama_tied"), "gated", rank=2, sites=("attn.q_proj",), gate=GateConfig())
    with pytest.raises(UserError, match="combine: got adapter 'gated', whose gates .* scale the update anew"):
        merge.combine([gated, gated], [0.5, 0.5], name="both")
