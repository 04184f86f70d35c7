"""Point-to-point transport of hidden states and gradients over Gloo."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybridop.pipeline.wire import decode, encode, encoded_bytes
from lightning_hybridop.schedules.actions import Action, Kind


class TransportError(RuntimeError):
    """A neighbouring stage could not be reached in time."""


_KINDS = tuple(Kind)
_LARGEST_INDEX = 2**13


def message_tag(action: Action) -> int:
    """Return a tag that is unique among the messages of one mini-batch: kind, micro-batch, query and sign."""
    query = 0 if action.query is None else action.query + 1
    if action.micro_batch >= _LARGEST_INDEX or query >= _LARGEST_INDEX:
        raise TransportError(
            f"Micro-batch {action.micro_batch}, query {action.query} cannot be addressed; use fewer than "
            f"{_LARGEST_INDEX - 1} micro-batches and queries."
        )
    index = (_KINDS.index(action.kind) * _LARGEST_INDEX + action.micro_batch) * _LARGEST_INDEX + query
    return 2 * index + (action.sign < 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Posted:
    work: dist.Work
    message: Tensor
    shape: tuple[int, ...]
    form: torch.dtype


class Channel:
    """Messages of one mini-batch from this stage to a neighbour and back.

    Tensors travel through host memory as bytes (see `wire`). Receives are posted ahead, sends are kept alive until `flush`.

    Args:
        peer: the neighbour's global rank.
        description: who the neighbour is, for error texts.
        timeout: how long to wait for a message.
    """

    def __init__(self, *, peer: int, description: str, timeout: timedelta) -> None:
        self._peer = peer
        self._description = description
        self._timeout = timeout
        self._posted: dict[Action, _Posted] = {}
        self._sent: list[tuple[Action, dist.Work, Tensor]] = []
        self.sent_bytes = 0
        """All that was ever sent."""

    def send(self, tensor: Tensor, action: Action, form: torch.dtype) -> None:
        """Start sending `tensor` in the format `form`; returns at once."""
        message = encode(tensor, form)
        try:
            work = dist.isend(message, self._peer, tag=message_tag(action))
        except RuntimeError as error:
            raise self._lost(action, "did not take", error) from error
        assert work is not None
        self._sent.append((action, work, message))
        self.sent_bytes += message.numel()

    def post(self, action: Action, shape: tuple[int, ...], form: torch.dtype) -> None:
        """Announce that a tensor of this shape will be received in the format `form`."""
        message = torch.empty(encoded_bytes(shape, form), dtype=torch.uint8)
        work = dist.irecv(message, self._peer, tag=message_tag(action))
        assert work is not None
        self._posted[action] = _Posted(work=work, message=message, shape=shape, form=form)

    def is_posted(self, action: Action) -> bool:
        """Tell whether the receive of `action` has been posted and not yet taken."""
        return action in self._posted

    def receive(self, action: Action) -> Tensor:
        """Wait for a posted tensor and return it, in host memory and the dtype that its format decodes to.

        Raises:
            TransportError: the neighbour is gone or silent for longer than the timeout.
        """
        # No local name for the pending message: an error's traceback would keep it, and with it the connection.
        try:
            self._posted[action].work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(action, "sent nothing for", error) from error
        posted = self._posted.pop(action)
        return decode(posted.message, posted.shape, posted.form)

    @property
    def held(self) -> int:
        """How many messages wait here, as far as is known, because the neighbour has not taken them."""
        return len(self._sent)

    @property
    def held_bytes(self) -> int:
        """The size of these messages."""
        return sum(message.numel() for _, _, message in self._sent)

    def make_room(self, window: int) -> None:
        """Wait until fewer than `window` messages wait here, oldest first."""
        while len(self._sent) >= window:
            self._await_send(0)

    def wait_until_taken(self, action: Action) -> None:
        """Wait until the neighbour has taken what was sent for `action`, whatever it has not taken of before."""
        place = next((i for i, (sent, _, _) in enumerate(self._sent) if sent == action), None)
        if place is not None:
            self._await_send(place)

    def flush(self) -> None:
        """Wait until every send has been taken by the neighbour."""
        while self._sent:
            self._await_send(0)

    def _await_send(self, place: int) -> None:
        action, work, _ = self._sent[place]
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(action, "did not take", error) from error
        self._sent.pop(place)

    def abandon(self) -> None:
        """Forget all pending messages, after a failure."""
        self._posted.clear()
        self._sent.clear()

    def _lost(self, action: Action, what: str, error: RuntimeError) -> TransportError:
        return TransportError(
            f"{self._description} {what} {action.kind.value} of micro-batch {action.micro_batch} within "
            f"{self._timeout.total_seconds():g} s ({_first_line(error)}); look at that stage's own error first."
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
