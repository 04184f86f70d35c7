"""Whether groups of rows can ride in one forward of the zo stages, and how many copies of a micro-batch fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_hybridop.estimation.estimators import Directions
from lightning_hybridop.estimation.grouped import GroupingError, factor_layers
from lightning_hybridop.pipeline.ownership import block_dtype
from lightning_hybridop.planning.plan import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """What a zo stage can do with groups of rows.

    `refusal` says why its parameters cannot have a value for each group, `dropout` which module would give copies of a
    micro-batch other masks; None where there is no such reason. `dimensions` is the number of elements perturbed,
    `parameter_bytes` their size, and `token_bytes` that of all that one block makes of one token, were nothing freed.
    """

    refusal: str | None = None
    dropout: str | None = None
    dimensions: int = 0
    parameter_bytes: int = 0
    token_bytes: int = 0


def grouping_of(
    module: nn.Module, blocks: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter], *, width: int
) -> tuple[dict[str, nn.Linear] | None, Grouping]:
    """Return the layers of a stage's perturbed `parameters`, None where groups are refused, and the stage's grouping.

    `module` is cut down to the stage, `blocks` are those of the stage by name, `width` is the size D of the hidden state.
    """
    factors, refusal = None, None
    try:
        factors = factor_layers(module, list(parameters))
    except GroupingError as error:
        refusal = str(error)
    return factors, Grouping(
        refusal=refusal,
        dropout=dropout_in(module),
        dimensions=sum(parameter.numel() for parameter in parameters.values()),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters.values()),
        token_bytes=max(_token_bytes(block, width) for block in blocks.values()),
    )


def common_grouping(groupings: Sequence[Grouping], *, zo_stages: Sequence[int]) -> Grouping:
    """Return what holds for all zo stages together; what stands before one runs the copies as well, and must not drop out.

    `groupings` are those of all stages.
    """
    zo = [groupings[stage] for stage in zo_stages]
    return Grouping(
        refusal=next((its.refusal for its in zo if its.refusal), None),
        dropout=next(
            (its.dropout for its in groupings[: max(zo_stages, default=-1) + 1] if its.dropout), None
        ),
        dimensions=sum(its.dimensions for its in zo),
        parameter_bytes=max((its.parameter_bytes for its in zo), default=0),
        token_bytes=max((its.token_bytes for its in zo), default=0),
    )


def copies_that_fit(
    grouping: Grouping, token_shapes: Sequence[tuple[int, int]], *, directions: Directions, memory: float
) -> int:
    """Return how many copies of any of the micro-batches, (rows, length), take at most `memory` MiB; at least 1."""
    largest = max(
        rows * length * grouping.token_bytes + (rows if directions == "row" else 1) * grouping.parameter_bytes
        for rows, length in token_shapes
    )
    return max(1, int(memory * MIB // max(1, largest)))


def dropout_in(module: nn.Module) -> str | None:
    """Return the name of a part that drops out (or adds noise), by a layer or by a probability of its own; None if none."""
    for path, child in module.named_modules():
        if isinstance(child, nn.modules.dropout._DropoutNd):
            if child.p > 0.0:
                return str(path)
            continue
        for attribute, value in vars(child).items():
            if ("drop" in attribute or "jitter" in attribute) and isinstance(value, float) and value > 0.0:
                return f"{path}.{attribute}".removeprefix(".")
    return None


def _token_bytes(block: nn.Module, width: int) -> int:
    outputs = [
        getattr(child, "out_features", getattr(child, "nf", 0))
        for child in block.modules()
        if not any(True for _ in child.children())
    ]
    return (4 * width + sum(outputs)) * block_dtype(block).itemsize
