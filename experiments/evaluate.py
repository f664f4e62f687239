"""Who answers how many questions rightly: the base, each expert, compositions, and the bounds between which they lie.

python -m experiments.evaluate --model=testbed:large --experts=calc=runs/calc/adapter,list=runs/list/adapter \\
    --compositions=hard=runs/hard,soft=runs/soft --data=testbed:calc,testbed:list,testbed:several --out=results/mine

Writes `table.md` (accuracies, and points over the oracle), `evaluation.json`, and the domain × expert confusion of each
composition as a PNG.
"""

from pathlib import Path

from absl import flags

from molora_jax import cli, compilation
from molora_jax.checkpoints import composition
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder, part
from molora_jax.config import UserError
from molora_jax.data.document import short
from molora_jax.data.questions import REPORTED, questions
from molora_jax.evaluation import comparison, report, systems
from molora_jax.evaluation.systems import System
from molora_jax.serving import specialists
from molora_jax.training import classifier, distil

_MODEL = flags.DEFINE_string("model", None, "The experts' base.", required=True)
_EXPERTS = flags.DEFINE_list("experts", [], "name=folder of each.")
_OWNER = flags.DEFINE_list("owner", [], "domain=expert, for the oracle; by default experts are named as their domains.")
_COMPOSITIONS = flags.DEFINE_list("compositions", [], "name=folder of each, of experiments.compose.")
_ALONE = flags.DEFINE_list("alone", [], "name=folder of adapters that answer everything alone, such as a joint LoRA.")
_TRACES = flags.DEFINE_string("traces", None, "Of experiments.distil: a prompt classifier learns from them, too.")
_BOUNDS = flags.DEFINE_list("bounds", list(systems.BOUNDS), f"What else is asked, of {', '.join(systems.BOUNDS)}.")
_DATA = flags.DEFINE_list("data", None, "testbed:calc, …, benchmarks, or two as gsm8k+boolq.", required=True)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of the benchmarks; by default MOLORA_DATA_DIR.")
_SPLIT = flags.DEFINE_string("split", REPORTED, "Of the questions; reported is test, or validation where that is all.")
_COUNT = flags.DEFINE_integer("count", 200, "Questions of each.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the questions.")
_ROWS = flags.DEFINE_integer("rows", 64, "Requests at once.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 128, "Most tokens of a prompt and its answer.", lower_bound=2)
_MOST = flags.DEFINE_list(
    "max_new_tokens", [], "Of an answer: 256, or of each set: 256,boolq=8. By default what is left of --length."
)
_ANSWERS = flags.DEFINE_string(
    "answers", None, "Folder of what each system wrote: a second start asks only the rest. By default OUT/answers."
)
_ROUTED = flags.DEFINE_integer("routed", None, "Questions of each set that tell how tokens are routed; all by default.")
_OUT = flags.DEFINE_string("out", None, "Folder to write.", required=True)


def main() -> None:
    """Asks, compares, writes; see the flags."""
    compilation.use_cache(cache_folder() / "xla")
    model = models.load(_MODEL.value)
    experts = specialists.read(model, _EXPERTS.value)
    named = specialists.pairs("compositions", _COMPOSITIONS.value, "name=folder")
    composed = {name: composition.load(part(folder), model, experts) for name, folder in named}
    owner = {e.name: e.name for e in experts} | dict(specialists.pairs("owner", _OWNER.value, "domain=expert"))
    asked = systems.bounds(experts, owner, model.cfg.layers, _BOUNDS.value)
    if _TRACES.value:
        decides = classifier.train(model, distil.load(_TRACES.value), owner, [e.name for e in experts])
        asked.append(System(name="prompt classifier", experts=tuple(experts), classifier=decides))
    asked += [System(name=e.name, experts=(e,), single=e.name) for e in specialists.read(model, _ALONE.value)]
    asked += [systems.composed(name, found) for name, found in composed.items()]
    how = dict(seed=_SEED.value, data_dir=_DATA_DIR.value)
    drawn = {name: questions(name, _SPLIT.value, _COUNT.value, **how) for name in _DATA.value}
    sets = {name: short(model.tokenizer, found, _LENGTH.value, name) for name, found in drawn.items()}
    if empty := [name for name, examples in sets.items() if not examples]:
        raise UserError(f"{empty[0]}: got no question of at most {_LENGTH.value} tokens, expected some: raise --length")
    how = dict(rows=_ROWS.value, length=_LENGTH.value, most=comparison.limits(_MOST.value, sets, _LENGTH.value))
    out = Path(_OUT.value)
    found = comparison.compare(model, asked, sets, **how, kept=Path(_ANSWERS.value or out / "answers"))
    print(comparison.table([found]))
    report.write(out, model, found, composed, sets, length=_LENGTH.value, routed=_ROUTED.value)


if __name__ == "__main__":
    cli.run(main)
