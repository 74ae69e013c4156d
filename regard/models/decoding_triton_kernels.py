"""Triton kernels for one decoding step of a few sequences: linear layers, attention to a KV cache, choice of tokens.

Sums are in float32, those of the choice of tokens in float64. Results are rounded to the dtype of the model where its
modules round them.

With EARLY, a kernel starts before the previous kernel has ended (programmatic dependent launch). It first reads weights
and what was written at least two kernels ago. Then it waits until the previous kernel has ended (`_wait`), lets the
next kernel start, and reads and writes everything else. So when a kernel starts, only the previous kernel may still
run.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _wait(EARLY: tl.constexpr):
    """With EARLY, wait until the previous kernel has ended, and let the next kernel start. Else do nothing."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        # a comparison and not a maximum, which would drop NaN
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu-tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = 0.5 * x * (1 + _tanh(inner))
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "tanh":
        x = _tanh(x)
    return x


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _moments(x, inside, n, eps, CENTRED: tl.constexpr):
    """Return the mean and the reciprocal standard deviation of the n elements of x that are `inside`.

    If CENTRED is False, as in RMSNorm, the mean is 0.
    """
    mean = 0.0
    if CENTRED:
        mean = tl.sum(x, 0) / n
    difference = tl.where(inside, x - mean, 0.0)
    return mean, 1 / tl.sqrt_rn(tl.sum(difference * difference, 0) / n + eps)


@triton.jit
def linear(
    X, W, SCALES, B, GATE_W, GATE_SCALES, GATE_B, NORM_W, NORM_B, RESIDUAL, Y, n, eps,
    K: tl.constexpr, K_ALL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of a linear layer for one token, with norm, bias, activation, gate and residual sum.

    The layer has K inputs and n outputs; K_ALL is K rounded up to a power of two. NORM is "none", "layer",
    "layer-no-bias" or "rms". SCALED is for int8 weights: each output is multiplied by its scale.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1)
    inner = tl.arange(0, BLOCK_K)
    there = columns[:, None] < n
    # the first weights are requested before x is there
    at = columns.to(tl.int64)[:, None] * K + inner[None, :]
    w = tl.load(W + at, mask=there & (inner[None, :] < K), other=0.0)
    if GATED:
        gate_w = tl.load(GATE_W + at, mask=there & (inner[None, :] < K), other=0.0)
    if NORM != "none":
        norm_w = tl.load(NORM_W + inner, mask=inner < K, other=0.0)
        if NORM == "layer":
            norm_b = tl.load(NORM_B + inner, mask=inner < K, other=0.0)
    if BIAS:
        b = tl.load(B + columns, mask=columns < n, other=0.0).to(tl.float32)
    _wait(EARLY)
    mean, scale = 0.0, 1.0
    if NORM != "none":
        whole = tl.arange(0, K_ALL)
        x = tl.load(X + row * K + whole, mask=whole < K, other=0.0).to(tl.float32)
        mean, scale = _moments(x, whole < K, K, eps, NORM != "rms")
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        feature = start + inner
        x = tl.load(X + row * K + feature, mask=feature < K, other=0.0).to(tl.float32)
        if start > 0:
            w = tl.load(W + at + start, mask=there & (feature[None, :] < K), other=0.0)
            if GATED:
                gate_w = tl.load(GATE_W + at + start, mask=there & (feature[None, :] < K), other=0.0)
            if NORM != "none":
                norm_w = tl.load(NORM_W + feature, mask=feature < K, other=0.0)
                if NORM == "layer":
                    norm_b = tl.load(NORM_B + feature, mask=feature < K, other=0.0)
        if NORM != "none":
            x = (x - mean) * scale * norm_w.to(tl.float32)
            if NORM == "layer":
                x += norm_b.to(tl.float32)
            x = x.to(Y.dtype.element_ty).to(tl.float32)
        total += w.to(tl.float32) * x[None, :]
        if GATED:
            gate += gate_w.to(tl.float32) * x[None, :]
    y = tl.sum(total, 1)
    if SCALED:
        y *= tl.load(SCALES + columns, mask=columns < n, other=0.0)
    if BIAS:
        y += b
    y = y.to(Y.dtype.element_ty).to(tl.float32)
    if GATED:
        g = tl.sum(gate, 1)
        if SCALED:
            g *= tl.load(GATE_SCALES + columns, mask=columns < n, other=0.0)
        if BIAS:
            g += tl.load(GATE_B + columns, mask=columns < n, other=0.0).to(tl.float32)
        g = g.to(Y.dtype.element_ty).to(tl.float32)
        y = _activate(g, ACTIVATION).to(Y.dtype.element_ty).to(tl.float32) * y
    else:
        y = _activate(y, ACTIVATION)
    if ADD:
        y = y.to(Y.dtype.element_ty).to(tl.float32)
        y += tl.load(RESIDUAL + row * n + columns, mask=columns < n, other=0.0).to(tl.float32)
    tl.store(Y + row * n + columns, y.to(Y.dtype.element_ty), mask=columns < n)


@triton.jit
def normalise(X, NORM_W, NORM_B, Y, eps, K: tl.constexpr, K_ALL: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr):
    """Apply LayerNorm or RMSNorm to the hidden state of one token."""
    row, feature = tl.program_id(0), tl.arange(0, K_ALL)
    inside = feature < K
    weight = tl.load(NORM_W + feature, mask=inside, other=0.0).to(tl.float32)
    _wait(EARLY)
    x = tl.load(X + row * K + feature, mask=inside, other=0.0).to(tl.float32)
    mean, scale = _moments(x, inside, K, eps, NORM != "rms")
    y = (x - mean) * scale * weight
    if NORM == "layer":
        y += tl.load(NORM_B + feature, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * K + feature, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def embed(
    TOKENS, POSITIONS, WEIGHT, TABLE, Y, scale, last,
    K: tl.constexpr, K_ALL: tl.constexpr, SCALED: tl.constexpr, PLACED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Look up the embedding of one token and add the embedding of its position.

    Positions after `last`, the last row of the position table, use the embedding of `last`.
    """
    _wait(EARLY)
    row, feature = tl.program_id(0), tl.arange(0, K_ALL)
    inside = feature < K
    token = tl.load(TOKENS + row)
    x = tl.load(WEIGHT + token * K + feature, mask=inside, other=0.0)
    if SCALED:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    if PLACED:
        position = tl.minimum(tl.load(POSITIONS + row), last)
        place = tl.load(TABLE + position * K + feature, mask=inside, other=0.0).to(x.dtype)
        x = (x.to(tl.float32) + place.to(tl.float32)).to(x.dtype)
    tl.store(Y + row * K + feature, x, mask=inside)


@triton.jit
def _head(
    X, position, COS, SIN, NORM_W, NORM_B, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Load one head of a query or key, and apply its norm and its rotary position embedding."""
    feature = tl.arange(0, WIDTH)
    inside = feature < C
    x = tl.load(X + feature, mask=inside, other=0.0).to(tl.float32)
    partner = feature
    if TURNED > 0:
        # the other coordinate of the pair
        if HALF:  # noqa: SIM108 (chosen when the kernel is compiled)
            partner = tl.where(feature < TURNED // 2, feature + TURNED // 2, feature - TURNED // 2)
        else:
            partner = feature ^ 1
        partner = tl.where(feature < TURNED, partner, feature)
    other = tl.load(X + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM != "none":
        mean, scale = _moments(x, inside, C, eps, NORM != "rms")
        x = (x - mean) * scale * tl.load(NORM_W + feature, mask=inside, other=0.0).to(tl.float32)
        other = (other - mean) * scale * tl.load(NORM_W + partner, mask=inside, other=0.0).to(tl.float32)
        if NORM == "layer":
            x += tl.load(NORM_B + feature, mask=inside, other=0.0).to(tl.float32)
            other += tl.load(NORM_B + partner, mask=inside, other=0.0).to(tl.float32)
        x = x.to(X.dtype.element_ty).to(tl.float32)
        other = other.to(X.dtype.element_ty).to(tl.float32)
    if TURNED > 0:
        if HALF:
            pair, first = feature % (TURNED // 2), feature < TURNED // 2
        else:
            pair, first = feature // 2, feature % 2 == 0
        at = position * (TURNED // 2) + pair
        cos = tl.load(COS + at, mask=feature < TURNED, other=1.0)
        sin = tl.load(SIN + at, mask=feature < TURNED, other=0.0)
        x = x * cos + tl.where(first, -1.0, 1.0) * other * sin
    return x.to(X.dtype.element_ty).to(tl.float32)


@triton.jit
def attention(
    X, KEYS, VALUES, OUT, PARTS, LOGSUM, ARRIVED, LENGTH, COS, SIN, Q_W, Q_B, K_W, K_B, BIAS,
    beta, eps, window, capacity, row_stride,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_ALL: tl.constexpr, BLOCK: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    OWN: tl.constexpr, WINDOW: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute attention of one query head of one sequence to a KV cache. SPLITS programs divide the keys.

    With OWN (self-attention), X holds query, key and value of the new token, and LENGTH is its position; the key and
    the value are stored in the cache. Without OWN (cross-attention), X holds the query, and LENGTH is the number of
    keys. BIAS has a number for each head and distance, which is added to the scores. The program that ends last
    combines the results of all programs.
    """
    b, h, split = tl.program_id(1), tl.program_id(0), tl.program_id(2)
    g = h // (H // G)
    length = tl.load(LENGTH + b).to(tl.int32)
    feature = tl.arange(0, WIDTH)
    inside = feature < C
    x = X + b * row_stride
    position = tl.minimum(length, capacity - 1)
    cache = (b * G + g).to(tl.int64) * capacity * C
    number = length
    if OWN:
        number = position
    low = 0
    if WINDOW:
        low = tl.maximum(position - window, 0)
    share = tl.cdiv(tl.cdiv(number - low, SPLITS), BLOCK) * BLOCK
    begin = low + split * share
    end = tl.minimum(begin + share, number)
    # keys and values of earlier tokens are requested before the query is there, and then always one tile ahead
    j = begin + tl.arange(0, BLOCK)
    at = cache + j[:, None] * C + feature[None, :]
    k = tl.load(KEYS + at, mask=(j < end)[:, None] & inside[None, :], other=0.0)
    v = tl.load(VALUES + at, mask=(j < end)[:, None] & inside[None, :], other=0.0)
    _wait(EARLY)
    q = _head(x + h * C, position, COS, SIN, Q_W, Q_B, eps, C, WIDTH, TURNED, HALF, NORM)
    own_score, own_v = float("-inf"), tl.zeros([WIDTH], tl.float32)
    if OWN:  # noqa: SIM102 (chosen when the kernel is compiled)
        if split == 0:
            own_k = _head(x + (H + g) * C, position, COS, SIN, K_W, K_B, eps, C, WIDTH, TURNED, HALF, NORM)
            stored_v = tl.load(x + (H + G + g) * C + feature, mask=inside, other=0.0)
            if h % (H // G) == 0:
                tl.store(KEYS + cache + position * C + feature, own_k.to(KEYS.dtype.element_ty), mask=inside)
                tl.store(VALUES + cache + position * C + feature, stored_v, mask=inside)
            own_score = tl.sum(q * own_k, 0) * beta * LOG2_E
            if BIASED:
                own_score += tl.load(BIAS + h * capacity) * LOG2_E
            own_v = stored_v.to(tl.float32)
    # every key of a tile has a softmax of its own over the tiles, so that threads need not wait for each other
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        j = start + tl.arange(0, BLOCK)
        scores = tl.sum(k.to(tl.float32) * q[None, :], 1) * beta * LOG2_E
        if BIASED:
            scores += tl.load(BIAS + h * capacity + position - j, mask=j < end, other=0.0) * LOG2_E
        scores = tl.where(j < end, scores, float("-inf"))
        new = tl.maximum(top, scores)
        base = tl.where(new == float("-inf"), 0.0, new)
        weights, kept = tl.exp2(scores - base), tl.exp2(top - base)
        total = total * kept + weights
        out = out * kept[:, None] + weights[:, None] * v.to(tl.float32)
        top = new
        following = (j + BLOCK < end)[:, None] & inside[None, :]
        at = cache + (j + BLOCK)[:, None] * C + feature[None, :]
        k = tl.load(KEYS + at, mask=following, other=0.0)
        v = tl.load(VALUES + at, mask=following, other=0.0)
    highest = tl.maximum(tl.max(top, 0), own_score)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shares, own_share = tl.exp2(top - base), tl.exp2(own_score - base)
    mass = tl.sum(total * shares, 0) + own_share
    summed = tl.sum(out * shares[:, None], 0) + own_share * own_v
    to = OUT + (b * H + h) * C + feature
    if SPLITS == 1:
        tl.store(to, (summed / tl.where(mass == 0, 1.0, mass)).to(OUT.dtype.element_ty), mask=inside)
    else:
        head = b * H + h
        part = head * SPLITS + split
        tl.store(PARTS + part * WIDTH + feature, summed)
        tl.store(LOGSUM + part * 2, highest)
        tl.store(LOGSUM + part * 2 + 1, mass)
        tl.debug_barrier()
        if tl.atomic_add(ARRIVED + head, 1, sem="acq_rel") == SPLITS - 1:
            splits = tl.arange(0, SPLITS_ALL)
            real = splits < SPLITS
            tops = tl.load(LOGSUM + (head * SPLITS + splits) * 2, mask=real, other=float("-inf"))
            masses = tl.load(LOGSUM + (head * SPLITS + splits) * 2 + 1, mask=real, other=0.0)
            factors = tl.where(tops == float("-inf"), 0.0, tl.exp2(tops - tl.max(tops, 0)))
            of_parts = (head * SPLITS + splits)[:, None] * WIDTH + feature[None, :]
            parts = tl.load(PARTS + of_parts, mask=real[:, None], other=0.0)
            every = tl.sum(parts * factors[:, None], 0)
            whole = tl.sum(masses * factors, 0)
            tl.store(to, (every / tl.where(whole == 0, 1.0, whole)).to(OUT.dtype.element_ty), mask=inside)
            tl.store(ARRIVED + head, 0)


@triton.jit
def choose(
    LOGITS, TOPS, PLACES, SUMS, HEATED, ARRIVED, TOKENS, POSITIONS, RECORDED_TOKENS, RECORDED_VALUES, STEP,
    UNIFORM, TEMPERATURE, n, row_stride, rows,
    DRAW: tl.constexpr, PARTS: tl.constexpr, PARTS_ALL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the next token of each sequence, and compute its log-probability in float64.

    With DRAW, the token is drawn from softmax(logits / temperature) by a random number in [0, 1). Without DRAW it is
    the most likely token, the first of equally likely ones. The token and its log-probability are recorded in row STEP,
    and the token becomes the next input. The log-probability is NaN if a logit is NaN or +inf, or if all logits of the
    sequence are -inf. ARRIVED counts the programs that have ended for each row of logits, and the finished rows.
    """
    _wait(EARLY)
    part, row = tl.program_id(0), tl.program_id(1)
    logits = LOGITS + row.to(tl.int64) * row_stride
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + column, mask=column < n, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    base = tl.where(top == float("-inf"), 0.0, top).to(tl.float64)
    tl.store(TOPS + row * PARTS + part, top)
    tl.store(SUMS + row * PARTS + part, tl.sum(tl.exp(x.to(tl.float64) - base), 0))
    if DRAW:
        temperature = tl.load(TEMPERATURE)
        tl.store(HEATED + row * PARTS + part, tl.sum(tl.exp((x.to(tl.float64) - base) / temperature), 0))
    else:
        tl.store(PLACES + row * PARTS + part, tl.min(tl.where(x == top, column, n), 0))
    tl.debug_barrier()
    if tl.atomic_add(ARRIVED + row, 1, sem="acq_rel") == PARTS - 1:
        parts = tl.arange(0, PARTS_ALL)
        real = parts < PARTS
        tops = tl.load(TOPS + row * PARTS + parts, mask=real, other=float("-inf"))
        masses = tl.load(SUMS + row * PARTS + parts, mask=real, other=0.0)
        step = tl.load(STEP)
        best = tl.max(tops, 0)
        highest = tl.where(best == float("-inf"), 0.0, best).to(tl.float64)
        below = tops.to(tl.float64) - highest
        # NaN in `masses` stays NaN
        total = tl.log(tl.sum(masses * tl.where(tops == float("-inf"), 0.0, tl.exp(below)), 0))
        if DRAW:
            heat = tl.load(TEMPERATURE)
            heated = tl.load(HEATED + row * PARTS + parts, mask=real, other=0.0)
            heated = heated * tl.where(tops == float("-inf"), 0.0, tl.exp(below / heat))
            target = tl.load(UNIFORM + step * rows + row) * tl.sum(heated, 0)
            # the part, and in it the token, where the cumulative sum exceeds the target; a sum in another order may
            # be smaller by a rounding error, and then it is the last one with a probability
            passed = (tl.cumsum(heated, 0) <= target) & real
            last = tl.max(tl.where(heated > 0, parts, 0), 0)
            chosen = tl.minimum(tl.sum(passed.to(tl.int32), 0), last)
            before = tl.sum(tl.where(parts < chosen, heated, 0.0), 0)
            inner = tl.arange(0, BLOCK)
            there = tl.load(logits + chosen * BLOCK + inner, mask=chosen * BLOCK + inner < n, other=float("-inf"))
            weights = tl.exp((there.to(tl.float64) - highest) / heat)
            passed_inner = before + tl.cumsum(weights, 0) <= target
            last = tl.max(tl.where(weights > 0, inner, 0), 0)
            place = chosen * BLOCK + tl.minimum(tl.sum(passed_inner.to(tl.int32), 0), last)
        else:
            places = tl.load(PLACES + row * PARTS + parts, mask=real, other=n)
            place = tl.min(tl.where(tops == best, places, n), 0)
        place = tl.minimum(place, n - 1)
        token = place.to(tl.int64)
        value = tl.load(logits + place).to(tl.float64) - highest - total
        tl.store(RECORDED_TOKENS + step * rows + row, token)
        tl.store(RECORDED_VALUES + step * rows + row, value)
        tl.store(TOKENS + row, token)
        tl.store(POSITIONS + row, tl.load(POSITIONS + row) + 1)
        tl.store(ARRIVED + row, 0)
        tl.debug_barrier()
        if tl.atomic_add(ARRIVED + rows, 1, sem="acq_rel") == rows - 1:
            tl.store(STEP, step + 1)
            tl.store(ARRIVED + rows, 0)
