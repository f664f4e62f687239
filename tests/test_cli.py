"""What every command-line program does the same way."""

import pytest
from ml_collections import config_flags

from molora_jax import cli
from molora_jax.config import UserError


def test_numbers_of_a_list_flag():
    assert cli.integers("depths", ["4", "12"], 1) == (4, 12)
    assert cli.integers("seeds", ["0"]) == (0,)
    for items, low in ((["x"], 0), (["1", ""], 0), ([], 0), (["0"], 1), (["-1"], 0), (["1.5"], 0)):
        with pytest.raises(UserError, match=f"sizes: got '{','.join(items)}', expected numbers from {low} on"):
            cli.integers("sizes", items, low)


def test_a_config_file_that_is_not_there_is_one_line():
    parser = config_flags.config_flags._ConfigFileParser("config")
    with pytest.raises(UserError, match=r"config: got .*nowhere.py.*, expected a file with get_config\(\)") as caught:
        cli.config(parser.parse("nowhere.py"), "configs/own.py")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="config: got none, expected --config=configs/own.py"):
        cli.config(None, "configs/own.py")
