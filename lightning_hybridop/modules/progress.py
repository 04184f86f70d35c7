"""Keeps transformers quiet."""

from collections.abc import Iterator
from contextlib import contextmanager

import transformers


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars inside the block."""
    # Every process of a pipeline reads the model: their bars would fill the screen.
    logging = transformers.utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
