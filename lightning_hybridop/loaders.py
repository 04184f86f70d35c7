"""DataLoaders under a pipeline: one that goes on in the middle of an epoch, one whose batches rank 0 hands to all."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from lightning_hybridop.pipeline.batches import BatchError
from lightning_hybridop.pipeline.exchange import broadcast_nested, gather_json
from lightning_hybridop.pipeline.packing import pack, unpack


class Wrapped:
    """A loader in the place of another one, answering reads of attributes as that one would."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet, as while this object is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)


class ResumedLoader(Wrapped):
    """A loader whose first epoch leaves out its first `trained` batches, which an interrupted run has trained on.

    They are drawn and thrown away, so that every random choice behind them is what it would have been.
    """

    def __init__(self, loader: Iterable[Any], *, trained: int) -> None:
        super().__init__(loader)
        self._trained = trained

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # TypeError of its own, as the wrapped loader's

    def __iter__(self) -> Iterator[Any]:
        # Nothing is drawn before the first batch is asked for: by then the sampler has been told the epoch.
        trained, self._trained = self._trained, 0
        yield from islice(self._loader, trained, None)


class SharedLoader(Wrapped):
    """A loader of rank 0 whose batches all ranks receive; the other ranks' own loaders are not read. Collective.

    Args:
        loader: this rank's loader.
        owner: whether this rank is rank 0.
        length: number of batches of rank 0's loader, None if it has no length.
    """

    def __init__(self, loader: Iterable[Any], *, owner: bool, length: int | None) -> None:
        super().__init__(loader)
        self._owner = owner
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(
                "The DataLoader of rank 0 has no length; give its dataset a __len__, or do not ask for the loader's."
            )
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if not self._owner:
            while (message := broadcast_nested(None, source=0)) is not None:
                yield message[0]
            return
        for batch in self._loader:
            broadcast_nested([batch], source=0)
            # With the types that the others get.
            yield unpack(pack(batch))
        broadcast_nested(None, source=0)


class EvenLoader(Wrapped):
    """A loader without a length, which sees before each batch that all ranks have one more, or none has. Collective."""

    def __iter__(self) -> Iterator[Any]:
        end = object()
        batches = iter(self._loader)
        while True:
            batch = next(batches, end)
            more = gather_json(batch is not end)
            if not any(more):
                return
            if not all(more):
                ended = ", ".join(f"rank {rank}" for rank, has_one in enumerate(more) if not has_one)
                raise BatchError(
                    f"Every rank must read the same batches, but those of {ended} ended before the others'; give all "
                    "hosts the same data files, or pass HybridOPStrategy(data='broadcast')."
                )
            yield batch


def length_of(loader: object) -> int | None:
    """Return a loader's number of batches, None if it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def batches_of_epoch(length: int | None, limit: int | float) -> float:
    """Return the batches of an epoch under Lightning's `limit_train_batches`: a number, or a share of the loader."""
    whole = float("inf") if length is None else length
    return min(whole, limit) if isinstance(limit, int) else whole if limit == 1.0 else int(whole * limit)


def shared_loader(loader: Iterable[Any], *, rank: int) -> SharedLoader:
    """Return a loader that yields rank 0's batches on this rank. Collective."""
    length = gather_json(length_of(loader))[0]
    return SharedLoader(loader, owner=rank == 0, length=length)


def check_same_length(loader: object, *, stage_of_rank: Callable[[int], int]) -> None:
    """Compare the number of batches over all ranks. Collective.

    Raises:
        BatchError: on every rank, naming the ranks whose loader has another length than rank 0's.
    """
    lengths = gather_json(length_of(loader))
    odd = [
        f"rank {rank} (stage {stage_of_rank(rank)}) has {length}"
        for rank, length in enumerate(lengths)
        if length != lengths[0]
    ]
    if odd:
        raise BatchError(
            f"Every rank must read the same batches, but rank 0's DataLoader has {lengths[0]} of them while "
            f"{', '.join(odd)}; give all hosts the same data files, or pass HybridOPStrategy(data='broadcast')."
        )
