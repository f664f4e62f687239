"""Losses of a tiny run on meshes of eight simulated devices, for a test to compare: prints one JSON object."""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np

from molora_jax import sharding
from molora_jax.checkpoints.store import Store
from molora_jax.sharding import MeshConfig
from molora_jax.training import resume, sft, specialist
from molora_jax.training.specialist import AdapterConfig
from tests.training import tiny

MESHES = {
    "data": MeshConfig(data=8),
    "fsdp": MeshConfig(data=2, fsdp=4),
    "tensor": MeshConfig(data=4, tensor=2),
    "all": MeshConfig(data=2, fsdp=2, tensor=2),
}
STEPS = 3


def made(config, mesh: MeshConfig | None):
    """The trainer on a mesh, and its batches."""
    place = None if mesh is None else sharding.mesh(mesh)
    model, place = sft.load(config, place)
    adapter = specialist.new(model.cfg, model.params, config.adapter, "x")
    documents = sft.documents(config, model.tokenizer, lambda line: None)[1]
    return sft.trainer(model, adapter, config, place), list(sft.batches(config, documents)), adapter


def train(trainer, state, batches, steps=STEPS):
    """(state, losses and norms of the gradient)."""
    found = []
    for step in range(steps):
        state, metrics = trainer.step(state, batches[step % len(batches)])
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return state, found


def spread(trainer) -> dict[str, str]:
    """How the leaves that tell the mesh axes apart lie."""
    leaves = {**trainer.frozen, **trainer.init().trained}
    names = ("params.layers.mlp.down_proj.weight", "bank.layers.mlp.down_proj.a", "bank.layers.mlp.down_proj.b")
    return {name: str(tuple(leaves[name].sharding.spec)) for name in names}


def main(folder: pathlib.Path) -> None:
    config = tiny.config(folder, held_out=16, rate=0.05)
    dora = dataclasses.replace(config, adapter=AdapterConfig(kind="dora", rank=4, sites=tiny.SITES), accumulate=2)
    malora = dataclasses.replace(config, adapter=specialist.named("malora", rank=4, sites=tiny.SITES))
    found = {}
    for kind, settings in dict(lora=config, dora=dora, malora=malora).items():
        trainer, batches, _ = made(settings, None)
        found[kind] = {"one": train(trainer, trainer.init(), batches)[1]}
        for name in MESHES if kind == "lora" else ("all",):
            trainer, _, adapter = made(settings, MESHES[name])
            state, found[kind][name] = train(trainer, trainer.init(), batches)
        found[kind]["spread"] = spread(trainer)
        back = specialist.trained(trainer.tree(state), adapter)
        found[kind]["sum"] = float(sum(np.abs(w.b).sum() for _, _, w in back.weights()))
    trainer, batches, _ = made(config, MESHES["all"])
    with Store(folder / "checkpoints") as store:
        resume.save(store, 2, train(trainer, trainer.init(), batches, 2)[0], None)
        store.wait()
        for name in ("fsdp", "data"):
            trainer, _, _ = made(config, MESHES[name])
            _, state, _ = resume.restore(store, trainer.init())
            found[f"restored on {name}"] = train(trainer, state, batches[2:] + batches[:2], 1)[1]
    print(json.dumps(found | dict(devices=jax.device_count())))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
