"""Meshes: what lies where, the same losses on any of them and in several processes, and restoring on another one."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from molora_jax import distributed, sharding
from molora_jax.config import UserError
from molora_jax.sharding import MeshConfig
from molora_jax.training.metrics import FILE
from molora_jax.training.placement import Placement, declared
from tests import fakes
from tests.training import tiny

ROOT = pathlib.Path(__file__).parents[2]


class Shape:
    """What `sharding.spec` looks at of a mesh, without devices."""

    shape = dict(data=2, fsdp=2, tensor=4)


@pytest.mark.parametrize(
    ("axes", "shape", "want"),
    [
        (("layers", "mlp", "embed"), (30, 1536, 576), (None, "tensor", "fsdp")),
        (("embed", "heads"), (7, 576), (None, "tensor")),  # seven do not divide
        (("vocab", "embed"), (49152, 576), (None, "fsdp")),
        (("mlp", "heads"), (8, 8), ("tensor", None)),  # a mesh axis cuts one dimension
        ((None, "norm"), (3, 8), (None, None)),
    ],
)
def test_logical_axes_become_mesh_axes_where_they_divide(axes, shape, want):
    assert tuple(sharding.spec(Shape, axes, shape)) == want


def test_every_leaf_of_a_model_and_of_its_experts_has_declared_axes():
    for name in ("llama_untied", "qwen3", "gemma3"):
        cfg, params = fakes.model(name)
        axes = declared(cfg)
        shapes = {".".join(key.key for key in path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
        assert {path: len(found) for path, found in axes.items()} == {path: len(s) for path, s in shapes.items()}


def test_a_bank_lies_as_its_projections_do():
    place = Placement(Shape, declared(fakes.model("llama_untied")[0]))
    cut = lambda path: place._axes(path)
    assert cut("bank.layers.mlp.up_proj.a") == ("layers", None, None, "embed")
    assert cut("bank.layers.mlp.up_proj.b") == ("layers", None, None, "mlp")
    assert cut("bank.layers.mlp.up_proj.growth") == ("layers", None, "mlp")
    assert cut("magnitudes.attn.k_proj") == ("layers", None, "kv_heads")
    assert cut("bank.layers.gates.attn/1.cores.proj.weight") is None
    assert cut("bank.layers.mlp.up_proj.scale") is None


def test_meshes_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="got data=3, fsdp=1, tensor=1 for 1 devices, expected sizes whose product"):
        sharding.mesh(MeshConfig(data=3), jax.devices()[:1])
    with pytest.raises(UserError, match="expected positive sizes"):
        MeshConfig(fsdp=0)
    with pytest.raises(UserError, match="expected all three, or none"):
        distributed.initialize("localhost:1", 2)
    assert sharding.mesh(MeshConfig(), jax.devices()[:1]).shape == dict(data=1, fsdp=1, tensor=1)


def run(*arguments: str, devices: int = 1, wait: bool = True):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return finished(process) if wait else process


def finished(process: subprocess.Popen) -> str:
    out, errors = process.communicate(timeout=900)
    assert process.returncode == 0, out + errors
    return out


@pytest.mark.slow
def test_losses_are_the_same_on_any_mesh_and_after_restoring_on_another(tmp_path):
    found = json.loads(run("tests.training.mesh_worker", str(tmp_path), devices=8).splitlines()[-1])
    assert found["devices"] == 8
    for kind in ("lora", "dora", "malora"):
        for name, got in found[kind].items():
            if name not in ("spread", "sum"):
                np.testing.assert_allclose(got, found[kind]["one"], rtol=1e-5, err_msg=f"{kind} on {name}")
        assert found[kind]["sum"] > 0
    assert found["lora"]["one"][-1][0] < found["lora"]["one"][0][0]
    assert found["lora"]["spread"] == {
        "params.layers.mlp.down_proj.weight": "(None, 'fsdp', 'tensor')",
        "bank.layers.mlp.down_proj.a": "(None, None, None, 'tensor')",
        "bank.layers.mlp.down_proj.b": "(None, None, None, 'fsdp')",
    }
    for name in ("fsdp", "data"):
        np.testing.assert_allclose(found[f"restored on {name}"][0], found["lora"]["one"][2], rtol=1e-5)


CONFIG = '''"""A tiny run."""

import pathlib

from molora_jax.training import settings
from tests.training import tiny


def get_config():
    return settings.editable(tiny.config(pathlib.Path(__file__).parent, held_out=8))
'''


def losses(folder: pathlib.Path) -> list[list[float]]:
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return [[line.get(name, 0.0) for name in ("step", "loss", "eval_loss", "grad_norm")] for line in lines]


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one_and_resume(tmp_path):
    tiny.config(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    train = ["experiments.train", f"--config={tmp_path / 'config.py'}", "--noprogress", "--config.schedule=constant"]
    run(*train, f"--out={tmp_path / 'one'}")
    joined = ["--distributed", f"--coordinator=127.0.0.1:{port}", "--processes=2"]

    def together(*arguments: str) -> list[str]:
        both = [*train, *joined, f"--out={tmp_path / 'two'}", *arguments]
        pair = [run(*both, f"--process_index={i}", wait=False) for i in range(2)]
        return [finished(process) for process in pair]

    together("--config.steps=3")
    first, second = together()
    assert "held-out loss" in first
    assert "held-out loss" not in second
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)
    assert (tmp_path / "two" / "adapter" / "adapter_model.safetensors").exists()
