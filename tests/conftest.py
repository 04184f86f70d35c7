import os
from pathlib import Path

import pytest

# Several processes share the cores in many tests: one thread each. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def agnews_folder() -> Path:
    """The folder with AG News's train_subset.csv and test.csv, in HYBRIDOP_DATA or the folder beside the checkout."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("HYBRIDOP_DATA", beside)) / "ag_news"
    if not (folder / "test.csv").is_file():
        pytest.skip(f"needs AG News in {folder}, or in ag_news/ of the folder that HYBRIDOP_DATA names")
    return folder
