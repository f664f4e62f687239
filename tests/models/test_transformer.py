"""The decoder, against the logits that transformers gives for tiny models of every family."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.config import ModelConfig, UserError
from molora_jax.models import families, transformer
from molora_jax.models.state import kv_rows, new_state
from molora_jax.nn.layout import dense, ragged
from tests import golden
from tests.numerics import assert_close

WIDTH = 70  # of dense rows: room for the three golden rows one after another
PAGE = 4


@functools.partial(jax.jit, static_argnums=0)
def run_dense(cfg, params, tokens, valid, segments):
    """Logits [B, T, V] of dense rows."""
    layout = dense(*tokens.shape, valid=valid, segments=segments)
    hidden = transformer.apply(cfg, params, tokens.reshape(-1), layout).hidden
    return transformer.logits(cfg, params, hidden).reshape(*tokens.shape, -1)


@functools.partial(jax.jit, static_argnames=("cfg", "tile"), donate_argnames="state")
def run_ragged(cfg, params, state, tables, tokens, starts, lengths, *, tile):
    """Logits [N, V] of ragged rows, and the state that remembers them."""
    layout = ragged(starts, lengths, tables, tokens=len(tokens), tile=tile, page_size=PAGE)
    out = transformer.apply(cfg, params, tokens, layout, state)
    return transformer.logits(cfg, params, out.hidden), out.state


@dataclasses.dataclass
class Model:
    """A golden model: stacked and unstacked weights, rows of tokens, their logits."""

    cfg: ModelConfig
    stacked: dict
    unstacked: dict
    rows: list[np.ndarray]
    want: list[np.ndarray]


@functools.cache
def load(name: str) -> Model:
    cfg, params = golden.params(name)
    _, _, rows, want = golden.load(name)
    return Model(cfg, params, transformer.unstack(dict(params)), rows, want)


every_family = pytest.mark.parametrize("name", golden.names())
some_families = pytest.mark.parametrize("name", ["llama_untied", "gemma3"])  # 3 layers; two windows, two rotations


PLACES = {
    "right": lambda n, rng: np.arange(n),
    "left": lambda n, rng: np.arange(WIDTH - n, WIDTH),
    "middle": lambda n, rng: np.sort(rng.choice(WIDTH, n, replace=False)),
}


@every_family
def test_pads_on_any_side_and_packed_neighbours_change_nothing(name):
    rng, model = np.random.default_rng(0), load(name)
    ends = np.cumsum([0, *map(len, model.rows)])
    for side in (*PLACES, "packed"):
        tokens = rng.integers(0, model.cfg.vocab, (3, WIDTH)).astype(np.int32)  # pads are any token
        valid, segments = np.zeros((3, WIDTH), bool), np.zeros((3, WIDTH), np.int32)
        if side == "packed":  # all in the last row; the first is nothing but pads, the second is somebody else
            valid[1, :] = True
            places = [(2, np.arange(ends[b], ends[b + 1]) + 2) for b in range(3)]
        else:
            places = [(b, PLACES[side](len(row), rng)) for b, row in enumerate(model.rows)]
        for b, at in enumerate(places):
            tokens[at], valid[at], segments[at] = model.rows[b], True, b + 1
        logits = np.asarray(run_dense(model.cfg, model.stacked, tokens, valid, segments))
        assert np.isfinite(logits).all()
        for at, want in zip(places, model.want, strict=True):
            assert_close(logits[at], want, "model")


@every_family
def test_batch_of_one_without_pads_unrolled(name):
    model = load(name)
    row = model.rows[0][None]
    logits = run_dense(model.cfg, model.unstacked, row, np.ones_like(row, bool), np.zeros_like(row))
    assert_close(logits[0], model.want[0], "model")


def chunkings(lengths: list[int], most: int, rng):
    """How many tokens each row gives at each call until all are read: random, some none, at most `most` in all."""
    left = np.array(lengths)
    while left.any():
        take = np.minimum(rng.integers(0, 9, len(left)), left)
        while take.sum() > most:
            take[rng.integers(len(left))] //= 2
        left -= take
        yield take


FORMS = [(name, "stacked", "unstacked") for name in golden.names()] + [("gemma3", "unstacked", "stacked")]


# a prefill of mixed chunks scans the stacked layers and decoding unrolls them, or the other way round
@pytest.mark.parametrize(("name", "prefill", "decode"), FORMS)
def test_prefill_in_any_chunks_and_decode_equal_the_whole_row(name, prefill, decode):
    model, rng = load(name), np.random.default_rng(1)
    cfg, rows = model.cfg, len(model.rows)
    pages = -(-max(map(len, model.rows)) // PAGE)
    counts = tuple(rows * pages + 2 + k for k in range(len(cfg.kinds)))
    tables = np.stack([rng.permutation(n)[: rows * pages].reshape(rows, pages) for n in counts]).astype(np.int32)
    state = new_state(cfg, pages=counts, page_size=PAGE)
    state = jax.tree.map(lambda kv: jnp.full_like(kv, jnp.nan), state)  # nothing is read before it is written
    got, at = [[] for _ in model.rows], np.zeros(rows, np.int32)
    prompts = [len(row) - 7 if len(row) > 7 else 0 for row in model.rows]
    steps = [np.array([len(row) > end + i for row, end in zip(model.rows, prompts, strict=True)]) for i in range(7)]
    calls = [(take, prefill, 16, 4) for take in chunkings(prompts, 16, rng)]
    calls += [(take.astype(np.int64), decode, rows, 1) for take in steps]
    for take, weights, size, tile in calls:
        flat = [row[i : i + n] for row, i, n in zip(model.rows, at, take, strict=True)]
        tokens = np.pad(np.concatenate(flat), (0, size - take.sum())).astype(np.int32)
        logits, state = run_ragged(
            cfg, getattr(model, weights), state, tables, tokens, at, take.astype(np.int32), tile=tile
        )
        for b, part in enumerate(np.split(np.asarray(logits)[: take.sum()], np.cumsum(take)[:-1])):
            got[b].append(part)
        at += take.astype(np.int32)
    for ours, want in zip(got, model.want, strict=True):
        assert_close(np.concatenate(ours), want, "model")


@pytest.mark.parametrize(("name", "weights"), [("gemma3", "stacked"), ("llama_untied", "unstacked")])
def test_first_layers_and_taps(name, weights):
    model = load(name)
    cfg, params, row = model.cfg, getattr(model, weights), model.rows[0][:11]
    run = functools.partial(jax.jit(transformer.apply, static_argnames=("cfg", "layers", "taps")), cfg, params, row)
    layout = dense(1, len(row))
    out = run(layout, taps=("hidden",))
    stream = np.asarray(out.taps["hidden"])
    assert out.state is None
    assert stream.shape == (cfg.layers, len(row), cfg.width)
    scale = np.sqrt(np.mean(np.square(stream[-1]), -1, keepdims=True) + cfg.norm_eps)
    normed = stream[-1] / scale * (np.asarray(params["norm"]["weight"]) + cfg.norm_offset)
    assert_close(out.hidden, normed, "model")  # the final norm is no part of the stream
    first = run(layout, layers=2, taps=("hidden",))
    assert_close(first.hidden, stream[1], "model")
    assert_close(first.taps["hidden"], stream[:2], "model")
    everything = run(layout, layers=cfg.layers)
    assert_close(everything.hidden, stream[-1], "model")
    assert everything.taps == {}


def test_queries_and_keys_are_projections_of_the_stream_where_nothing_is_rotated():
    model = load("llama_untied")
    cfg, params, row = model.cfg, model.stacked, model.rows[0][:6]
    layout = dense(1, len(row), positions=np.zeros((1, len(row)), np.int32))
    taps = transformer.apply(cfg, params, row, layout, taps=("hidden", "queries", "keys")).taps
    before = np.concatenate([np.asarray(params["embed"]["weight"])[row][None], taps["hidden"][:-1]]).astype(np.float64)
    for i, x in enumerate(before):
        layer = jax.tree.map(lambda leaf, i=i: np.asarray(leaf[i], np.float64), params["layers"])
        x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + cfg.norm_eps) * layer["attn_norm"]["weight"]
        for name, site in dict(queries="q_proj", keys="k_proj").items():
            want = (layer["attn"][site]["weight"] @ x.T).reshape(-1, cfg.head_width, len(row))
            assert_close(taps[name][i], want, "model")


def test_logits_are_projected_for_the_rows_asked_for():
    model = load("llama_tied")
    cfg, row, wanted = model.cfg, model.rows[0], np.array([len(model.rows[0]) - 1, 3])

    @jax.jit
    def run(params):
        hidden = transformer.apply(cfg, params, row, dense(1, len(row))).hidden
        return transformer.logits(cfg, params, hidden[wanted])

    logits = run(model.stacked)
    assert logits.shape == (2, cfg.vocab)
    assert_close(logits, model.want[0][wanted], "model")


def test_abstract_is_the_shape_of_init():
    cfg, dtype = load("gemma3").cfg, jnp.bfloat16
    made, declared = transformer.init(cfg, seed=3, dtype=dtype), transformer.abstract(cfg, dtype)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), declared)
    assert jax.tree.structure(made) == jax.tree.structure(load("gemma3").stacked)
    embed, norm = (np.asarray(made[name]["weight"], np.float32) for name in ("embed", "norm"))
    np.testing.assert_allclose(np.std(embed), cfg.width**-0.5, rtol=0.05)
    np.testing.assert_array_equal(norm, 1 - cfg.norm_offset)
    other = transformer.init(cfg, seed=4, dtype=dtype)
    assert np.any(np.asarray(other["embed"]["weight"], np.float32) != embed)


@some_families
def test_unstack_gives_each_layer_its_slice(name):
    model = load(name)
    assert len(model.unstacked["layers"]) == model.cfg.layers
    for i, layer in enumerate(model.unstacked["layers"]):
        same = jax.tree.map(lambda whole, part, i=i: np.array_equal(whole[i], part), model.stacked["layers"], layer)
        assert all(jax.tree.leaves(same))


@some_families
def test_bfloat16_weights_stay_near_the_reference(name):
    model = load(name)
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model.stacked)
    row = model.rows[1][None]
    logits = run_dense(model.cfg, low, row, np.ones_like(row, bool), np.zeros_like(row))
    assert logits.dtype == jnp.float32
    assert_close(logits[0], model.want[1], "model", jnp.bfloat16)


def test_layers_of_a_kind_share_a_page_table_and_no_rows():
    cfg, _ = golden.params("gemma3")
    pages = tuple(3 + i for i in range(len(cfg.kinds)))
    state = new_state(cfg, pages=pages, page_size=PAGE)
    bases = state.bases(cfg)
    ends = [base + pages[kind] * PAGE for base, kind in zip(bases, cfg.kind_of_layer, strict=True)]
    assert bases[0] == 0
    assert list(bases[1:]) == ends[:-1]
    assert ends[-1] == kv_rows(cfg, pages, PAGE) == len(state.kv.rows)
    assert state.kv.rows.shape[1] == 2 * cfg.kv_width


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (dict(heads=6, kv_heads=4), "6 query heads do not divide into 4"),
        (dict(windows=(0,)), "got 1 attention windows for 2 layers"),
        (dict(head_width=5), "needs an even head width, got 5"),
    ],
)
def test_impossible_configs_are_refused_in_one_line(fields, line):
    cfg = families.from_hf(golden.load("llama_tied")[0])
    with pytest.raises(UserError, match=line):
        dataclasses.replace(cfg, **fields)
