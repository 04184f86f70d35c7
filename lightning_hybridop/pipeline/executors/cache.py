"""What took long to make, kept on disk: a folder for each set of frozen weights, a file for each graph."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_hybridop.devices.cache import CACHE_VARIABLE, cache_folder
from lightning_hybridop.pipeline.executors.executor import ExecutorError

# Counts up whenever a file has another form.
_FORMAT = 2

_MAKERS = ("onnx", "transformers", "peft")


def stage_folder(weights_hash: str, storage: str) -> Path:
    """Return the folder of a stage's graphs and weights, having made it.

    Raises:
        ExecutorError: it cannot be written.
    """
    folder = cache_folder() / "executors" / f"{weights_hash}-{storage}-{_FORMAT}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExecutorError(
            f"The stage's graphs cannot be kept in {folder} ({error.strerror}): name a writable folder in the environment "
            f"variable {CACHE_VARIABLE}."
        ) from error
    return folder


def key_of(*parts: Any) -> str:
    """Return a short hash of what a graph depends on, and of the versions of what makes it."""
    versions = [torch.__version__, *map(version, _MAKERS), _own_sources()]
    return hashlib.sha256(repr((_FORMAT, versions, parts)).encode()).hexdigest()[:20]


@cache
def _own_sources() -> str:
    """Return a hash of the code that makes graphs: whatever is mended there is not hidden by older files."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
