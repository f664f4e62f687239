"""Models in processes of their own: the same tokens, and one line when a process fails, however it does."""

import dataclasses
import os
import signal

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.engine.processes import Source
from molora_jax.engine.request import EngineConfig
from molora_jax.engine.separate import in_processes
from molora_jax.routing.programs.speculative import Speculative
from tests.routing import routed, sources

pytestmark = pytest.mark.slow
CONFIG = EngineConfig(max_rows=3, max_length=routed.LENGTH, page_size=4, prefill_chunk=16, block=3)


def test_processes_give_the_same_until_one_is_killed():
    program = Speculative()
    models, own = sources.of(program)
    models[1] = dataclasses.replace(models[1], cores=(0,), environment=(("WHOSE", "large"),))
    with in_processes(models, own, CONFIG, entropy=True) as engine:
        engine.warm_up()
        for thresholds in ((1, 1, 1, 1), (3, 1, 1, 2)):
            engine.schedule = dataclasses.replace(engine.schedule, thresholds=np.array(thresholds))
            asked = routed.requests(sum(thresholds), 6)
            for request, event in zip(asked, engine.run(asked), strict=True):
                want = routed.naive(program, request)
                assert (event.tokens, event.writers, event.finished) == (want.tokens, want.writers, want.finished)
        os.kill(engine._workers._processes[1].pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"subserver of models\[1\]: ended with .*exit code -9"):
            engine.run(routed.requests(0, 3))
        with pytest.raises(UserError, match="exit code -9"):
            engine.submit(routed.requests(0, 1)[0])
    assert not any(process.is_alive() for process in engine._workers._processes)


def test_a_model_that_cannot_be_loaded_is_told_in_one_line():
    models, own = sources.of(Speculative())
    models[1] = Source("tests.routing.sources:model", ("none",))
    with pytest.raises(UserError, match=r"models\[1\]: ValueError: invalid literal") as caught:
        in_processes(models, own, CONFIG)
    assert "\n" not in str(caught.value)


def test_a_factory_that_is_not_there_is_told():
    with pytest.raises(UserError, match="expected module:function"):
        Source("tests.routing.sources:nothing").load()
    with pytest.raises(UserError, match="expected module:function"):
        Source("no colon").load()
