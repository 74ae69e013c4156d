"""Maximum flow compared with scipy."""

import numpy as np
import pytest

from regard.see.max_flow import layered_max_flow


def scipy_flows(capacities: np.ndarray, sink: int) -> list[int]:
    sparse, graph = pytest.importorskip("scipy.sparse"), pytest.importorskip("scipy.sparse.csgraph")
    depth, n, _ = capacities.shape
    layer, i, j = np.nonzero(capacities)
    size = (depth + 1) * n
    edges = (capacities[layer, i, j].astype(np.int32), (layer * n + j, (layer + 1) * n + i))
    matrix = sparse.coo_array(edges, shape=(size, size)).tocsr()
    return [graph.maximum_flow(matrix, source, depth * n + sink).flow_value for source in range(n)]


@pytest.mark.parametrize(("depth", "n", "zeros"), [(1, 1, 0.0), (1, 5, 0.3), (2, 7, 0.0), (3, 5, 0.6), (5, 9, 0.8)])
def test_the_maximum_flow_is_that_of_scipy(depth: int, n: int, zeros: float) -> None:
    draws = np.random.default_rng(depth)
    for sink in range(n):
        capacities = draws.integers(0, 1000, (depth, n, n)) * (draws.random((depth, n, n)) > zeros)
        assert layered_max_flow(capacities, sink).tolist() == scipy_flows(capacities, sink)
