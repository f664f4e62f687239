"""MaLoRA beside plain LoRA of the same rank and sites on a whole model: a training step, and decoding one row."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax import benchmarking
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import Route
from molora_jax.checkpoints import hf
from molora_jax.checkpoints.resolve import resolve
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.models import transformer
from molora_jax.training.batch import batch, layout
from molora_jax.training.objective import next_token_loss
from molora_jax.training.partition import matches, partition

SITES = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.up_proj", "mlp.down_proj")
RANK, ROWS, LENGTH, BLOCK = 16, 2, 128, 16
EXPERTS = {"lora": {}} | {share: dict(gate=GateConfig(), share=share) for share in ("matrix", "input", "layer")}


def overheads(bench: benchmarking.Bench, model: str, repeats: int, *, shared: bool) -> dict[str, float]:
    """Seconds over those of plain LoRA with a gate for each matrix; `shared` adds rows for gates that are shared."""
    experts, summary = {name: how for name, how in EXPERTS.items() if shared or name in ("lora", "matrix")}, {}
    for what, candidates in (("train", training), ("decode", decoding)):
        cfg, params = hf.load(resolve(model), dtype=jnp.float32, stacked=what == "train")
        made = candidates(cfg, params, {name: library(cfg, params, **how) for name, how in experts.items()})
        summary[f"overhead_malora_{what}"] = compare(bench, what, made, repeats)
    return summary


def compare(bench: benchmarking.Bench, what: str, made, repeats: int) -> float:
    """Adds a row for each candidate of `made`, name to (call, seconds of compilation)."""
    times = benchmarking.interleave({name: call for name, (call, _) in made.items()}, repeats, rest=0.1)
    for name, timing in times.items():
        row = dict(ms=1e3 * timing.min, median_ms=1e3 * timing.median, over_lora=timing.min / times["lora"].min)
        bench.add(step=what, candidate=name, **row, compile_s=made[name][1])
    return times["matrix"].min / times["lora"].min


def library(cfg, params, **how) -> Library:
    """A bank with a new expert; its B is not zero, as none is after training."""
    return Library.holding([fresh(cfg, params, "expert", rank=RANK, sites=SITES, spread=0.02, **how)], params)


def training(cfg, params, libraries: dict[str, Library]):
    """Loss and gradients of factors and gates on `ROWS` rows of `LENGTH` tokens."""
    rows = batch(np.random.default_rng(0).integers(0, cfg.vocab, (ROWS, LENGTH)))
    route, made = Route.of(np.zeros(ROWS * LENGTH, np.int32)), {}
    for name, lib in libraries.items():
        parts, trained, frozen = partition(lib.bank, matches(("*.[ab]", "*.cores.*")))

        def loss(trained, frozen, params, parts=parts):
            bank, tokens = parts.join(trained, frozen), rows.tokens.reshape(-1)
            hidden = transformer.apply(cfg, params, tokens, layout(rows), bank=bank, route=route).hidden
            return next_token_loss(cfg, params, hidden, rows, bank=bank).loss

        begun = time.perf_counter()
        step = jax.jit(jax.value_and_grad(loss)).lower(trained, frozen, params).compile()
        call = lambda step=step, args=(trained, frozen, params): jax.block_until_ready(step(*args)) and None
        made[name] = call, time.perf_counter() - begun
    return made


def decoding(cfg, params, libraries: dict[str, Library]):
    """A block of `BLOCK` tokens of one row."""
    made = {}
    for name, lib in libraries.items():
        begun, config = time.perf_counter(), EngineConfig(max_rows=1, max_length=256, block=BLOCK)
        engine = Engine(cfg, params, config, Experts(lib, cfg.vocab))
        decode(engine)  # compiles
        made[name] = functools.partial(decode, engine), time.perf_counter() - begun
    return made


def decode(engine: Engine) -> None:
    """The next block, of a new request where the last one is at its end."""
    if not engine.busy:
        engine.submit(Request(prompt=[1], max_new_tokens=15 * BLOCK, adapter="expert"))
    engine.step()
