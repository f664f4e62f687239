"""Training of heads: the loss against fp64 numpy, what is held out, and heads that learn what is there to learn."""

import jax
import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.routing import heads as routing_heads
from molora_jax.routing.heads import HeadConfig
from molora_jax.training import heads
from molora_jax.training.heads import HeadTraining, Tokens
from molora_jax.training.labels import DIVERGENT, IDENTICAL, Labels
from tests.numerics import assert_close
from tests.routing import numpy_heads

D, K, V = 5, 3, 7
CONFIGS = {
    "r2r": HeadConfig(kind="r2r", hidden=D, width=6, top_k=K, blocks=1, expansion=2),
    "mlp": HeadConfig(kind="mlp", hidden=D, width=4),
    "linear": HeadConfig(kind="linear", hidden=D),
}
EMBEDDING = np.random.default_rng(9).normal(size=(V, D)).astype(np.float32)


def labelled(count: int, per_question: int = 4, seed: int = 0) -> Labels:
    """Tokens that are divergent where the first feature is high, with some noise."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(count, D)).astype(np.float32)
    top = -np.sort(-rng.normal(size=(count, K)).astype(np.float32), axis=1)
    kind = np.where(hidden[:, 0] + 0.2 * rng.normal(size=count) > 1, DIVERGENT, IDENTICAL)
    return Labels(hidden, rng.integers(0, V, count), top, kind, np.arange(count) // per_question)


@pytest.mark.parametrize("kind", CONFIGS)
def test_loss(kind):
    cfg, rng, own = CONFIGS[kind], np.random.default_rng(1), labelled(6)
    params, wanted = routing_heads.init(cfg, 1), np.arange(6) % 2 == 0
    weights = rng.uniform(0, 3, 6).astype(np.float32)
    batch = Tokens(own.token, own.hidden, own.top_logits, wanted, weights)
    got = heads.loss(cfg, dict(head=params, embedding=EMBEDDING), batch, None)
    want = 0.0
    for i in range(6):
        given = (own.hidden[i], EMBEDDING[own.token[i]], own.top_logits[i]) if kind == "r2r" else (own.hidden[i],)
        if kind == "linear":
            p = numpy_heads.sigmoid(numpy_heads.affine(params["output"], *given))[0]
        else:
            p = getattr(numpy_heads, kind)(params, *given)
        want -= weights[i] * np.log(p if wanted[i] else 1 - p)
    assert_close(got.loss, np.array(want), "model")
    assert_close(got.weight, np.array(weights.sum(dtype=np.float64)), "op")


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_head_learns_and_comes_back_from_disk(kind, tmp_path):
    own, cfg = labelled(640), CONFIGS[kind]
    wanted = ~own.divergent if kind == "mlp" else own.divergent
    found = heads.train(cfg, EMBEDDING, own, wanted, HeadTraining(rows=64, rate=2e-2, epochs=10, patience=4))
    assert found.losses.index(min(found.losses)) > 0
    new = labelled(400, seed=5)
    scores = heads.scored(cfg, found.params, EMBEDDING, new)
    truth = ~new.divergent if kind == "mlp" else new.divergent
    above = scores[truth][:, None] > scores[~truth][None]
    assert above.mean() > 0.95
    routing_heads.save(tmp_path, cfg, found.params, found.threshold)
    again, params, threshold = routing_heads.load(tmp_path)
    assert (again, threshold) == (cfg, found.threshold)
    given = (new.hidden[3], EMBEDDING[new.token[3]], new.top_logits[3]) if kind == "r2r" else (new.hidden[3],)
    assert_close(routing_heads.score(cfg, params, *given), scores[3], "model")


def test_the_slice_held_out_is_never_trained_on(monkeypatch):
    own, seen = labelled(400), []
    real = heads.Trainer

    class Watched(real):
        def step(self, state, batch):
            seen.append(np.asarray(batch.hidden)[:, 1])
            return super().step(state, batch)

    monkeypatch.setattr(heads, "Trainer", Watched)
    config = HeadTraining(rows=32, rate=1e-2, epochs=2, held_out=0.2, recall=1.0)
    found = heads.train(CONFIGS["linear"], EMBEDDING, own, own.divergent, config)
    used = np.isin(own.hidden[:, 1], np.concatenate(seen))
    by_question = used.reshape(-1, 4)
    whole = by_question.all(axis=1) | ~by_question.any(axis=1)
    # two epochs of 10 batches of 32 leave nothing out of the 320 tokens of 80 questions
    assert whole.all()
    assert by_question.any(axis=1).sum() == 80
    held = own.at(~used)
    scores = heads.scored(CONFIGS["linear"], found.params, EMBEDDING, held)
    assert found.threshold == pytest.approx(scores[held.divergent].min(), rel=1e-5)
    assert found.recall == 1.0
    assert found.rate == pytest.approx(np.mean(scores >= found.threshold))


def test_the_best_epoch_is_kept():
    own = labelled(240)
    config = HeadTraining(rows=32, rate=0.3, epochs=20, patience=3)
    found = heads.train(CONFIGS["r2r"], EMBEDDING, own, own.divergent, config)
    best = int(np.argmin(found.losses))
    assert len(found.losses) == min(best + 1 + config.patience, config.epochs)
    rerun = heads.train(CONFIGS["r2r"], EMBEDDING, own, own.divergent, HeadTraining(rows=32, rate=0.3, epochs=best + 1))
    jax.tree.map(np.testing.assert_array_equal, rerun.params, found.params)


@pytest.mark.parametrize("recall", [0.1, 0.5, 0.95, 1.0])
def test_the_threshold_is_the_highest_that_recalls_enough(recall):
    rng = np.random.default_rng(3)
    scores, wanted = rng.integers(0, 20, 60) / 20, rng.random(60) < 0.4
    got = heads.at_recall(scores, wanted, recall)
    enough = [t for t in np.unique(scores) if np.mean(scores[wanted] >= t) >= recall]
    assert got == max(enough)


def test_refusals():
    own = labelled(40)
    with pytest.raises(UserError, match=r"head: got labels of width 5 with 3 logits, expected 5 and 4"):
        heads.train(HeadConfig(kind="r2r", hidden=D, top_k=4), EMBEDDING, own, own.divergent)
    with pytest.raises(UserError, match="head: got 0 wanted tokens of .* in the training slice"):
        heads.train(CONFIGS["linear"], EMBEDDING, own, np.zeros(40, bool))
    with pytest.raises(UserError, match="head: got HeadTraining"):
        HeadTraining(epochs=0)
