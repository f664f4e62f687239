"""Who may import whom."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("molora_jax", "pallas_kernels", "experiments", "configs")
SHARED = {"typing", "config", "precision", "sharding", "distributed", "compilation", "benchmarking", "files"}
"""Modules at the top of molora_jax that every room may use."""

ALLOWED = {
    "nn": {"pallas_kernels"},
    "adapters": {"pallas_kernels", "nn"},
    "models": {"pallas_kernels", "nn", "adapters"},
    "text": set(),
    "checkpoints": {"nn", "adapters", "models", "text"},
    "data": {"text", "checkpoints"},
    "routing": set(),
    "engine": {"nn", "adapters", "models", "routing"},
    "serving": {"nn", "adapters", "models", "routing", "engine", "text", "checkpoints"},
    "training": {"pallas_kernels", "nn", "adapters", "models", "routing", "engine", "text", "checkpoints", "data"},
    "evaluation": {
        *("nn", "adapters", "models", "routing", "engine", "serving", "training", "text", "checkpoints", "data")
    },
    "retrieval": {"nn", "adapters", "models", "engine", "training", "evaluation", "text", "checkpoints", "data"},
}
FORBIDDEN = ("jax._src", "pickle", "dill", "cloudpickle")


def sources() -> list[pathlib.Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: pathlib.Path) -> set[str]:
    """Full names of everything that a file imports, also inside functions; `from a import b` gives a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(name: str) -> str | None:
    """Room of a module's full name: `nn`, `pallas_kernels`, `experiments`; None for other people's packages."""
    package, *rest = name.split(".")
    if package not in PACKAGES:
        return None
    return rest[0] if package == "molora_jax" and rest else package


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(path):
    own = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
    names = imported(path)
    for name in names:
        assert not name.startswith(FORBIDDEN), f"{path} imports {name}"
    others = {room(name) for name in names} - {None, own}
    if own == "pallas_kernels":
        assert not others
    if own not in ("experiments", "configs"):
        assert not others & {"experiments", "configs"}
    if own in ALLOWED:
        assert others - SHARED <= ALLOWED[own], f"{path} reaches into {others - SHARED - ALLOWED[own]}"


def test_every_room_has_a_rule():
    rooms = {path.parent.name for path in (ROOT / "molora_jax").glob("*/__init__.py")}
    assert rooms <= set(ALLOWED), f"add {rooms - set(ALLOWED)} to ALLOWED"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_nnx_jit_or_unpickles(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("nnx", "jit"), ("torch", "load"), ("pickle", "load")}
