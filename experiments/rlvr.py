"""An expert by reinforcement from verifiable rewards, by a config file; run again on the same --out, it resumes.

python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc
python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc --config.shuffled_rewards=True --out=runs/control
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from molora_jax import cli, compilation
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.evaluation import rlvr
from molora_jax.training import grpo, settings
from molora_jax.training.rlvr_settings import RLVRConfig

_CONFIG = config_flags.DEFINE_config_file("config", None, "File with get_config(), and what it takes after a colon.")
_OUT = flags.DEFINE_string("out", None, "Folder of the run; by default runs/rlvr/ and the data's name.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Draw a bar with the time left.")


def main() -> None:
    """Trains as the config says, exports the expert and writes its report; see the flags."""
    compilation.use_cache(cache_folder() / "xla")
    config = settings.frozen(cli.config(_CONFIG.value, "configs/rlvr_testbed.py:calc"), RLVRConfig)
    out = Path(_OUT.value or Path("runs/rlvr") / config.data.split(":")[-1])
    result = grpo.run(config, out, progress=_PROGRESS.value)
    print(rlvr.report(config, result, out))


if __name__ == "__main__":
    cli.run(main)
