"""Triton kernels for attention statistics, which compute one tile of scores (queries x keys) at a time.

Rows are queries, columns are keys. A pair is visible if low <= column - row - shift <= high, where `shift` is the
position of the first query minus that of the first key. LOW and HIGH say whether these limits exist. BM and BN are the
numbers of rows and columns of a tile. Scores are multiplied by 1 / log 2, so that exp2 replaces exp.
"""

import triton
import triton.language as tl

GROUPS = tl.constexpr(4)  # groups of neighbouring keys in a tile; the largest weight is located by its group


@triton.jit
def _scores(
    q, K, start, j, stride_n, stride_c, scale,
    C: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of scores of the queries q and BN keys, starting at key `start`. The shape is (queries, BN)."""
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
    """Return limits (begin, inner, outer, end) of the keys that are visible to BM rows, starting at row `first`.

    Only keys from `begin` to `end` (excluded) may be visible; `begin` is rounded down to a tile of BN keys. Keys from
    `inner` to `outer` (excluded) are whole tiles that are visible to all BM rows.
    """
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
    """Compute the log-sum-exp of each row of scores, as a natural logarithm."""
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
    """Return limits (begin, inner, outer, end) of the rows that see keys of the tile of keys with this number.

    Only rows from `begin` to `end` (excluded) may see a key of the tile; `begin` is rounded down to a tile of BM rows.
    Rows from `inner` to `outer` (excluded) see all keys of the tile.
    """
    first, last = number * BN, tl.minimum(number * BN + BN, j) - 1
    begin, end, inner, outer = 0, i, 0, i // BM * BM
    if HIGH:
        begin = tl.maximum(first - shift - high, 0) // BM * BM
        inner = (tl.maximum(last - shift - high, 0) + BM - 1) // BM * BM
    if LOW:
        end = tl.minimum(tl.maximum(last - shift - low + 1, 0), i)
        outer = tl.minimum(tl.maximum(first - shift - low + 1, 0) // BM * BM, outer)
    if number * BN + BN > j:
        outer = 0  # the last tile may be incomplete, so every row needs the mask
    return begin, inner, tl.maximum(outer, inner), end


@triton.jit
def _products(Q, k, b, h, start, BM: tl.constexpr, WIDTH: tl.constexpr):
    """Compute q . k for BM queries, starting at query `start`, and all keys k of the program, (BM, keys)."""
    q = tl.reshape(Q.load([b.to(tl.int32), h.to(tl.int32), start, 0]), [BM, WIDTH])
    return tl.dot(q, k, input_precision="ieee")


@triton.jit
def _tile(
    logs, SUMS, BEST, number, start, mass, i, j, shift, low, high,
    C: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add the weights of one tile to all statistics; return the sum of the weights on each key so far.

    logs    logarithms to base 2 of the weights, (BM rows, BN keys)
    number  number of the tile of keys
    start   first row of the tile
    mass    sum of the weights on each key from the rows of earlier calls
    """
    rows, columns = start + tl.arange(0, BM), number * BN + tl.arange(0, BN)
    weights = tl.exp2(logs)
    if CUT:
        weights = tl.where(_in_band(rows, columns, j, shift, low, high, LOW, HIGH), weights, 0.0)
        logs = tl.where(weights > 0, logs, 0.0)
    # a row is 16 w + 8 u + g, a column 8 x + 2 y + z: a thread of the tensor cores has all u, x and z of one w, g and y
    parts = tl.reshape(weights, [BM // 16, 2, 8, BN // 8, 4, 2])
    mass += tl.sum(parts, 1)
    if CUT and not BACK:
        far = tl.sum(weights * tl.abs((rows + shift)[:, None] - columns[None, :]).to(tl.float32), 1)
    else:
        # the tile is on one side of the diagonal; i - j is a number of the thread plus a constant
        own = start + shift - number * BN + 16 * tl.arange(0, BM // 16)
        own = (own[:, None, None] + tl.arange(0, 8)[None, :, None] - 2 * tl.arange(0, 4)[None, None, :]).to(tl.float32)
        known = 8 * tl.arange(0, 2)[:, None, None] - 8 * tl.arange(0, BN // 8)[None, :, None]
        known = (known - tl.arange(0, 2)[None, None, :]).to(tl.float32)
        apart = own[:, None, :, None, :, None] + known[None, :, None, :, None, :]
        far = tl.abs(tl.sum(tl.reshape(tl.sum(tl.sum(parts * apart, 3), 4), [BM, 4]), 1))
    # weights are not negative, so their bits compare like integers, and the maximum of three is one instruction
    groups = tl.reshape(weights.to(tl.int32, bitcast=True), [BM, GROUPS, BN // 8 // GROUPS, 4, 2])
    groups = tl.max(tl.max(groups, 2), 3)
    # the last bits are the group, inverted so that the first of equals wins
    groups = (groups & -GROUPS) | (tl.arange(0, GROUPS) ^ (GROUPS - 1))[None, :, None]
    best = tl.max(tl.max(groups, 1), 1)
    # the larger weight wins, the earlier tile among equals
    packed = (best.to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)
    sums = tl.join(tl.sum(weights * logs, 1), far)
    at = SUMS + rows[:, None] * 2 + tl.arange(0, 2)[None, :]
    if CUT:
        tl.atomic_add(at, sums, mask=(rows < i)[:, None], sem="relaxed")
        tl.atomic_max(BEST + rows, packed, mask=rows < i, sem="relaxed")
    else:
        tl.atomic_add(at, sums, sem="relaxed")
        tl.atomic_max(BEST + rows, packed, sem="relaxed")
    return mass


@triton.jit
def _cell(CELLS, mass, before, row, SPAN):
    """Add the weights on the keys of the program since the previous call to a cell of the pooled map.

    The cell is the one of these keys that contains `row`. Returns the sum of the weights on the keys so far, which is
    passed as `before` in the next call.
    """
    now = tl.sum(tl.sum(mass, 4), 2)
    tl.atomic_add(CELLS + (row // SPAN).to(tl.int64) * tl.num_programs(0), tl.sum(now - before), sem="relaxed")
    return now


@triton.jit
def _edge(
    Q, k, LSE, SUMS, BEST, CELLS, SPAN, b, h, number, begin, end, mass, before, i, j, shift, low, high, scale,
    C: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Process the rows from `begin` to `end`, whose tiles of scores are partly masked or cross the diagonal.

    Returns the sums `mass` of `_tile` and `before` of `_cell`.
    """
    for row in tl.range(begin, end, BM):
        rows = row + tl.arange(0, BM)
        lse = tl.load(LSE + rows, mask=rows < i, other=float("inf"))
        logs = _products(Q, k, b, h, row, BM, WIDTH) * scale - lse[:, None]
        mass = _tile(
            logs, SUMS, BEST, number, row, mass, i, j, shift, low, high, C, WIDTH, LOW, HIGH, BACK, BM, BN, True
        )
        if ((row + BM) % SPAN == 0) | (row + BM >= end):
            before = _cell(CELLS, mass, before, row, SPAN)
    return mass, before


@triton.jit
def _row(turn, tiles, before, first, gap, BM: tl.constexpr):
    """Return the first row of the tile that a program processes at step `turn`.

    Tile 0 begins at row `first`. Between the tiles `before` - 1 and `before`, `gap` rows are skipped. Each program
    starts at another tile, so `turn` may exceed `tiles`, the number of tiles; tile 0 then follows the last tile.
    """
    tile = tl.where(turn >= tiles, turn - tiles, turn)
    return first + tile * BM + tl.where(tile >= before, gap, 0)


@triton.jit
def gather(
    Q, K, LSE, SUMS, BEST, RECEIVED, CELLS, SPAN, i, j, shift, low, high, scale,
    k_b, k_h, k_n, k_c,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, BACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute all statistics of rows and of keys from the weights exp(score - lse), visiting each pair once.

    Each program processes one tile of keys, so the sums of the weights on these keys stay in registers. Row statistics
    are added to memory atomically, one number for each row and tile. The sum of the weights on these keys over SPAN
    rows is one cell of a pooled map.
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
    mass = tl.zeros([BM // 16, 8, BN // 8, 4, 2], tl.float32)
    before = tl.zeros([BM // 16, 8, 4], tl.float32)
    mass, before = _edge(
        Q, k, lses, sums, best, cells, SPAN, b, h, number, begin, tl.minimum(inner, end), mass, before,
        i, j, shift, low, high, scale, C, WIDTH, LOW, HIGH, BACK, BM, BN,
    )  # fmt: skip
    if not BACK:
        # near the diagonal a row has keys on both sides
        mass, before = _edge(
            Q, k, lses, sums, best, cells, SPAN, b, h, number, near, beyond, mass, before,
            i, j, shift, low, high, scale, C, WIDTH, LOW, HIGH, BACK, BM, BN,
        )  # fmt: skip
    mass, before = _edge(
        Q, k, lses, sums, best, cells, SPAN, b, h, number, tl.maximum(begin, outer), end, mass, before,
        i, j, shift, low, high, scale, C, WIDTH, LOW, HIGH, BACK, BM, BN,
    )  # fmt: skip
    early = (near - inner) // BM
    tiles = early + (outer - beyond) // BM
    if tiles > 0:
        turn = number * (SPAN // BM) % tiles  # programs start at different rows, to avoid conflicts of atomics
        row = _row(turn, tiles, early, inner, beyond - near, BM)
        stop = (row // SPAN + 1) * SPAN
        for now in tl.range(turn, turn + tiles):
            row = _row(now, tiles, early, inner, beyond - near, BM)
            then = _row(now + 1, tiles, early, inner, beyond - near, BM)
            lse = tl.load(lses + row + tl.arange(0, BM))
            logs = _products(Q, k, b, h, row, BM, WIDTH) * scale - lse[:, None]
            mass = _tile(
                logs, sums, best, number, row, mass, i, j, shift, low, high, C, WIDTH, LOW, HIGH, BACK, BM, BN, False
            )
            if (then >= stop) | (then <= row) | (now + 1 == turn + tiles):
                before = _cell(cells, mass, before, row, SPAN)
                stop = (then // SPAN + 1) * SPAN
    tl.store(RECEIVED + both * j + columns, tl.sum(tl.reshape(mass, [BM // 2, BN]), 0), mask=columns < j)


@triton.jit
def pool(
    Q, K, LSE, EDGES, SUMS, i, j, shift, low, high, scale,
    q_b, q_h, q_n, q_c, k_b, k_h, k_n, k_c,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute a map pooled over rows: for each key, the sum of the weights over the rows of each cell.

    EDGES has the first row of every cell, and the number of rows as the last entry.
    """
    number, cell = tl.program_id(0), tl.program_id(1)
    both = tl.program_id(2).to(tl.int64)
    b, h = both // H, both % H
    columns, features = number * BN + tl.arange(0, BN), tl.arange(0, WIDTH)
    at = K + b * k_b + h // GROUP * k_h + columns[None, :].to(tl.int64) * k_n + features[:, None] * k_c
    k = tl.load(at, mask=(columns[None, :] < j) & (features[:, None] < C), other=0.0)
    begin, _, _, end = _between(number, i, j, shift, low, high, LOW, HIGH, BM, BN)
    begin, end = tl.maximum(begin, tl.load(EDGES + cell)), tl.minimum(end, tl.load(EDGES + cell + 1))
    mass = tl.zeros([BM, BN], tl.float32)
    for row in tl.range(begin, end, BM):
        rows = row + tl.arange(0, BM)
        q = _queries(Q + b * q_b + h * q_h, rows, end, q_n, q_c, C, WIDTH)
        lse = tl.load(LSE + both * i + rows, mask=rows < end, other=float("inf"))
        weights = tl.exp2(tl.dot(q, k, input_precision="ieee") * scale - lse[:, None])
        mass += tl.where(_in_band(rows, columns, j, shift, low, high, LOW, HIGH), weights, 0.0)
    at = SUMS + (both * tl.num_programs(1) + cell) * j + columns
    tl.store(at, tl.sum(mass, 0), mask=columns < j)


@triton.jit
def locate(
    Q, K, BEST, LARGEST, WHERE, i, j, shift, low, high, scale,
    q_b, q_h, q_n, q_c, k_b, k_h, k_n, k_c,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Find the key with the largest weight of each row, in the group of neighbouring keys that `gather` found."""
    both = tl.program_id(1).to(tl.int64)
    b, h = both // H, both % H
    rows, features = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, WIDTH)
    real = rows < i
    best = tl.load(BEST + both * i + rows, mask=real, other=0)
    nonempty = best > 0
    weight = (best >> 32).to(tl.int32)
    group = (weight & (GROUPS - 1)) ^ (GROUPS - 1)
    first = tl.where(nonempty, (0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)) * BN + group * (BN // GROUPS), 0)
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
        visible = nonempty & (column < j)
        if LOW:
            visible = visible & (there >= low)
        if HIGH:
            visible = visible & (there <= high)
        better = visible & (score > top)
        top = tl.where(better, score, top)
        where = tl.where(better, column, where)
    tl.store(LARGEST + both * i + rows, (weight & -GROUPS).to(tl.float32, bitcast=True), mask=real)
    tl.store(WHERE + both * i + rows, where, mask=real)
