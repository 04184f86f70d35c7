"""A file of the scalars from which zo stages learn: what replays their steps, in a few bytes for each direction.

Header: magic, version, seed and distribution of the directions. Then records, each with a checksum. All integers and
floats are little-endian.
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, Literal, get_args

from lightning_hybridop.estimation.directions import DirectionKey, Distribution

MAGIC = b"hybridop scalars"
VERSION = 1

_HEADER = struct.Struct("<16sHqB")
_CHECKSUM = struct.Struct("<I")
# Kind and length of a record's body, and a checksum of these two: a damaged length must not look like a torn tail.
_FRAME = struct.Struct("<BI")
_BATCH = struct.Struct("<I")
_DIRECTION = struct.Struct("<HHHd")
_UPDATE = struct.Struct("<IdBBHI")
_CLIPPING = struct.Struct("<Bdd")
_MARK = struct.Struct("<I")
_STAGE_CHECKSUM = struct.Struct("<H16s")
_ABSENT = 0xFFFF
"""In the place of a micro-batch or row that a direction has none of."""

_ALGORITHMS = ("norm", "value")
_DISTRIBUTIONS = get_args(Distribution)

Coefficients = tuple[tuple[DirectionKey, float], ...]
"""The usable directions of a mini-batch and what each counts, in the order in which they are added up."""


class ScalarLogError(ValueError):
    """A file that is no log of scalars, or a damaged one; the message names it and what to do."""


class _Kind(IntEnum):
    START = 1
    BATCH = 2
    UPDATE = 3
    MARK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run that begins or goes on, at an optimizer step and a mini-batch: what was logged from there on is void.

    `optimizer` is its class, `groups` the names of each of its groups' parameters, `stages` those that each zo stage
    estimates.
    """

    step: int
    mini_batch: int
    optimizer: str
    groups: tuple[tuple[str, ...], ...]
    stages: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """How gradients were clipped: to `limit`, by value or by a norm that was `norm` over all zo stages."""

    algorithm: Literal["norm", "value"]
    limit: float
    norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How zo stages took an optimizer step, beside the gradient.

    `share` is the factor on each mini-batch's gradient, `learning_rates` are those of the optimizer's groups, `options`
    the groups' others as JSON.
    """

    share: float
    learning_rates: tuple[float, ...]
    options: str = "[]"
    clippings: tuple[Clipping, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An optimizer step, counted from 1, and the mini-batches that it took."""

    step: int
    mini_batches: tuple[int, ...]
    settings: StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Checksums of each zo stage's parameters after an optimizer step, and which parameters those were."""

    step: int
    checksums: Mapping[int, bytes]
    stages: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarLog:
    """What a log holds that is still valid; of steps that were taken twice, the later ones.

    `starts` are by the steps that they began at, `bytes_of_steps` what each step and its mini-batches take up; `torn` tells that the last record is incomplete and left out, and
    `whole_bytes` is the length without it.
    """

    seed: int
    distribution: Distribution
    starts: list[Start] = field(default_factory=list)
    mini_batches: dict[int, Coefficients] = field(default_factory=dict)
    updates: dict[int, Update] = field(default_factory=dict)
    marks: dict[int, Mark] = field(default_factory=dict)
    bytes_of_steps: dict[int, int] = field(default_factory=dict)
    torn: bool
    whole_bytes: int

    @property
    def last_step(self) -> int:
        """The last optimizer step that is logged without a gap behind the latest start."""
        step = self.starts[-1].step if self.starts else 0
        while step + 1 in self.updates:
            step += 1
        return step


class ScalarLogWriter:
    """Appends records to a log, each written through to the operating system, and marks to the disk.

    A new run begins the file anew. One that goes on appends to it, behind its last whole record.

    Raises:
        ScalarLogError: the log that is to be gone on with is damaged, or another seed's or distribution's.
    """

    def __init__(self, path: str | Path, *, seed: int, distribution: Distribution, goes_on: bool) -> None:
        if not -(2**63) <= seed < 2**63:
            raise ScalarLogError(f"The seed is {seed}, expected one of 64 bits for a log of scalars.")
        path = Path(path)
        whole = _bytes_to_go_on_from(path, seed=seed, distribution=distribution) if goes_on else 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._options = ""
        self._file: IO[bytes] = path.open("r+b" if whole else "wb")
        if whole:
            self._file.truncate(whole)
            self._file.seek(whole)
        else:
            header = _HEADER.pack(MAGIC, VERSION, seed, _DISTRIBUTIONS.index(distribution))
            self._file.write(header + _CHECKSUM.pack(zlib.crc32(header)))
            self._file.flush()

    def start(self, start: Start) -> None:
        """Log that a run begins or goes on."""
        value = [start.step, start.mini_batch, start.optimizer, start.groups, list(start.stages.items())]
        self._options = ""
        self._write(_Kind.START, json.dumps(value, separators=(",", ":")).encode())

    def mini_batch(self, number: int, coefficients: Coefficients) -> None:
        """Log the usable directions of a mini-batch."""
        body = [_BATCH.pack(number)]
        for key, coefficient in coefficients:
            body.append(
                _DIRECTION.pack(_or_absent(key.micro_batch), key.query, _or_absent(key.row), coefficient)
            )
        self._write(_Kind.BATCH, b"".join(body))

    def update(self, update: Update) -> None:
        """Log an optimizer step; the groups' options only where they differ from the step before."""
        settings = update.settings
        options = b"" if settings.options == self._options else settings.options.encode()
        self._options = settings.options
        rates, batches = settings.learning_rates, update.mini_batches
        counts = (len(rates), len(settings.clippings), len(batches), len(options))
        body = [_UPDATE.pack(update.step, settings.share, *counts)]
        body.append(struct.pack(f"<{len(rates)}d{len(batches)}I", *rates, *batches))
        for clipping in settings.clippings:
            algorithm = _ALGORITHMS.index(clipping.algorithm)
            body.append(_CLIPPING.pack(algorithm, clipping.limit, clipping.norm))
        self._write(_Kind.UPDATE, b"".join([*body, options]))

    def mark(self, mark: Mark) -> None:
        """Log checksums of 16 bytes, and see to it that all that was logged is on the disk."""
        parts = [_STAGE_CHECKSUM.pack(stage, checksum) for stage, checksum in mark.checksums.items()]
        self._write(_Kind.MARK, b"".join([_MARK.pack(mark.step), *parts]))
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, kind: _Kind, body: bytes) -> None:
        frame = _FRAME.pack(kind, len(body))
        checksums = _CHECKSUM.pack(zlib.crc32(frame)) + _CHECKSUM.pack(zlib.crc32(body))
        self._file.write(frame + checksums + body)
        self._file.flush()


def _or_absent(number: int | None) -> int:
    return _ABSENT if number is None else number


def _bytes_to_go_on_from(path: Path, *, seed: int, distribution: Distribution) -> int:
    """Return the length of the log that is whole, 0 without any."""
    if not path.exists() or path.stat().st_size < _HEADER.size + _CHECKSUM.size:
        return 0
    log = read_scalar_log(path)
    if (log.seed, log.distribution) != (seed, distribution):
        raise ScalarLogError(
            f"{path} was written with the seed {log.seed} and {log.distribution} directions, but this run has the seed {seed} "
            f"and {distribution} ones; give it another file."
        )
    return log.whole_bytes


def read_scalar_log(path: str | Path) -> ScalarLog:
    """Return what a log holds. It stops at an incomplete last record, as a process that is killed leaves.

    Raises:
        ScalarLogError: there is no such file, it is none, or it is damaged before its last record.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ScalarLogError(
            f"{path} cannot be read ({error.strerror}); give the scalars.log of a run."
        ) from error
    start = _HEADER.size + _CHECKSUM.size
    if len(content) < start or not content.startswith(MAGIC):
        raise ScalarLogError(f"{path} is no log of scalars; give the scalars.log of a run.")
    _, version, seed, distribution = _HEADER.unpack_from(content)
    (checksum,) = _CHECKSUM.unpack_from(content, _HEADER.size)
    if checksum != zlib.crc32(content[: _HEADER.size]) or distribution >= len(_DISTRIBUTIONS):
        raise _damaged(path, 0)
    if version != VERSION:
        raise ScalarLogError(
            f"{path} has version {version}, expected {VERSION}; read it with the release of this package that wrote it."
        )
    contents = _Contents(seed=seed, distribution=_DISTRIBUTIONS[distribution])
    offset = start
    while (end := _end_of_record(path, content, offset)) is not None:
        try:
            contents.add(_Kind(content[offset]), content[offset + _FRAME.size + 2 * _CHECKSUM.size : end])
        except (struct.error, ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
            # Its checksums fit, so somebody wrote it like that.
            raise _damaged(path, offset) from error
        offset = end
    return ScalarLog(
        seed=seed,
        distribution=_DISTRIBUTIONS[distribution],
        starts=contents.starts,
        mini_batches=contents.mini_batches,
        updates=contents.updates,
        marks=contents.marks,
        bytes_of_steps=contents.bytes_of_steps,
        torn=offset < len(content),
        whole_bytes=offset,
    )


def _end_of_record(path: str | Path, content: bytes, offset: int) -> int | None:
    """Return where the record at `offset` ends, None if what is left is no whole record.

    Raises:
        ScalarLogError: a damaged record that is not the last one.
    """
    begin = offset + _FRAME.size + 2 * _CHECKSUM.size
    if begin > len(content):
        return None
    _, length = _FRAME.unpack_from(content, offset)
    of_frame, of_body = struct.unpack_from("<II", content, offset + _FRAME.size)
    if of_frame != zlib.crc32(content[offset : offset + _FRAME.size]):
        # A host that loses power may leave the file longer than what reached the disk.
        if not any(content[offset:]):
            return None
        raise _damaged(path, offset)
    end = begin + int(length)
    if end > len(content):
        return None
    if of_body == zlib.crc32(content[begin:end]):
        return end
    if not any(content[end:]):
        return None
    raise _damaged(path, offset)


def _damaged(path: str | Path, offset: int) -> ScalarLogError:
    return ScalarLogError(
        f"{path} is damaged at byte {offset}, so nothing behind it can be trusted; go on from a checkpoint instead."
    )


class _Contents:
    """What the records that were read so far come to."""

    def __init__(self, *, seed: int, distribution: Distribution) -> None:
        self.starts: list[Start] = []
        self.mini_batches: dict[int, Coefficients] = {}
        self.updates: dict[int, Update] = {}
        self.marks: dict[int, Mark] = {}
        self.bytes_of_steps: dict[int, int] = {}
        self._seed = seed
        self._distribution: Distribution = distribution
        self._options = "[]"
        self._bytes = 0

    def add(self, kind: _Kind, body: bytes) -> None:
        """Take one record in."""
        self._bytes += _FRAME.size + 2 * _CHECKSUM.size + len(body)
        match kind:
            case _Kind.START:
                self._start(_decoded_start(body))
            case _Kind.BATCH:
                number, coefficients = self._mini_batch(body)
                self.mini_batches[number] = coefficients
            case _Kind.UPDATE:
                update = self._update(body)
                self.updates[update.step] = update
                self.bytes_of_steps[update.step], self._bytes = self._bytes, 0
            case _Kind.MARK:
                (step,) = _MARK.unpack_from(body)
                checksums = dict(_STAGE_CHECKSUM.iter_unpack(body[_MARK.size :]))
                stages = self.starts[-1].stages
                if checksums.keys() != stages.keys():
                    raise ValueError("A mark has other stages than the run.")
                self.marks[step] = Mark(step=step, checksums=checksums, stages=stages)
                self._bytes = 0

    def _start(self, start: Start) -> None:
        for step in [step for step in self.updates if step > start.step]:
            del self.updates[step], self.bytes_of_steps[step]
        for step in [step for step in self.marks if step > start.step]:
            del self.marks[step]
        for number in [number for number in self.mini_batches if number >= start.mini_batch]:
            del self.mini_batches[number]
        self.starts = [*(earlier for earlier in self.starts if earlier.step < start.step), start]
        self._options = "[]"
        self._bytes = 0

    def _mini_batch(self, body: bytes) -> tuple[int, Coefficients]:
        (number,) = _BATCH.unpack_from(body)
        return number, tuple(
            (
                DirectionKey(
                    seed=self._seed,
                    step=number,
                    micro_batch=None if micro_batch == _ABSENT else micro_batch,
                    query=query,
                    row=None if row == _ABSENT else row,
                    distribution=self._distribution,
                ),
                coefficient,
            )
            for micro_batch, query, row, coefficient in _DIRECTION.iter_unpack(body[_BATCH.size :])
        )

    def _update(self, body: bytes) -> Update:
        step, share, rates, clippings, batches, options = _UPDATE.unpack_from(body)
        offset = _UPDATE.size
        numbers = struct.unpack_from(f"<{rates}d{batches}I", body, offset)
        offset += struct.calcsize(f"<{rates}d{batches}I")
        clips = [_CLIPPING.unpack_from(body, offset + number * _CLIPPING.size) for number in range(clippings)]
        offset += clippings * _CLIPPING.size
        if len(body) != offset + options:
            raise ValueError("An update is longer or shorter than it says.")
        if options:
            self._options = body[offset:].decode()
        return Update(
            step=step,
            mini_batches=tuple(numbers[rates:]),
            settings=StepSettings(
                share=share,
                learning_rates=tuple(numbers[:rates]),
                options=self._options,
                clippings=tuple(
                    Clipping(algorithm=_ALGORITHMS[algorithm], limit=limit, norm=norm)  # type: ignore[arg-type]
                    for algorithm, limit, norm in clips
                ),
            ),
        )


def _decoded_start(body: bytes) -> Start:
    step, mini_batch, optimizer, groups, stages = json.loads(body)
    return Start(
        step=int(step),
        mini_batch=int(mini_batch),
        optimizer=str(optimizer),
        groups=tuple(_names(names) for names in groups),
        stages={int(stage): _names(names) for stage, names in stages},
    )


def _names(names: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(name) for name in names)
