"""PEFT itself reads what we export."""

import dataclasses
import sys

import numpy as np
import pytest

from molora_jax.adapters import adapter as adapters
from molora_jax.adapters import merge
from molora_jax.checkpoints import peft
from tests import golden
from tests.checkpoints import peft_files
from tests.checkpoints.test_peft import logits
from tests.numerics import assert_close

pytest.importorskip("peft", reason="compares with PEFT, which needs torch: pip install peft torch")
pytestmark = pytest.mark.slow


def peft_logits(name: str, folder, tokens: np.ndarray) -> np.ndarray:
    """What PEFT computes with the adapter in `folder` on a golden base."""
    from peft import PeftModel

    sys.path.insert(0, str(golden.FOLDER))
    try:
        import make
    finally:
        sys.path.pop(0)
    model = make.build(name, make.SIZES | make.VARIANTS[name][0])[0]
    return make.rows_alone(PeftModel.from_pretrained(model, folder).eval(), [tokens])[0]


@pytest.mark.parametrize("name", peft_files.names())
def test_a_config_of_our_own_making(tmp_path, name):
    base, tokens, expected = peft_files.logits(name)
    cfg, _ = golden.params(base)
    adapter, _ = peft.load(peft_files.FOLDER / name, cfg)
    peft.save(tmp_path, cfg, dataclasses.replace(adapter, origin={}))
    assert_close(peft_logits(base, tmp_path, tokens.astype(np.int64)), expected, "model")


def test_a_combination(tmp_path):
    cfg, params = golden.params("llama_tied")
    given = [peft.load(peft_files.FOLDER / name, cfg)[0] for name in ("plain", "embeddings", "bfloat16")]
    combined = merge.combine(given, (0.5, 0.7, -0.4), name="c")
    peft.save(tmp_path, cfg, combined)
    tokens = peft_files.logits("plain")[1]
    expected = peft_logits("llama_tied", tmp_path, tokens.astype(np.int64))
    assert_close(logits(*adapters.merge(cfg, params, combined), tokens), expected, "model")
