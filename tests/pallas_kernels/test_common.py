"""Choosing a backend, and reading a table of measurements."""

import json
import logging

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import common

CAN = {"tpu": None, "gpu": None}


@pytest.fixture
def on(monkeypatch):
    def pretend(platform, kind="made up"):
        monkeypatch.setattr(common, "target", lambda: (platform, kind))
        common.warn_once.cache_clear()

    return pretend


@pytest.mark.parametrize(("platform", "expected"), [("cpu", "xla"), ("tpu", "tpu"), ("gpu", "gpu")])
def test_auto_takes_the_kernel_of_the_platform(on, platform, expected):
    on(platform)
    assert common.choose_backend("op", "auto", CAN) == expected


def test_a_fallback_is_said_once(on, caplog):
    on("tpu")
    with caplog.at_level(logging.WARNING, logger="absl"):
        chosen = [common.choose_backend("op", "auto", {"tpu": "takes no float64", "gpu": None}) for _ in range(3)]
    assert chosen == ["xla"] * 3
    assert [r.getMessage() for r in caplog.records] == [
        "op: the tpu kernel takes no float64; the xla path runs instead"
    ]


def test_an_explicit_backend_never_falls_back(on):
    on("cpu")
    with pytest.raises(common.NotSupported, match="does not run on cpu; use backend='auto' or 'xla'"):
        common.choose_backend("op", "tpu", CAN)
    with pytest.raises(common.NotSupported, match="takes no float64"):
        common.choose_backend("op", "gpu", {"tpu": None, "gpu": "takes no float64"})
    assert common.choose_backend("op", "tpu", CAN, interpret=True) == "tpu"


def test_an_unknown_backend_is_named(on):
    on("cpu")
    with pytest.raises(ValueError, match="got backend='cuda', expected one of auto, reference, xla, tpu, gpu"):
        common.choose_backend("op", "cuda", CAN)


def test_the_target_is_the_device_of_an_abstract_mesh():
    kind = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)):
        assert common.target() == ("tpu", "TPU v5 lite")
    assert common.target()[0] == jax.default_backend()


def test_the_nearest_measurement_within_reach_is_taken(on, tmp_path, monkeypatch):
    on("gpu", "Some Chip (x2)")
    (tmp_path / "tuned").mkdir()
    rows = [{"dims": {"N": n, "E": 8}, "choice": {"tile": n}} for n in (16, 256)]
    (tmp_path / "tuned" / "some_chip_x2.json").write_text(json.dumps({"what": rows}))
    monkeypatch.setattr(common.importlib.resources, "files", lambda package: tmp_path)
    common.tuned_table.cache_clear()
    assert common.tuned("p", "what", N=20, E=8) == {"tile": 16}
    assert common.tuned("p", "what", N=100, E=16) == {"tile": 256}
    assert common.tuned("p", "what", N=3, E=8) is None
    assert common.tuned("p", "what", N=20, E=64) is None
    assert common.tuned("p", "other", N=20, E=8) is None
    on("gpu", "Another")
    assert common.tuned("p", "what", N=20, E=8) is None
    common.tuned_table.cache_clear()


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [(["bfloat16"], "float32"), (["bfloat16", "float32"], "float32"), (["float32", "float64"], "float64")],
)
def test_sums_are_taken_in_fp32_or_wider(dtypes, expected):
    assert common.accumulator(*map(jnp.dtype, dtypes)) == expected
