"""Draws traces from experts, each in its own domain, and keeps those that are whole and right.

python -m experiments.distil --model=testbed:large --experts=calc=runs/calc/adapter,list=runs/list/adapter \\
    --data=calc=testbed:calc,list=testbed:list --count=1000 --output=runs/traces.jsonl
"""

from absl import flags

from molora_jax import cli, compilation
from molora_jax.adapters.library import Library
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.data.document import short
from molora_jax.data.questions import questions
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig
from molora_jax.serving import specialists
from molora_jax.training import distil
from molora_jax.training.distil import DistilConfig

_MODEL = flags.DEFINE_string("model", None, "A folder, a .gguf file, testbed:large, pypi:PACKAGE, …", required=True)
_EXPERTS = flags.DEFINE_list("experts", None, "name=folder of each expert.", required=True)
_DATA = flags.DEFINE_list("data", None, "expert=questions: testbed:calc, …, or a benchmark.", required=True)
_SPLIT = flags.DEFINE_string("split", "train", "Of the questions.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of the benchmarks; by default MOLORA_DATA_DIR.")
_COUNT = flags.DEFINE_integer("count", 1000, "Questions of each.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Completions of each question.", lower_bound=1)
_CAP = flags.DEFINE_integer("cap", 1, "Most of them to keep.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
_ROWS = flags.DEFINE_integer("rows", 64, "Requests at once.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 128, "Most tokens of a prompt and its completion.", lower_bound=2)
_MOST = flags.DEFINE_integer(
    "max_new_tokens", None, "Of a completion; by default what is left of --length.", lower_bound=1
)
_REASONING = flags.DEFINE_bool("reasoning", True, "Drop completions without reasoning, as released.")
_SEED = flags.DEFINE_integer("seed", 0, "Of questions and samples.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON lines to write.", required=True)


def main() -> None:
    """Draws, filters, writes, and tells what was dropped; see the flags."""
    compilation.use_cache(cache_folder() / "xla")
    model = models.load(_MODEL.value)
    experts = specialists.read(model, _EXPERTS.value)
    asked = specialists.pairs("data", _DATA.value, "expert=questions")
    examples, owner = [], {}
    for name, data in asked:
        found = questions(data, _SPLIT.value, _COUNT.value, seed=_SEED.value, data_dir=_DATA_DIR.value)
        examples += short(model.tokenizer, found, _LENGTH.value, name)
        owner |= dict.fromkeys((example.task for example in found), name)
    library = Library.holding(experts, model.params)
    config = EngineConfig(max_rows=_ROWS.value, max_length=_LENGTH.value)
    engine = Engine(model.cfg, model.params, config, Experts(library, model.cfg.vocab))
    how = dict(samples=_SAMPLES.value, cap=_CAP.value, temperature=_TEMPERATURE.value, seed=_SEED.value)
    how |= dict(max_new_tokens=_MOST.value or _LENGTH.value - 1, reasoning=_REASONING.value)
    config = DistilConfig(**how)
    traces, tallies = distil.traces(engine, model.tokenizer, examples, owner, config)
    distil.save(_OUTPUT.value, traces)
    for task, tally in tallies.items():
        print(f"{task}: {tally}")
    print(f"{len(traces)} traces in {_OUTPUT.value}")


if __name__ == "__main__":
    cli.run(main)
