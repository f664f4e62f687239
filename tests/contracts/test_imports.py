"""Who may import whom, and what nobody may."""

import ast
import sys

import pytest

from tests.contracts import tree

MODELS = {"pallas_kernels", "nn", "adapters", "models"}
LIBRARY = MODELS | {"checkpoints", "text", "data", "routing"}
MAY_IMPORT = {  # rooms; everyone may import the modules beside them (typing, config, ...)
    "pallas_kernels": set(),
    "nn": {"pallas_kernels"},
    "adapters": {"pallas_kernels", "nn"},
    "models": MODELS,
    "routing": set(),
    "engine": MODELS | {"routing"},
    "checkpoints": LIBRARY,
    "text": LIBRARY,
    "data": LIBRARY,
    "training": LIBRARY | {"engine"},
    "serving": LIBRARY | {"engine", "retrieval"},
    "retrieval": LIBRARY | {"engine", "training"},
    "evaluation": LIBRARY | {"engine", "training", "retrieval"},
    "": set(),  # the modules beside the rooms
}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def room(path: str) -> str:
    """`molora_jax/nn/rope.py` is in `nn`; `molora_jax/config.py` in none."""
    parts = path.split("/")
    if parts[0] != "molora_jax":
        return parts[0]
    return parts[1] if len(parts) > 2 else ""


def target(name: str) -> str | None:
    """The room that an imported name lies in; None for what is not ours."""
    parts = name.split(".")
    if parts[0] == "molora_jax":
        return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""
    return parts[0] if parts[0] in ("pallas_kernels", "experiments", "configs", "tests", "notebooks") else None


def wrong_imports(path: str, module: ast.Module) -> list[str]:
    """The imports of one file that the plan of the house forbids."""
    here, wrong = room(path), []
    for name in tree.imports(path, module):
        there = target(name)
        if here == "routing" and there in (None, ""):
            top = name.split(".")[0]
            typing = name.startswith("molora_jax.typing.") or name == "molora_jax.typing"
            if not (typing or top == "jax" or top in sys.stdlib_module_names):
                wrong.append(name)
        elif there is None or there == here:
            continue
        elif here in MAY_IMPORT:
            if there not in MAY_IMPORT[here] | {""} or (here == "pallas_kernels" and name.startswith("molora_jax")):
                wrong.append(name)
        elif there in ("experiments", "configs", "tests") and here != "tests":
            wrong.append(name)
    return wrong


def forbidden(path: str, module: ast.Module) -> list[str]:
    """Names that may appear nowhere: internals of jax, `nnx.jit`, and whatever unpickles."""
    names = tree.imports(path, module) + tree.attributes(module)
    wrong = [name for name in names if "jax._src" in name or name.endswith(("nnx.jit", "torch.load", "nnx.pmap"))]
    wrong += [name for name in tree.imports(path, module) if name.split(".")[0] in PICKLES]
    for node in ast.walk(module):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            wrong.append(f"allow_pickle={ast.unparse(node.value)}")
    return wrong


@pytest.mark.parametrize("path", tree.files("molora_jax", "pallas_kernels", "experiments", "configs", "notebooks"))
def test_imports_follow_the_plan(path):
    assert path.split("/")[0] != "molora_jax" or room(path) in MAY_IMPORT, f"no rule for the room {room(path)}"
    assert wrong_imports(path, tree.parsed(path)) == []


@pytest.mark.parametrize("path", tree.files(*tree.FOLDERS))
def test_nothing_forbidden_is_used(path):
    assert forbidden(path, tree.parsed(path)) == []


@pytest.mark.parametrize(
    ("path", "line", "wrong"),
    [
        ("pallas_kernels/common.py", "from molora_jax.config import UserError", True),
        ("pallas_kernels/common.py", "import molora_jax", True),
        ("pallas_kernels/routed_lora/api.py", "from pallas_kernels.common import x", False),
        ("molora_jax/nn/a.py", "from molora_jax.models import state", True),
        ("molora_jax/nn/a.py", "from ..models.state import DecodeState", True),
        ("molora_jax/nn/a.py", "from .. import models", True),
        ("molora_jax/nn/a.py", "from . import rope", False),
        ("molora_jax/nn/__init__.py", "from . import rope", False),
        ("molora_jax/nn/a.py", "def f():\n  import molora_jax.engine.engine", True),
        ("molora_jax/nn/a.py", "from pallas_kernels import common", False),
        ("molora_jax/nn/a.py", "from molora_jax.typing import Array", False),
        ("molora_jax/adapters/a.py", "from molora_jax.models import transformer", True),
        ("molora_jax/models/a.py", "from molora_jax.adapters import bank", False),
        ("molora_jax/models/a.py", "from molora_jax.engine import engine", True),
        ("molora_jax/routing/a.py", "import numpy", True),
        ("molora_jax/routing/a.py", "from molora_jax.nn import linear", True),
        ("molora_jax/routing/a.py", "import jax.numpy as jnp, dataclasses", False),
        ("molora_jax/routing/a.py", "from molora_jax.typing import Array", False),
        ("molora_jax/routing/programs/a.py", "from molora_jax.routing import program", False),
        ("molora_jax/engine/a.py", "from molora_jax.routing.program import Program", False),
        ("molora_jax/engine/a.py", "from molora_jax.training import loop", True),
        ("molora_jax/serving/a.py", "from molora_jax import training", True),
        ("molora_jax/serving/a.py", "from molora_jax.engine import engine", False),
        ("molora_jax/training/a.py", "from molora_jax.engine import engine", False),
        ("molora_jax/data/a.py", "from molora_jax.engine import engine", True),
        ("molora_jax/text/a.py", "from molora_jax.serving import app", True),
        ("molora_jax/checkpoints/a.py", "from molora_jax.training import loop", True),
        ("molora_jax/config.py", "from molora_jax.nn import rope", True),
        ("molora_jax/nn/a.py", "from experiments import generate", True),
        ("experiments/a.py", "from experiments import generate", False),
        ("experiments/a.py", "import configs.sft", True),
        ("notebooks/a.py", "from experiments.demo import main", True),
        ("notebooks/a.py", "from molora_jax.training import loop", False),
        ("molora_jax/nn/a.py", "from tests import golden", True),
    ],
)
def test_the_rule_itself(path, line, wrong):
    assert bool(wrong_imports(path, ast.parse(line))) == wrong


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("from jax._src import core", True),
        ("import jax._src.core as c", True),
        ("import jax\njax._src.core.x()", True),
        ("from jax import numpy", False),
        ("from flax import nnx\nnnx.jit(f)", True),
        ("from flax.nnx import jit", True),
        ("import flax\n@flax.nnx.jit\ndef f(): ...", True),
        ("from flax import nnx\nnnx.split(m)\njax.jit(f)", False),
        ("import pickle", True),
        ("def f():\n  from joblib import load", True),
        ("import torch\ntorch.load(p)", True),
        ("from torch import load", True),
        ("np.load(p, allow_pickle=True)", True),
        ("np.load(p, allow_pickle=False)", False),
    ],
)
def test_the_ban_itself(line, wrong):
    assert bool(forbidden("molora_jax/nn/a.py", ast.parse(line))) == wrong
