"""Reinforcement from prompts to an adapter's folder: it learns, a control does not, it resumes, a bad sync is seen."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from molora_jax import compilation
from molora_jax.checkpoints import peft
from molora_jax.compilation import counted
from molora_jax.config import UserError
from molora_jax.training import grpo, policy, sft, specialist
from molora_jax.training.actor import Actor
from molora_jax.training.collector import AGREEMENT
from molora_jax.training.metrics import FILE
from molora_jax.training.rlvr_settings import RLVRConfig
from molora_jax.training.specialist import AdapterConfig
from tests.numerics import TOLERANCES
from tests.training import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base, and a cache for the programs that every run of these compiles anew."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation.use_cache(tmp_path_factory.mktemp("xla"))
    yield tiny.base(tmp_path_factory.mktemp("base"))
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(autouse=True)
def even(monkeypatch):
    """Right is what begins with four even tokens: one rollout in sixteen of a model that knows nothing."""

    def judged(self, examples, found, reward):
        share = [sum(token % 2 == 0 for token in rollout.tokens[:4]) / 4 for rollout in found]
        return [value == 1 for value in share], share

    monkeypatch.setattr(Actor, "judged", judged)


def config(base, **changes) -> RLVRConfig:
    usual = dict(sft_steps=0, prompts=4, per_prompt=8, length=32, max_new_tokens=6, steps=4, rate=0.02, save_every=2)
    usual |= dict(levels=(3,))  # whose rows all fall between 16 and 32 tokens
    adapter = AdapterConfig(sites=tiny.SITES, rank=4)
    return RLVRConfig(model=str(base), adapter=adapter, problems=9, **(usual | changes))


def learner(base, **changes) -> grpo.Learner:
    made = config(base, **changes)
    model, _ = sft.load(made)
    adapter = specialist.new(model.cfg, model.params, made.adapter, "x")
    return grpo.Learner.of(made, model, policy.of_adapter(model, adapter, rate=made.rate))


def lines(folder) -> list[dict]:
    timeless = lambda line: {key: value for key, value in line.items() if key != "tokens_per_second"}
    return [timeless(json.loads(line)) for line in (folder / FILE).read_text().splitlines()]


def test_the_tolerance_is_that_of_the_table():
    for name, value in AGREEMENT.items():
        assert TOLERANCES["model", name] == (0, value)


def test_it_learns_and_from_shuffled_rewards_it_does_not(base):
    last = {}
    for shuffled in (False, True):
        made = learner(base, shuffled_rewards=shuffled, rate=0.1, temperature=0.5)
        state, rewards = made.init(), []
        frozen = {path: np.asarray(leaf) for path, leaf in made.trainer.frozen.items()}
        for step in range(16):
            with counted() as count:
                drawn = made.collector.draw(state)
                state, metrics = made.step(state, drawn)
            assert step < 2 or not count.programs
            assert metrics["finite"]
            rewards.append(drawn.facts["reward"])
        last[shuffled] = np.mean(rewards[-4:])
        assert abs(np.mean(rewards[:2]) - 0.5) < 0.1
        for path, leaf in made.trainer.frozen.items():
            np.testing.assert_array_equal(leaf, frozen[path])
        assert drawn.facts["kl"] > 1e-4  # it has left its start
    assert last[False] > 0.8
    assert last[True] < 0.65


def test_a_batch_tells_what_it_is(base):
    made = learner(base, algorithm="grpo", updates=2)
    drawn = made.collector.draw(made.init())
    facts, found = drawn.facts, drawn.experience
    assert found.tokens.shape == (32, 32)
    assert found.ids[::8] == tuple(dict.fromkeys(found.ids))
    np.testing.assert_allclose(facts["length"], found.sampled.sum(1).mean())
    np.testing.assert_allclose(facts["entropy"], -found.logprobs.sum() / found.sampled.sum(), rtol=1e-4)
    assert facts["truncated"] == np.mean(found.sampled.sum(1) == 6)  # nobody ends by itself yet
    assert facts["kl"] == 0
    assert 0 <= facts["logprob_gap"] < 2e-4
    assert facts["refills"] == 0
    rewards = np.array(
        [sum(t % 2 == 0 for t in row[s][:4]) / 4 for row, s in zip(found.tokens, found.sampled, strict=True)]
    )
    groups = rewards.reshape(4, 8)
    np.testing.assert_allclose(facts["reward"], rewards.mean())
    assert facts["accuracy"] == np.mean(rewards == 1)
    assert facts["equal_groups"] == np.mean(groups.max(1) == groups.min(1))
    want = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(found.advantages, want.reshape(-1), rtol=1e-6)


def test_one_update_of_a_batch_is_clipped_by_nothing_that_the_engine_rounds(base, monkeypatch):
    """GSPO's bounds are narrower than what two ways to run a decoder differ by in half precision."""
    made, play = learner(base, algorithm="gspo"), Actor.play

    def rounded(self, *args, **how):
        found = play(self, *args, **how)
        return [
            dataclasses.replace(r, logprobs=[value + 4e-4 * (-1) ** i for value in r.logprobs])
            for i, r in enumerate(found)
        ]

    monkeypatch.setattr("molora_jax.training.collector.AGREEMENT", {"float32": 1e-2, "bfloat16": 1e-2})
    made.collector._tolerance = 1e-2
    exact, _ = made.step(made.init(), made.collector.draw(made.init()))
    made.collector.set_state({"at": 0})
    monkeypatch.setattr(Actor, "play", rounded)
    drawn = made.collector.draw(made.init())
    assert drawn.facts["logprob_gap"] > 3e-4
    state, metrics = made.step(made.init(), drawn)
    assert metrics["clip_share"] == 0
    for path, leaf in state.trained.items():
        np.testing.assert_array_equal(leaf, exact.trained[path])


def test_dapo_draws_again_for_groups_of_equal_rewards(base, monkeypatch):
    made = learner(base, algorithm="dapo", per_prompt=2, beta=0.1, overlong=3, mask_truncated=True, updates=2)
    kinds = iter([[0, 0, 1, 1] + [0, 1] * 2, [1, 1] * 3 + [1, 0], [0, 1] * 4])

    def judged(self, examples, found, reward):
        rewards = [float(value) for value in next(kinds)]
        return [value == 1 for value in rewards], rewards

    monkeypatch.setattr(Actor, "judged", judged)
    monkeypatch.setattr("molora_jax.training.collector.overlong", lambda lengths, most, margin: np.zeros(len(lengths)))
    state = made.init()
    drawn = made.collector.draw(state)
    assert drawn.facts["refills"] == 2
    assert drawn.facts["equal_groups"] == 5 / 12
    assert made.collector.prompts.at == 12
    found = drawn.experience
    assert (found.advantages.reshape(4, 2)[:, 0] < 0).tolist() == [True, True, False, True]
    np.testing.assert_array_equal(found.weights.sum(1) > 0, found.sampled.sum(1) < 6)  # those that were cut
    np.testing.assert_allclose(found.reference, found.logprobs, atol=1e-4)
    _, metrics = made.step(state, drawn)
    assert metrics["finite"]
    assert metrics["kl"] >= 0


def test_an_engine_that_plays_another_policy_is_noticed(base, monkeypatch):
    made = learner(base)
    state, _ = made.step(made.init(), made.collector.draw(made.init()))
    monkeypatch.setattr(Actor, "sync", lambda self, adapter: None)
    with pytest.raises(
        UserError, match=r"lie 0\.\d+ from the trainer's, expected 0.0001\d? at most: the engine plays an"
    ):
        made.collector.draw(state)


def test_a_run_that_was_killed_ends_the_same_to_the_bit(base, tmp_path, monkeypatch):
    whole, broken = tmp_path / "a" / "x", tmp_path / "b" / "x"
    at_once = grpo.run(config(base), whole, progress=False)
    step = grpo.Learner.step

    def killed(self, state, drawn):
        if int(state.step) == 3:
            raise KeyboardInterrupt
        return step(self, state, drawn)

    monkeypatch.setattr(grpo.Learner, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        grpo.run(config(base), broken, progress=False)
    monkeypatch.setattr(grpo.Learner, "step", step)
    resumed = grpo.run(config(base), broken, progress=False)
    assert lines(broken) == lines(whole)
    assert (resumed.before, resumed.after, resumed.problems) == (at_once.before, at_once.after, 9)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (resumed.out / name).read_bytes() == (at_once.out / name).read_bytes()
    assert (whole / "reward.png").read_bytes()[:4] == b"\x89PNG"
    told = [line for line in lines(whole) if "reward" in line]
    assert [line["step"] for line in told] == [1, 2, 3, 4]
    shown = {"loss", "grad_norm", "clip_share", "reward", "accuracy", "length", "entropy", "kl", "equal_groups"}
    assert shown | {"truncated", "logprob_gap"} <= set(told[0])


def test_it_starts_from_a_folder_or_from_a_supervised_run(base, tmp_path):
    pytest.importorskip("grain", reason="grain is not installed")
    made = config(base, sft_steps=3, sft_rows=2, steps=1)
    result = grpo.run(made, tmp_path / "a", progress=False)
    model, _ = sft.load(made)
    start, end = (peft.load(path, model.cfg)[0] for path in (tmp_path / "a" / "start" / "adapter", result.out))
    moved = lambda one, two: max(
        np.abs(u.b - v.b).max() for (*_, u), (*_, v) in zip(one.weights(), two.weights(), strict=True)
    )
    assert max(np.abs(w.b).max() for *_, w in start.weights()) > 0
    assert 0 < moved(start, end) < 0.1
    other = dataclasses.replace(made, start=str(tmp_path / "a" / "start" / "adapter"))
    again = grpo.run(other, tmp_path / "b", progress=False)
    assert moved(peft.load(again.out, model.cfg)[0], end) == 0
    with pytest.raises(UserError, match="got rate=1.0, expected 0.02, as the run in"):
        grpo.run(dataclasses.replace(other, rate=1.0), tmp_path / "b", progress=False)


REFUSED = {
    "groups of one": (dict(per_prompt=1), "got 1 rollouts of a prompt, expected at least 2"),
    "parts": (dict(updates=3), "got 32 rollouts in 3 updates of 1 microbatches"),
    "an algorithm": (dict(algorithm="ppo"), "got 'ppo'"),
    "a reward": (dict(reward="gold"), "reward: got 'gold', expected one of testbed, exact, released"),
    "room": (dict(max_new_tokens=32), "for rows of 32, expected fewer than that"),
    "a rate": (dict(rate=0.0), "expected positive ones"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case, base):
    fields, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        config(base, **fields)
