"""Maximum flow through a layered graph, for attention flow."""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
UNREACHABLE = np.iinfo(np.int64).max // 2
CHUNK = 1 << 24  # residual capacities to hold at once


def layered_max_flow(capacities: Integers, sink: int) -> Integers:
    """Return the maximum flow from each position of the first layer to one position of the last.

    capacities  (l, i, j): how much may flow from position j of layer l to position i of layer l + 1
    sink        the position of the last layer
    """
    n = capacities.shape[-1]
    at_once = max(1, CHUNK // capacities.size)
    chunks = [np.arange(start, min(start + at_once, n)) for start in range(0, n, at_once)]
    return np.concatenate([_push_relabel(capacities, sources, sink) for sources in chunks])


def _push_relabel(capacities: Integers, sources: Integers, sink: int) -> Integers:
    """The push-relabel method with exact distances (Goldberg and Tarjan 1988), for several sources at a time.

    All edges of a source are saturated. Every round moves the excess of each node to nodes that are nearer to the
    sink, until no excess can reach it.
    """
    depth, n, _ = capacities.shape
    count = np.arange(len(sources))
    forward = np.repeat(capacities[None], len(sources), 0)  # what may still flow from (l, j) to (l + 1, i)
    backward = np.zeros_like(forward)  # what may flow back
    excess = np.zeros((len(sources), depth + 1, n), np.int64)
    excess[:, 1] = backward[count, 0, :, sources] = forward[count, 0, :, sources]
    forward[count, 0, :, sources] = 0
    while True:
        distance = _distances(forward, backward, sink)
        reaching = (excess > 0) & (distance < UNREACHABLE) & (distance > 0)
        if not reaching.any():
            return excess[:, depth, sink]
        for near in range(distance[reaching].max(), 0, -1):
            for layer in range(depth + 1):
                moving = np.where(distance[:, layer] == near, excess[:, layer], 0)
                if not moving.any():
                    continue
                if layer < depth:
                    allowed = forward[:, layer] * (distance[:, layer + 1, :, None] == near - 1)
                    pushed = _distribute(moving[:, None, :], allowed, axis=1)
                    forward[:, layer] -= pushed
                    backward[:, layer] += pushed
                    excess[:, layer] -= pushed.sum(1)
                    excess[:, layer + 1] += pushed.sum(2)
                    moving = moving - pushed.sum(1)
                if layer > 0:
                    allowed = backward[:, layer - 1] * (distance[:, layer - 1, None, :] == near - 1)
                    pushed = _distribute(moving[:, :, None], allowed, axis=2)
                    backward[:, layer - 1] -= pushed
                    forward[:, layer - 1] += pushed
                    excess[:, layer] -= pushed.sum(2)
                    excess[:, layer - 1] += pushed.sum(1)


def _distribute(amount: Integers, allowed: Integers, axis: int) -> Integers:
    """Fill the allowed capacities along an axis one after the other, until the amount is used up."""
    return np.clip(amount - (allowed.cumsum(axis) - allowed), 0, allowed)


def _distances(forward: Integers, backward: Integers, sink: int) -> Integers:
    """The number of edges from each node to the sink in the residual graph."""
    depth = forward.shape[1]
    distance = np.full((len(forward), depth + 1, forward.shape[-1]), UNREACHABLE)
    distance[:, depth, sink] = 0
    while True:
        before = distance.copy()
        for layer in reversed(range(depth)):
            through = np.where(forward[:, layer] > 0, distance[:, layer + 1, :, None] + 1, UNREACHABLE)
            distance[:, layer] = np.minimum(distance[:, layer], through.min(1))
        for layer in range(depth):
            through = np.where(backward[:, layer] > 0, distance[:, layer, None, :] + 1, UNREACHABLE)
            distance[:, layer + 1] = np.minimum(distance[:, layer + 1], through.min(2))
        if np.array_equal(before, distance):
            return distance
