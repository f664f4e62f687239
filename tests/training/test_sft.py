"""Fine-tuning from a file to an adapter's folder: every kind, its numbers, what it resumes and what it refuses."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import gsm8k, own
from molora_jax.adapters import adapter as adapters
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.route import Route
from molora_jax.adapters.spec import BankSpec, new_bank, pack, write
from molora_jax.checkpoints import peft
from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.training import settings, sft, specialist
from molora_jax.training.batch import layout
from molora_jax.training.metrics import FILE
from molora_jax.training.specialist import AdapterConfig
from tests.numerics import assert_close
from tests.training import tiny

RANK = 4
ALL = (*specialist.PLAIN, *specialist.GATES)
FAST = ("lora", "dora", "linear")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def adapter(kind: str) -> AdapterConfig:
    return dataclasses.replace(specialist.named(kind), rank=RANK, sites=tiny.SITES)


def scores(cfg, params, bank, b):
    tokens = b.tokens.reshape(-1)
    route = bank and Route.of(jnp.zeros(tokens.size, jnp.int32))
    return transformer.logits(
        cfg, params, transformer.apply(cfg, params, tokens, layout(b), bank=bank, route=route).hidden
    )


def held_out_loss(config, cfg, params, bank=None) -> float:
    """Of whole scores, in numpy: mean of -log p over the tokens that count."""
    _, held = sft.documents(config, sft.load(config)[0].tokenizer, lambda line: None)
    total = weight = 0.0
    score = jax.jit(functools.partial(scores, cfg))
    for b in sft.batches(config, held):
        found = np.asarray(score(params, bank, b), np.float64).reshape(*b.tokens.shape, -1)
        for row, (at, counts) in enumerate(zip(b.tokens, b.weights, strict=True)):
            for t in range(1, len(at)):
                own = found[row, t - 1]
                total += counts[t] * (np.log(np.exp(own - own.max()).sum()) + own.max() - own[at[t]])
        weight += b.weights.sum()
    return total / weight


@pytest.mark.parametrize("kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in ALL])
def test_a_folder_that_is_exported_has_the_loss_that_the_run_ended_with(kind, folder, tmp_path, capsys):
    config = tiny.config(folder, adapter(kind))
    result = sft.run(config, tmp_path / kind, progress=False)
    assert result.after < result.before - 0.3
    model, _ = sft.load(config)
    cfg, params = model.cfg, model.params
    np.testing.assert_allclose(held_out_loss(config, cfg, params), result.before, rtol=1e-5)
    found, _ = peft.load(result.adapter, cfg)
    assert bool(found.gates) == (kind in specialist.GATES)
    if found.gates:
        spec = BankSpec.holding([found])
        got = held_out_loss(config, cfg, params, bank=write(new_bank(spec, params), 0, pack(spec, params, found)))
    else:
        got = held_out_loss(config, *adapters.merge(cfg, params, found))
    np.testing.assert_allclose(got, result.after, rtol=1e-5)
    assert (tmp_path / kind / "loss.png").read_bytes()[:4] == b"\x89PNG"
    shown = capsys.readouterr().out
    assert f"{specialist.count(found):,} parameters train" in shown
    assert f"held-out loss {result.before:.4f} before, {result.after:.4f} after 6 steps" in shown


def test_equal_is_lora_with_the_parameters_of_its_gates(folder):
    config = tiny.config(folder)
    model, _ = sft.load(config)
    for share in ("matrix", "layer"):
        kinds = {
            kind: AdapterConfig(kind=kind, rank=8, sites=tiny.SITES, gate=GateConfig(kind="gru"), share=share)
            for kind in ("gated", "equal", "lora")
        }
        made = {kind: specialist.new(model.cfg, model.params, value, kind) for kind, value in kinds.items()}
        sizes = {kind: specialist.count(found) for kind, found in made.items()}
        one_rank = 2 * (32 + 16)  # of v_proj, the cheapest site, in two layers
        assert abs(sizes["equal"] - sizes["gated"]) <= one_rank / 2
        assert sizes["equal"] > sizes["lora"] + one_rank
        assert {w.scale for _, _, w in made["equal"].weights()} == {2.0}
        assert len(set(specialist.ranks(made["equal"]).values())) <= 2


def test_a_finished_run_goes_on_and_keeps_its_start(folder, tmp_path):
    short = tiny.config(folder, schedule="constant", steps=3)
    whole = dataclasses.replace(short, steps=6)
    sft.run(short, tmp_path / "a", progress=False)
    resumed = sft.run(whole, tmp_path / "a", progress=False)
    at_once = sft.run(whole, tmp_path / "b", progress=False)
    assert (resumed.before, resumed.after) == (at_once.before, at_once.after)
    timeless = lambda line: {k: v for k, v in json.loads(line).items() if k != "tokens_per_second"}
    logs = [list(map(timeless, (tmp_path / name / FILE).read_text().splitlines())) for name in "ab"]
    assert logs[0] == logs[1]


def test_rematerialised_and_cut_runs_are_the_same_run(folder, tmp_path):
    plain = tiny.config(folder, steps=3)
    results = [
        sft.run(config, tmp_path / str(i), progress=False)
        for i, config in enumerate([plain, dataclasses.replace(plain, remat=True, accumulate=4)])
    ]
    np.testing.assert_allclose(results[1].after, results[0].after, rtol=1e-4)


def test_bf16_bases_train_masters_in_fp32(folder):
    config = tiny.config(folder, dtype="bfloat16")
    model, _ = sft.load(config)
    made = sft.trainer(model, specialist.new(model.cfg, model.params, config.adapter, "x"), config)
    assert {leaf.dtype for leaf in made.init().trained.values()} == {jnp.float32.dtype}
    assert made.frozen["params.embed.weight"].dtype == jnp.bfloat16


def test_a_config_file_and_its_editable_form_hold_the_same():
    assert settings.frozen(own.get_config("dora")).adapter == specialist.named("dora")
    edited = gsm8k.get_config("malora")
    assert settings.frozen(edited) == dataclasses.replace(settings.SFTConfig(), adapter=specialist.named("malora"))
    edited.data_dir, edited.adapter.alpha, edited.mesh.fsdp = "elsewhere", 3.0, 2
    config = settings.frozen(edited)
    assert (config.data_dir, config.adapter.alpha, config.mesh.fsdp) == ("elsewhere", 3.0, 2)
    with pytest.raises(AttributeError):
        edited.adapter.rang = 3


REFUSED = {
    "kind": (dict(adapter="AdapterConfig(kind='lara')"), "adapter: got kind 'lara', expected one of lora"),
    "site": (dict(adapter="AdapterConfig(sites=('attn.x',))"), "got sites"),
    "rank": (dict(adapter="AdapterConfig(rank=0)"), "got rank 0"),
    "dtype": (dict(dtype="'int8'"), "got dtype 'int8'"),
    "rate": (dict(rate="0.0"), "not positive"),
    "held": (dict(held_out="0"), "got held_out=0"),
    "parts": (dict(accumulate="3"), "got 4 rows in 3 microbatches"),
    "warmup": (dict(warmup="500"), "got 500 steps of 200 before the fall"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_be_are_refused(case):
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        settings.SFTConfig(**{name: eval(value) for name, value in changes.items()})


def test_data_that_cannot_be_used_is_refused(folder, tmp_path):
    tokenizer = sft.load(tiny.config(folder))[0].tokenizer
    for changes, message in (
        (dict(held_out=48), "got 48 documents of at most 32 tokens"),
        (dict(length=8), "has no usable line"),
        (dict(data="gsm9k"), "data: got 'gsm9k'"),
        (dict(data="svamp", data_dir=str(tmp_path)), "got the split 'train'"),
    ):
        with pytest.raises(UserError, match=message):
            sft.documents(tiny.config(folder, **changes), tokenizer, lambda line: None)


def test_another_run_s_folder_is_refused(folder, tmp_path):
    settings.remember(tiny.config(folder), tmp_path)
    settings.remember(tiny.config(folder, log_every=7), tmp_path)
    with pytest.raises(UserError, match=r"config: got rate=0.5, expected 0.02, as the run in .* has; resume with"):
        settings.remember(tiny.config(folder, rate=0.5), tmp_path)
    with pytest.raises(UserError, match="got steps=9, expected 6"):
        settings.remember(tiny.config(folder, steps=9), tmp_path)


def test_a_new_adapter_changes_nothing(folder):
    config = tiny.config(folder)
    model, _ = sft.load(config)
    tokens = jnp.arange(8)
    base = transformer.apply(model.cfg, model.params, tokens, transformer.dense(1, 8)).hidden
    for kind in ("lora", "dora", "malora"):
        tree = specialist.tree(model.params, specialist.new(model.cfg, model.params, adapter(kind), kind))
        route = Route.of(jnp.zeros(8, jnp.int32))
        got = transformer.apply(
            model.cfg, model.params, tokens, transformer.dense(1, 8), bank=tree["bank"], route=route
        )
        assert_close(got.hidden, base, "model")
