import os
from pathlib import Path

import pytest

# Several processes share the cores in many tests: one thread each. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def agnews_folder() -> Path:
    """The folder with AG News's train_subset.csv and test.csv: HYBRIDOP_DATA, else the one beside the checkout."""
    beside = Path(__file__).parents[2] / "shared" / "data" / "ag_news"
    folder = Path(os.environ.get("HYBRIDOP_DATA", beside))
    if not (folder / "test.csv").is_file():
        pytest.skip(f"needs AG News in {folder}, or in the folder that HYBRIDOP_DATA names")
    return folder
