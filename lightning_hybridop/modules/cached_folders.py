"""Folders that are built once and kept in the user's cache."""

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from lightning_hybridop.devices.cache import cache_folder


def built_folder(name: str, build: Callable[[Path], None]) -> Path:
    """Return the cached folder `name`, having `build` fill it if it is not there yet.

    Processes that ask at the same time wait for the first of them; an interrupted build leaves nothing that would be
    taken for a whole one. Raises OSError when the cache cannot be written.
    """
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Not Path.with_suffix, which would cut a version in the name at its last dot.
    with FileLock(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            partial = folder.parent / f"{folder.name}.partial"
            # An interrupted build may have left one; only the holder of the lock touches it.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            build(partial)
            partial.rename(folder)
    return folder
