"""What XLA makes of the engine's programs: the KV table is updated in place and never copied."""

import pytest

from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig
from tests import fakes

MEGABYTE = 2**20


@pytest.mark.parametrize("unrolled", [False, True])
def test_no_program_copies_the_kv_table(unrolled):
    cfg, params = fakes.weights("gemma3", unrolled=unrolled)
    row = 4 * 2 * cfg.kv_width
    pages = (64 * MEGABYTE // (row * 16 * cfg.layers),) * len(cfg.kinds)
    config = EngineConfig(max_rows=3, max_length=64, prefill_chunk=32, block=4, pages=pages)
    engine = Engine(cfg, params, config)
    assert engine.kv_bytes > 60 * MEGABYTE
    for bucket in (engine.decode[-1], engine.prefill[-1]):
        memory = engine._program(bucket).memory_analysis()
        assert memory.temp_size_in_bytes < engine.kv_bytes / 8, bucket
        assert memory.alias_size_in_bytes >= engine.kv_bytes, bucket  # donated: the result lies where the input lay
    for program in (engine._enter, engine._stop):
        assert program.memory_analysis().temp_size_in_bytes < MEGABYTE
    assert engine._enter.memory_analysis().alias_size_in_bytes >= engine.kv_bytes
