"""A new adapter learns its data, and a hard router over frozen experts finds out whose tokens are whose."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import adapter as adapters
from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.bank import Bank
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.route import Choice, Route
from molora_jax.adapters.spec import BankSpec, new_bank, pack, unpack, write
from molora_jax.data.batch import Batch
from molora_jax.models import transformer
from molora_jax.training.batch import batch, layout
from molora_jax.training.objective import next_token_loss
from molora_jax.training.optimiser import Group, OptimiserConfig, Schedule
from molora_jax.training.step import Trainer
from tests import experts, fakes
from tests.numerics import assert_close

NAME, SITES, LAYER = "llama_untied", ("mlp.up_proj", "mlp.down_proj"), 1
KINDS, RANGE = 2, 10
ADAPTERS = Group(name="adapters", paths=("bank.*.[ab]",), rate=0.02)


def rows(seed: int, kinds: list[int], length: int = 12) -> Batch:
    """Each row counts: of kind 0 upwards by one among the first 40 tokens, of kind 1 down by three among the next."""
    first = np.random.default_rng(seed).integers(0, RANGE, len(kinds))
    counts = [
        (start + (1, -3)[kind] * np.arange(length)) % RANGE + kind * RANGE
        for start, kind in zip(first, kinds, strict=True)
    ]
    return batch(np.stack(counts))


def banked(params, found: list[Adapter]) -> Bank:
    spec = BankSpec.holding(found)
    put = lambda bank, at: write(bank, at[0], pack(spec, params, at[1]))
    return functools.reduce(put, enumerate(found), new_bank(spec, params))


def loss(cfg, tree, b: Batch, key):
    """Experts by `tree["router"]`, or all tokens with the one there is."""
    n = b.tokens.size
    route = Route(router=tree["router"]) if "router" in tree else Route.of(jnp.zeros(n, jnp.int32))
    out = transformer.apply(cfg, tree["params"], b.tokens.reshape(-1), layout(b), bank=tree["bank"], route=route)
    sums = next_token_loss(cfg, tree["params"], out.hidden, b, bank=tree["bank"])
    if "router" in tree:
        mine = out.trace["layer"].ids[LAYER] == b.tokens.reshape(-1) // RANGE
        sums.extra["routed_right"] = jnp.mean(mine) * sums.weight
    return sums


@functools.cache
def model():
    return fakes.model(NAME)


@functools.cache
def trained(kind: int) -> tuple[Adapter, Bank, list[float]]:
    """An expert of one kind of rows, the bank it was trained in, and its losses."""
    cfg, params = model()
    new = fresh(cfg, params, f"kind {kind}", rank=4, sites=SITES, seed=kind)
    new = experts.edit(new, lambda path, i, weights: weights if i == LAYER else None)
    before = jax.tree.map(lambda leaf: np.array(leaf, copy=True), params)
    made = Trainer(
        {"params": params, "bank": banked(params, [new])},
        functools.partial(loss, cfg),
        OptimiserConfig(groups=(ADAPTERS,)),
    )
    state, losses = made.init(), []
    for step in range(60):
        state, metrics = made.step(state, rows(step, [kind] * 8))
        losses.append(metrics["loss"])
    after = made.tree(state)
    jax.tree.map(np.testing.assert_array_equal, after["params"], before)
    return unpack(after["bank"], 0, params, new), after["bank"], [float(value) for value in losses]


@pytest.mark.parametrize("kind", range(KINDS))
def test_a_new_adapter_learns_its_rows_and_goes_into_the_base(kind):
    cfg, params = model()
    found, bank, losses = trained(kind)
    assert losses[0] > 4
    assert np.mean(losses[-5:]) < losses[0] / 4
    b = rows(1000, [kind] * 3)
    ids = jnp.zeros(b.tokens.size, jnp.int32)
    run = lambda cfg, params, **kw: transformer.logits(
        cfg, params, transformer.apply(cfg, params, b.tokens.reshape(-1), layout(b), **kw).hidden
    )
    merged = adapters.merge(cfg, params, found)
    assert_close(jax.jit(run, static_argnums=0)(*merged), run(cfg, params, bank=bank, route=Route.of(ids)), "model")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hard:
    """The best-scored expert, with the gradient of the mixture (dense straight-through)."""

    weight: jax.Array
    per_site = False

    def at(self, layer) -> "Hard":
        return self

    def decide(self, key, x, site, given, layout, pool) -> Choice:
        scores = (self.weight @ x).T
        return Choice(ids=jnp.argmax(scores, axis=1).astype(jnp.int32), weights=jax.nn.softmax(scores))


def test_a_hard_router_learns_whose_tokens_are_whose():
    cfg, params = model()
    bank = banked(params, [trained(kind)[0] for kind in range(KINDS)])
    router = Hard(jnp.asarray(np.random.default_rng(0).standard_normal((KINDS, cfg.width)) * 0.02, jnp.float32))
    made = Trainer(
        {"params": params, "bank": bank, "router": router},
        functools.partial(loss, cfg),
        OptimiserConfig(
            groups=(Group(name="router", paths=("router.*",), rate=0.1),), schedule=Schedule(shape="cosine", steps=100)
        ),
    )
    state, seen = made.init(), []
    assert set(state.trained) == {"router.weight"}
    for step in range(100):
        state, metrics = made.step(state, rows(step, [0, 1] * 4))
        seen.append((metrics["loss"], metrics["routed_right"]))
    losses, right = np.asarray(seen, np.float32).T
    assert right[0] < 0.7
    assert np.mean(right[-20:]) > 0.9
    assert np.mean(losses[-20:]) < np.mean(losses[:3]) / 3
    jax.tree.map(np.testing.assert_array_equal, made.tree(state)["bank"], bank)


def test_microbatches_of_a_decoder_give_the_gradient_of_the_whole_batch():
    """In float64, with rows that count differently; Adam's first moment is a tenth of the gradient."""
    with jax.enable_x64(True):
        cfg, params = fakes.model(NAME, jnp.float64)
        new = fresh(cfg, params, "new", rank=2, sites=SITES, spread=0.1)
        spec = BankSpec.holding([new], dtype=jnp.float64)
        tree = {"params": params, "bank": write(new_bank(spec, params), 0, pack(spec, params, new))}
        b = rows(0, [0, 1, 0, 1])
        weights = np.random.default_rng(0).uniform(size=b.tokens.shape) * (np.arange(4) != 2)[:, None]
        b = dataclasses.replace(b, weights=jnp.asarray(weights))
        config = OptimiserConfig(groups=(ADAPTERS,), clip=None)
        states = []
        for parts in (1, 4):
            made = Trainer(tree, functools.partial(loss, cfg), config, accumulate=parts)
            states.append(made.step(made.init(), b))
        (one, whole), (four, cut) = states
        assert_close(cut["loss"], whole["loss"], "model")
        for got, want in zip(jax.tree.leaves(four.optimiser), jax.tree.leaves(one.optimiser), strict=True):
            if got.dtype == np.float64:
                assert_close(got, want, "model")
        assert np.abs(whole["grad_norm"]) > 1e-3
