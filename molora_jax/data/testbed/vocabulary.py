"""The testbed's tokenizer: byte-level BPE over its own texts, at most 512 entries.

Digits, single letters and punctuation are always tokens of their own, so that a value has one spelling; words of the
testbed are one token each. `python -m molora_jax.data.testbed.vocabulary FOLDER` writes the files anew.
"""

import functools
import json
import pathlib
import sys

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers

from molora_jax.data.testbed.calendar import DAYS
from molora_jax.data.testbed.domains import DOMAINS
from molora_jax.data.testbed.facts import NAMES, RELATIONS
from molora_jax.data.testbed.problem import HOUSE, RIVAL
from molora_jax.text.tokenizer import Tokenizer

FOLDER = pathlib.Path(__file__).parent / "tokenizer"
"""A HF folder: `tokenizer.json` and `tokenizer_config.json`."""

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SIZE = 512
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""A question and its answer as in training: the one ends with a line break, the other with the end of text."""
_PARTS = r" ?->| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s"


@functools.cache
def tokenizer() -> Tokenizer:
    """The tokenizer that the package carries."""
    return Tokenizer.load(FOLDER)


def words() -> list[str]:
    """Every word of the testbed as its texts write it, sorted; the merges are learnt from these and nothing else."""
    operations = [o for d in DOMAINS.values() for o in d.operations]
    operations += [s.under(rule) for d in DOMAINS.values() for s in d.signs for rule in (HOUSE, RIVAL)]
    inner = {o.name for o in operations} | {*DAYS, *NAMES, *RELATIONS, "of", "m", "h", "d", "->", "|"}
    inner |= {chr(c) for c in range(ord("a"), ord("z") + 1)} | {str(d) for d in range(10)} | {"T", "F"}
    return sorted({f" {word}" for word in inner} | set(DOMAINS) | {"->"})


def build() -> tokenizers.Tokenizer:
    """Trains the tokenizer; the same on every run."""
    built = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PARTS), behavior="isolated")
    built.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[PAD, BOS, EOS],
        show_progress=False,
    )
    built.train_from_iterator(words(), trainer)
    bos = (BOS, built.token_to_id(BOS))
    built.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    return built


def write(folder: pathlib.Path) -> None:
    """Writes the tokenizer's HF folder."""
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    config = dict(bos_token=BOS, eos_token=EOS, pad_token=PAD, chat_template=CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
