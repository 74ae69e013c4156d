"""Maximum flow through a graph of layers by Dinic's algorithm, for attention flow.

A set of positions of a layer is stored as the bits of a Python integer, so that one bitwise operation handles all edges
between a position and a layer.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def layered_max_flow(capacities: Integers, sink: int) -> Integers:
    """Return the maximum flow from each position of the first layer to one position of the last layer.

    capacities  (l, i, j): the capacity of the edge from position j of layer l to position i of layer l + 1
    sink        the position of the last layer to which the flow goes
    """
    graph = _ResidualGraph(capacities)
    return np.array([graph.max_flow(source, sink) for source in range(capacities.shape[-1])], np.int64)


class _ResidualGraph:
    """The residual graph of Dinic's maximum-flow algorithm: the capacity of each edge minus the flow through it.

    When a maximum flow has been computed, all capacities are reset for the next one.
    """

    def __init__(self, capacities: Integers) -> None:
        self.depth, self.n, _ = capacities.shape
        self.capacity: list[int] = capacities.ravel().tolist()
        self.residual = self.capacity.copy()
        # the positions to which something may flow, from (layer, position) to the next layer and back to the last
        self.open_edges = [
            [sum(1 << int(i) for i in np.flatnonzero(capacities[layer, :, j])) for j in range(self.n)]
            for layer in range(self.depth)
        ]
        self.open_edges.append([0] * self.n)

    def max_flow(self, source: int, sink: int) -> int:
        """Return the maximum flow from a position of the first layer to a position of the last layer."""
        self.forward = [edges.copy() for edges in self.open_edges]
        self.backward = [[0] * self.n for _ in range(self.depth + 1)]
        self.changed: set[int] = set()
        total = 0
        while (levels := self._levels(source, sink)) is not None:
            for path in self._paths(levels, source):
                total += self._augment(path)
        for edge in self.changed:
            self.residual[edge] = self.capacity[edge]
        return total

    def _levels(self, source: int, sink: int) -> list[list[int]] | None:
        """Breadth-first search: return the positions at each distance from the source; None if the sink is unreachable.

        Entry [d][layer] is a bit mask of the positions of this layer that are d edges from the source. Only edges
        with remaining capacity count.
        """
        seen = [0] * (self.depth + 1)
        frontier = [1 << source, *([0] * self.depth)]
        levels = [frontier]
        while any(frontier) and not frontier[self.depth] >> sink & 1:
            seen = [before | now for before, now in zip(seen, frontier, strict=True)]
            following = [0] * (self.depth + 1)
            for layer, positions in enumerate(frontier):
                for j in _bits(positions):
                    if layer < self.depth:
                        following[layer + 1] |= self.forward[layer][j]
                    if layer > 0:
                        following[layer - 1] |= self.backward[layer][j]
            frontier = [now & ~before for now, before in zip(following, seen, strict=True)]
            levels.append(frontier)
        if not any(frontier):
            return None
        levels[-1] = [*([0] * self.depth), 1 << sink]
        return levels

    def _paths(self, levels: list[list[int]], source: int) -> Iterator[list[tuple[int, int]]]:
        """Yield augmenting paths of shortest length as (layer, position) nodes, until there are none.

        levels  the result of `_levels`; positions without a path to the sink are removed from this list
        """
        path = [(0, source)]
        while path:
            layer, j = path[-1]
            if len(path) == len(levels):
                yield path
                path = path[:1]
                continue
            following = levels[len(path)]
            if layer < self.depth and (there := self.forward[layer][j] & following[layer + 1]):
                path.append((layer + 1, _lowest_bit(there)))
            elif layer > 0 and (there := self.backward[layer][j] & following[layer - 1]):
                path.append((layer - 1, _lowest_bit(there)))
            else:
                levels[len(path) - 1][layer] &= ~(1 << j)  # a dead end
                path.pop()

    def _augment(self, path: list[tuple[int, int]]) -> int:
        """Send the largest possible flow along a path, update the remaining capacities, and return the amount."""
        steps = []
        for (layer, j), (after, i) in pairwise(path):
            ahead = after > layer
            edge = (layer * self.n + i) * self.n + j if ahead else (after * self.n + j) * self.n + i
            steps.append((edge, ahead, self.residual[edge] if ahead else self.capacity[edge] - self.residual[edge]))
        amount: int = min(left for _, _, left in steps)
        for (edge, ahead, left), (layer, j), (after, i) in zip(steps, path, path[1:], strict=False):
            self.residual[edge] -= amount if ahead else -amount
            self.changed.add(edge)
            here, there = (self.forward, self.backward) if ahead else (self.backward, self.forward)
            there[after][i] |= 1 << j
            if left == amount:
                here[layer][j] &= ~(1 << i)
        return amount


def _bits(positions: int) -> Iterator[int]:
    while positions:
        yield _lowest_bit(positions)
        positions &= positions - 1


def _lowest_bit(positions: int) -> int:
    return (positions & -positions).bit_length() - 1
