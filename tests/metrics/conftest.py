import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder with the original data sets: HYBRIDOP_DATA, or the one beside the checkout."""
    return Path(os.environ.get("HYBRIDOP_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
