"""The scoreboard of adapter libraries: this project does right on every row, and a careless one on none."""

import importlib.util
import zlib

import numpy as np
import pytest

from experiments.conformance import inputs, rows, side
from experiments.conformance.ours import Ours

MISSING = {34} if importlib.util.find_spec("molora_jax.adapters.mixtures") is None else set()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> inputs.Inputs:
    return inputs.Inputs(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="module")
def ours(written) -> Ours:
    return Ours(written)


class Careless:
    """Takes anything, says nothing, and gives what the base would."""

    name, said = "careless", []

    def bare(self, folder):
        return np.random.default_rng(zlib.crc32(folder.name.encode())).standard_normal((12, 97))

    def load(self, folders, base="untied"):
        return {name: inputs.read(folder) for name, folder in folders.items()}

    def logits(self, group, name="x"):
        return np.full((12, 97), len(name))

    def mixed(self, group, names):
        return np.ones((len(names), 12, 97))

    def scales(self, group):
        return {inputs.Q.format(layer): 2.0 for layer in range(2)}

    def dtypes(self, group):
        return {"float32"}

    def delta(self, group, name="x"):
        return np.full((64, 64), len(name))

    def combine(self, group, weights, method):
        return group

    def merge(self, group, folder):
        folder.mkdir()
        (folder / "config.json").write_text('{"tie_word_embeddings": true}')
        return np.zeros((12, 97))

    def merged_weight(self, group):
        return np.zeros((64, 64)), True

    def toggled(self, group, times):
        return np.zeros((64, 64))

    def save(self, group, folder):
        folder.mkdir()
        for name in group:
            (folder / name).mkdir()
            inputs.safetensors.numpy.save_file({}, folder / name / "adapter_model.safetensors")
        return {name: folder / name for name in group}

    def swap(self, group, folder):
        raise KeyError("x")

    def decode_xlora(self, folders, base="untied"):
        return False, "decodes the base"


def test_every_row_has_a_number_of_its_own():
    numbers = [row.number for row in rows.ROWS]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 27


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: str(row.number))
def test_a_row_is_done_right(written, ours, row):
    verdict = side.judge(row, written, ours)
    assert (verdict.word == "right") == (row.number not in MISSING), verdict.what


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: str(row.number))
def test_a_row_can_be_done_wrong(written, row):
    assert side.judge(row, written, Careless()).word != "right"
