"""The candidates of `bench_train`, each in a process of its own that steps when it is told to.

The parent writes a line, "step" or "peak"; the process answers with one: seconds and CPU seconds, or bytes.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

from molora_jax.config import UserError

RANK = 16


def has(name: str) -> bool:
    """Whether the packages of a candidate are installed."""
    return name != "peft" or all(importlib.util.find_spec(package) for package in ("torch", "peft", "transformers"))


class Worker:
    """One candidate, loaded and ready; `cpu` has the CPU seconds of its steps."""

    def __init__(self, name: str, model: str, *, rows: int, length: int, threads: int):
        command = [
            sys.executable,
            "-m",
            "experiments.train_costs.worker",
            name,
            model,
            *map(str, (rows, length, threads)),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = name
        self.cpu: list[float] = []

    def _ask(self, what: str):
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise UserError(f"bench: got no answer of the candidate {self.name}, expected a number; its error is above")
        return json.loads(answer)

    def step(self) -> float:
        """Seconds of one step."""
        wall, cpu = self._ask("step")
        self.cpu.append(cpu)
        return wall

    def peak(self) -> int:
        """Bytes over the loaded weights, at the highest since the first step."""
        return self._ask("peak")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def ours(kind: str, model: str, tokens: np.ndarray):
    """The step of `experiments.train` in fp32, a function without arguments; and the resident size before it."""
    import dataclasses

    import jax

    from molora_jax.training import sft, specialist
    from molora_jax.training.batch import batch
    from molora_jax.training.settings import SFTConfig

    adapter = dataclasses.replace(specialist.named("malora" if kind == "malora" else "lora"), rank=RANK)
    config = SFTConfig(model=model, dtype="float32", adapter=adapter, schedule="constant", remat=kind == "remat")
    loaded, _ = sft.load(config)
    before = resident("VmRSS")
    trainer = sft.trainer(loaded, specialist.new(loaded.cfg, loaded.params, adapter, kind), config)
    state, rows = trainer.init(), jax.tree.map(np.asarray, batch(tokens))

    def step() -> None:
        nonlocal state
        state, metrics = trainer.step(state, rows)
        jax.block_until_ready((state, metrics))

    return step, before


def peft(model: str, tokens: np.ndarray, threads: int):
    """The same of PEFT and torch: loss of transformers, clipping, AdamW."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    from molora_jax.checkpoints.resolve import resolve

    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    base = transformers.AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32)
    sum(weight.abs().sum() for weight in base.parameters())  # reads what was only mapped
    before = resident("VmRSS")
    how = dict(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(base, LoraConfig(**how)).train()
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimiser, ids = torch.optim.AdamW(trained, lr=5e-4, weight_decay=0.0), torch.tensor(tokens)

    def step() -> None:
        adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return step, before


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def main(name: str, model: str, rows: int, length: int, threads: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    tokens = np.random.default_rng(0).integers(0, 500, (rows, length))  # ids that every vocabulary has
    step, before = peft(model, tokens, threads) if name == "peft" else ours(name, model, tokens)
    for number, line in enumerate(sys.stdin):
        if line.strip() == "peak":
            print(resident("VmHWM") - before, flush=True)
            continue
        if number == 1:  # the first step compiled
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:6]))
