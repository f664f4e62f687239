"""The grid of readers on a base of random weights: every cell is there, and MaRA's contexts are short and hold more."""

import dataclasses
import pathlib

import numpy as np
import pytest

from molora_jax.checkpoints.model import Model
from molora_jax.config import ModelConfig
from molora_jax.data import testbed
from molora_jax.models import transformer
from molora_jax.retrieval import baselines, grid, recipe
from molora_jax.retrieval.grid import GridConfig
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.training.specialist import AdapterConfig

TINY = GridConfig(
    readers={"lora": AdapterConfig(rank=2, sites=("attn.q_proj",))},
    level=1,
    router_questions=60,
    test_questions=8,
    depths=(1,),
    top=3,
    steps=2,
    rows=2,
    seeds=1,
)


@pytest.mark.slow
def test_every_cell_of_the_grid(monkeypatch):
    pytest.importorskip("grain", reason="grain is missing; pip install 'molora_jax[train]'")
    monkeypatch.setattr(baselines, "bm25", baselines.tfidf)  # so that nothing here needs its package
    monkeypatch.setattr(recipe, "TRAINING", dataclasses.replace(recipe.TRAINING, epochs=4))
    words = Tokenizer.load(pathlib.Path(testbed.__file__).parent / "tokenizer")
    cfg = ModelConfig(
        family="llama", vocab=words.vocab, layers=2, width=16, mlp_width=16, heads=2, kv_heads=1, head_width=8,
        windows=(0, 0), attn_scale=8**-0.5,
    )  # fmt: skip
    model, rows = Model(cfg, transformer.init(cfg), words), []
    picked = []
    evidence = grid.evidence
    monkeypatch.setattr(grid, "evidence", lambda *args: picked.append((args[1], evidence(*args))) or picked[-1][1])
    summary = grid.run(lambda **row: rows.append(row), model, TINY)
    cells = [(reader, context) for reader in ("base", "lora") for context in ("all", "mara")]
    assert [(row["reader"], row["context"]) for row in rows] == cells
    assert set(summary) == {f"{reader}_{context}" for reader, context in cells}
    assert all(0 <= row["low"] <= row["right"] <= row["high"] <= 1 and row["n"] == 8 for row in rows)
    [(asked, (chosen, _))] = picked
    assert all(list(own) == sorted(own) and len(own) == 3 for own in chosen)
    recall = np.mean([len(set(own) & set(q.supporting)) / q.hops for q, own in zip(asked, chosen, strict=True)])
    assert recall > 0.7  # by chance it is a half
