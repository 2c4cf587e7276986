"""Limits as a part of the layer before them, which is how the peers' own converters write them."""

from __future__ import annotations

from typing import Any

LAYERS = ("conv2d", "depthwise_conv2d", "fully_connected", "add")


def folded(graph: Any) -> list[Any]:
    """The nodes of a graph, a Clamp joined to the layer that it alone reads where both have the same quantization."""
    readers: dict[int, int] = {}
    for node in graph.nodes:
        for id in node.inputs:
            if id is not None:
                readers[id] = readers.get(id, 0) + 1
    made: list[Any] = []
    places: dict[int, int] = {}
    for node in graph.nodes:
        source = places.get(node.inputs[0]) if node.op.name == "clamp" else None
        if source is not None:
            before = made[source]
            inner, outer = graph.value(before.outputs[0]), graph.value(node.outputs[0])
            if (
                before.op.name in LAYERS
                and before.clamp is None
                and readers[inner.id] == 1
                and not inner.is_output
                and inner.quantization == outer.quantization
            ):
                made[source] = before.replace(outputs=node.outputs, clamp=node.clamp)
                places[node.outputs[0]] = source
                continue
        for id in node.outputs:
            places[id] = len(made)
        made.append(node)
    return made
