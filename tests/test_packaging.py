import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TAKEN = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "lightning_hybridop", "conf", "recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy: setuptools leaves a build folder behind, whose old files would get into the next wheel.
    source = tmp_path_factory.mktemp("source")
    for name in TAKEN:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*command, "--wheel-dir", str(target), str(source)], check=True, timeout=100)
    (path,) = target.glob("*.whl")
    return path


def files_of(folder: str, *suffixes: str) -> set[str]:
    paths = (path for suffix in suffixes for path in (ROOT / folder).rglob(f"*{suffix}"))
    return {str(path.relative_to(ROOT)) for path in paths}


def test_wheel_holds_the_package_the_configuration_and_the_recipes(wheel: Path) -> None:
    expected = files_of("lightning_hybridop", ".py", ".yaml", "py.typed")
    expected |= {
        f"lightning_hybridop/{name}" for name in files_of("conf", ".yaml") | files_of("recipes", ".py")
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # What an installation of the wheel is: its files, in a folder on the path.
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_installed_command_finds_its_configuration_from_any_folder(installed: Path, tmp_path: Path) -> None:
    code = "import sys; from lightning_hybridop.cli import main; sys.exit(main(sys.argv[1:]))"
    shown = subprocess.run(
        [sys.executable, "-c", code, "fit", "recipe=quickstart", "--show"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "name: quickstart" in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_dependency_has_a_tested_version() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    for extra in ("demo", "viz", "openvino", "onnx", "test"):
        lines += setup["options.extras_require"][extra].splitlines()
    names = {
        line.replace("<", ">").split(">")[0].lower() for line in lines if line and not line.startswith("#")
    }
    pinned = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert names <= pinned
