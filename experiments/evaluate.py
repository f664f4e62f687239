"""Who answers how many questions rightly: the base, each expert, compositions, and the bounds between which they lie.

python -m experiments.evaluate --model=testbed:large --experts=calc=runs/calc/adapter,list=runs/list/adapter \\
    --compositions=hard=runs/hard,soft=runs/soft --data=testbed:calc,testbed:list,testbed:several --out=results/mine

Writes `table.md`, `evaluation.json`, and the domain × expert confusion of each composition as a PNG.
"""

from pathlib import Path

from absl import flags

from molora_jax import cli, compilation
from molora_jax.checkpoints import composition
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder, part
from molora_jax.data.questions import questions
from molora_jax.evaluation import comparison, report, systems
from molora_jax.serving import specialists

_MODEL = flags.DEFINE_string("model", None, "The experts' base.", required=True)
_EXPERTS = flags.DEFINE_list("experts", [], "name=folder of each.")
_OWNER = flags.DEFINE_list("owner", [], "domain=expert, for the oracle; by default experts are named as their domains.")
_COMPOSITIONS = flags.DEFINE_list("compositions", [], "name=folder of each, of experiments.compose.")
_BOUNDS = flags.DEFINE_bool("bounds", True, "Also each expert alone, all at equal weight, and the oracle.")
_DATA = flags.DEFINE_list("data", None, "testbed:calc, …, testbed:several, or benchmarks.", required=True)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of the benchmarks; by default MOLORA_DATA_DIR.")
_SPLIT = flags.DEFINE_string("split", "test", "Of the questions.")
_COUNT = flags.DEFINE_integer("count", 200, "Questions of each.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the questions.")
_ROWS = flags.DEFINE_integer("rows", 64, "Requests at once.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 128, "Most tokens of a prompt and its answer.", lower_bound=2)
_OUT = flags.DEFINE_string("out", None, "Folder to write.", required=True)


def main() -> None:
    """Asks, compares, writes; see the flags."""
    compilation.use_cache(cache_folder() / "xla")
    model = models.load(_MODEL.value)
    experts = specialists.read(model, _EXPERTS.value)
    named = specialists.pairs("compositions", _COMPOSITIONS.value, "name=folder")
    composed = {name: composition.load(part(folder), model, experts) for name, folder in named}
    asked = [systems.BASE]
    if experts and _BOUNDS.value:
        owner = {e.name: e.name for e in experts} | dict(specialists.pairs("owner", _OWNER.value, "domain=expert"))
        asked = systems.bounds(experts, owner, model.cfg.layers)
    asked += [systems.composed(name, found) for name, found in composed.items()]
    how = dict(seed=_SEED.value, data_dir=_DATA_DIR.value)
    sets = {name: questions(name, _SPLIT.value, _COUNT.value, **how) for name in _DATA.value}
    found = comparison.compare(model, asked, sets, rows=_ROWS.value, length=_LENGTH.value)
    print(comparison.table([found]))
    report.write(Path(_OUT.value), model, found, composed, sets, length=_LENGTH.value)


if __name__ == "__main__":
    cli.run(main)
