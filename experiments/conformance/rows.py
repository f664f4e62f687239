"""The rows: small inputs that adapter libraries were reported to get wrong, and what is right for each."""

import json
import pathlib
from collections.abc import Callable

import ml_dtypes
import numpy as np

from experiments.conformance.inputs import ROOT, Inputs, Q, Tensors, read
from experiments.conformance.side import Row, Side

ROWS: list[Row] = []


def row(number: int, input: str, behaviour: str, refusal: str | None = None):
    """Puts a check on the scoreboard."""

    def put(check: Callable) -> Callable:
        ROWS.append(Row(number, input, behaviour, check, refusal))
        return check

    return put


def close(got: np.ndarray, want: np.ndarray) -> tuple[bool, str]:
    """Whether logits, or updates, are equal but for rounding."""
    off = float(np.abs(got - want).max())
    return off < 1e-3 * np.abs(want).max(), f"off by {off:.2g} of {np.abs(want).max():.2g}"


def all_of(*found: tuple[bool, str]) -> tuple[bool, str]:
    """Right if every part is; says what the first wrong one did, else the last one."""
    return next((part for part in found if not part[0]), found[-1])


def reads(inputs: Inputs, side: Side, folder: pathlib.Path, meant: pathlib.Path) -> tuple[bool, str]:
    """Whether the adapter in `folder` gives what the plain one in `meant` does."""
    got, want = side.logits(side.load({"x": folder})), side.bare(inputs.folded(meant))
    base = side.bare(inputs.base("untied"))
    right, what = close(got, want)
    return (False, "loads, and gives the base's logits") if close(got, base)[0] else (right, f"loads, {what}")


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


@row(1, "tensor names lack one `model.`", "the prefix is repaired, or an error", r"expected|prefix")
def _(inputs, side):
    broken = inputs.adapter(edit=renamed(ROOT, "base_model.model."))
    return reads(inputs, side, broken, inputs.adapter())


@row(2, "tensor names lack `base_model.model.`", "the prefix is repaired, or an error", r"expected|prefix")
def _(inputs, side):
    broken = inputs.adapter(edit=renamed("base_model.model.", ""))
    return reads(inputs, side, broken, inputs.adapter())


@row(3, "one lora_B is missing", "an error that names it", r"layers\.1\.self_attn\.v_proj\.lora_B")
def _(inputs, side):
    gone = f"{ROOT}layers.1.self_attn.v_proj.lora_B.weight"
    side.load({"x": inputs.adapter(edit=lambda t: {n: v for n, v in t.items() if n != gone})})
    return False, "loads, that module left unadapted"


@row(4, "a tensor of layer 9, of a model of 2", "an error that names it", r"layers\.9\.self_attn\.q_proj")
def _(inputs, side):
    extra = lambda t: t | {f"{ROOT}{Q.format(9)}.lora_A.weight": np.ones((4, 64), np.float32)}
    side.load({"x": inputs.adapter(edit=extra)})
    return False, "loads, that tensor left out"


def names(side: Side, word: str, what: str) -> tuple[bool, str]:
    return any(word in line for line in side.said), what


@row(5, 'target_modules ["q_proj", "v_proj", "w1"]', "an error or a warning that names w1", r"\bw1\b")
def _(inputs, side):
    side.load({"x": inputs.adapter(target_modules=["q_proj", "v_proj", "w1"])})
    return names(side, "w1", "loads, w1 left out")


@row(6, 'alpha_pattern {"q_porj": 100}', "an error or a warning that names q_porj", "q_porj")
def _(inputs, side):
    side.load({"x": inputs.adapter(alpha_pattern={"q_porj": 100})})
    return names(side, "q_porj", "loads, the pattern left out")


def scaled(side: Side, folder: pathlib.Path, want: tuple[float, float]) -> tuple[bool, str]:
    found = side.scales(side.load({"x": folder}))
    got = found[Q.format(0)], found[Q.format(1)]
    return got == want, f"scales {got[0]:g} and {got[1]:g}"


@row(7, "rank_pattern of q, alpha_pattern of q in layer 1", "scales 0.5 and 4")
def _(inputs, side):
    patterns = dict(rank_pattern={"q_proj": 16}, alpha_pattern={Q.format(1): 64})
    return scaled(side, inputs.adapter(rank=lambda name: 16 if "q_proj" in name else 4, **patterns), (0.5, 4.0))


@row(8, "rsLoRA, with both patterns in layer 1", "scales 4 and 16")
def _(inputs, side):
    patterns = dict(use_rslora=True, rank_pattern={Q.format(1): 16}, alpha_pattern={Q.format(1): 64})
    return scaled(side, inputs.adapter(rank=lambda name: 16 if name == Q.format(1) else 4, **patterns), (4.0, 16.0))


@row(9, "one rsLoRA adapter, combined alone by cat and svd", "its own update")
def _(inputs, side):
    group = side.load({"x": inputs.adapter(rank=16, lora_alpha=16, use_rslora=True)})
    found, own = [], side.delta(group)
    for method in ("cat", "svd"):
        got = side.delta(side.combine(group, {"x": 1.0}, method), "sum")
        found.append((close(got, own)[0], f"{method}: update × {np.linalg.norm(got) / np.linalg.norm(own):.3g}"))
    return all_of(*found)


def alone(side: Side, folder: pathlib.Path) -> tuple[bool, str]:
    """One adapter combined with weight 1 by cat is itself."""
    group = side.load({"x": folder})
    want = side.logits(group)
    side.said.clear()  # what matters is whether the loss is told
    right, what = close(side.logits(side.combine(group, {"x": 1.0}, "cat"), "sum"), want)
    return right, f"logits {what}"


@row(10, "an adapter with lora_bias, combined alone by cat", "keeps the bias, or an error", "bias")
def _(inputs, side):
    bias = lambda t: t | {n[:-6] + "bias": np.linspace(-1, 1, len(v)).astype("f4") for n, v in t.items() if "_B" in n}
    return alone(side, inputs.adapter(edit=bias, lora_bias=True))


@row(11, "a trained DoRA adapter, combined alone by cat", "keeps the magnitude, or an error", "(?i)dora|magnitude")
def _(inputs, side):
    base = inputs.base_tensors("untied")

    def decomposed(tensors: Tensors) -> Tensors:
        vectors = {}
        for name, a in tensors.items():
            if "lora_A" in name:
                own = base[name.removeprefix("base_model.model.").replace("lora_A.", "")]
                full = own + 2 * tensors[name.replace("lora_A", "lora_B")] @ a
                vectors[name.replace("lora_A.weight", "lora_magnitude_vector")] = 1.3 * np.linalg.norm(full, axis=1)
        return tensors | vectors

    return alone(side, inputs.adapter(edit=decomposed, use_dora=True))


@row(13, "an adapter and itself, at 0.5 each, by linear", "its own update")
def _(inputs, side):
    folder = inputs.adapter()
    group = side.load({"x": folder, "y": folder})
    got, own = side.delta(side.combine(group, {"x": 0.5, "y": 0.5}, "linear"), "sum"), side.delta(group)
    return close(got, own)[0], f"update × {np.linalg.norm(got) / np.linalg.norm(own):.3g}"


@row(14, "a batch: one adapter with a head of its own, one without", "each row has its own head")
def _(inputs, side):
    head = np.random.default_rng(3).standard_normal((97, 64)).astype(np.float32)
    plain = inputs.adapter(seed=1)
    whole = inputs.adapter(edit=lambda t: t | {"base_model.model.lm_head.weight": head}, modules_to_save=["lm_head"])
    got = side.mixed(side.load({"plain": plain, "whole": whole}), ["plain", "whole"])
    found = [close(got[i], side.bare(inputs.folded(folder))) for i, folder in enumerate((plain, whole))]
    return all_of(*found)


@row(16, "a batch with a misspelt adapter", "an error that names it", "plane")
def _(inputs, side):
    side.mixed(side.load({"plain": inputs.adapter()}), ["plain", "plane"])
    return False, "runs"


@row(17, "an adapter of a tied head, merged", "the same logits, and a config that says untied; or an error", "tie")
def _(inputs, side):
    def head(tensors: Tensors) -> Tensors:
        rng = np.random.default_rng(5)
        a, b = rng.uniform(-1, 1, (4, 64)) / 8, rng.standard_normal((97, 4))
        at = "base_model.model.lm_head.lora_{}.weight"
        return tensors | {at.format("A"): a.astype("f4"), at.format("B"): b.astype("f4")}

    group = side.load({"x": inputs.adapter(edit=head, target_modules=["q_proj", "v_proj", "lm_head"])}, "tied")
    want, folder = side.logits(group), inputs.new()
    merged = close(side.merge(group, folder), want)
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    found = [(merged[0], f"merged logits {merged[1]}"), (not tied, f"tie_word_embeddings {tied}")]
    return all_of(*found, close(side.bare(folder), want))


@row(19, "bf16 adapter, bf16 base", "the adapter stays bf16")
def _(inputs, side):
    dtypes = side.dtypes(side.load({"x": inputs.adapter(dtype=ml_dtypes.bfloat16)}, "bfloat16"))
    return dtypes == {"bfloat16"}, f"loads as {', '.join(sorted(dtypes))}"


@row(20, "bf16 base: merge and take out again, 50 times", "the base as it was")
def _(inputs, side):
    before = inputs.base_tensors("bfloat16")["model.layers.0.self_attn.q_proj.weight"].astype(np.float32)
    after = side.toggled(side.load({"x": inputs.adapter(dtype=ml_dtypes.bfloat16)}, "bfloat16"), 50)
    drift = float(np.abs(after.astype(np.float32) - before).max())
    return drift == 0, f"weights drift by {drift:.2g}"


@row(21, "bf16 base: merged weights", "the fp32 sum rounded once, the error reported")
def _(inputs, side):
    folder = inputs.adapter(dtype=ml_dtypes.bfloat16)
    own = {name: value.astype(np.float64) for name, value in read(folder).items()}
    a, b = (own[f"{ROOT}{Q.format(0)}.lora_{part}.weight"] for part in "AB")
    base = inputs.base_tensors("bfloat16")["model.layers.0.self_attn.q_proj.weight"].astype(np.float64)
    exact = base + 2 * b @ a
    got, reported = side.merged_weight(side.load({"x": folder}, "bfloat16"))
    differ = float(np.mean(got.astype(np.float32) != exact.astype(ml_dtypes.bfloat16).astype(np.float32)))
    error = float(np.abs(got.astype(np.float64) - exact).max())
    what = f"{differ:.2%} of the weights are not the nearest bf16, error {error:.2g}, "
    return differ < 1e-3 and reported, what + ("reported" if reported else "not reported")


def kept(got: pathlib.Path, want: pathlib.Path) -> tuple[bool, str]:
    """Whether a written adapter holds what the given one does."""
    left, right = read(got), read(want)
    same = left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in right)
    return same, f"{len(left)} of {len(right)} tensors written"


@row(23, 'adapters "x" and "mlp" side by side, saved', "all tensors of both")
def _(inputs, side):
    folders = {n: inputs.adapter(modules=("q_proj", "down_proj"), seed=i) for i, n in enumerate(("x", "mlp"))}
    written = side.save(side.load(folders), inputs.new())
    return all_of(*(kept(written[name], folder) for name, folder in folders.items()))


@row(25, "an adapter of rank 4 swapped for one of rank 8, saved, loaded", "the logits of the latter")
def _(inputs, side):
    new = inputs.adapter(rank=8, lora_alpha=16, seed=1)
    group = side.swap(side.load({"x": inputs.adapter()}), new)
    written = side.save(group, inputs.new())["x"]
    return close(side.logits(side.load({"x": written})), side.logits(side.load({"x": new})))


@row(27, "r = 8 in the config, tensors of rank 4", "an error that names both", r"(?=.*\b8\b)(?=.*\b4\b)")
def _(inputs, side):
    side.load({"x": inputs.adapter(r=8)})
    return False, "loads"


@row(28, "A and B transposed", "an error", r"shape|size|transposed")
def _(inputs, side):
    side.load({"x": inputs.adapter(edit=lambda t: {n: np.ascontiguousarray(v.T) for n, v in t.items()})})
    return False, "loads"


@row(29, "a NaN in a tensor", "an error", "(?i)nan|finite")
def _(inputs, side):
    def spoilt(tensors: Tensors) -> Tensors:
        tensors[f"{ROOT}layers.1.self_attn.v_proj.lora_B.weight"][3, 2] = np.nan
        return tensors

    got = side.logits(side.load({"x": inputs.adapter(edit=spoilt)}))
    return False, f"loads, {np.isnan(got).mean():.0%} of the logits are NaN"


@row(30, 'config fields of the future: null, and {"x": 1}', "the first ignored, an error for the second", "meant")
def _(inputs, side):
    side.load({"x": inputs.adapter(empty=None)})
    quiet = not side.said
    side.load({"x": inputs.adapter(meant={"x": 1})})
    return False, "loads both" if quiet else "loads both, and complains of the first"


@row(33, "two adapters of other ranks and other modules", "mixed in a batch and summed, absent ones as zero")
def _(inputs, side):
    one, two = inputs.adapter(), inputs.adapter(modules=("q_proj", "down_proj"), rank=8, seed=1)
    group = side.load({"one": one, "two": two})
    got = side.mixed(group, ["one", "two"])
    found = [close(got[i], side.bare(inputs.folded(folder))) for i, folder in enumerate((one, two))]
    total = side.logits(side.combine(group, {"one": 0.5, "two": 0.5}, "linear"), "sum")
    return all_of(*found, close(total, side.bare(inputs.folded(one, two, weights=(0.5, 0.5)))))


@row(34, "X-LoRA, decoding with a cache", "the tokens that it gives without one")
def _(inputs, side):
    return side.decode_xlora({"one": inputs.adapter(), "two": inputs.adapter(seed=1)})


@row(36, 'adapters named "weight_x" and "lora"', "the same as under any other name")
def _(inputs, side):
    folder, found = inputs.adapter(), []
    for name in ("weight_x", "lora"):
        group = side.load({name: folder})
        found.append(close(side.logits(group, name), side.bare(inputs.folded(folder))))
        found.append(kept(side.save(group, inputs.new())[name], folder))
    return all_of(*found)
