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


@contextmanager
def without_load_report() -> Iterator[None]:
    """Keep transformers from reporting, inside the block, which weights of a model its files lack or hold in vain."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
