"""Reinforcement from verifiable rewards, of an expert or of a router over experts; run again on one --out, it resumes.

python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc
python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc --config.shuffled_rewards=True --out=runs/control
python -m experiments.rlvr --config=configs/rlvr_testbed.py:several --composition=runs/hard --out=runs/refined \\
    --experts=calc=runs/calc/adapter,list=runs/list/adapter
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from molora_jax import cli, compilation
from molora_jax.checkpoints import composition
from molora_jax.checkpoints.resolve import cache_folder, part
from molora_jax.evaluation import rlvr
from molora_jax.serving import specialists
from molora_jax.training import grpo, settings, sft
from molora_jax.training.rlvr_settings import RLVRConfig

_CONFIG = config_flags.DEFINE_config_file("config", None, "File with get_config(), and what it takes after a colon.")
_OUT = flags.DEFINE_string("out", None, "Folder of the run; by default runs/rlvr/ and the data's name.")
_COMPOSITION = flags.DEFINE_string(
    "composition", None, "Of experiments.compose: its router and attention LoRA are what trains, over --experts."
)
_EXPERTS = flags.DEFINE_list("experts", [], "With --composition: name=folder of each, in the order of the router.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Draw a bar with the time left.")


def main() -> None:
    """Trains as the config says, exports what was trained and writes its report; see the flags."""
    compilation.use_cache(cache_folder() / "xla")
    config = settings.frozen(cli.config(_CONFIG.value, "configs/rlvr_testbed.py:calc"), RLVRConfig)
    out = Path(_OUT.value or Path("runs/rlvr") / config.data.split(":")[-1])
    if _COMPOSITION.value:
        model, _ = sft.load(config)
        found = composition.load(part(_COMPOSITION.value), model, specialists.read(model, _EXPERTS.value))
        result = grpo.refine(config, out, model, found, progress=_PROGRESS.value)
    else:
        result = grpo.run(config, out, progress=_PROGRESS.value)
    print(rlvr.report(config, result, out))


if __name__ == "__main__":
    cli.run(main)
