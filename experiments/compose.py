"""Trains a router over frozen experts, and the attention LoRA beside it, on traces that `experiments.distil` wrote.

python -m experiments.compose --config=configs/compose_testbed.py:hard --model=testbed:large --out=runs/hard \\
    --experts=calc=runs/calc/adapter,list=runs/list/adapter --traces=runs/traces.jsonl

The folder then goes into `experiments.generate --route=router --router=runs/hard`. Run again on the same --out, it
resumes.
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from molora_jax import cli, compilation
from molora_jax.adapters.digest import adapter_digest, base_digest, composition_digest
from molora_jax.checkpoints import composition
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder, part
from molora_jax.serving import specialists
from molora_jax.training import compose, distil, growth, settings
from molora_jax.training.compose import ComposeConfig

_CONFIG = config_flags.DEFINE_config_file("config", "configs/compose_testbed.py", "File with get_config().")
_MODEL = flags.DEFINE_string("model", None, "The experts' base.", required=True)
_EXPERTS = flags.DEFINE_list("experts", None, "name=folder of each, in the order of the router.", required=True)
_OWNER = flags.DEFINE_list("owner", [], "task=expert for each task of the traces; by default experts are named so.")
_GROW = flags.DEFINE_string("grow", None, "Composition of all experts but the last, to which that one is added.")
_TRACES = flags.DEFINE_string("traces", None, "JSON lines of experiments.distil.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder of the run: checkpoints, numbers, router, attention.", required=True)
_PROGRESS = flags.DEFINE_bool("progress", True, "Draw a bar with the time left.")


def main() -> None:
    """Trains as the config says; see the flags."""
    config = settings.frozen(cli.config(_CONFIG.value, "configs/compose_testbed.py:hard"), ComposeConfig)
    compilation.use_cache(cache_folder() / "xla")
    model = models.load(_MODEL.value)
    experts = specialists.read(model, _EXPERTS.value)
    owner = {e.name: e.name for e in experts} | dict(specialists.pairs("owner", _OWNER.value, "task=expert"))
    out = Path(_OUT.value)
    traces = distil.load(_TRACES.value)
    compose.slots(experts, traces, owner)
    digests = [adapter_digest(expert) for expert in experts]
    owned = {task: owner[task] for task in sorted({trace.task for trace in traces})}
    old = composition.load(part(_GROW.value), model, experts[:-1]) if _GROW.value else None
    grown = old and composition_digest(old)
    settings.remember(config, out, experts=digests, base=base_digest(model.params), owner=owned, grown=grown)
    how = dict(progress=_PROGRESS.value)
    if old is not None:
        found = growth.grown(model, old, experts[-1], traces, owner, config, out, **how)
    else:
        found = compose.run(model, experts, traces, owner, config, out, **how)
    counts = compose.parameters(found)
    print(f"{config.mixture.kind}: {counts['router']:,} parameters of the router, {counts['attention']:,} of the LoRA")
    named = ",".join(_EXPERTS.value)
    print(f"--model={_MODEL.value} --adapters={named} --route=router --router={out}")


if __name__ == "__main__":
    cli.run(main)
