"""Folders of many ages load as transformers loads them; BOS once; errors in one line."""

import subprocess
import sys

import numpy as np
import pytest
import tokenizers
import transformers

from molora_jax.config import UserError
from molora_jax.text.tokenizer import Tokenizer
from tests.text import tiny

NAMES = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
TEXTS = ["", "a", " the dog ", "<s>the dog", "the</s>dog<pad>", "<s>", "x <s> y", *tiny.TEXT[:7]]


@pytest.fixture(scope="module")
def sentencepiece():
    return tiny.sentencepiece("llama")


@pytest.fixture(scope="module")
def byte_level():
    return tiny.byte_level()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma", "byte_level"])
def test_agrees_with_transformers(tmp_path, kind, special):
    if kind == "byte_level":
        tok, names = tiny.byte_level(), dict(bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>")
    else:
        tok, names = tiny.sentencepiece(kind), NAMES
    folder = tiny.write(tmp_path, tiny.with_bos(tok, names["bos_token"]), tokenizer_config=names)
    ours = Tokenizer.load(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, (theirs.eos_token_id,), theirs.pad_token_id)
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert ours.special >= set(theirs.all_special_ids)
    assert ours.vocab == len(theirs)
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=special)
        doubled = special and text.startswith(names["bos_token"])
        assert ours.encode(text, special=special) == expected[doubled:]
        for skip in (True, False):
            want = theirs.decode(expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(np.array(expected, np.int32), skip_special=skip) == want


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("in_json", [True, False])
def test_bos_is_added_once_where_the_files_say_so(tmp_path, in_json, flag):
    tok = tiny.sentencepiece("llama")
    if in_json:
        tiny.with_bos(tok, "<s>")
    ours = Tokenizer.load(tiny.write(tmp_path, tok, tokenizer_config=NAMES | dict(add_bos_token=flag)))
    adds = in_json if flag is None else flag
    body = ours.encode("the dog", special=False)
    assert ours.bos not in body
    assert ours.encode("the dog") == [ours.bos] * adds + body
    for special in (True, False):
        assert ours.encode("<s>the dog", special=special).count(ours.bos) == 1


def test_eos_is_appended_once_where_the_config_says_so(tmp_path, byte_level):
    config = dict(eos_token="<|im_end|>", add_eos_token=True)
    ours = Tokenizer.load(tiny.write(tmp_path, byte_level, tokenizer_config=config))
    body = ours.encode("the dog", special=False)
    assert ours.encode("the dog") == ours.encode("the dog<|im_end|>") == [*body, ours.eos[0]]
    assert ours.encode("") == [ours.eos[0]]


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        (dict(tokenizer_config=dict(eos_token="</s>")), (2,)),
        (dict(tokenizer_config=dict(eos_token={"content": "</s>", "lstrip": False})), (2,)),
        (dict(special_tokens_map=dict(eos_token={"content": "</s>"})), (2,)),
        (dict(config=dict(eos_token_id=7)), (7,)),
        (dict(tokenizer_config=dict(eos_token="</s>"), config=dict(eos_token_id=[9, 2])), (2, 9)),
        (
            dict(
                tokenizer_config=dict(eos_token="</s>"),
                config=dict(eos_token_id=5),
                generation_config=dict(eos_token_id=[5, 6]),
            ),
            (2, 5, 6),
        ),
        (dict(tokenizer_config=dict(eos_token=None), config=dict(eos_token_id=None)), ()),
        ({}, ()),
    ],
)
def test_every_token_that_ends_an_answer_is_found(tmp_path, sentencepiece, files, eos):
    assert Tokenizer.load(tiny.write(tmp_path, sentencepiece, **files)).eos == eos


def test_bos_and_pad_come_from_the_oldest_files_too(tmp_path, sentencepiece):
    ids = dict(bos_token_id=1, pad_token_id=-1)
    ours = Tokenizer.load(tiny.write(tmp_path / "model", sentencepiece, config=ids))
    assert (ours.bos, ours.pad, ours.bos_token) == (1, None, "<s>")
    mapped = dict(special_tokens_map=dict(bos_token="<s>", pad_token={"content": "<pad>"}))
    ours = Tokenizer.load(tiny.write(tmp_path / "map", sentencepiece, **mapped))
    assert (ours.bos, ours.pad) == (1, 3)
    none = dict(tokenizer_config=dict(bos_token=None), config=dict(bos_token_id=1))
    assert Tokenizer.load(tiny.write(tmp_path / "none", sentencepiece, **none)).bos is None


def test_tokens_that_only_the_config_knows_are_added_and_special(tmp_path, byte_level):
    size = byte_level.get_vocab_size()
    token = {"content": "<|tool|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    plain = byte_level.token_to_id("日本")  # added, but not special, in tokenizer.json
    declared = {str(size): token, str(plain): dict(content="日本", special=True)}
    files = dict(tokenizer_config=dict(added_tokens_decoder=declared), added_tokens={"<|x|>": size + 1})
    ours = Tokenizer.load(tiny.write(tmp_path, byte_level, **files))
    assert ours.encode("a<|tool|><|x|>")[1:] == [size, size + 1]
    assert ours.special >= {size, plain}
    assert size + 1 not in ours.special
    assert ours.vocab == size + 2
    assert ours.decode(ours.encode("a<|tool|>b<|x|>")) == "ab<|x|>"


def test_named_tokens_are_special_and_keep_their_flags(tmp_path, byte_level):
    tok = tokenizers.Tokenizer.from_str(byte_level.to_str())
    tok.add_tokens([tokenizers.AddedToken("<|end|>", rstrip=True)])
    assert not tok.get_added_tokens_decoder()[tok.token_to_id("<|end|>")].special
    files = dict(tokenizer_config=dict(eos_token="<|end|>", additional_special_tokens=["<|end|>", "<|absent|>", "q"]))
    ours = Tokenizer.load(tiny.write(tmp_path, tok, **files))
    assert ours.special >= {ours.eos[0], tok.token_to_id("q")}
    assert ours.decode(ours.encode("a<|end|>   b")) == "ab"


def test_saved_truncation_and_padding_are_off(tmp_path, byte_level):
    tok = tokenizers.Tokenizer.from_str(byte_level.to_str())
    tok.enable_truncation(4)
    tok.enable_padding(length=8, pad_id=3, pad_token="<|pad|>")
    ours = Tokenizer.load(tiny.write(tmp_path, tok))
    assert ours.decode(ours.encode(tiny.TEXT[0])) == tiny.TEXT[0]
    assert len(ours.encode("a")) == 1


@pytest.mark.parametrize(
    ("files", "template"),
    [
        (dict(tokenizer_config=dict(chat_template="one")), "one"),
        (
            dict(
                tokenizer_config=dict(
                    chat_template=[dict(name="rag", template="r"), dict(name="default", template="d")]
                )
            ),
            "d",
        ),
        (dict(chat_template=dict(chat_template="processor")), "processor"),
        ({}, None),
    ],
)
def test_chat_template_is_found(tmp_path, byte_level, files, template):
    folder = tiny.write(tmp_path, byte_level, **files)
    assert Tokenizer.load(folder).chat_template == template
    (folder / "chat_template.jinja").write_text("é {{ 1 }}\n", "utf-8")
    assert Tokenizer.load(folder).chat_template == "é {{ 1 }}\n"


def test_older_forms_load_through_transformers(tmp_path, byte_level):
    byte_level.model.save(str(tmp_path))  # vocab.json and merges.txt
    ends = dict(eos_token="<|im_end|>", unk_token="<|im_end|>", bos_token="<|bos|>")
    tiny.write(tmp_path, None, tokenizer_config=ends | dict(tokenizer_class="GPT2Tokenizer"))
    ours = Tokenizer.load(tmp_path)
    for text in tiny.TEXT[:7]:
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("the fox<|im_end|>") == byte_level.encode("the fox<|im_end|>").ids


def test_without_transformers_an_older_form_says_what_to_install(tmp_path, monkeypatch):
    tiny.write(tmp_path, None, vocab={})
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"^tokenizer: .* needs? transformers: pip install 'molora_jax\[hf\]'$"):
        Tokenizer.load(tmp_path)


def test_transformers_is_not_imported_for_a_tokenizer_json(tmp_path, byte_level):
    folder = tiny.write(tmp_path, byte_level)
    code = (
        "import sys; from molora_jax.text.tokenizer import Tokenizer; Tokenizer.load(sys.argv[1]); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0


def corrupt(name):
    return lambda folder: (folder / f"{name}.json").write_text("{", "utf-8")


def rewrite(name, value):
    return lambda folder: tiny.write(folder, None, **{name: value})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "found none in"),
        (corrupt("tokenizer"), "cannot read .*tokenizer.json"),
        (corrupt("tokenizer_config"), "cannot read .*tokenizer_config.json"),
        (rewrite("config", [1]), "got a list in .*config.json, expected a JSON object"),
        (rewrite("tokenizer_config", dict(eos_token="<eos>")), "eos_token is '<eos>' in .*not in its vocabulary"),
        (rewrite("added_tokens", {"<s>": 40}), "token '<s>' of .* is 40 in .* but 1 in the tokenizer"),
        (
            rewrite("tokenizer_config", dict(chat_template=[dict(name="rag", template="")])),
            "got chat templates rag in .*, expected one named default",
        ),
    ],
)
def test_a_spoilt_folder_gives_one_line(tmp_path, sentencepiece, spoil, message):
    spoil(tiny.write(tmp_path, sentencepiece))
    with pytest.raises(UserError, match=f"^tokenizer: .*{message}") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_folder_gives_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^tokenizer: found none in .*absent, expected a folder with tokenizer\.json$"):
        Tokenizer.load(tmp_path / "absent")


@pytest.mark.parametrize("text", ["\ud800", 3, None])
def test_what_is_not_text_gives_one_line(tmp_path, byte_level, text):
    ours = Tokenizer.load(tiny.write(tmp_path, byte_level))
    with pytest.raises(UserError, match=r"^tokenizer: got .*, expected a string of valid Unicode to encode$"):
        ours.encode(text)
