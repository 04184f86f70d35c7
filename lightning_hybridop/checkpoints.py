"""Checkpoints of plain containers, in files that appear whole or not at all."""

import glob
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import OmegaConf
from typing_extensions import override

_HYPER_PARAMETERS = (
    LightningModule.CHECKPOINT_HYPER_PARAMS_KEY,
    LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY,
)


def with_plain_hyper_parameters(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint whose hyperparameters hold dicts and lists in the place of OmegaConf's containers.

    Those are objects of their own, which loading under `weights_only` refuses.
    """
    plain = {key: _plain(checkpoint[key]) for key in _HYPER_PARAMETERS if key in checkpoint}
    # The class that they were, which Lightning would make of them again.
    kept = {
        key: value for key, value in checkpoint.items() if key != LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE
    }
    return {**kept, **plain}


def _plain(value: Any) -> Any:
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


_FOLDER = 0x10
"""The attribute of a part that says it is a folder."""


class CheckpointError(RuntimeError):
    """A checkpoint file that cannot be trusted; the message names it and what to do."""


def check_whole(path: str | Path) -> None:
    """Check that a checkpoint file is all there and as it was written; nothing in it is unpickled.

    Every member of the file has a checksum. They tell damage: someone who may write the file can make new ones.

    Raises:
        CheckpointError: the file is missing, cut short, changed, or no checkpoint at all.
    """
    path = Path(path)
    found = _damage(path)
    if found is not None:
        raise CheckpointError(
            f"{path} is not a whole checkpoint ({found}); go on from an earlier one, or start without it."
        )


@contextmanager
def code_refused(path: str | Path) -> Iterator[None]:
    """Inside the block, say in one sentence which file it was when loading refuses what could run code.

    Raises:
        CheckpointError: in the place of what torch raises.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+) (?:was|whose)", str(error))
        what = f"asks for {found[1]}" if found else "holds more than plain containers and tensors"
        raise CheckpointError(
            f"{path} {what}, which could run code while it is loaded; if you trust whoever wrote it, pass weights_only=False to "
            "the Trainer's method, else do not use it."
        ) from error


def _damage(path: Path) -> str | None:
    if not path.is_file():  # opening a pipe would wait for a writer
        return "it is no file" if path.exists() else "there is no such file"
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            # torch.save compresses nothing: what would unfold to more than the file holds comes from somewhere else.
            if (
                any(
                    member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size
                    for member in members
                )
                or sum(member.file_size for member in members) > path.stat().st_size
            ):
                return "its parts are larger than the file"
            # torch would read nothing from it and hand out whatever lay in memory.
            if any(member.external_attr & _FOLDER for member in members):
                return "one of its parts says that it is a folder"
            if len({member.filename for member in members}) < len(members):
                return "two of its parts have one name"
            if not any(member.filename.endswith("/data.pkl") for member in members):
                return "torch.save did not write it"
            torn = archive.testzip()
            if torn is not None:
                return f"the checksum of its part {torn!r} does not fit"
        # A private name of torch: its reader is stricter about the list of parts, and unpickles nothing here.
        torch._C.PyTorchFileReader(str(path))
        return None
    except PermissionError as error:
        return error.strerror or "it cannot be read"
    except zipfile.BadZipFile as error:
        return " ".join(str(error).split())
    except Exception:  # a damaged list leads wherever its fields happen to point
        return "its list of parts is damaged"


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's own reading and writing, except that a local file is written beside its place and moved there whole.

    A process that is killed while it saves leaves the earlier checkpoint of that name as it was.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        if not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(str(path).removeprefix("file://"))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Its own: copies of several processes may go to one disk.
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
            process = left.suffixes[-2].removeprefix(".")
            # Left by one that was killed while it saved.
            if process.isdecimal() and not psutil.pid_exists(int(process)):
                left.unlink(missing_ok=True)
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                # Before the move is: else a power cut could leave an empty file under the old name.
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
