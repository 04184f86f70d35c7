"""What comes from elsewhere - files, checkpoints, bytes on the wire - runs no code and ends in one sentence."""

import contextlib
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import distributed_c10d

from lightning_hybridop import HybridOPStrategy
from lightning_hybridop.callbacks import ComuTi, Energy
from lightning_hybridop.checkpoints import CheckpointError
from lightning_hybridop.cli import main
from lightning_hybridop.devices import cache
from lightning_hybridop.devices.library import read_profile
from lightning_hybridop.pipeline import exchange
from lightning_hybridop.pipeline.batches import BatchError
from lightning_hybridop.pipeline.packing import pack, unpack
from lightning_hybridop.planning.fields import MOST_BYTES, read_yaml
from lightning_hybridop.planning.plan import even_plan, load_plan, save_plan
from tests.distributed.harness import run_ranks
from tests.distributed.runs import quiet_trainer, trainer_for
from tests.tiny import TinyModule, loader

MARK = Path("executed-by-a-file")

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)

HOSTILE: dict[str, bytes] = {
    "a python object": f"blocks: !!python/object/apply:os.system ['touch {MARK}']".encode(),
    "an interpolation": b"blocks: '${oc.env:HOME}'",
    "a python module": b"blocks: !!python/module:antigravity",
    "a python name": b"stages: !!python/name:os.system",
    "hydra's target": f"_target_: os.system\n_args_: ['touch {MARK}']\nblocks: 2".encode(),
    "a target inside": f"blocks: {{_target_: os.system, command: 'touch {MARK}'}}\nstages: []".encode(),
    "an alias bomb": BOMB.encode(),
    "a loop of aliases": b"blocks: &a [*a]",
    "a merge bomb": b"a: &a {x: 1}\nb: {<<: *a}",
    "a number of too many digits": b"blocks: 1" + b"0" * 10_000 + b"\nstages: []",
    "a hexadecimal number as long": b"blocks: 0x" + b"f" * 100_000 + b"\nstages: []",
    "such a number as a name": b"? 0x" + b"f" * 100_000 + b"\n: 1",
    "such a number deeper": b"blocks: [0x" + b"f" * 100_000 + b"]\nstages: []",
    "a day that is none": b"blocks: 2026-99-99",
    "lists in lists": b"[" * 10_000,
    "mappings in mappings": b"{a: " * 10_000,
    "many values": b"blocks: [" + b"1," * 25_000 + b"]",
    "a file that is too large": b"#" * (MOST_BYTES + 1),
    "NUL bytes": b"blocks: 2\x00\x00",
    "not UTF-8": b"blocks: \xff\xfe\xfa",
    "nothing": b"",
    "a list": b"- 1",
}

READERS: dict[str, Callable[[Path], Any]] = {
    "plan": load_plan,
    "profile": read_profile,
    "hosts": lambda path: read_yaml(path, what="hosts file", error=RefusedFileError),
}


class RefusedFileError(ValueError):
    """Stands for what a command raises."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    yield
    assert not MARK.exists()


@pytest.mark.parametrize("reader", ["plan", "profile"])
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_plan_or_profile_is_refused_in_one_sentence(case: str, reader: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(ValueError) as refused:
        READERS[reader](path)
    text = str(refused.value)
    assert type(refused.value).__name__ in ("PlanError", "ClusterError")
    assert "\n" not in text and len(text) < 1500


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_not_opened(reader: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "/dev/zero"):
        with pytest.raises(ValueError, match="is no file"):
            READERS[reader](tmp_path / name)
    with pytest.raises(ValueError, match="null byte"):
        READERS[reader](Path("a\x00b"))


@pytest.mark.parametrize(
    "case", ["a python object", "hydra's target", "an alias bomb", "lists in lists", "NUL bytes"]
)
def test_the_command_line_says_so_and_ends_with_1(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_bytes(HOSTILE[case])
    assert main(["simulate", f"plan={path}"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("hybridop: ") and told.count("\n") == 1
    assert "plan" in told


def test_a_damaged_or_hostile_measurement_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "measured.yaml"
    monkeypatch.setattr(cache, "measured_path", lambda _: path)
    for content in HOSTILE.values():
        path.write_bytes(content)
        assert cache.load_measured(None) is None  # type: ignore[arg-type]
    path.unlink()
    os.mkfifo(path)
    assert cache.load_measured(None) is None  # type: ignore[arg-type]


def test_a_hosts_file_cannot_read_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text("hosts:\n- {name: nano, python: '${oc.env:HOME}'}\n", encoding="utf-8")
    with pytest.raises(RefusedFileError, match="it has an interpolation"):
        READERS["hosts"](path)


def test_a_plan_that_a_person_wrote_is_read_as_before(tmp_path: Path) -> None:
    plan = even_plan(blocks=64, stages=32, zo_stages=16)
    save_plan(plan, tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml") == plan
    many = {"links": [{"between": [f"a{i}", f"b{i}"], "bandwidth_mbit_s": 1} for i in range(2016)]}
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(many), encoding="utf-8")
    assert READERS["hosts"](tmp_path / "hosts.yaml") == many


# Checkpoints.


class RunsCode:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {MARK}",)


quiet = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")


def _resume_from(path: Path) -> None:
    strategy = HybridOPStrategy(stages=1, zo_stages=1, micro_batches=1)
    quiet_trainer(strategy, max_steps=1).fit(TinyModule(blocks=2), loader(8), ckpt_path=path)


@quiet
def test_a_checkpoint_that_would_run_code_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "hostile.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": RunsCode()}, path)
    with pytest.raises(CheckpointError, match=r"hostile\.ckpt asks for posix\.system, which could run code"):
        _resume_from(path)
    # The old form of torch.save, and a bare pickle, have no checksums.
    torch.save({"a": RunsCode()}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
        _resume_from(path)
    path.write_bytes(pickle.dumps(RunsCode()))
    with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
        _resume_from(path)


@quiet
def test_a_checkpoint_with_a_part_that_was_exchanged_is_refused(tmp_path: Path) -> None:
    path, changed = tmp_path / "last.ckpt", tmp_path / "changed.ckpt"
    torch.save({"state_dict": {"weight": torch.ones(100)}}, path)
    content = path.read_bytes()
    changed.write_bytes(content.replace(torch.ones(1).numpy().tobytes(), torch.zeros(1).numpy().tobytes(), 1))
    with pytest.raises(CheckpointError, match=r"the checksum of its part '.*' does not fit"):
        _resume_from(changed)
    # Whoever writes new checksums can write other numbers, never code.
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for member in old.infolist():
            body = pickle.dumps(RunsCode(), 2) if member.filename.endswith("data.pkl") else old.read(member)
            new.writestr(member.filename, body)
    with pytest.raises(CheckpointError, match="which could run code while it is loaded"):
        _resume_from(changed)


# Bytes.


def _message(header: bytes, rest: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + rest


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 4096,
        _message(b"not json"),
        _message(b"[1, 2, 3]"),
        _message(b"[" * 100_000),
        _message(b'[{"tensor": 0}, [["float32", [1099511627776]]]]'),
        _message(b'[{"tensor": 0}, [["float32", [-1]]]]'),
        _message(b'[{"tensor": 0}, [["float32", [true]]]]', bytes(4)),
        _message(b'[{"tensor": 0}, [["float32", [1.5]]]]', bytes(8)),
        _message(b'[{"tensor": 0}, [["load", [1]]]]', bytes(8)),
        _message(b'[{"tensor": 0}, [["__name__", [1]]]]', bytes(8)),
        _message(b'[{"tensor": 7}, []]'),
        _message(b'[{"tensor": -1}, [["int8", [1]]]]', b"a"),
        _message(b'[{"object": "x"}, []]'),
        _message(b'[{"value": [1]}, []]'),
        _message(b'[{"mapping": [[[], {"value": 1}]]}, []]'),
        _message(b'[{"value": 1, "list": []}, []]'),
        _message(b'[{"value": 1' + b"0" * 5000 + b"}, []]"),
        _message(b'[{"value": 1}, []]', b"left over"),
        _message(b'[{"tensor": 0}, [["float32", [0, 281474976710655, 281474976710655, 281474976710655]]]]'),
    ],
)  # fmt: skip
def test_bytes_that_nobody_packed_are_refused(message: bytes) -> None:
    with pytest.raises(BatchError, match="that are no packed batch"):
        unpack(message)


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
def test_changed_bytes_give_a_value_or_a_sentence(tail: bytes, place: int, byte: int) -> None:
    changed = bytearray(pack({"a": torch.arange(3), "b": [1, "x", None]}))
    changed[place % len(changed)] = byte
    for message in (bytes(changed), bytes(changed[: place % len(changed)]), tail):
        with contextlib.suppress(BatchError):
            unpack(message)


# The wire.


class Refused:
    pass


def _sent_and_refused() -> list[Any]:
    """Return what each kind of object became on this rank, behind a run."""
    loss = _train_and_validate_without_pickles()
    strategy = HybridOPStrategy(stages=2, zo_stages=1, micro_batches=1)
    trainer_for(strategy, max_steps=1).fit(TinyModule(blocks=2), loader(8))
    rank = torch.distributed.get_rank()
    found: list[Any] = [loss]
    for value in (
        {"a": torch.ones(2, dtype=torch.bfloat16), "b": (1, None)},
        OrderedDict(a=1),
        Path("x"),
        {1, 2},
    ):
        found.append(strategy.broadcast(value if rank == 0 else None))
    for hostile in (RunsCode(), Refused()):
        try:
            found.append(strategy.broadcast(hostile if rank == 0 else None))
        except BatchError as error:
            found.append(str(error))
    # Rank 0 leaves out the check that it should make of what it sends.
    exchange._saved = _unchecked  # type: ignore[assignment]
    try:
        found.append(strategy.broadcast(RunsCode() if rank == 0 else None) is not None)
    except Exception as error:
        found.append(type(error).__name__)
    length = exchange.torch.tensor([2**60])
    if rank == 0:
        torch.distributed.broadcast(length, 0)
    else:
        try:
            exchange.broadcast_json(None, source=0)
        except BatchError as error:
            found.append(str(error))
    return found


def _unchecked(value: Any) -> tuple[bytes, None]:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue(), None


class NoPickles(lightning.Callback):
    """From the first training batch to the last validation batch nothing may be pickled in this process."""

    def on_sanity_check_end(self, *_: Any) -> None:
        self._stop()

    def on_train_start(self, *_: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("something was pickled")

        for module, names in (
            (pickle, ("dumps", "loads", "dump", "load", "Pickler", "Unpickler")),
            (distributed_c10d, ("_pickler", "_unpickler")),
            (torch, ("save", "load")),
        ):
            for name in names:
                setattr(module, name, refuse)


def _train_and_validate_without_pickles() -> float:
    trainer = None
    kept = {
        name: getattr(pickle, name) for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler")
    }
    saved, loaded = torch.save, torch.load
    try:
        for options in (
            {"estimator": "loss", "exit_queries": 1},
            {"estimator": "boundary", "directions": "row", "data": "broadcast"},
        ):
            strategy = HybridOPStrategy(stages=2, zo_stages=1, micro_batches=2, queries=2, **options)
            trainer = trainer_for(
                strategy,
                max_epochs=2,
                gradient_clip_val=0.5,
                log_every_n_steps=1,
                callbacks=[NoPickles(), ComuTi(), Energy()],
            )
            trainer.fit(TinyModule(blocks=3), loader(16), loader(8))
        assert trainer is not None
        with pytest.raises(AssertionError, match="something was pickled"):
            pickle.dumps(1)
        return float(trainer.callback_metrics["val_loss"])
    finally:
        for name, value in kept.items():
            setattr(pickle, name, value)
        torch.save, torch.load = saved, loaded


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_nothing_is_pickled_in_steps_and_nothing_that_is_sent_can_run_code() -> None:
    first, second = run_ranks(_sent_and_refused, 2)
    assert first[0] == second[0] > 0.0
    for _, plain, ordered, path, numbers, *refused in (first, second):
        assert plain["a"].dtype == torch.bfloat16 and plain["b"] == (1, None)
        assert type(ordered) is OrderedDict and path == Path("x") and numbers == {1, 2}
        assert refused[0].startswith("A RunsCode cannot be sent to other processes")
        assert refused[1].startswith("A Refused cannot be sent") and "add_safe_globals" in refused[1]
    assert second[7] == "UnpicklingError"
    assert second[8].startswith(f"A message of {2**60} bytes was announced")
