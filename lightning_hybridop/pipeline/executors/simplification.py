"""Takes out of a traced graph what moves data to no effect."""

from typing import Any

import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_COPIES = (aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default)


def simplified(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with each value computed once, copies left out, and transpositions and views of each other joined."""
    for node in list(graph.graph.nodes):
        if node.target in _COPIES:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.permute.default:
            _join_permutation(node)
        elif node.target in _VIEWS:
            _join_view(node)
    graph.graph.eliminate_dead_code()
    # Every block makes the same of a mask, for instance.
    return fx.GraphModule(graph, fx_graph_cse(graph.graph))


def _join_permutation(node: Any) -> None:
    source, order = node.args
    order = _positive(order)
    if isinstance(source, fx.Node) and source.target is aten.permute.default:
        before = _positive(source.args[1])
        order = [before[axis] for axis in order]
        source = source.args[0]
    node.args = (source, order)
    if order == sorted(order):
        node.replace_all_uses_with(source)


def _join_view(node: Any) -> None:
    source = node.args[0]
    while isinstance(source, fx.Node) and source.target in _VIEWS:
        source = source.args[0]
    node.args = (source, *node.args[1:])
    node.target = aten.reshape.default  # without the copies a view need not be one
    if isinstance(source, fx.Node) and source.meta["val"].shape == node.meta["val"].shape:
        node.replace_all_uses_with(source)


def _positive(order: Any) -> list[int]:
    return [axis % len(order) for axis in order]
