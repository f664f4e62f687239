"""Compiled programs: kept on disk between runs, and counted."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


def use_cache(folder: pathlib.Path) -> None:
    """Keeps compiled programs in `folder`, so that the next start of the same model and buckets takes seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@dataclasses.dataclass
class Count:
    """Programs compiled (or fetched from the cache on disk), and the seconds that took."""

    programs: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def counted() -> Iterator[Count]:
    """Counts every compilation of the process while it is open."""
    count = Count()

    def listen(event: str, seconds: float, **_) -> None:
        if event == _COMPILED:
            count.programs += 1
            count.seconds += seconds

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
