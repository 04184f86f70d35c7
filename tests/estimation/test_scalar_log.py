"""A log of scalars holds what was written, ends where a process was killed, and is refused when it is damaged."""

import math
import struct
from pathlib import Path

import pytest

from lightning_hybridop.estimation.directions import DirectionKey
from lightning_hybridop.estimation.scalar_log import (
    Clipping,
    Mark,
    ScalarLog,
    ScalarLogError,
    ScalarLogWriter,
    Start,
    StepSettings,
    Update,
    read_scalar_log,
)

HEADER = 16 + 2 + 8 + 1 + 4
FRAME = 1 + 4 + 4 + 4
STAGES = {0: ("a.weight", "b.weight"), 1: ("c.weight",)}


def start(step: int = 0, mini_batch: int = 0) -> Start:
    return Start(
        step=step,
        mini_batch=mini_batch,
        optimizer="torch.optim.adam.Adam",
        groups=(("a.weight", "c.weight"), ("b.weight",)),
        stages=STAGES,
    )


def coefficients(number: int) -> tuple[tuple[DirectionKey, float], ...]:
    """Return three directions: one that all share, a micro-batch's, and a row's."""
    places = [(None, 0, None), (3, 1, None), (0, 7, 2)]
    return tuple(
        (
            DirectionKey(
                seed=-7,
                step=number,
                micro_batch=micro_batch,
                query=query,
                row=row,
                distribution="rademacher",
            ),
            math.pi * 10.0 ** (-3 * number) * (-1) ** query,
        )
        for micro_batch, query, row in places
    )


def settings(step: int) -> StepSettings:
    return StepSettings(
        share=1 / 3,
        learning_rates=(0.1 / step, 5e-324),
        options='[{"betas": [0.9, 0.999]}, {}]' if step < 3 else '[{"betas": [0.8, 0.999]}, {}]',
        clippings=(
            Clipping(algorithm="norm", limit=0.5, norm=12.75),
            Clipping(algorithm="value", limit=1e-3),
        )[: step % 3],
    )


def mark(step: int) -> Mark:
    return Mark(step=step, checksums={0: bytes(range(16)), 1: bytes([step]) * 16}, stages=STAGES)


def write_step(writer: ScalarLogWriter, step: int) -> None:
    """Write an optimizer step that takes two mini-batches, the second of which has no usable direction."""
    first = 2 * (step - 1)
    writer.mini_batch(first, coefficients(first))
    writer.mini_batch(first + 1, ())
    writer.update(Update(step=step, mini_batches=(first, first + 1), settings=settings(step)))


def written(path: Path, steps: int = 4) -> bytes:
    writer = ScalarLogWriter(path, seed=-7, distribution="rademacher", goes_on=False)
    writer.start(start())
    for step in range(1, steps + 1):
        write_step(writer, step)
        if step == 2:
            writer.mark(mark(2))
    writer.close()
    return path.read_bytes()


def go_on(path: Path, *, seed: int = -7) -> ScalarLogWriter:
    return ScalarLogWriter(path, seed=seed, distribution="rademacher", goes_on=True)


def read(path: Path, content: bytes) -> ScalarLog:
    path.write_bytes(content)
    return read_scalar_log(path)


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    content = written(tmp_path / "log")
    log = read_scalar_log(tmp_path / "log")
    assert (log.seed, log.distribution, log.torn, log.whole_bytes) == (-7, "rademacher", False, len(content))
    assert log.starts == [start()]
    assert log.mini_batches == {n: coefficients(n) if n % 2 == 0 else () for n in range(8)}
    assert log.updates == {
        step: Update(step=step, mini_batches=(2 * step - 2, 2 * step - 1), settings=settings(step))
        for step in range(1, 5)
    }
    assert log.marks == {2: mark(2)}
    assert log.last_step == 4


def test_a_direction_takes_fourteen_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    sizes = []
    for directions in (1, 3):
        writer = ScalarLogWriter(path, seed=-7, distribution="rademacher", goes_on=False)
        writer.mini_batch(0, coefficients(0)[:directions])
        writer.close()
        sizes.append(path.stat().st_size - HEADER - FRAME)
    assert sizes == [4 + 14, 4 + 3 * 14]


def test_a_step_says_how_much_of_the_log_it_takes_up(tmp_path: Path) -> None:
    written(tmp_path / "log")
    # Two mini-batches, one with three directions; two rates; the mini-batches' numbers; clippings; changed options.
    log = read_scalar_log(tmp_path / "log")
    plain = 3 * FRAME + (4 + 3 * 14) + 4 + (4 + 8 + 1 + 1 + 2 + 4) + 2 * 8 + 2 * 4
    assert log.bytes_of_steps[4] == plain + 17
    assert log.bytes_of_steps[2] == plain + 2 * 17
    assert log.bytes_of_steps[3] == plain + len(settings(3).options)


def test_a_log_that_is_cut_anywhere_holds_what_came_before(tmp_path: Path) -> None:
    content = written(tmp_path / "log")
    whole = read_scalar_log(tmp_path / "log")
    ends = {HEADER}
    for length in range(len(content)):
        if length < HEADER:
            with pytest.raises(ScalarLogError, match="is no log of scalars; give"):
                read(tmp_path / "cut", content[:length])
            continue
        log = read(tmp_path / "cut", content[:length])
        ends.add(log.whole_bytes)
        assert log.whole_bytes == max(end for end in ends if end <= length)
        assert log.torn == (log.whole_bytes < length)
        for found, expected in (
            (log.mini_batches, whole.mini_batches),
            (log.updates, whole.updates),
            (log.marks, whole.marks),
        ):
            assert found.items() <= expected.items()  # type: ignore[operator]
    # A start, four steps of three records, a mark: all but the last one ended somewhere before the end.
    assert len(ends) == 1 + 1 + 4 * 3 + 1 - 1


def test_a_log_that_lost_power_ends_where_zeros_begin(tmp_path: Path) -> None:
    content = written(tmp_path / "log")
    cut = len(content) - 30
    log = read(tmp_path / "zeros", content[:cut] + bytes(1000))
    assert log.torn
    assert log.whole_bytes <= cut
    assert log.last_step == 3


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    content = written(tmp_path / "log", steps=2)
    last = read_scalar_log(tmp_path / "log")
    record = FRAME + 4 + 2 * 18
    assert content[len(content) - record] == 4  # the mark, which is the last record
    for offset in range(len(content)):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << offset % 8
        if (
            offset >= len(content) - record + FRAME - 4
        ):  # its body, which may be one that did not reach the disk
            log = read(tmp_path / "damaged", bytes(damaged))
            assert log.torn
            assert not log.marks
            assert log.updates == last.updates
            continue
        with pytest.raises(ScalarLogError, match=r"is damaged at byte|is no log of scalars"):
            read(tmp_path / "damaged", bytes(damaged))


def test_a_run_that_goes_on_replaces_what_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path)
    writer = go_on(path)
    writer.start(start(step=2, mini_batch=4))
    log = read_scalar_log(path)
    assert (sorted(log.updates), sorted(log.mini_batches), log.last_step) == ([1, 2], [0, 1, 2, 3], 2)
    assert log.marks == {2: mark(2)}
    writer.mini_batch(4, coefficients(4)[:1])
    writer.update(Update(step=3, mini_batches=(4,), settings=settings(3)))
    writer.close()
    log = read_scalar_log(path)
    assert log.starts == [start(), start(step=2, mini_batch=4)]
    assert log.mini_batches[4] == coefficients(4)[:1]
    assert log.updates[3] == Update(step=3, mini_batches=(4,), settings=settings(3))
    assert log.last_step == 3


def test_a_run_goes_on_behind_the_last_whole_record(tmp_path: Path) -> None:
    content = written(tmp_path / "log")
    for cut in (0, 5, HEADER, HEADER + 3, len(content) - 1, len(content)):
        path = tmp_path / f"cut_{cut}"
        path.write_bytes(content[:cut])
        writer = go_on(path)
        writer.start(start(step=2, mini_batch=4))
        write_step(writer, 3)
        writer.close()
        log = read_scalar_log(path)
        assert not log.torn
        assert log.updates[3].mini_batches == (4, 5)
        assert log.last_step == 3


def test_a_new_run_begins_the_log_anew(tmp_path: Path) -> None:
    written(tmp_path / "log")
    ScalarLogWriter(tmp_path / "log", seed=3, distribution="normal", goes_on=False).close()
    log = read_scalar_log(tmp_path / "log")
    assert (log.seed, log.distribution, log.starts, log.updates) == (3, "normal", [], {})


def test_the_log_of_another_seed_is_not_gone_on_with(tmp_path: Path) -> None:
    written(tmp_path / "log")
    with pytest.raises(
        ScalarLogError,
        match="with the seed -7 and rademacher directions, but this run has the seed 8 and rademacher ones; give it another",
    ):
        go_on(tmp_path / "log", seed=8)


def test_a_gap_ends_what_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, steps=2)
    writer = go_on(path)
    write_step(writer, 4)
    writer.close()
    assert read_scalar_log(path).last_step == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no log of scalars"),
        (b"PK" + bytes(100), "is no log of scalars"),
        (None, r"cannot be read \(No such file or directory\)"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "log"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ScalarLogError, match=message):
        read_scalar_log(path)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (9, b""),
        (1, b"[0,0"),
        (1, b"[0,0,1e999,[[]],[]]"[:-1]),
        (1, b'[1e999,0,"Adam",[],[]]'),
        (1, b"[" * 100_000),
        (2, b"\0"),
        (2, struct.pack("<I", 0) + b"x" * 15),
        (3, struct.pack("<IdBBHI", 1, 1.0, 200, 200, 60000, 2**31)),
        (3, struct.pack("<IdBBHIBdd", 1, 1.0, 0, 1, 0, 0, 77, 1.0, 1.0)),
        (4, struct.pack("<I", 1) + b"x" * 18),
    ],
)
def test_records_that_somebody_made_up_are_refused_in_one_sentence(
    tmp_path: Path, kind: int, body: bytes
) -> None:
    path = tmp_path / "log"
    writer = ScalarLogWriter(path, seed=-7, distribution="rademacher", goes_on=False)
    writer._write(kind, body)  # type: ignore[arg-type]
    write_step(writer, 1)
    writer.close()
    with pytest.raises(
        ScalarLogError, match=f"is damaged at byte {HEADER}, so nothing behind it can be trusted"
    ):
        read_scalar_log(path)
