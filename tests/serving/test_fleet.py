"""Models to route between, from what a user types."""

import jax
import pytest

from molora_jax.config import UserError
from molora_jax.serving import fleet
from tests.serving import folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return folders.write(tmp_path_factory.mktemp("model"))


def test_a_model_and_less_of_it(folder):
    small, smaller, full = fleet.load(folder, [], ["0-0", "1"], stacked=False)
    assert [model.cfg.layers for model in (small, smaller, full)] == [1, 1, 2]
    assert small.params["layers"][0] is full.params["layers"][1]
    assert smaller.params["layers"][0] is full.params["layers"][0]
    assert small.params["embed"] is full.params["embed"]


def test_several_runs_of_layers_may_go():
    assert fleet.cuts("20-22+3+7-8") == [(3, 3), (7, 8), (20, 22)]


def test_a_model_alone(folder):
    (model,) = fleet.load(folder, [], [], stacked=True)
    assert jax.tree.leaves(model.params["layers"])[0].shape[0] == 2


def test_models_by_name_may_be_padded_differently(folder, tmp_path):
    found = fleet.load(None, [folder, folders.write(tmp_path, seed=1, padding=5)], [])
    assert found[1].cfg.vocab == found[0].cfg.vocab + 5


def test_another_vocabulary_is_another_tokenizer_and_more_padding_is_not(folder, tmp_path):
    other, padded = folders.write(tmp_path / "a", extra="\n\n\n"), folders.write(tmp_path / "b", padding=5)
    assert fleet.one_tokenizer(fleet.load(None, [padded, folder], []))
    assert not fleet.one_tokenizer(fleet.load(None, [other, folder], []))


BAD = {
    "neither": (None, [], [], "models: got --model and --models, or neither"),
    "both": ("M", ["M", "M"], [], "models: got --model and --models, or neither"),
    "layers of several": (None, ["M", "M"], ["0-0"], "models: got --model and --models, or neither"),
    "no range": ("M", [], ["0..1"], "drop_layers: got '0..1', expected FIRST-LAST, as 12-17"),
    "one layer twice": ("M", [], ["0-1+1-1"], "drop_layers: got '0-1\\+1-1', expected runs of layers without one in"),
    "no such layer": ("M", [], ["1-2"], "drop_layers: got 1-2, expected FIRST-LAST within 0-1"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_flag_is_one_line(case, folder):
    model, names, drop, message = BAD[case]
    own = lambda name: folder if name == "M" else name
    with pytest.raises(UserError, match=message) as caught:
        fleet.load(own(model), list(map(own, names)), drop)
    assert "\n" not in str(caught.value)
