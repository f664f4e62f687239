"""The Python files of the project, parsed."""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("molora_jax", "pallas_kernels", "experiments", "configs", "notebooks", "tests")


def files(*folders: str) -> list[str]:
    """Their paths from the root, in order."""
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def text(path: str) -> str:
    return (ROOT / path).read_text()


@functools.cache
def parsed(path: str) -> ast.Module:
    return ast.parse(text(path), path)


def imports(path: str, module: ast.Module) -> list[str]:
    """Dotted names of all that a file imports anywhere in it, `from a.b import c` as `a.b.c`."""
    package = path.removesuffix(".py").removesuffix("/__init__").split("/")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            found += [f"{origin}.{alias.name}" for alias in node.names]
    return found


def attributes(module: ast.Module) -> list[str]:
    """Every dotted access `a.b.c` in a file, each at full length."""
    return [ast.unparse(node) for node in ast.walk(module) if isinstance(node, ast.Attribute)]
