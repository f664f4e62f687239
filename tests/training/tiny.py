"""A tiny base in a folder, and a file of rows to fine-tune it on: letters that go up by one."""

import json
import pathlib
import shutil

import numpy as np

from molora_jax.checkpoints import hf
from molora_jax.config import ModelConfig
from molora_jax.data.testbed import vocabulary
from molora_jax.models import transformer
from molora_jax.training.settings import SFTConfig
from molora_jax.training.specialist import AdapterConfig

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SITES = ("attn.v_proj", "mlp.down_proj")


def base(folder: pathlib.Path) -> pathlib.Path:
    """Writes a Llama of two layers with the testbed's tokenizer."""
    sizes = dict(vocab=512, layers=2, width=32, mlp_width=64, heads=4, kv_heads=2, head_width=8)
    cfg = ModelConfig(family="llama", windows=(0, 0), attn_scale=8**-0.5, max_positions=128, **sizes)
    hf.save(folder, cfg, transformer.init(cfg, seed=0))
    for path in vocabulary.FOLDER.iterdir():
        shutil.copy(path, folder)
    return folder


def rows(path: pathlib.Path, count: int = 48) -> pathlib.Path:
    """Writes rows of equal length, 24 letters each, so that a row of 32 tokens holds one of them."""
    starts = np.random.default_rng(0).integers(0, len(LETTERS), count)
    text = lambda start, span: " ".join(LETTERS[(start + i) % len(LETTERS)] for i in span)
    lines = [dict(prompt=text(s, range(4)), completion=" " + text(s, range(4, 24))) for s in starts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(folder: pathlib.Path, adapter: AdapterConfig = AdapterConfig(sites=SITES, rank=4), **changes) -> SFTConfig:  # noqa: B008
    """A run of a few steps on them; the base and the rows are written where they are not there yet."""
    if not (folder / "base").exists():
        base(folder / "base")
        rows(folder / "rows.jsonl")
    usual = dict(steps=6, rows=8, length=32, held_out=5, rate=0.02, gate_rate=0.02, warmup=1, log_every=1)
    usual |= dict(evaluate_every=3, save_every=3)
    data = dict(model=str(folder / "base"), data=str(folder / "rows.jsonl"))
    return SFTConfig(adapter=adapter, **(data | usual | changes))
