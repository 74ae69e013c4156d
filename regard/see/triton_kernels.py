"""The GPU's passes over all pairs, in Triton: tiles of scores are made, used and forgotten.

Visible is what lies in a band: low <= column - row - shift <= high. Scores are held in units of log 2.
"""

import triton
import triton.language as tl

GROUPS = tl.constexpr(4)  # neighbouring keys of a tile that the place of the largest weight is told apart by


@triton.jit
def _scores(
    q, K, start, j, stride_n, stride_c, scale,
    C: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """The tile of scores of these queries and the keys from `start` on."""
    columns = start + tl.arange(0, BN)
    features = tl.arange(0, WIDTH)
    at = K + columns[None, :].to(tl.int64) * stride_n + features[:, None] * stride_c
    if CUT:
        k = tl.load(at, mask=(columns[None, :] < j) & (features[:, None] < C), other=0.0)
    elif C < WIDTH:
        k = tl.load(at, mask=features[:, None] < C, other=0.0)
    else:
        k = tl.load(at)
    return tl.dot(q, k, input_precision="ieee") * scale


@triton.jit
def _in_band(rows, columns, j, shift, low, high, LOW: tl.constexpr, HIGH: tl.constexpr):
    there = columns[None, :] - rows[:, None] - shift
    visible = (columns < j)[None, :] & (there == there)
    if LOW:
        visible = visible & (there >= low)
    if HIGH:
        visible = visible & (there <= high)
    return visible


@triton.jit
def _range(first, i, j, shift, low, high, LOW: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Where the band of these rows begins and ends, and between which tiles it is seen whole."""
    last = tl.minimum(first + BM, i) - 1
    begin, end, inner, outer = 0, j, 0, (j // BN) * BN
    if LOW:
        begin = tl.maximum(first + shift + low, 0) // BN * BN
        inner = tl.maximum(last + shift + low + BN - 1, 0) // BN * BN
    if HIGH:
        end = tl.minimum(last + shift + high + 1, j)
        outer = tl.minimum(tl.maximum(first + shift + high + 1, 0) // BN * BN, outer)
    inner = tl.minimum(tl.maximum(inner, begin), tl.maximum(end, begin))
    inner = (inner + BN - 1) // BN * BN
    outer = tl.maximum(outer, inner)
    return begin, inner, outer, end


@triton.jit
def _queries(Q, rows, i, stride_n, stride_c, C: tl.constexpr, WIDTH: tl.constexpr):
    features = tl.arange(0, WIDTH)
    at = Q + rows[:, None].to(tl.int64) * stride_n + features[None, :] * stride_c
    return tl.load(at, mask=(rows[:, None] < i) & (features[None, :] < C), other=0.0)


@triton.jit
def normalise(
    Q, K, LSE, i, j, shift, low, high, scale,
    q_b, q_h, q_n, q_c, k_b, k_h, k_n, k_c,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of each row, in nats."""
    first = tl.program_id(0) * BM
    both = tl.program_id(1)
    b, h = (both // H).to(tl.int64), (both % H).to(tl.int64)
    rows = first + tl.arange(0, BM)
    q = _queries(Q + b * q_b + h * q_h, rows, i, q_n, q_c, C, WIDTH)
    keys = K + b * k_b + h // GROUP * k_h
    begin, inner, outer, end = _range(first, i, j, shift, low, high, LOW, HIGH, BM, BN)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for start in tl.range(begin, end, BN):
        s = _scores(q, keys, start, j, k_n, k_c, scale, C, WIDTH, BN, True)
        if (start < inner) | (start >= outer):
            s = tl.where(_in_band(rows, start + tl.arange(0, BN), j, shift, low, high, LOW, HIGH), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
        top = new
    lse = (tl.where(total > 0, top, 0.0) + tl.log2(total)) * 0.6931471805599453
    tl.store(LSE + both.to(tl.int64) * i + rows, lse, mask=rows < i)


@triton.jit
def _between(number, i, j, shift, low, high, LOW: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Where the rows begin and end that see a tile of keys, and between which all of them see all of it."""
    first, last = number * BN, tl.minimum(number * BN + BN, j) - 1
    begin, end, inner, outer = 0, i, 0, i // BM * BM
    if HIGH:
        begin = tl.maximum(first - shift - high, 0) // BM * BM
        inner = (tl.maximum(last - shift - high, 0) + BM - 1) // BM * BM
    if LOW:
        end = tl.minimum(tl.maximum(last - shift - low + 1, 0), i)
        outer = tl.minimum(tl.maximum(first - shift - low + 1, 0) // BM * BM, outer)
    if number * BN + BN > j:
        outer = 0  # the last tile may be cut short, so every row looks where it ends
    return begin, inner, tl.maximum(outer, inner), end


@triton.jit
def _products(Q, k, b, h, start, BM: tl.constexpr, WIDTH: tl.constexpr):
    """q . k of the rows from `start` on."""
    q = tl.reshape(Q.load([b.to(tl.int32), h.to(tl.int32), start, 0]), [BM, WIDTH])
    return tl.dot(q, k, input_precision="ieee")


@triton.jit
def _tile(
    logs, SUMS, BEST, number, start, given, i, j, shift, low, high,
    C: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """One tile's part in every statistic."""
    rows, columns = start + tl.arange(0, BM), number * BN + tl.arange(0, BN)
    weights = tl.exp2(logs)
    if CUT:
        weights = tl.where(_in_band(rows, columns, j, shift, low, high, LOW, HIGH), weights, 0.0)
        logs = tl.where(weights > 0, logs, 0.0)
    # a row is 16 w + 8 u + g, a column 8 x + 2 y + z: a thread of the tensor cores has all u, x and z of one w, g and y
    parts = tl.reshape(weights, [BM // 16, 2, 8, BN // 8, 4, 2])
    given += tl.sum(parts, 1)
    if CUT and not BACK:
        far = tl.sum(weights * tl.abs((rows + shift)[:, None] - columns[None, :]).to(tl.float32), 1)
    else:
        # such a tile lies on one side of the diagonal; i - j is the thread's own number plus what the compiler knows
        own = start + shift - number * BN + 16 * tl.arange(0, BM // 16)
        own = (own[:, None, None] + tl.arange(0, 8)[None, :, None] - 2 * tl.arange(0, 4)[None, None, :]).to(tl.float32)
        known = 8 * tl.arange(0, 2)[:, None, None] - 8 * tl.arange(0, BN // 8)[None, :, None]
        known = (known - tl.arange(0, 2)[None, None, :]).to(tl.float32)
        apart = own[:, None, :, None, :, None] + known[None, :, None, :, None, :]
        far = tl.abs(tl.sum(tl.reshape(tl.sum(tl.sum(parts * apart, 3), 4), [BM, 4]), 1))
    # weights are not negative, so their bits are in their order, and of integers the larger of three is one instruction
    groups = tl.reshape(weights.to(tl.int32, bitcast=True), [BM, GROUPS, BN // 8 // GROUPS, 4, 2])
    groups = tl.max(tl.max(groups, 2), 3)
    # the last bits tell the group, and let the earlier of equals win
    groups = (groups & -GROUPS) | (tl.arange(0, GROUPS) ^ (GROUPS - 1))[None, :, None]
    best = tl.max(tl.max(groups, 1), 1)
    # the larger weight wins, among equals the earlier tile
    packed = (best.to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)
    sums = tl.join(tl.sum(weights * logs, 1), far)
    at = SUMS + rows[:, None] * 2 + tl.arange(0, 2)[None, :]
    if CUT:
        tl.atomic_add(at, sums, mask=(rows < i)[:, None], sem="relaxed")
        tl.atomic_max(BEST + rows, packed, mask=rows < i, sem="relaxed")
    else:
        tl.atomic_add(at, sums, sem="relaxed")
        tl.atomic_max(BEST + rows, packed, sem="relaxed")
    return given


@triton.jit
def _cell(CELLS, given, before, row, SPAN):
    """What these keys were given since the last look goes to the row's span; what they have been given by now."""
    now = tl.sum(tl.sum(given, 4), 2)
    tl.atomic_add(CELLS + (row // SPAN).to(tl.int64) * tl.num_programs(0), tl.sum(now - before), sem="relaxed")
    return now


@triton.jit
def _edge(
    Q, k, LSE, SUMS, BEST, CELLS, SPAN, b, h, number, begin, end, given, before, i, j, shift, low, high, scale,
    C: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows from `begin` to `end`, of which some do not see all of these keys, or have them on both sides."""
    for row in tl.range(begin, end, BM):
        rows = row + tl.arange(0, BM)
        lse = tl.load(LSE + rows, mask=rows < i, other=float("inf"))
        logs = _products(Q, k, b, h, row, BM, WIDTH) * scale - lse[:, None]
        given = _tile(
            logs, SUMS, BEST, number, row, given, i, j, shift, low, high, C, WIDTH, LOW, HIGH, BACK, BM, BN, True
        )
        if ((row + BM) % SPAN == 0) | (row + BM >= end):
            before = _cell(CELLS, given, before, row, SPAN)
    return given, before


@triton.jit
def _row(turn, tiles, before, first, gap, BM: tl.constexpr):
    """Where the tile of this turn begins, of tiles that lie before and after a gap."""
    tile = tl.where(turn >= tiles, turn - tiles, turn)
    return first + tile * BM + tl.where(tile >= before, gap, 0)


@triton.jit
def gather(
    Q, K, LSE, SUMS, BEST, RECEIVED, CELLS, SPAN, i, j, shift, low, high, scale,
    k_b, k_h, k_n, k_c,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, BACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Every statistic of weights exp(score - lse), each pair looked at once.

    A program owns a tile of keys, so what the keys are given stays in its registers; what belongs to rows is added to
    memory, a number a row and tile. Rows come in spans, whose sums are the cells of pooled maps.
    """
    number = tl.program_id(0)
    both = tl.program_id(1).to(tl.int64)
    b, h = both // H, both % H
    columns, features = number * BN + tl.arange(0, BN), tl.arange(0, WIDTH)
    at = K + b * k_b + h // GROUP * k_h + columns[None, :].to(tl.int64) * k_n + features[:, None] * k_c
    k = tl.load(at, mask=(columns[None, :] < j) & (features[:, None] < C), other=0.0)
    lines = both * i
    lses, sums, best = LSE + lines, SUMS + lines * 2, BEST + lines
    cells = CELLS + both * tl.cdiv(i, SPAN) * tl.num_programs(0) + number
    begin, inner, outer, end = _between(number, i, j, shift, low, high, LOW, HIGH, BM, BN)
    near, beyond = outer, outer
    if not BACK:
        near = tl.minimum(tl.maximum(tl.maximum(number * BN - shift, 0) // BM * BM, inner), outer)
        beyond = tl.minimum(tl.maximum((tl.maximum(number * BN + BN - shift, 0) + BM - 1) // BM * BM, near), outer)
    given = tl.zeros([BM // 16, 8, BN // 8, 4, 2], tl.float32)
    before = tl.zeros([BM // 16, 8, 4], tl.float32)
    given, before = _edge(
        Q, k, lses, sums, best, cells, SPAN, b, h, number, begin, tl.minimum(inner, end), given, before,
        i, j, shift, low, high, scale, C, WIDTH, LOW, HIGH, BACK, BM, BN,
    )  # fmt: skip
    if not BACK:
        # around the diagonal a row has keys on both sides
        given, before = _edge(
            Q, k, lses, sums, best, cells, SPAN, b, h, number, near, beyond, given, before,
            i, j, shift, low, high, scale, C, WIDTH, LOW, HIGH, BACK, BM, BN,
        )  # fmt: skip
    given, before = _edge(
        Q, k, lses, sums, best, cells, SPAN, b, h, number, tl.maximum(begin, outer), end, given, before,
        i, j, shift, low, high, scale, C, WIDTH, LOW, HIGH, BACK, BM, BN,
    )  # fmt: skip
    early = (near - inner) // BM
    tiles = early + (outer - beyond) // BM
    if tiles > 0:
        turn = number * (SPAN // BM) % tiles  # neighbours begin elsewhere, so that they seldom meet on a row
        row = _row(turn, tiles, early, inner, beyond - near, BM)
        stop = (row // SPAN + 1) * SPAN
        for now in tl.range(turn, turn + tiles):
            row = _row(now, tiles, early, inner, beyond - near, BM)
            then = _row(now + 1, tiles, early, inner, beyond - near, BM)
            lse = tl.load(lses + row + tl.arange(0, BM))
            logs = _products(Q, k, b, h, row, BM, WIDTH) * scale - lse[:, None]
            given = _tile(
                logs, sums, best, number, row, given, i, j, shift, low, high, C, WIDTH, LOW, HIGH, BACK, BM, BN, False
            )
            if (then >= stop) | (then <= row) | (now + 1 == turn + tiles):
                before = _cell(cells, given, before, row, SPAN)
                stop = (then // SPAN + 1) * SPAN
    tl.store(RECEIVED + both * j + columns, tl.sum(tl.reshape(given, [BM // 2, BN]), 0), mask=columns < j)


@triton.jit
def pool(
    Q, K, LSE, EDGES, SUMS, i, j, shift, low, high, scale,
    q_b, q_h, q_n, q_c, k_b, k_h, k_n, k_c,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What each key is given by the rows between two edges."""
    number, cell = tl.program_id(0), tl.program_id(1)
    both = tl.program_id(2).to(tl.int64)
    b, h = both // H, both % H
    columns, features = number * BN + tl.arange(0, BN), tl.arange(0, WIDTH)
    at = K + b * k_b + h // GROUP * k_h + columns[None, :].to(tl.int64) * k_n + features[:, None] * k_c
    k = tl.load(at, mask=(columns[None, :] < j) & (features[:, None] < C), other=0.0)
    begin, _, _, end = _between(number, i, j, shift, low, high, LOW, HIGH, BM, BN)
    begin, end = tl.maximum(begin, tl.load(EDGES + cell)), tl.minimum(end, tl.load(EDGES + cell + 1))
    given = tl.zeros([BM, BN], tl.float32)
    for row in tl.range(begin, end, BM):
        rows = row + tl.arange(0, BM)
        q = _queries(Q + b * q_b + h * q_h, rows, end, q_n, q_c, C, WIDTH)
        lse = tl.load(LSE + both * i + rows, mask=rows < end, other=float("inf"))
        weights = tl.exp2(tl.dot(q, k, input_precision="ieee") * scale - lse[:, None])
        given += tl.where(_in_band(rows, columns, j, shift, low, high, LOW, HIGH), weights, 0.0)
    at = SUMS + (both * tl.num_programs(1) + cell) * j + columns
    tl.store(at, tl.sum(given, 0), mask=columns < j)


@triton.jit
def locate(
    Q, K, BEST, LARGEST, WHERE, i, j, shift, low, high, scale,
    q_b, q_h, q_n, q_c, k_b, k_h, k_n, k_c,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The key of each row's largest weight, looked for in the one group of keys that has it."""
    both = tl.program_id(1).to(tl.int64)
    b, h = both // H, both % H
    rows, features = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, WIDTH)
    real = rows < i
    best = tl.load(BEST + both * i + rows, mask=real, other=0)
    awake = best > 0
    weight = (best >> 32).to(tl.int32)
    group = (weight & (GROUPS - 1)) ^ (GROUPS - 1)
    first = tl.where(awake, (0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)) * BN + group * (BN // GROUPS), 0)
    inside = real[:, None] & (features[None, :] < C)
    at = Q + b * q_b + h * q_h + rows[:, None].to(tl.int64) * q_n + features[None, :] * q_c
    q = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    where = tl.full([BM], -1, tl.int32)
    keys = K + b * k_b + h // GROUP * k_h
    for step in tl.range(0, BN // GROUPS):
        column = first + step
        known = inside & (column < j)[:, None]
        k = tl.load(keys + column[:, None].to(tl.int64) * k_n + features[None, :] * k_c, mask=known, other=0.0)
        score = tl.sum(q * k.to(tl.float32), 1) * scale
        there = column - rows - shift
        visible = awake & (column < j)
        if LOW:
            visible = visible & (there >= low)
        if HIGH:
            visible = visible & (there <= high)
        better = visible & (score > top)
        top = tl.where(better, score, top)
        where = tl.where(better, column, where)
    tl.store(LARGEST + both * i + rows, (weight & -GROUPS).to(tl.float32, bitcast=True), mask=real)
    tl.store(WHERE + both * i + rows, where, mask=real)
