"""Sizes that keep the house readable."""

import ast

import pytest

from tests.contracts.test_imports import ROOT, sources

FILES = [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]


def lines(path) -> int:
    return path.read_text().count("\n")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_fits_in_the_head(path):
    most = 90 if path.parent == ROOT / "experiments" else 400
    assert lines(path) <= most, "split it by noun"


def code_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring, which is as long as the contract needs."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = first.end_lineno - first.lineno + 1 if is_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_function_is_one_thought(path):
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not {f.name: code_lines(f) for f in functions if code_lines(f) > 60}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_what_it_is(path):
    if path.name != "__init__.py":
        assert ast.get_docstring(ast.parse(path.read_text()))
