"""The losses of compositions, against forced routes and loops in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import router_losses
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.route import LAYER, Route
from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.training import mixture
from molora_jax.training.batch import batch as make_batch
from molora_jax.training.batch import layout
from molora_jax.training.mixture import KINDS, LORAHUB, MixtureConfig
from molora_jax.training.optimiser import OptimiserConfig
from molora_jax.training.owned import Owned
from molora_jax.training.step import Trainer
from tests import fakes
from tests.numerics import assert_close

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def world():
    cfg, params = fakes.model("llama_tied")
    experts = [fresh(cfg, params, f"e{i}", rank=2 + i, sites=MLP, seed=i, spread=0.5) for i in range(3)]
    tokens = np.random.default_rng(0).integers(0, cfg.vocab, (2, 9))
    valid = np.ones((2, 9), bool)
    valid[1, 6:] = False
    return cfg, params, experts, make_batch(jnp.asarray(tokens), valid=jnp.asarray(valid))


def _made(world, config: MixtureConfig, seed=3):
    cfg, params, experts, _ = world
    mixer = mixture.new_mixer(cfg, params, config, experts, seed=seed)
    attention = mixture.new_attention(cfg, params, config, seed=seed)
    return mixer, attention, mixture.tree(params, experts, mixer, attention)


def _reference(cfg, params, hidden, batch) -> float:
    """Σ w (-log p) by a loop in float64."""
    logits = np.asarray(transformer.logits(cfg, params, hidden), np.float64).reshape(*batch.tokens.shape, -1)
    total = 0.0
    for row in range(logits.shape[0]):
        for t in range(1, logits.shape[1]):
            weight = float(batch.weights[row, t])
            scores = logits[row, t - 1]
            total += weight * (
                np.log(np.sum(np.exp(scores - scores.max()))) + scores.max() - scores[batch.tokens[row, t]]
            )
    return total


@pytest.mark.parametrize("kind", ["hard", "hard_dense", "switch"])
def test_a_hard_choice_has_the_loss_of_the_experts_that_it_chose(world, kind):
    cfg, params, _, batch = world
    mixer, _, tree = _made(world, MixtureConfig(kind=kind, rank=0))
    out = mixture.forward(cfg, tree, batch, mixer)
    assert len(np.unique(out.trace[LAYER].ids)) > 1
    replayed = Route({LAYER: dataclasses.replace(out.trace[LAYER], scores=None, weights=None)})
    tokens = batch.tokens.reshape(-1)
    hidden = transformer.apply(cfg, params, tokens, layout(batch), bank=tree["bank"], route=replayed).hidden
    got = mixture.loss(cfg, MixtureConfig(kind=kind, rank=0), mixer)(tree, batch, jax.random.key(0))
    assert_close(got.loss, _reference(cfg, params, hidden, batch))
    if kind != "switch":
        assert np.all(np.asarray(out.trace[LAYER].gate if kind == "hard" else 1) == 1)


SLOTS = np.array([[1] * 9, [2] * 6 + [-1] * 3])


def _owned(batch) -> Owned:
    return Owned(**{f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}, experts=SLOTS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != LORAHUB])
def test_every_kind_trains_its_router_and_the_shared_adapter_alone(world, kind):
    cfg, _, _, batch = world
    batch = _owned(batch)
    config = MixtureConfig(kind=kind, rank=2)
    mixer, attention, tree = _made(world, config)
    groups = mixture.groups(attention, rate=1e-2, router_rate=1e-2)
    trainer = Trainer(tree, mixture.loss(cfg, config, mixer), OptimiserConfig(groups=groups), seed=1)
    frozen = {path: np.array(leaf) for path, leaf in trainer.frozen.items()}
    state = trainer.init()
    before = jax.tree.map(np.array, state.trained)
    for _ in range(2):  # B of the shared adapter is zero at first, so that A moves from the second step on
        state, metrics = trainer.step(state, batch)
    assert np.isfinite(metrics["loss"])
    moved = {path for path, leaf in state.trained.items() if np.any(np.asarray(leaf) != before[path])}
    assert moved == set(before)
    assert {path.split(".")[0] for path in before} == {"router", "bank"}
    assert all("shared" in path for path in before if path.startswith("bank"))
    assert all(np.array_equal(trainer.frozen[path], leaf) for path, leaf in frozen.items())
    found = mixture.trained_mixer(trainer.tree(state), mixer)
    assert type(found) is type(mixer)


def test_the_gates_of_phatgoose_train_on_their_own_domains_and_then_compete(world):
    cfg, _, experts, batch = world
    config = MixtureConfig(kind="phatgoose", rank=0)
    mixer, _, tree = _made(world, config)
    half = dataclasses.replace(Route.of(jnp.asarray(SLOTS.reshape(-1))).choices[LAYER], gate=jnp.full(18, 0.5))
    tokens = batch.tokens.reshape(-1)
    route = Route({LAYER: half})
    hidden = transformer.apply(cfg, tree["params"], tokens, layout(batch), bank=tree["bank"], route=route).hidden
    of = mixture.loss(cfg, config, mixer)
    got = of(tree, _owned(batch), jax.random.key(0))
    assert_close(got.loss, _reference(cfg, tree["params"], hidden, batch))  # gates of zero open half
    gradient = jax.grad(lambda router: of(tree | {"router": router}, _owned(batch), jax.random.key(0)).loss)
    for site, leaf in gradient(tree["router"])["params"].items():
        sizes = np.abs(np.asarray(leaf["out"]["weight"])).max(axis=(0, 2))
        assert sizes[0] == 0 < min(sizes[1:]), site  # no token is the first expert's
    assert mixer.training
    assert not mixture.trained_mixer(tree, mixer).training
    assert [e.name for e in experts] == ["e0", "e1", "e2"]


def test_the_auxiliary_losses_are_added_by_their_factors(world):
    cfg, _, _, batch = world
    factors = dict(balance=0.5, z=0.25, entropy=0.125, consistency=2.0)
    plain, config = MixtureConfig(rank=0), MixtureConfig(rank=0, **factors)
    mixer, _, tree = _made(world, plain)
    key = jax.random.key(0)
    bare, full = (jax.jit(mixture.loss(cfg, c, mixer))(tree, batch, key) for c in (plain, config))
    forward = jax.jit(lambda tree: mixture.forward(cfg, tree, batch, mixer).trace[LAYER].scores)
    scores, valid = forward(tree), batch.valid.reshape(-1)
    want = dict(
        balance=router_losses.load_balance(scores, valid),
        z=router_losses.z_loss(scores, valid),
        entropy=router_losses.entropy(scores, valid),
        consistency=router_losses.consistency(scores, layout(batch)),
    )
    added = sum(factors[name] * want[name] for name in want) * bare.weight
    assert_close(full.loss, bare.loss + added)
    for name in want:
        assert_close(full.extra[name] / full.weight, want[name])


def test_the_divergence_from_the_own_expert(world):
    cfg, params, _, batch = world
    config = MixtureConfig(kind="soft", rank=0, expert_kl=0.5)
    mixer, _, tree = _made(world, config)
    got = mixture.loss(cfg, config, mixer)(tree, _owned(batch), jax.random.key(0))
    plain = mixture.loss(cfg, MixtureConfig(kind="soft", rank=0), mixer)(tree, batch, jax.random.key(0))

    def log_p(hidden):
        logits = np.asarray(transformer.logits(cfg, params, hidden), np.float64)
        return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))

    route = Route.of(jnp.asarray(SLOTS.reshape(-1)))
    tokens = batch.tokens.reshape(-1)
    own = log_p(transformer.apply(cfg, params, tokens, layout(batch), bank=tree["bank"], route=route).hidden)
    mixed = log_p(mixture.forward(cfg, tree, batch, mixer).hidden)
    each = np.sum(np.exp(own) * (own - mixed), axis=-1).reshape(2, 9)
    want = sum(float(batch.weights[b, t]) * each[b, t - 1] for b in range(2) for t in range(1, 9))
    assert want > 0.1
    assert_close(got.extra["expert_kl"], want)
    assert_close(got.loss, plain.loss + 0.5 * want)


@pytest.mark.parametrize(
    ("kind", "output", "line"),
    [
        ("hard_dense", "diagonal", "got hard_dense over experts with diagonal gates"),
        ("gumbel", "diagonal", "got gumbel over experts with diagonal gates"),
        ("smear", "scalar", "got smear, a mixture of factors, over gated experts"),
        ("lorahub", "scalar", "got lorahub, a mixture of factors, over gated experts"),
    ],
)
def test_kinds_that_cannot_learn_over_gates_are_refused(kind, output, line):
    cfg, params = fakes.model("llama_tied")
    gate = GateConfig(output=output)
    experts = [fresh(cfg, params, n, rank=2, sites=("mlp.up_proj",), gate=gate) for n in "ab"]
    with pytest.raises(UserError, match=line):
        mixture.new_mixer(cfg, params, MixtureConfig(kind=kind), experts)
    mixture.new_mixer(cfg, params, MixtureConfig(kind="hard"), experts)


def test_bad_settings_are_one_line():
    with pytest.raises(UserError, match="got kind 'hardest'"):
        MixtureConfig(kind="hardest")
    with pytest.raises(UserError, match="auxiliary losses for mole"):
        MixtureConfig(kind="mole", balance=0.1)
    with pytest.raises(UserError, match="expected no negative number"):
        MixtureConfig(z=-1.0)
