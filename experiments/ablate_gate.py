"""What the gate of a trained MaLoRA does: the same expert with constant scales, or without memory, beside plain LoRA.

python -m experiments.ablate_gate --out=FOLDER
"""

import pathlib

from absl import flags

from experiments import gate_measures as measures
from experiments import gate_training as training
from molora_jax import benchmarking, cli, compilation
from molora_jax.adapters import ablation, gate
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.library import Library
from molora_jax.adapters.spec import projection_shape
from molora_jax.checkpoints import hf, peft
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.data.testbed import vocabulary
from molora_jax.data.testbed.recipe import Recipe
from molora_jax.models import transformer
from molora_jax.training.batch import layout
from molora_jax.training.optimiser import Group

_BASE = flags.DEFINE_integer("base_steps", 800, "Steps of the base, of 16 rows of 128 tokens.")
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of each expert.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the base, the experts and their data.")
_OUT = flags.DEFINE_string("out", None, "Folder for the base and the experts, to look at with `probe_gate`.")

SHARES = {"list": 1.0, "logic": 1.0, "text": 1.0}
BASE = Recipe(shares=SHARES, levels=(1, 2), rival=0.7)
EXPERT = Recipe(shares=SHARES, levels=(1, 2), signs=0.5)
SITES, RANK = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.up_proj", "mlp.down_proj"), 4
EVERYTHING = (Group(name="all", paths=("params.*",), rate=3e-3),)
ROWS, HELD_OUT, QUESTIONS = 16, 1024, 256


def main() -> None:
    """Prints held-out loss, token accuracy and exact greedy answers of each variant."""
    compilation.use_cache(cache_folder() / "xla")
    bench, cfg = benchmarking.Bench("ablate_gate"), training.config()
    data = training.batches(BASE, "train", _SEED.value, ROWS)
    params = transformer.init(cfg, _SEED.value)
    params = training.train(cfg, {"params": params}, data, _BASE.value, EVERYTHING, "base")["params"]
    found, sizes = {}, {"base": 0}
    for name, lib in variants(cfg, params, sizes).items():
        row = measures.held_out(cfg, params, lib and lib.bank, EXPERT, rows=ROWS, size=HELD_OUT)
        row["exact"] = measures.exact(cfg, params, lib, EXPERT, size=QUESTIONS)
        bench.add(variant=name, parameters=sizes[name.partition("_")[0]], **row)
        found[name] = row
    summary = {f"{key}_{name}": row[key] for key in ("loss", "exact") for name, row in found.items()}
    bench.finish(summary, lambda axes: plot(axes, found))


def variants(cfg, params, sizes: dict[str, int]) -> dict[str, Library | None]:
    """The base alone, plain LoRA of as many parameters, and the trained MaLoRA in its three states."""
    config = gate.GateConfig()
    fair = gate.equal_rank(config, RANK, [[projection_shape(params, site)[::-1]] for site in SITES])
    experts, found = {}, {"base": None}
    for name, how in {"lora": dict(rank=fair), "malora": dict(rank=RANK, gate=config)}.items():
        data = training.batches(EXPERT, "train", _SEED.value + 100, ROWS)
        start = fresh(cfg, params, name, sites=SITES, seed=_SEED.value, **how)
        experts[name] = training.train_expert(cfg, params, start, data, _STEPS.value)
        found[name], sizes[name] = measures.library(params, experts[name]), training.size(experts[name])
    batch, real = next(data), found["malora"].bank
    lam = measures.scales(cfg, params, real, batch.tokens.reshape(-1), layout(batch))
    constants = ablation.means(lam, batch.valid.reshape(-1))
    for name, bank in (("mean", ablation.frozen(real, constants)), ("reset", ablation.without_memory(real))):
        found[f"malora_{name}"] = measures.library(params, experts["malora"])
        found[f"malora_{name}"].bank = bank
    if _OUT.value:
        hf.save(f"{_OUT.value}/base", cfg, params)
        vocabulary.write(pathlib.Path(_OUT.value) / "base")
        for name, expert in experts.items():
            peft.save(f"{_OUT.value}/{name}", cfg, expert)
    return found


def plot(axes, found: dict[str, dict[str, float]]) -> None:
    """Held-out loss by variant, with the share of exact answers."""
    bars = axes.bar(list(found), [row["loss"] for row in found.values()])
    axes.bar_label(bars, [f"exact {row['exact']:.1%}" for row in found.values()])
    axes.set(ylabel="held-out loss, nats a token", yscale="log", title="A gate without its memory, or its tokens")


if __name__ == "__main__":
    cli.run(main)
