"""Readers with and without MaRA, end to end on the testbed's fact world.

python -m experiments.retrieval_grid --config=configs/retrieval_grid.py
"""

from absl import flags
from ml_collections import config_flags

from molora_jax import benchmarking, cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.config import UserError
from molora_jax.retrieval import grid
from molora_jax.retrieval.grid import GridConfig

_CONFIG = config_flags.DEFINE_config_file("config", "configs/retrieval_grid.py", "File with get_config().")
_MODEL = flags.DEFINE_string("model", None, "Another base than the config's: a folder, pypi:PACKAGE, ….")


def main() -> None:
    """Prints a row for each reader and context, with intervals and cost."""
    compilation.use_cache(cache_folder() / "xla")
    given = cli.config(_CONFIG.value, "configs/retrieval_grid.py")
    try:
        config = GridConfig(**given.to_dict())
    except TypeError as e:
        raise UserError(f"config: got a field that a grid has not ({e}), expected those of GridConfig") from None
    bench = benchmarking.Bench("retrieval_grid")
    model = models.load(_MODEL.value or config.model, stacked=True)
    summary = grid.run(bench.add, model, config)
    bench.finish(summary, lambda axes: plot(axes, bench.rows))


def plot(axes, rows) -> None:
    """Questions answered right, by reader and context, with 95 % intervals."""
    names = [f"{row['reader']}\n{row['context']}" for row in rows]
    spread = [[row["right"] - row["low"] for row in rows], [row["high"] - row["right"] for row in rows]]
    axes.bar(names, [row["right"] for row in rows], yerr=spread, capsize=3)
    axes.set(ylabel="questions answered right", title="Readers with all segments, and with those MaRA picks")


if __name__ == "__main__":
    cli.run(main)
