"""From the command line: a run, its resumption, what it exports taken by the generator, and one line for a mistake."""

import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from molora_jax.adapters.route import Route
from molora_jax.adapters.spec import BankSpec, new_bank, pack, write
from molora_jax.checkpoints import hf, peft
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.training.metrics import FILE
from tests.training import tiny

PROMPT, NEW = "d e f g", 6
ROOT = pathlib.Path(__file__).parents[2]
CONFIG = '''"""A tiny run."""

import dataclasses
import pathlib

from molora_jax.training import settings, specialist
from tests.training import tiny


def get_config(kind: str = "lora"):
    adapter = dataclasses.replace(specialist.named(kind), rank=4, sites=tiny.SITES)
    return settings.editable(tiny.config(pathlib.Path(__file__).parent, adapter))
'''


def run(module: str, *arguments: str, cache: pathlib.Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"experiments.{module}", *arguments]
    environment = os.environ | {"MOLORA_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)


def greedy(folder: pathlib.Path, adapter: pathlib.Path | None) -> list[int]:
    """The likeliest tokens after the prompt, each from the whole text anew."""
    tokenizer, (cfg, params) = Tokenizer.load(folder / "base"), hf.load(folder / "base")
    tokens, bank = tokenizer.encode(PROMPT), None
    if adapter:
        found, _ = peft.load(adapter, cfg)
        spec = BankSpec.holding([found])
        bank = write(new_bank(spec, params), 0, pack(spec, params, found))
    start = len(tokens)
    for _ in range(NEW):
        count = len(tokens)
        route = bank and Route.of(jnp.zeros(count, jnp.int32))
        hidden = transformer.apply(cfg, params, jnp.asarray(tokens), dense(1, count), bank=bank, route=route).hidden
        tokens.append(int(jnp.argmax(transformer.logits(cfg, params, hidden)[-1])))
    return tokens[start:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "toplora"])
def test_what_is_trained_by_one_command_generates_by_another(kind, tmp_path):
    tiny.config(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    train = [f"--config={tmp_path / 'config.py'}:{kind}", f"--out={tmp_path / 'run'}", "--config.schedule=constant"]
    for steps in (3, 20):
        done = run("train", *train, f"--config.steps={steps}", "--config.evaluate_every=10", cache=tmp_path)
        assert done.returncode == 0, done.stderr
    assert f"after {steps} steps" in done.stdout
    assert "20/20" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 21))
    output = tmp_path / "answer.jsonl"
    ask = [f"--model={tmp_path / 'base'}", f"--prompt={PROMPT}", "--temperature=0", f"--max_new_tokens={NEW}"]
    ask += [f"--adapters=up={tmp_path / 'run' / 'adapter'}", "--adapter=up", "--max_length=64", f"--output={output}"]
    done = run("generate", *ask, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(output.read_text())
    base, adapted = greedy(tmp_path, None), greedy(tmp_path, tmp_path / "run" / "adapter")
    assert answer["tokens"] == adapted
    assert adapted != base


WRONG = {
    "no config": ([], "error: config: got none, expected --config=configs/gsm8k.py"),
    "no file": (["--config=nowhere.py"], "error: config: got "),
    "a field": (["--config=configs/gsm8k.py", "--config.stps=3"], "error: flags: ''stps' Did you mean \"steps\""),
    "a kind": (["--config=configs/gsm8k.py:lara"], "error: flags: config: got 'lara', expected one of lora"),
    "a number": (["--config=configs/gsm8k.py", "--config.steps=many"], "error: flags: flag --config.steps=many"),
    "a value": (["--config=configs/gsm8k.py", "--config.rate=-1"], "error: config: got a rate or clip"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line(case, tmp_path):
    arguments, message = WRONG[case]
    done = run("train", f"--out={tmp_path / 'run'}", *arguments, cache=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(message), done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
