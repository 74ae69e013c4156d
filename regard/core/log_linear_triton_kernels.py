"""Triton kernels for causal linear attention whose features are given by their logarithms, forward and backward.

The steps are those of `linear_triton_kernels`. The peak of a feature is the largest logarithm of this feature so far.
Sums of exponentials are stored divided by exp(peak), and rescaled when the peak increases. The weights inside a chunk
are sums over the features of exp(ln phi(q) + ln phi(k) - TOP), computed pair by pair, where TOP is one number for each
query that prevents overflow. If queries and keys were scaled separately, both factors could underflow although their
product does not.
"""

import triton
import triton.language as tl

from regard.core import linear_triton_kernels as linear
from regard.core.linear_triton_kernels import _head, _inverse, _of_found, _rows, _store


@triton.jit
def _logs(X, rows, n, stride_n, stride_c, beyond, C: tl.constexpr, R: tl.constexpr):
    """Load the logarithms of features, (tokens, features). Entries outside the tensor get the value `beyond`."""
    features = tl.arange(0, R)
    there = (rows[:, None] < n) & (features[None, :] < C)
    at = X + rows[:, None].to(tl.int64) * stride_n + features[None, :] * stride_c
    return tl.load(at, mask=there, other=beyond).to(tl.float32)


@triton.jit
def _finite(peak):
    """Replace -inf by 0 in a peak, so that the peak can be subtracted. A peak is -inf before the first key."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _add(matrix, vector, peak, logs, values, extra, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Add exp(logs)^T times `values` to a matrix, and exp(logs)^T times `extra` to a vector.

    Matrix and vector are stored divided by exp(peak), where `peak` is the largest logarithm of each feature so far.
    Returns both and the new peak.
    """
    higher = tl.maximum(peak, tl.max(logs, 0))
    level = _finite(higher)
    fading, factors = tl.exp(peak - level), tl.exp(logs - level[None, :]).to(OPERAND)
    matrix = tl.dot(tl.trans(factors), values, matrix * fading[:, None], input_precision=PRECISION)
    vector = vector * fading + tl.sum(factors.to(tl.float32) * extra[:, None], 0)
    return matrix, vector, higher


@triton.jit
def _load_sums(SUMS, C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """Load the sums of keys before a segment: a matrix (features, width of v), a vector and a peak (features)."""
    matrix, vector = linear._load_sums(SUMS, C, W, R, E)
    features = tl.arange(0, R)
    return matrix, vector, tl.load(SUMS + C * W + C + features, mask=features < C, other=float("-inf"))


@triton.jit
def _store_sums(SUMS, matrix, vector, peak, C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    linear._store_sums(SUMS, matrix, vector, C, W, R, E)
    features = tl.arange(0, R)
    tl.store(SUMS + C * W + C + features, peak, mask=features < C)


@triton.jit
def sum_keys(
    K, V, SUMS, n, length,
    k_b, k_h, k_n, k_c, v_b, v_h, v_n, v_c,
    H: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute the sums of each segment over its keys: the sum of phi(k) v^T and the sum of phi(k), and the peak.

    Both sums are divided by exp(peak).
    """
    segment, both = tl.program_id(0), tl.program_id(1)
    b, h = both // H, both % H
    keys, values = _head(K, b, h // GROUP, k_b, k_h), _head(V, b, h // GROUP, v_b, v_h)
    matrix, vector = tl.zeros([R, E], tl.float32), tl.zeros([R], tl.float32)
    peak = tl.full([R], float("-inf"), tl.float32)
    ones = tl.full([M], 1.0, tl.float32)
    for start in tl.range(segment * length, tl.minimum(segment * length + length, n), M):
        rows = start + tl.arange(0, M)
        logs = _logs(keys, rows, n, k_n, k_c, float("-inf"), C, R)
        v = _rows(values, rows, n, v_n, v_c, W, E).to(OPERAND)
        matrix, vector, peak = _add(matrix, vector, peak, logs, v, ones, OPERAND, PRECISION)
    at = both.to(tl.int64) * tl.num_programs(0) + segment
    _store_sums(SUMS + at * (C * W + 2 * C), matrix, vector, peak, C, W, R, E)


@triton.jit(do_not_specialize=["segments"])
def accumulate(
    SUMS, BEFORE, MATRIX, VECTOR, PEAK, MATRIX_AFTER, VECTOR_AFTER, PEAK_AFTER, segments,
    FRESH: tl.constexpr, REVERSE: tl.constexpr, C: tl.constexpr, W: tl.constexpr, E: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute cumulative sums over segments for FEATURES features, as `linear_triton_kernels.accumulate` does.

    PEAK is the peak of the start values MATRIX and VECTOR, PEAK_AFTER that of the results.
    """
    both = tl.program_id(1).to(tl.int64)
    features, columns = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES), tl.arange(0, E)
    real = features < C
    there = real[:, None] & (columns[None, :] < W)
    at = features[:, None] * W + columns[None, :]
    matrix = tl.zeros([FEATURES, E], tl.float32)
    vector = tl.zeros([FEATURES], tl.float32)
    peak = tl.full([FEATURES], float("-inf"), tl.float32)
    if not FRESH:
        matrix = tl.load(MATRIX + both * (C * W) + at, mask=there, other=0.0)
        vector = tl.load(VECTOR + both * C + features, mask=real, other=0.0)
        peak = tl.load(PEAK + both * C + features, mask=real, other=0.0)
    for line in tl.range(0, segments):
        own = segments - 1 - line if REVERSE else line
        one = (both * segments + own) * (C * W + 2 * C)
        tl.store(BEFORE + one + at, matrix, mask=there)
        tl.store(BEFORE + one + C * W + features, vector, mask=real)
        tl.store(BEFORE + one + C * W + C + features, peak, mask=real)
        other = tl.load(SUMS + one + C * W + C + features, mask=real, other=0.0)
        higher = tl.maximum(peak, other)
        level = _finite(higher)
        fading, factor = tl.exp(peak - level), tl.exp(other - level)
        matrix = matrix * fading[:, None] + tl.load(SUMS + one + at, mask=there, other=0.0) * factor[:, None]
        vector = vector * fading + tl.load(SUMS + one + C * W + features, mask=real, other=0.0) * factor
        peak = higher
    tl.store(MATRIX_AFTER + both * (C * W) + at, matrix, mask=there)
    tl.store(VECTOR_AFTER + both * C + features, vector, mask=real)
    tl.store(PEAK_AFTER + both * C + features, peak, mask=real)


@triton.jit
def attend_chunks(
    Q, K, V, BEFORE, OUT, MASS, TOP, n, length,
    q_b, q_h, q_n, q_c, k_b, k_h, k_n, k_c, v_b, v_h, v_n, v_c,
    H: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr, M: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of the queries of each segment.

    If KEEP, also compute TOP, and the sum of weights of each query divided by exp(TOP).
    """
    segment, both = tl.program_id(0), tl.program_id(1)
    b, h = both // H, both % H
    queries = _head(Q, b, h, q_b, q_h)
    keys, values = _head(K, b, h // GROUP, k_b, k_h), _head(V, b, h // GROUP, v_b, v_h)
    at = both.to(tl.int64) * tl.num_programs(0) + segment
    matrix, vector, peak = _load_sums(BEFORE + at * (C * W + 2 * C), C, W, R, E)
    own = both.to(tl.int64) * n
    seen = tl.arange(0, M)[:, None] >= tl.arange(0, M)[None, :]
    ones = tl.full([M], 1.0, tl.float32)
    for start in tl.range(segment * length, tl.minimum(segment * length + length, n), M):
        rows = start + tl.arange(0, M)
        logs_q = _logs(queries, rows, n, q_n, q_c, 0.0, C, R)
        logs_k = _logs(keys, rows, n, k_n, k_c, float("-inf"), C, R)
        v = _rows(values, rows, n, v_n, v_c, W, E).to(OPERAND)
        past = logs_q + peak[None, :]
        pairs = tl.where(seen[:, :, None], logs_q[:, None, :] + logs_k[None, :, :], float("-inf"))
        top = _finite(tl.maximum(tl.max(past, 1), tl.max(tl.max(pairs, 2), 1)))
        past = tl.exp(past - top[:, None]).to(OPERAND)
        weights = tl.sum(tl.exp(pairs - top[:, None, None]), 2).to(OPERAND)
        mass = tl.sum(weights.to(tl.float32), 1) + tl.sum(past.to(tl.float32) * vector[None, :], 1)
        out = tl.dot(past, matrix.to(OPERAND), input_precision=PRECISION)
        out = tl.dot(weights, v, out, input_precision=PRECISION) * _inverse(mass, 0.0)[:, None]
        _store(OUT + own * W, out, rows, n, W, E)
        if KEEP:
            tl.store(MASS + own + rows, mass, mask=rows < n)
            tl.store(TOP + own + rows, top, mask=rows < n)
        matrix, vector, peak = _add(matrix, vector, peak, logs_k, v, ones, OPERAND, PRECISION)


@triton.jit
def sum_queries(
    Q, OUT, MASS, TOP, GRAD, OF_MASS, SUMS, n, length,
    q_b, q_h, q_n, q_c, o_b, o_h, o_n, o_c,
    H: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute OF_MASS and SUMS from the queries, for the kernels that compute gradients of queries and keys.

    OF_MASS is the gradient of the sum of weights of each row. SUMS has sums over the rows of each segment, which
    `accumulate` adds up over all later segments before `key_gradients` runs.
    """
    segment, both = tl.program_id(0), tl.program_id(1)
    b, h = both // H, both % H
    queries, grads = _head(Q, b, h, q_b, q_h), _head(GRAD, b, h, o_b, o_h)
    matrix, vector = tl.zeros([R, E], tl.float32), tl.zeros([R], tl.float32)
    peak = tl.full([R], float("-inf"), tl.float32)
    own = both.to(tl.int64) * n
    for start in tl.range(segment * length, tl.minimum(segment * length + length, n), M):
        rows = start + tl.arange(0, M)
        of_found = _of_found(grads, MASS + own, rows, n, o_n, o_c, OPERAND, W, E)
        out = _rows(OUT + own * W, rows, n, W, 1, W, E).to(tl.float32)
        of_mass = -tl.sum(of_found.to(tl.float32) * out, 1)
        tl.store(OF_MASS + own + rows, of_mass, mask=rows < n)
        top = tl.load(TOP + own + rows, mask=rows < n, other=0.0)
        logs = _logs(queries, rows, n, q_n, q_c, float("-inf"), C, R) - top[:, None]
        matrix, vector, peak = _add(matrix, vector, peak, logs, of_found, of_mass, OPERAND, PRECISION)
    at = both.to(tl.int64) * tl.num_programs(0) + segment
    _store_sums(SUMS + at * (C * W + 2 * C), matrix, vector, peak, C, W, R, E)


@triton.jit
def query_gradients(
    Q, K, V, BEFORE, MASS, TOP, OF_MASS, GRAD, OF_Q, n, length,
    q_b, q_h, q_n, q_c, k_b, k_h, k_n, k_c, v_b, v_h, v_n, v_c, o_b, o_h, o_n, o_c,
    H: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the logarithms of queries, from the first chunk of each segment to the last."""
    segment, both = tl.program_id(0), tl.program_id(1)
    b, h = both // H, both % H
    queries, grads = _head(Q, b, h, q_b, q_h), _head(GRAD, b, h, o_b, o_h)
    keys, values = _head(K, b, h // GROUP, k_b, k_h), _head(V, b, h // GROUP, v_b, v_h)
    at = (both.to(tl.int64) * tl.num_programs(0) + segment) * (C * W + 2 * C)
    matrix, vector, peak = _load_sums(BEFORE + at, C, W, R, E)
    own = both.to(tl.int64) * n
    seen = tl.arange(0, M)[:, None] >= tl.arange(0, M)[None, :]
    ones = tl.full([M], 1.0, tl.float32)
    for start in tl.range(segment * length, tl.minimum(segment * length + length, n), M):
        rows = start + tl.arange(0, M)
        logs_k = _logs(keys, rows, n, k_n, k_c, float("-inf"), C, R)
        v = _rows(values, rows, n, v_n, v_c, W, E).to(OPERAND)
        of_found = _of_found(grads, MASS + own, rows, n, o_n, o_c, OPERAND, W, E)
        of_mass = tl.load(OF_MASS + own + rows, mask=rows < n, other=0.0)
        top = tl.load(TOP + own + rows, mask=rows < n, other=0.0)
        logs_q = _logs(queries, rows, n, q_n, q_c, float("-inf"), C, R) - top[:, None]
        of_weights = tl.dot(of_found, tl.trans(v), input_precision=PRECISION) + of_mass[:, None]
        pairs = tl.where(seen[:, :, None], logs_q[:, None, :] + logs_k[None, :, :], float("-inf"))
        of_logs = tl.sum(tl.where(seen, of_weights, 0.0)[:, :, None] * tl.exp(pairs), 1)
        of_past = tl.dot(of_found, tl.trans(matrix.to(OPERAND)), input_precision=PRECISION)
        of_past += of_mass[:, None] * vector[None, :]
        of_logs += of_past * tl.exp(logs_q + peak[None, :])
        _store(OF_Q + own * C, of_logs, rows, n, C, R)
        matrix, vector, peak = _add(matrix, vector, peak, logs_k, v, ones, OPERAND, PRECISION)


@triton.jit
def key_gradients(
    Q, K, V, AFTER, MASS, TOP, OF_MASS, GRAD, OF_K, OF_V, n, length,
    q_b, q_h, q_n, q_c, k_b, k_h, k_n, k_c, v_b, v_h, v_n, v_c, o_b, o_h, o_n, o_c,
    H: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of values and of the logarithms of keys, from the last chunk to the first."""
    segment, both = tl.program_id(0), tl.program_id(1)
    b, h = both // H, both % H
    queries, grads = _head(Q, b, h, q_b, q_h), _head(GRAD, b, h, o_b, o_h)
    keys, values = _head(K, b, h // GROUP, k_b, k_h), _head(V, b, h // GROUP, v_b, v_h)
    at = (both.to(tl.int64) * tl.num_programs(0) + segment) * (C * W + 2 * C)
    matrix, vector, peak = _load_sums(AFTER + at, C, W, R, E)
    own = both.to(tl.int64) * n
    seen = tl.arange(0, M)[:, None] <= tl.arange(0, M)[None, :]  # keys are rows here
    chunks = tl.cdiv(tl.minimum(length, n - segment * length), M)
    for chunk in tl.range(0, chunks):
        rows = segment * length + (chunks - 1 - chunk) * M + tl.arange(0, M)
        logs_k = _logs(keys, rows, n, k_n, k_c, float("-inf"), C, R)
        v = _rows(values, rows, n, v_n, v_c, W, E).to(OPERAND)
        of_found = _of_found(grads, MASS + own, rows, n, o_n, o_c, OPERAND, W, E)
        of_mass = tl.load(OF_MASS + own + rows, mask=rows < n, other=0.0)
        top = tl.load(TOP + own + rows, mask=rows < n, other=0.0)
        logs_q = _logs(queries, rows, n, q_n, q_c, float("-inf"), C, R) - top[:, None]
        pairs = tl.exp(tl.where(seen[:, :, None], logs_k[:, None, :] + logs_q[None, :, :], float("-inf")))
        future = tl.exp(logs_k + peak[None, :])
        of_v = tl.dot(tl.sum(pairs, 2).to(OPERAND), of_found, input_precision=PRECISION)
        of_v = tl.dot(future.to(OPERAND), matrix.to(OPERAND), of_v, input_precision=PRECISION)
        of_weights = tl.dot(v, tl.trans(of_found), input_precision=PRECISION) + of_mass[None, :]
        of_logs = tl.sum(tl.where(seen, of_weights, 0.0)[:, :, None] * pairs, 1)
        of_future = tl.dot(v, tl.trans(matrix.to(OPERAND)), input_precision=PRECISION) + vector[None, :]
        of_logs += of_future * future
        _store(OF_K + own * C, of_logs, rows, n, C, R)
        _store(OF_V + own * W, of_v, rows, n, W, E)
        matrix, vector, peak = _add(matrix, vector, peak, logs_q, of_found, of_mass, OPERAND, PRECISION)
