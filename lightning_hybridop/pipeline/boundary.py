"""The boundary estimator's inner products: what a perturbed hidden state changes of the loss, to first order."""

import torch
from torch import Tensor

from lightning_hybridop.schedules.actions import Action


class InnerProducts:
    """Takes `<G, h(theta + eps z) - h(theta)>` of every row of one mini-batch, on the last zo stage.

    `G = dL/dh` comes back from the first bp stage once per micro-batch. A perturbed hidden state that was made before
    waits for it as its difference from the unperturbed one; by the schedule at most as many forwards do as there are
    micro-batches (twice as many with a central difference). Held are thus at most 3 hidden states for each micro-batch on
    average: the unperturbed one, G, and a waiting one (one for each query of a forward, and sign); a micro-batch's are
    let go with its last perturbed forward.

    Args:
        perturbed: how many perturbed forwards each micro-batch has.
    """

    def __init__(self, perturbed: dict[int, int]) -> None:
        self.changes: dict[tuple[int, int | None, int], tuple[float, ...]] = {}
        """By (micro-batch, query, sign): the change of the mini-batch's loss that each row contributes."""
        self.largest_movement = 0.0
        """The largest `||h(theta + eps z) - h(theta)|| / ||h(theta)||`; below the arithmetic's resolution it is noise."""
        self._left = dict(perturbed)
        self._base: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._waiting: dict[int, list[tuple[Action, Tensor]]] = {}

    @property
    def held(self) -> int:
        """How many hidden states and gradients are held."""
        waiting = [moved for of_one in self._waiting.values() for _, moved in of_one]
        return len(self._base) + len(self._gradients) + sum(len(moved) for moved in waiting)

    def put_base(self, micro_batch: int, hidden_BTD: Tensor) -> None:
        """Take the unperturbed hidden state of a micro-batch."""
        if self._left.get(micro_batch):
            self._base[micro_batch] = hidden_BTD.detach()

    def put_perturbed(self, action: Action, hidden_BTD: Tensor) -> None:
        """Take a perturbed hidden state, of `action.count` queries one after the other."""
        base_BTD = self._base[action.micro_batch].float()
        moved_QBTD = hidden_BTD.float().reshape(action.count, *base_BTD.shape) - base_BTD
        size = float(torch.linalg.vector_norm(base_BTD))
        for moved_BTD in moved_QBTD:
            movement = float(torch.linalg.vector_norm(moved_BTD)) / size if size > 0.0 else 0.0
            self.largest_movement = max(self.largest_movement, movement)
        waiting = self._waiting.setdefault(action.micro_batch, [])
        waiting.append((action, moved_QBTD))
        self._multiply(action.micro_batch)

    def put_gradient(self, micro_batch: int, gradient_BTD: Tensor) -> None:
        """Take `G` of a micro-batch."""
        if self._left.get(micro_batch):
            self._gradients[micro_batch] = gradient_BTD.detach().float()
            self._multiply(micro_batch)

    def _multiply(self, micro_batch: int) -> None:
        gradient_BTD = self._gradients.get(micro_batch)
        if gradient_BTD is None:
            return
        for action, moved_QBTD in self._waiting.pop(micro_batch, []):
            assert action.query is not None
            # float64 on the CPU: not every device has it.
            by_row_QB = (moved_QBTD * gradient_BTD).sum(dim=3).cpu().double().sum(dim=2)
            for offset, row_changes in enumerate(by_row_QB.tolist()):
                self.changes[micro_batch, action.query + offset, action.sign] = tuple(row_changes)
            self._left[micro_batch] -= 1
        if not self._left[micro_batch]:
            del self._base[micro_batch], self._gradients[micro_batch]
