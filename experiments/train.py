"""Fine-tunes a new specialist over a frozen base, by a config file; run again on the same --out, it resumes.

python -m experiments.train --config=configs/gsm8k.py --out=runs/gsm8k
python -m experiments.train --config=configs/gsm8k.py:malora --out=runs/malora --config.steps=100
"""

from absl import flags
from ml_collections import config_flags

from molora_jax import cli, compilation, distributed
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.training import settings, sft

_CONFIG = config_flags.DEFINE_config_file("config", None, "File with get_config(), and what it takes after a colon.")
_OUT = flags.DEFINE_string("out", None, "Folder of the run: checkpoints, numbers, loss.png, adapter.", required=True)
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the other processes of the run.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, where the cluster does not tell it.")
_PROCESSES = flags.DEFINE_integer("processes", None, "How many there are, likewise.")
_INDEX = flags.DEFINE_integer("process_index", None, "Number of this process from 0, likewise.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Draw a bar with the time left.")


def main() -> None:
    """Trains as the config says; see the flags."""
    if _DISTRIBUTED.value:
        distributed.initialize(_COORDINATOR.value, _PROCESSES.value, _INDEX.value)
    compilation.use_cache(cache_folder() / "xla")
    sft.run(settings.frozen(cli.config(_CONFIG.value, "configs/gsm8k.py")), _OUT.value, progress=_PROGRESS.value)


if __name__ == "__main__":
    cli.run(main)
