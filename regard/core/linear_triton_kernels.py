"""Triton kernels for causal linear attention in its chunked form, forward and backward.

A sequence is cut into segments, and a segment into chunks of M tokens. One kernel computes the sums of each segment,
`accumulate` adds up those of all earlier (or later) segments, and one program for each segment then goes through its
chunks with these sums in registers. Sums are float32. Products take operands of the dtype OPERAND.

The kernels have these constants in common: H heads, GROUP query heads for each key head, C features (or the width of q
before the feature map), W the width of v, R and E the widths C and W rounded up to powers of two.
"""

import triton
import triton.language as tl

# values of MAP: which feature map the kernels compute; PRECOMPUTED takes features as they are
PRECOMPUTED = tl.constexpr(0)
ELU_PLUS_ONE = tl.constexpr(1)
RELU = tl.constexpr(2)
SQUARED_RELU = tl.constexpr(3)


@triton.jit
def _exp(x, EXACT: tl.constexpr):
    """Compute exp(x).

    EXACT  whether to correct the rounding error of x / ln(2), the exponent of the power of two that the GPU computes;
           without it, the result has fewer correct digits for large |x|
    """
    power = x * 1.4426950408889634
    if not EXACT:
        return tl.exp2(power)
    lost = tl.fma(x, tl.full(x.shape, 1.4426950408889634, tl.float32), -power) + x * 1.925963033500e-08
    return tl.exp2(power) * tl.where(x < -200.0, 1.0, 1.0 + lost * 0.6931471805599453)


@triton.jit
def _phi(x, MAP: tl.constexpr, EXACT: tl.constexpr):
    # comparisons are false for NaN, so NaN stays NaN
    if MAP == ELU_PLUS_ONE:
        x = tl.where(x < 0, _exp(tl.where(x < 0, x, 0.0), EXACT), x + 1.0)
    elif MAP == RELU:
        x = tl.where(x < 0, 0.0, x)
    elif MAP == SQUARED_RELU:
        x = tl.where(x < 0, 0.0, x)
        x = x * x
    return x


@triton.jit
def _slope(phi, factor, MAP: tl.constexpr):
    """Compute the derivative of the feature map, multiplied by `factor`.

    phi  the features, multiplied by `factor`
    """
    if MAP == ELU_PLUS_ONE:
        slope = tl.where(phi < factor, phi, factor)
    elif MAP == RELU:
        slope = tl.where(phi > 0, factor, 0.0)
    elif MAP == SQUARED_RELU:
        slope = 2.0 * tl.sqrt(phi * factor)
    else:
        slope = tl.full(phi.shape, 1.0, tl.float32)
    return slope


@triton.jit
def _rows(X, rows, n, stride_n, stride_c, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load the rows with the indices `rows`; rows and columns beyond the end of the tensor are 0."""
    columns = tl.arange(0, PADDED)
    there = rows[:, None] < n
    if WIDTH < PADDED:
        there = there & (columns[None, :] < WIDTH)
    return tl.load(X + rows[:, None].to(tl.int64) * stride_n + columns[None, :] * stride_c, mask=there, other=0.0)


@triton.jit
def _keys(
    X, rows, n, stride_n, stride_c, MAP: tl.constexpr, OPERAND: tl.constexpr, C: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Load keys and compute their features. Rows and columns beyond the end of the tensor have features of 0."""
    phi = _phi(_rows(X, rows, n, stride_n, stride_c, C, R).to(tl.float32), MAP, tl.float32 == OPERAND)
    if MAP == ELU_PLUS_ONE:
        phi = tl.where((rows[:, None] < n) & (tl.arange(0, R)[None, :] < C), phi, 0.0)
    return phi


@triton.jit
def _queries(
    X, rows, n, stride_n, stride_c, MAP: tl.constexpr, OPERAND: tl.constexpr, C: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Load queries and compute their features.

    Returns the features of each query divided by its largest feature, and 1 / (this largest feature). Features that
    were computed before the kernel runs are returned unchanged, with factors of 1.
    """
    phi = _keys(X, rows, n, stride_n, stride_c, MAP, OPERAND, C, R)
    factor = tl.full([phi.shape[0]], 1.0, tl.float32)
    if MAP != PRECOMPUTED:
        factor = _inverse(tl.max(phi, 1), 1.0)
        phi = phi * factor[:, None]
    return phi.to(OPERAND), factor


@triton.jit
def _inverse(x, nothing):
    """Compute 1 / x. Returns `nothing` where x is below the smallest normal number, because 1 / x may overflow."""
    small = x < 1.1754944e-38
    return tl.where(small, nothing, 1.0 / tl.where(small, 1.0, x))


@triton.jit
def _store(X, x, rows, n, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store x in the rows with the indices `rows` of a contiguous tensor."""
    columns = tl.arange(0, PADDED)
    there = (rows[:, None] < n) & (columns[None, :] < WIDTH)
    tl.store(X + rows[:, None].to(tl.int64) * WIDTH + columns[None, :], x.to(X.dtype.element_ty), mask=there)


@triton.jit
def _load_sums(SUMS, C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """Load the sums of keys before a segment: a matrix (features, width of v) and a vector (features)."""
    features, columns = tl.arange(0, R), tl.arange(0, E)
    there = (features[:, None] < C) & (columns[None, :] < W)
    matrix = tl.load(SUMS + features[:, None] * W + columns[None, :], mask=there, other=0.0)
    return matrix, tl.load(SUMS + C * W + features, mask=features < C, other=0.0)


@triton.jit
def _store_sums(SUMS, matrix, vector, C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    features, columns = tl.arange(0, R), tl.arange(0, E)
    there = (features[:, None] < C) & (columns[None, :] < W)
    tl.store(SUMS + features[:, None] * W + columns[None, :], matrix, mask=there)
    tl.store(SUMS + C * W + features, vector, mask=features < C)


@triton.jit
def _head(X, b, h, stride_b, stride_h):
    return X + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h


@triton.jit
def sum_keys(
    K, V, SUMS, n, length,
    k_b, k_h, k_n, k_c, v_b, v_h, v_n, v_c,
    H: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute the sums of each segment over its keys: the sum of phi(k) v^T and the sum of phi(k)."""
    segment, both = tl.program_id(0), tl.program_id(1)
    b, h = both // H, both % H
    keys, values = _head(K, b, h // GROUP, k_b, k_h), _head(V, b, h // GROUP, v_b, v_h)
    matrix, vector = tl.zeros([R, E], tl.float32), tl.zeros([R], tl.float32)
    for start in tl.range(segment * length, tl.minimum(segment * length + length, n), M):
        rows = start + tl.arange(0, M)
        g = _keys(keys, rows, n, k_n, k_c, MAP, OPERAND, C, R).to(OPERAND)
        v = _rows(values, rows, n, v_n, v_c, W, E).to(OPERAND)
        matrix = tl.dot(tl.trans(g), v, matrix, input_precision=PRECISION)
        vector += tl.sum(g.to(tl.float32), 0)
    at = both.to(tl.int64) * tl.num_programs(0) + segment
    _store_sums(SUMS + at * (C * W + C), matrix, vector, C, W, R, E)


@triton.jit(do_not_specialize=["segments"])
def accumulate(
    SUMS, BEFORE, MATRIX, VECTOR, MATRIX_AFTER, VECTOR_AFTER, segments,
    FRESH: tl.constexpr, REVERSE: tl.constexpr, C: tl.constexpr, W: tl.constexpr, LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute cumulative sums over segments. Their initial value is MATRIX and VECTOR, or 0 if FRESH.

    BEFORE gets, for each segment, the initial value plus the SUMS of all earlier segments, or of all later ones if
    REVERSE. MATRIX_AFTER and VECTOR_AFTER get the initial value plus the SUMS of all segments.
    """
    both = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_matrix, in_vector = at < C * W, (at >= C * W) & (at < C * W + C)
    inside = at < C * W + C
    carry = tl.zeros([BLOCK], tl.float32)
    if not FRESH:
        carry += tl.load(MATRIX + both * (C * W) + at, mask=in_matrix, other=0.0)
        carry += tl.load(VECTOR + both * C + at - C * W, mask=in_vector, other=0.0)
    SUMS += both * segments * (C * W + C)
    BEFORE += both * segments * (C * W + C)
    first = segments - 1 if REVERSE else 0
    tl.store(BEFORE + first * (C * W + C) + at, carry, mask=inside)
    for start in tl.range(0, segments, LINES):
        line = start + tl.arange(0, LINES)
        own, next_one = line, line + 1
        if REVERSE:
            own, next_one = segments - 1 - line, segments - 2 - line
        x = tl.load(
            SUMS + own[:, None].to(tl.int64) * (C * W + C) + at[None, :],
            mask=(line < segments)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        tl.store(
            BEFORE + next_one[:, None].to(tl.int64) * (C * W + C) + at[None, :],
            tl.cumsum(x, 0) + carry[None, :], mask=(line < segments - 1)[:, None] & inside[None, :],
        )  # fmt: skip
        carry += tl.sum(x, 0)
    tl.store(MATRIX_AFTER + both * (C * W) + at, carry, mask=in_matrix)
    tl.store(VECTOR_AFTER + both * C + at - C * W, carry, mask=in_vector)


@triton.jit
def attend_chunks(
    Q, K, V, BEFORE, OUT, MASS, n, length,
    q_b, q_h, q_n, q_c, k_b, k_h, k_n, k_c, v_b, v_h, v_n, v_c,
    H: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr, M: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of the queries of each segment. If KEEP, store the sum of weights of each query in MASS."""
    segment, both = tl.program_id(0), tl.program_id(1)
    b, h = both // H, both % H
    queries = _head(Q, b, h, q_b, q_h)
    keys, values = _head(K, b, h // GROUP, k_b, k_h), _head(V, b, h // GROUP, v_b, v_h)
    at = both.to(tl.int64) * tl.num_programs(0) + segment
    matrix, vector = _load_sums(BEFORE + at * (C * W + C), C, W, R, E)
    own = both.to(tl.int64) * n
    seen = tl.arange(0, M)[:, None] >= tl.arange(0, M)[None, :]
    for start in tl.range(segment * length, tl.minimum(segment * length + length, n), M):
        rows = start + tl.arange(0, M)
        f, _ = _queries(queries, rows, n, q_n, q_c, MAP, OPERAND, C, R)
        g = _keys(keys, rows, n, k_n, k_c, MAP, OPERAND, C, R).to(OPERAND)
        v = _rows(values, rows, n, v_n, v_c, W, E).to(OPERAND)
        weights = tl.where(seen, tl.dot(f, tl.trans(g), input_precision=PRECISION), 0.0).to(OPERAND)
        # the sum of the rounded weights, so that rounding cancels where it is the same in both sums
        mass = tl.sum(weights.to(tl.float32), 1) + tl.sum(f.to(tl.float32) * vector[None, :], 1)
        out = tl.dot(f, matrix.to(OPERAND), input_precision=PRECISION)
        out = tl.dot(weights, v, out, input_precision=PRECISION)
        _store(OUT + own * W, out * _inverse(mass, 0.0)[:, None], rows, n, W, E)
        if KEEP:
            tl.store(MASS + own + rows, mass, mask=rows < n)
        matrix = tl.dot(tl.trans(g), v, matrix, input_precision=PRECISION)
        vector += tl.sum(g.to(tl.float32), 0)


@triton.jit
def sum_queries(
    Q, OUT, MASS, GRAD, OF_MASS, SUMS, n, length,
    q_b, q_h, q_n, q_c, o_b, o_h, o_n, o_c,
    H: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute OF_MASS and SUMS from the queries, for the kernels that compute gradients of queries and keys.

    OF_MASS is the gradient of the sum of weights of each row. SUMS has two sums over the rows of each segment: phi(q)^T
    times the gradients of the weighted sums of values, and phi(q) times OF_MASS. Before `key_gradients` runs,
    `accumulate` adds up the SUMS of all later segments.
    """
    segment, both = tl.program_id(0), tl.program_id(1)
    b, h = both // H, both % H
    queries, grads = _head(Q, b, h, q_b, q_h), _head(GRAD, b, h, o_b, o_h)
    matrix, vector = tl.zeros([R, E], tl.float32), tl.zeros([R], tl.float32)
    own = both.to(tl.int64) * n
    for start in tl.range(segment * length, tl.minimum(segment * length + length, n), M):
        rows = start + tl.arange(0, M)
        f, _ = _queries(queries, rows, n, q_n, q_c, MAP, OPERAND, C, R)
        of_found = _of_found(grads, MASS + own, rows, n, o_n, o_c, OPERAND, W, E)
        out = _rows(OUT + own * W, rows, n, W, 1, W, E).to(tl.float32)
        # from the rounded gradient, so that rounding cancels where both gradients are added
        of_mass = -tl.sum(of_found.to(tl.float32) * out, 1)
        tl.store(OF_MASS + own + rows, of_mass, mask=rows < n)
        matrix = tl.dot(tl.trans(f), of_found, matrix, input_precision=PRECISION)
        vector += tl.sum(f.to(tl.float32) * of_mass[:, None], 0)
    at = both.to(tl.int64) * tl.num_programs(0) + segment
    _store_sums(SUMS + at * (C * W + C), matrix, vector, C, W, R, E)


@triton.jit
def _of_found(GRAD, MASS, rows, n, stride_n, stride_c, OPERAND: tl.constexpr, W: tl.constexpr, E: tl.constexpr):
    """Compute the gradients of the weighted sums of values: the gradients of the outputs, divided by MASS.

    MASS holds the sum of weights of each row, by which the forward pass divides the weighted sums.
    """
    grad = _rows(GRAD, rows, n, stride_n, stride_c, W, E).to(tl.float32)
    mass = tl.load(MASS + rows, mask=rows < n, other=0.0)
    return (grad * _inverse(mass, 0.0)[:, None]).to(OPERAND)


@triton.jit
def query_gradients(
    Q, K, V, BEFORE, MASS, OF_MASS, GRAD, OF_Q, n, length,
    q_b, q_h, q_n, q_c, k_b, k_h, k_n, k_c, v_b, v_h, v_n, v_c, o_b, o_h, o_n, o_c,
    H: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, from the first chunk of each segment to the last."""
    segment, both = tl.program_id(0), tl.program_id(1)
    b, h = both // H, both % H
    queries, grads = _head(Q, b, h, q_b, q_h), _head(GRAD, b, h, o_b, o_h)
    keys, values = _head(K, b, h // GROUP, k_b, k_h), _head(V, b, h // GROUP, v_b, v_h)
    at = (both.to(tl.int64) * tl.num_programs(0) + segment) * (C * W + C)
    matrix, vector = _load_sums(BEFORE + at, C, W, R, E)
    own = both.to(tl.int64) * n
    seen = tl.arange(0, M)[:, None] >= tl.arange(0, M)[None, :]
    for start in tl.range(segment * length, tl.minimum(segment * length + length, n), M):
        rows = start + tl.arange(0, M)
        g = _keys(keys, rows, n, k_n, k_c, MAP, OPERAND, C, R).to(OPERAND)
        v = _rows(values, rows, n, v_n, v_c, W, E).to(OPERAND)
        of_found = _of_found(grads, MASS + own, rows, n, o_n, o_c, OPERAND, W, E)
        of_mass = tl.load(OF_MASS + own + rows, mask=rows < n, other=0.0)
        of_weights = tl.dot(of_found, tl.trans(v), input_precision=PRECISION) + of_mass[:, None]
        of_weights = tl.where(seen, of_weights, 0.0).to(OPERAND)
        of_f = of_mass[:, None] * vector[None, :]
        of_f = tl.dot(of_found, tl.trans(matrix.to(OPERAND)), of_f, input_precision=PRECISION)
        of_f = tl.dot(of_weights, g, of_f, input_precision=PRECISION)
        f, factor = _queries(queries, rows, n, q_n, q_c, MAP, OPERAND, C, R)
        _store(OF_Q + own * C, of_f * _slope(f.to(tl.float32), factor[:, None], MAP), rows, n, C, R)
        matrix = tl.dot(tl.trans(g), v, matrix, input_precision=PRECISION)
        vector += tl.sum(g.to(tl.float32), 0)


@triton.jit
def key_gradients(
    Q, K, V, AFTER, MASS, OF_MASS, GRAD, OF_K, OF_V, n, length,
    q_b, q_h, q_n, q_c, k_b, k_h, k_n, k_c, v_b, v_h, v_n, v_c, o_b, o_h, o_n, o_c,
    H: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values, from the last chunk of each segment to the first."""
    segment, both = tl.program_id(0), tl.program_id(1)
    b, h = both // H, both % H
    queries, grads = _head(Q, b, h, q_b, q_h), _head(GRAD, b, h, o_b, o_h)
    keys, values = _head(K, b, h // GROUP, k_b, k_h), _head(V, b, h // GROUP, v_b, v_h)
    at = (both.to(tl.int64) * tl.num_programs(0) + segment) * (C * W + C)
    matrix, vector = _load_sums(AFTER + at, C, W, R, E)
    own = both.to(tl.int64) * n
    seen = tl.arange(0, M)[:, None] <= tl.arange(0, M)[None, :]  # keys are rows here
    chunks = tl.cdiv(tl.minimum(length, n - segment * length), M)
    for chunk in tl.range(0, chunks):
        rows = segment * length + (chunks - 1 - chunk) * M + tl.arange(0, M)
        f, _ = _queries(queries, rows, n, q_n, q_c, MAP, OPERAND, C, R)
        g = _keys(keys, rows, n, k_n, k_c, MAP, OPERAND, C, R).to(OPERAND)
        v = _rows(values, rows, n, v_n, v_c, W, E).to(OPERAND)
        of_found = _of_found(grads, MASS + own, rows, n, o_n, o_c, OPERAND, W, E)
        of_mass = tl.load(OF_MASS + own + rows, mask=rows < n, other=0.0)
        weights = tl.where(seen, tl.dot(g, tl.trans(f), input_precision=PRECISION), 0.0).to(OPERAND)
        of_v = tl.dot(weights, of_found, input_precision=PRECISION)
        of_v = tl.dot(g, matrix.to(OPERAND), of_v, input_precision=PRECISION)
        _store(OF_V + own * W, of_v, rows, n, W, E)
        of_weights = tl.dot(v, tl.trans(of_found), input_precision=PRECISION) + of_mass[None, :]
        of_weights = tl.where(seen, of_weights, 0.0).to(OPERAND)
        of_g = tl.dot(of_weights, f, input_precision=PRECISION) + vector[None, :]
        of_g = tl.dot(v, tl.trans(matrix.to(OPERAND)), of_g, input_precision=PRECISION)
        _store(OF_K + own * C, of_g * _slope(g.to(tl.float32), 1.0, MAP), rows, n, C, R)
        matrix = tl.dot(tl.trans(f), of_found, matrix, input_precision=PRECISION)
        vector += tl.sum(f.to(tl.float32) * of_mass[:, None], 0)
