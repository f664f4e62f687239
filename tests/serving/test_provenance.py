"""Who wrote which part: by colour, or by marks below each line."""

import io

import pytest

from molora_jax.serving.provenance import WIDTH, Provenance


def shown(parts, writers, models=2, *, colour=False) -> str:
    out = io.StringIO()
    paint = Provenance(out, models, colour=colour)
    for part, writer in zip(parts, writers, strict=True):
        paint.write([part], [writer])
    paint.end()
    return out.getvalue()


def test_marks_stand_below_what_the_others_wrote():
    assert (
        shown(["The capital", " is", " Paris", "."], [0, 1, 0, 2], 3)
        == "The capital is Paris.\n           111      ^\n"
    )


def test_a_line_of_the_first_alone_has_no_marks():
    assert shown(["a", "b\nc", "d\n", "\ne"], [0, 1, 0, 1]) == "ab\n ^\ncd\n^\n\ne\n^\n"


def test_wide_characters_take_two_marks_and_accents_none():
    assert shown(["狐x", "e\u0301", "狐"], [0, 0, 1]) == "狐xe\u0301狐\n    ^^\n"


def test_long_lines_break():
    assert shown(["a" * (WIDTH + 3)], [1]) == f"{'a' * WIDTH}\n{'^' * WIDTH}\naaa\n^^^\n"


def test_long_lines_break_between_words():
    words = ["word "] * (WIDTH // 5) + ["longer", " end"]
    got = shown(words, [0] * (WIDTH // 5) + [1, 0])
    assert got == "word " * (WIDTH // 5) + "\nlonger end\n^^^^^^\n"


def test_colours_begin_and_end_with_a_run():
    out = io.StringIO()
    paint = Provenance(out, 3, colour=True)
    paint.write(["a", "b", "c", "d", ""], [0, 2, 2, 1, 2])
    paint.end()
    assert out.getvalue() == "a\x1b[1;36mbc\x1b[0m\x1b[33md\x1b[0m\n"


@pytest.mark.parametrize("colour", [False, True])
def test_the_legend_counts(colour):
    legend = Provenance(io.StringIO(), 3, colour=colour).legend([0, 0, 2, 1])
    assert [part.split(" of ")[0][-1] for part in legend.split(", ")] == ["2", "1", "1"]
    assert "(25.0%)" in legend
    assert ("\x1b" in legend) == colour
    assert Provenance(io.StringIO(), 2, colour=colour).legend([]) == "no tokens"
