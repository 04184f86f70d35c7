"""Tensors of any layout as bytes."""

import pytest
import torch
from torch import Tensor

from lightning_hybridop.pipeline.raw_bytes import as_bytes

MATRIX = torch.arange(14).view(2, 7)


@pytest.mark.parametrize(
    "tensor",
    [
        MATRIX,
        MATRIX[:, 0],
        MATRIX[:1, 0],  # a single element, whose stride is 7
        MATRIX[:0, 0],
        MATRIX.t(),
        torch.tensor(3.5),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16, requires_grad=True),
        torch.tensor([[True], [False]]),
    ],
)
def test_bytes_are_those_of_the_elements_in_order_of_rows(tensor: Tensor) -> None:
    found = as_bytes(tensor)

    assert found.dtype == torch.uint8
    assert found.shape == (tensor.numel() * tensor.element_size(),)
    assert found.clone().view(tensor.dtype).tolist() == tensor.detach().flatten().tolist()
