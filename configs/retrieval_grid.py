"""LoRA and MaLoRA readers with and without MaRA on the testbed's fact world, three seeds: the grid end to end.

    python -m experiments.retrieval_grid --config=configs/retrieval_grid.py
    python -m experiments.retrieval_grid --config=configs/retrieval_grid.py:small --config.seeds=1

After the colon: large (the default) or small, the testbed's bases. Every field of `retrieval.grid.GridConfig` can be
set by a flag, `--config.top=4`.
"""

from ml_collections import config_dict

from molora_jax.retrieval.grid import GridConfig


def get_config(base: str = "large"):
    fields = GridConfig(model=f"testbed:{base}")
    kept = {name: value for name, value in vars(fields).items() if name != "readers"}
    return config_dict.ConfigDict(kept).lock()
