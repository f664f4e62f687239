"""Peak memory of loading, and loading onto several devices; each in a process of its own."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.checkpoints import tiny

ROOT = pathlib.Path(__file__).parents[2]

PEAK = """
import sys
import jax, numpy as np
from molora_jax.checkpoints import hf
from molora_jax.models import transformer

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

folder, stacked = sys.argv[1], sys.argv[2] == "stacked"
transformer.abstract(hf.families.from_hf(hf.read_config(hf.Path(folder))))
jax.block_until_ready(jax.device_put(np.zeros(3)))
before = peak()
params = jax.block_until_ready(hf.load(folder, stacked=stacked)[1])
print((peak() - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""

SHARDED = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)
from jax.sharding import NamedSharding, PartitionSpec as P
from molora_jax.checkpoints import hf

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
here = lambda *spec: NamedSharding(mesh, P(*spec))
for dtype in (np.float32, np.float64):
    _, plain = hf.load(sys.argv[1], dtype=dtype)
    _, replicated = hf.load(sys.argv[1], dtype=dtype, sharding=here())
    places = jax.tree.map(lambda leaf: here(), plain)
    places["layers"]["mlp"]["up_proj"]["weight"] = here(None, "b", "a")
    places["layers"]["mlp"]["down_proj"]["weight"] = here("a", None, "b")
    places["embed"]["weight"] = here(("a", "b"))
    _, placed = hf.load(sys.argv[1], dtype=dtype, sharding=places)
    for tree in (replicated, placed):
        for got, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(plain), strict=True):
            assert got.dtype == dtype
            np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    def shard(leaf):
        return leaf.addressable_shards[0].data.shape
    assert shard(placed["layers"]["mlp"]["up_proj"]["weight"]) == (2, 32, 16)
    assert shard(placed["layers"]["mlp"]["down_proj"]["weight"]) == (1, 32, 32)
    assert shard(placed["embed"]["weight"]) == (75, 32)
    listed = places | {"layers": [jax.tree.map(lambda leaf: here(), layer) for layer in
                                  hf.load(sys.argv[1], stacked=False)[1]["layers"]]}
    _, layers = hf.load(sys.argv[1], dtype=dtype, stacked=False, sharding=listed)
    np.testing.assert_array_equal(layers["layers"][1]["attn"]["k_proj"]["weight"],
                                  plain["layers"]["attn"]["k_proj"]["weight"][1])
print("equal")
"""


def run(script: str, *args) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module", params=[1, 4], ids=["single", "sharded"])
def checkpoint(request, tmp_path_factory):
    """About 100 MB of fp32."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config, small = tiny.llama(hidden_size=512, intermediate_size=1536, vocab_size=8192, num_hidden_layers=6)
    config |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    wide = {32: 512, 64: 1536, 300: 8192}
    rng, weights = np.random.default_rng(1), {}
    for name, value in small.items():
        shape = tuple(wide[n] for n in value.shape)
        if "self_attn" in name:
            shape = {"q": (512, 512), "k": (256, 512), "v": (256, 512), "o": (512, 512)}[name.split("attn.")[1][0]]
        copies = range(6) if "layers.0" in name else [None] if "layers" not in name else []
        for i in copies:
            weights[name.replace("layers.0", f"layers.{i}")] = rng.random(shape, np.float32)
    tiny.write(folder, config, weights, request.param)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("layers", ["stacked", "listed"])
def test_peak_memory_of_loading_stays_near_the_result(checkpoint, layers):
    ratio = float(run(PEAK, checkpoint, layers))
    print(f"{checkpoint.name} {layers}: peak memory {ratio:.3f} x the weights")
    assert 0.9 < ratio < 1.3


def test_each_device_gets_its_part(tmp_path):
    tiny.write(tmp_path, *tiny.llama(), shards=2)
    assert run(SHARDED, tmp_path) == "equal"
