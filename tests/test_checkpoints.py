"""A checkpoint file is the old one or the new one, whatever happens while it is written."""

import multiprocessing
import os
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_hybridop.checkpoints import (
    CheckpointError,
    WholeCheckpointIO,
    check_whole,
    with_plain_hyper_parameters,
)


def test_what_is_saved_is_loaded_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "last.ckpt"

    WholeCheckpointIO().save_checkpoint({"weight": torch.ones(3)}, path)
    WholeCheckpointIO().save_checkpoint({"weight": torch.zeros(3)}, path)

    assert WholeCheckpointIO().load_checkpoint(path, weights_only=True)["weight"].equal(torch.zeros(3))
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def _die_while_saving(path: Path) -> None:
    save = torch.save

    def half(checkpoint: Any, file: Any) -> None:
        save(checkpoint, file)
        file.truncate(file.tell() // 2)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
    WholeCheckpointIO().save_checkpoint({"weight": torch.zeros(1000)}, path)


def test_a_kill_during_saving_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    WholeCheckpointIO().save_checkpoint({"weight": torch.ones(3)}, path)

    saving = multiprocessing.get_context("spawn").Process(target=_die_while_saving, args=(path,))
    saving.start()
    saving.join(60)

    assert saving.exitcode == -signal.SIGKILL
    assert WholeCheckpointIO().load_checkpoint(path, weights_only=True)["weight"].equal(torch.ones(3))
    # The next one of that name takes the half-written one's place.
    WholeCheckpointIO().save_checkpoint({"weight": torch.zeros(3)}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    WholeCheckpointIO().save_checkpoint({"weight": torch.ones(3)}, path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left on device"):
        WholeCheckpointIO().save_checkpoint({"weight": torch.zeros(3)}, path)

    monkeypatch.undo()
    assert WholeCheckpointIO().load_checkpoint(path, weights_only=True)["weight"].equal(torch.ones(3))
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_destination_that_is_no_local_file_is_left_to_lightning() -> None:
    fsspec = pytest.importorskip("fsspec")

    WholeCheckpointIO().save_checkpoint({"step": 3}, "memory://run/last.ckpt")

    assert fsspec.filesystem("memory").exists("/run/last.ckpt")


def test_containers_of_omegaconf_are_saved_as_plain_ones(tmp_path: Path) -> None:
    container = OmegaConf.create({"rank": 8, "targets": ["q", "v"], "alpha": "${rank}"})
    checkpoint = {
        "state_dict": {"weight": torch.ones(3)},
        "hyper_parameters": {"lora": container, "list": [container], "rate": 0.1},
        "datamodule_hyper_parameters": container,
        "hparams_type": type(container),
    }

    WholeCheckpointIO().save_checkpoint(with_plain_hyper_parameters(checkpoint), tmp_path / "last.ckpt")

    loaded = torch.load(tmp_path / "last.ckpt", weights_only=True)
    plain = {"rank": 8, "targets": ["q", "v"], "alpha": 8}
    assert loaded["hyper_parameters"] == {"lora": plain, "list": [plain], "rate": 0.1}
    assert loaded["datamodule_hyper_parameters"] == plain
    assert "hparams_type" not in loaded
    assert checkpoint["hyper_parameters"]["lora"] is container


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and found.equal(expected)
    return bool(found == expected)


def test_every_flipped_bit_is_told_or_changes_nothing(tmp_path: Path) -> None:
    checkpoint = {"state_dict": {"weight": torch.arange(40.0)}, "epoch": 3}
    path, changed = tmp_path / "last.ckpt", tmp_path / "changed.ckpt"
    WholeCheckpointIO().save_checkpoint(checkpoint, path)
    written = path.read_bytes()
    check_whole(path)

    told = 0
    contents = written.index(b"PK\x01\x02")  # where the list of parts begins
    bits = [(place, place % 8) for place in range(0, contents, 5)]
    bits += [(place, bit) for place in range(contents, len(written)) for bit in (0, 4)]
    for place, bit in bits:
        flipped = bytearray(written)
        flipped[place] ^= 1 << bit
        changed.write_bytes(flipped)
        try:
            check_whole(changed)
        except CheckpointError:
            told += 1
        else:
            # Padding between parts, times and versions carry no meaning.
            assert _equal(torch.load(changed, weights_only=True), checkpoint), place
    assert told > 300


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.9, 0.99])
def test_a_checkpoint_that_was_cut_short_is_told_by_its_name(tmp_path: Path, share: float) -> None:
    path = tmp_path / "last.ckpt"
    WholeCheckpointIO().save_checkpoint({"weight": torch.ones(1000)}, path)
    os.truncate(path, int(share * path.stat().st_size))

    with pytest.raises(
        CheckpointError, match=r"last\.ckpt is not a whole checkpoint .*; go on from an earlier"
    ):
        check_whole(path)


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(2**24))

    for name, reason in {
        "missing.ckpt": "there is no such file",
        "pipe": "it is no file",
        ".": "it is no file",
        "other.zip": "torch.save did not write it",
        "bomb.ckpt": "its parts are larger than the file",
    }.items():
        with pytest.raises(CheckpointError, match=reason):
            check_whole(tmp_path / name)
