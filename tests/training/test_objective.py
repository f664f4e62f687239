"""The chunked loss against one that holds all scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters.spec import BankSpec, new_bank
from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.training.batch import batch, layout, next_tokens
from molora_jax.training.objective import head, next_token_loss, token_scores
from tests import fakes
from tests.numerics import assert_close

SHAPES = [(7, 5, 23, 4), (1, 3, 9, 9), (5, 4, 8, 4), (6, 3, 1, 1)]


def operands(n: int, d: int, v: int, dtype=np.float64):
    rng = np.random.default_rng(n * v)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    targets = jnp.asarray(rng.integers(0, v, n))
    return draw(n, d), draw(v, d), targets.at[-1].set(v - 1).at[0].set(0), draw(2, n)


def naive(h, w, targets):
    scores = jnp.einsum("nd,vd->nv", h, w)
    return scores[jnp.arange(len(h)), targets], jax.nn.logsumexp(scores, axis=1)


@pytest.mark.parametrize(("n", "d", "v", "chunk"), SHAPES)
def test_any_chunk_gives_the_naive_values_and_gradients(n, d, v, chunk):
    with jax.enable_x64(True):
        h, w, targets, out = operands(n, d, v)
        ours = lambda h, w: jnp.sum(out * jnp.stack(token_scores(h, w, targets, chunk=chunk)[:2]))
        theirs = lambda h, w: jnp.sum(out * jnp.stack(naive(h, w, targets)))
        score, log_z, highest = token_scores(h, w, targets, chunk=chunk)
        for got, want in zip((score, log_z), naive(h, w, targets), strict=True):
            assert_close(got, want)
        assert_close(highest, np.max(np.asarray(h) @ np.asarray(w).T, axis=1))
        want = jax.jit(jax.grad(theirs, (0, 1)))(h, w)
        jax.tree.map(assert_close, jax.jit(jax.grad(ours, (0, 1)))(h, w), want)
        assert_close(jax.jit(jax.grad(ours))(h, w), want[0])  # with a frozen head


@pytest.mark.parametrize(("n", "share"), [(300, 0.1), (513, 0.9), (257, 0.0), (600, 1.0), (5, 0.5)])
@pytest.mark.parametrize("train_head", [False, True])
def test_tokens_that_do_not_count_have_neither_scores_nor_gradients(n, share, train_head):
    with jax.enable_x64(True):
        h, w, targets, out = operands(n, 3, 11)
        h = h * 400  # exp of scores without log Z would overflow
        where = jnp.asarray(np.random.default_rng(n).random(n) < share)

        def ours(h, w):
            score, log_z, _ = token_scores(h, w, targets, where=where, chunk=4)
            return jnp.sum(out * jnp.stack([score, log_z]))

        def theirs(h, w):
            return jnp.sum(out * jnp.where(where, jnp.stack(naive(h, w, targets)), 0))

        score, log_z, highest = jax.jit(functools.partial(token_scores, where=where, chunk=4))(h, w, targets)
        best = np.max(np.asarray(h) @ np.asarray(w).T, axis=1)
        for got, want in zip((score, log_z, highest), (*naive(h, w, targets), best), strict=True):
            assert_close(got, np.where(where, want, 0))
        of = (0, 1) if train_head else 0
        jax.tree.map(assert_close, *(jax.jit(jax.grad(f, of))(h, w) for f in (ours, theirs)))


def test_tiles_without_a_token_that_counts_are_not_computed():
    h, w, targets, _ = operands(1024, 3, 11, np.float32)
    where = jnp.arange(1024) % 4 == 1  # 256 of them, a whole tile
    broken = jnp.where(where[:, None], h, jnp.nan)
    total = jax.jit(lambda h: jnp.sum(jnp.stack(token_scores(h, w, targets, where=where)[:2])))
    assert_close(total(broken), total(h))
    want = jax.grad(lambda h: jnp.sum(jnp.where(where, jnp.stack(naive(h, w, targets)), 0)))(h)
    assert_close(jax.jit(jax.grad(total))(broken), want)


def test_scores_are_kept_in_fp32_and_gradients_in_the_dtype_they_belong_to():
    h, w, targets, out = operands(9, 16, 50, np.float32)
    low = h.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    got = token_scores(*low, targets, chunk=13)
    assert got[0].dtype == got[1].dtype == jnp.float32
    for mine, want in zip(got[:2], naive(*(leaf.astype(jnp.float32) for leaf in low), targets), strict=True):
        assert_close(mine, want, dtype=jnp.bfloat16)
    grads = jax.grad(lambda h, w: jnp.sum(out[0] * token_scores(h, w, targets, chunk=13)[0]), (0, 1))(*low)
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 2


def test_scores_as_large_as_fp32_allows_do_not_overflow():
    h, w = jnp.full((2, 1), 1e4), jnp.asarray([[1e4], [-1e4], [0.0]])
    score, log_z, _ = token_scores(h, w, jnp.asarray([0, 1]), chunk=2)
    np.testing.assert_array_equal(log_z, [1e8, 1e8])
    np.testing.assert_array_equal(score, [1e8, -1e8])
    np.testing.assert_array_equal(jax.grad(lambda h: token_scores(h, w, jnp.asarray([0, 1]))[1].sum())(h), [[1e4]] * 2)


def test_neither_all_scores_nor_a_frozen_heads_gradient_are_ever_there():
    h, w, targets, _ = operands(256, 8, 4096, np.float32)
    lowered = jax.jit(jax.grad(lambda h, w: jnp.sum(token_scores(h, w, targets, chunk=256)[1]))).lower(h, w)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 256 * 4096 * 4 / 4
    assert "256x4096x" not in lowered.as_text()
    assert "dynamic_update_slice" not in lowered.as_text()


def test_a_position_predicts_the_token_after_it():
    b = batch(np.array([[5, 6, 7], [8, 9, 0]]), valid=np.array([[1, 1, 1], [1, 1, 0]], bool))
    targets, weights = next_tokens(b)
    np.testing.assert_array_equal(targets, [6, 7, 0, 9, 0, 0])
    np.testing.assert_array_equal(weights, [1, 1, 0, 1, 0, 0])


@pytest.mark.parametrize(("name", "z_loss"), [("llama_untied", 0.1), ("qwen3", 0.0)])  # one with tied ends
def test_the_loss_of_packed_rows_is_that_of_each_document_alone(name, z_loss):
    cfg, params = fakes.model(name)
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 97, n) for n in (5, 1, 5)]
    packed = batch(np.concatenate(documents)[None], segments=np.repeat([1, 2, 3], [5, 1, 5])[None])

    @jax.jit
    def run(b):
        hidden = transformer.apply(cfg, params, b.tokens.reshape(-1), layout(b)).hidden
        return next_token_loss(cfg, params, hidden, b, z_loss=z_loss), hidden

    total, right = 0.0, 0
    for document in documents:
        scores = np.asarray(transformer.logits(cfg, params, run(batch(document[None]))[1]), np.float64)
        log_z = np.log(np.exp(scores).sum(axis=1))
        at, after = np.arange(len(document) - 1), document[1:]
        total += np.sum(log_z[:-1] - scores[at, after] + z_loss * log_z[:-1] ** 2)
        right += np.sum(scores[:-1].argmax(axis=1) == after)
    got = run(packed)[0]
    assert_close(got.loss, total, "model")
    assert (got.weight, got.extra["accuracy"]) == (8, right)


def test_experts_of_the_head_are_refused():
    cfg, params = fakes.model("qwen3")
    bank = new_bank(BankSpec(slots=1, ranks={"head": 1}), params)
    with pytest.raises(UserError, match="got a bank with experts of the head, expected experts of the layers"):
        head(cfg, params, bank)
