"""Where the boxes of a drawn graph go: layers from top to bottom, few crossings, short edges.

In come sizes of boxes and the edges between them, which must not form cycles; out come places and the points that
edges pass. The same graph gives the same picture, and the work grows with what is drawn: well below a second for 500
boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

#: Between boxes of a layer, between layers, beside the lane of a passing edge.
GAP, RISE, LANE = 28.0, 44.0, 18.0
#: Passes over all layers, for their order and for their places.
SWEEPS = 6
#: Layers on either side whose mean place tells where a layer has drifted to.
WINDOW = 20
#: Edges get a lane in each layer that they pass, unless that would be more lanes than this in the whole picture.
MAX_LANES = 20_000

Point = tuple[float, float]


@dataclass
class Layout:
    """Places: of boxes by their left upper corner, of edges by the points from the upper box to the lower one."""

    width: float
    height: float
    boxes: list[Point]
    edges: list[list[Point]]


def layered(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Layout:
    """Places for boxes of these sizes (width, height) with edges (upper, lower)."""
    if not sizes:
        return Layout(0.0, 0.0, [], [])
    layer = _layers(len(sizes), edges)
    # Items are boxes, and behind them the lanes of edges that pass layers.
    width, height = [size[0] for size in sizes], [size[1] for size in sizes]
    above: list[list[int]] = [[] for _ in sizes]
    below: list[list[int]] = [[] for _ in sizes]
    lanes: list[list[int]] = []
    left = MAX_LANES
    for upper, lower in edges:
        passed: list[int] = []
        if layer[lower] - layer[upper] - 1 <= left:
            left -= layer[lower] - layer[upper] - 1
            for level in range(layer[upper] + 1, layer[lower]):
                passed.append(len(layer))
                layer.append(level)
                width.append(LANE)
                height.append(0.0)
                above.append([])
                below.append([])
        way = [upper, *passed, lower]
        for one, two in itertools.pairwise(way):
            below[one].append(two)
            above[two].append(one)
        lanes.append(passed)
    rows: list[list[int]] = [[] for _ in range(max(layer) + 1)]
    for item in _by_depth(len(layer), below, len(sizes)):
        rows[layer[item]].append(item)
    _order(rows, above, below)
    x = _across(rows, width, above, below, len(sizes))
    _upright(rows, width, x)
    tops, y = [], 0.0
    for row in rows:
        tops.append(y)
        y += max(height[item] for item in row) + RISE
    tall = [max(height[item] for item in row) for row in rows]
    start = min(x[item] - width[item] / 2 for item in range(len(layer)))
    boxes = [(x[box] - width[box] / 2 - start, tops[layer[box]]) for box in range(len(sizes))]
    routes = []
    for (upper, lower), passed in zip(edges, lanes):
        points = [(x[upper] - start, boxes[upper][1] + height[upper])]
        for lane in passed:
            top = tops[layer[lane]]
            points += [(x[lane] - start, top), (x[lane] - start, top + tall[layer[lane]])]
        points.append((x[lower] - start, boxes[lower][1]))
        routes.append(points)
    right = max(x[item] + width[item] / 2 for item in range(len(layer))) - start
    return Layout(right, y - RISE, boxes, routes)


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """A layer for every box: below all that lead to it, and sources right above what they lead to."""
    after: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for upper, lower in edges:
        after[upper].append(lower)
        waits[lower] += 1
    source = [number == 0 for number in waits]
    layer = [0] * count
    ready = [box for box in range(count) if source[box]]
    for box in ready:
        for lower in after[box]:
            layer[lower] = max(layer[lower], layer[box] + 1)
            waits[lower] -= 1
            if not waits[lower]:
                ready.append(lower)
    if len(ready) < count:
        raise ValueError("need edges without cycles")
    for box in range(count):
        if source[box] and after[box]:
            layer[box] = min(layer[lower] for lower in after[box]) - 1
    return layer


def _by_depth(count: int, below: Sequence[Sequence[int]], boxes: int) -> list[int]:
    """All items as a walk along the edges meets them: neighbours in the graph start as neighbours in a layer."""
    found, seen = [], [False] * count
    targets = [False] * count
    for each in below:
        for item in each:
            targets[item] = True
    for first in [*(box for box in range(boxes) if not targets[box]), *range(count)]:
        stack = [first]
        while stack:
            item = stack.pop()
            if not seen[item]:
                seen[item] = True
                found.append(item)
                stack.extend(reversed(below[item]))
    return found


def _order(rows: list[list[int]], above: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> None:
    """Sort each layer by the middle of its neighbours, downward and upward in turn; keep the best of all orders."""
    place = [0.0] * len(above)

    def number(row: list[int]) -> None:
        for position, item in enumerate(row):
            place[item] = position

    for row in rows:
        number(row)
    if all(len(row) == 1 for row in rows):
        return
    best, fewest = [list(row) for row in rows], _crossings(rows, below, place)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            middle = {}
            for item in row:
                near = above[item] if down else below[item]
                middle[item] = sum(place[each] for each in near) / len(near) if near else place[item]
            row.sort(key=middle.__getitem__)
            number(row)
        crossings = _crossings(rows, below, place)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    rows[:] = best


def _crossings(rows: Sequence[Sequence[int]], below: Sequence[Sequence[int]], place: Sequence[float]) -> int:
    """How often edges between neighbouring layers cross: inversions, counted in a Fenwick tree."""
    total = 0
    for row, lower in itertools.pairwise(rows):
        ends = [int(place[end]) for item in row for end in sorted(below[item], key=place.__getitem__)]
        if len(row) < 2 or len(ends) < 2:
            continue
        size = max(len(lower), max(ends) + 1) + 1
        tree = [0] * (size + 1)
        for done, end in enumerate(ends):
            index, before = end + 1, 0
            while index:
                before += tree[index]
                index &= index - 1
            total += done - before
            index = end + 1
            while index <= size:
                tree[index] += 1
                index += index & -index
    return total


def _across(
    rows: Sequence[Sequence[int]],
    width: Sequence[float],
    above: Sequence[Sequence[int]],
    below: Sequence[Sequence[int]],
    boxes: int,
) -> list[float]:
    """Middles of all items: each as near to its neighbours as order and gaps of its layer permit."""
    x = [0.0] * len(width)
    for row in rows:
        at = 0.0
        for item in row:
            x[item] = at + width[item] / 2
            at += width[item] + GAP
        for item in row:
            x[item] -= at / 2
    for sweep in range(SWEEPS):
        down = sweep % 2 == 1
        for row in rows if down else reversed(rows):
            wanted, weight = [], []
            for item in row:
                # From one side only: chains hang straight from where they begin, after one pass.
                near = (above[item] if down else below[item]) or below[item] or above[item]
                # Lanes pull hard, so that long edges become straight.
                pull = [4.0 if each >= boxes or item >= boxes else 1.0 for each in near]
                wanted.append(sum(x[each] * force for each, force in zip(near, pull)) / sum(pull) if near else x[item])
                weight.append(sum(pull) or 0.1)
            for item, found in zip(row, _apart(wanted, weight, [width[item] for item in row])):
                x[item] = found
    return x


def _upright(rows: Sequence[Sequence[int]], width: Sequence[float], x: list[float]) -> None:
    """Move whole layers where many small steps to one side, such as those of residual blocks, have added up."""
    widest = max(sum(width[item] + GAP for item in row) for row in rows)
    if max(x) - min(x) < 3 * widest:
        return
    sums = [0.0]
    for row in rows:
        sums.append(sums[-1] + sum(x[item] for item in row) / len(row))
    for number, row in enumerate(rows):
        first, last = max(0, number - WINDOW), min(len(rows), number + WINDOW + 1)
        trend = (sums[last] - sums[first]) / (last - first)
        for item in row:
            x[item] -= trend


def _apart(wanted: Sequence[float], weight: Sequence[float], width: Sequence[float]) -> list[float]:
    """Places in order, GAP apart, with the least sum of weighted squares of what they miss."""
    offset, offsets = 0.0, []
    for i, each in enumerate(width):
        offset += (width[i - 1] / 2 + GAP + each / 2) if i else 0.0
        offsets.append(offset)
    # Without the offsets the places only have to rise: runs that would fall are put on their mean.
    runs: list[tuple[float, float, int]] = []
    for want, pull, shift in zip(wanted, weight, offsets):
        mean, total, count = want - shift, pull, 1
        while runs and runs[-1][0] > mean:
            before, more, length = runs.pop()
            mean = (mean * total + before * more) / (total + more)
            total, count = total + more, count + length
        runs.append((mean, total, count))
    flat = [mean for mean, _, count in runs for _ in range(count)]
    return [each + shift for each, shift in zip(flat, offsets)]
