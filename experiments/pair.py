"""A small and a large model routed token by token: accuracy and throughput against the large model's share.

python -m experiments.pair --small=testbed:small --large=testbed:large --out=results/testbed/pair

Trains R2R's classifier on the testbed, calibrates it to every share, and measures it beside entropy deferral, random
tokens and whole questions, with either model alone as the ends. Writes `table.md`, `pair.json` and two plots.
"""

from pathlib import Path

from absl import flags

from molora_jax import cli, compilation
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.evaluation import pair, pair_report
from molora_jax.evaluation.pair import RANDOM, TRAINED, PairConfig
from molora_jax.serving import fleet

_SMALL = flags.DEFINE_string("small", "testbed:small", "The quick model.")
_LARGE = flags.DEFINE_string("large", "testbed:large", "The good one, of the same vocabulary.")
_SEEDS = flags.DEFINE_integer(
    "seeds", 1, "Runs, from seed 0 on: other training questions, heads, coins.", lower_bound=1
)
_TRAIN = flags.DEFINE_integer("train", PairConfig.train, "Questions that the routers learn from.", lower_bound=1)
_TEST = flags.DEFINE_integer("test", PairConfig.test, "Questions that are asked.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "Folder to write.", required=True)

AT = 0.2
"""The share whose accuracies are printed last."""


def main() -> None:
    """Runs all seeds and writes what came of them; see the flags."""
    compilation.use_cache(cache_folder() / "xla")
    small, large = fleet.load(None, [_SMALL.value, _LARGE.value], [])
    config = PairConfig(train=_TRAIN.value, test=_TEST.value)
    runs = [pair.run(small, large, seed=seed, config=config) for seed in range(_SEEDS.value)]
    pair_report.write(Path(_OUT.value), runs)
    print(pair_report.table(runs))
    for name, router in dict(routed=TRAINED, random=RANDOM).items():
        print(f"{name} at {AT:.0%}: {pair_report.accuracy_at(runs, router, AT):.1%} solved")


if __name__ == "__main__":
    cli.run(main)
