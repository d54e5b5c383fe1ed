"""Triton kernels of disentangled attention: forward, and backward without atomic additions.

What `fused` says of shapes holds here. A program has some queries (or, for the gradients of keys and values,
some keys) of one head of one sequence in its registers and passes over the others tile by tile. The tiles lie
in three ranges by their distances i - j: where all distances read the first slot (FIRST) or the last one
(LAST), position is one number a row and one a column; in the band between, each pair looks its slot up.

Pairs are always [queries, keys]. Hidden scores are a large negative number, not -inf, so that a query all of
whose keys so far are hidden has finite weights; the first key that is not takes them all away.
"""

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)
BAND = tl.constexpr(0)
FIRST = tl.constexpr(1)
LAST = tl.constexpr(2)
# Numbers that change from call to call must not each compile a kernel of its own.
CHANGING = ("length", "low", "high", "seed")


@triton.jit
def load_rows(X, rows, stride, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a matrix with WIDTH columns, as [rows, PADDED]: zero where not `inside` and past WIDTH."""
    column = tl.arange(0, PADDED)
    pointers = X + rows.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(pointers, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(X, rows, stride, inside, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The counterpart of `load_rows`, in the matrix's dtype."""
    column = tl.arange(0, PADDED)
    pointers = X + rows.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(pointers, x.to(X.dtype.element_ty), mask=inside[:, None] & (column < WIDTH)[None, :])


@triton.jit
def load_real(MASK, start, place, inside, MASKED: tl.constexpr):
    """Which of the tokens at these places of a sequence are real."""
    if MASKED:
        return tl.load(MASK + start + place, mask=inside, other=0) != 0
    else:
        return inside


@triton.jit
def first_row(X, row, columns):
    """A matrix of contiguous rows, from a row on."""
    return X + tl.cast(row, tl.int64) * columns


@triton.jit
def score(
    q, k, C, P, SLOTS, i, j, i_inside, j_inside, i_real, j_real, scale, length, rows,
    WHERE: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of queries `i` and keys `j`, in base 2: [queries, keys]. C and P begin with the first of them.

    So what is added to them is in 32 bits for any size, and takes half the registers.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    c = tl.arange(0, i.shape[0]) * rows
    p = tl.arange(0, j.shape[0]) * rows
    if WHERE == BAND:
        inside = i_inside[:, None] & j_inside[None, :]
        if C2P or P2C:
            slot = tl.load(SLOTS + (i[:, None] - j[None, :] + length - 1), mask=inside, other=0)
            if C2P:
                s += tl.load(C + (c[:, None] + slot), mask=inside, other=0.0).to(tl.float32)
            if P2C:
                s += tl.load(P + (p[None, :] + slot), mask=inside, other=0.0).to(tl.float32)
    else:
        edge = 0 if WHERE == FIRST else rows - 1
        if C2P:
            s += tl.load(C + (c + edge), mask=i_inside, other=0.0).to(tl.float32)[:, None]
        if P2C:
            s += tl.load(P + (p + edge), mask=j_inside, other=0.0).to(tl.float32)[None, :]
    s = s * LOG2E
    if MASKED:
        # A query that is padding attends uniformly.
        s = tl.where(i_real[:, None], tl.where(j_real[None, :], s, HIDDEN), 0.0)
    return tl.where(j_inside[None, :], s, HIDDEN)


@triton.jit
def keep(seed, i, j, length, dropout):
    """Which weights dropout keeps, and by what they are multiplied: [queries, keys]."""
    number = i[:, None] * length + j[None, :]
    return tl.where(tl.rand(seed, number) >= dropout, 1 / (1 - dropout), 0.0)


@triton.jit
def key_ranges(first_query, length, count, low, high, M: tl.constexpr, N: tl.constexpr):
    """Tiles of keys before the first number read the last slot with all these queries; from the second on,
    the first slot."""
    tiles = tl.cdiv(count, N)
    last = tl.minimum(tl.maximum(first_query - high + 1, 0) // N, tiles)
    first = tl.minimum(tl.maximum((tl.maximum(first_query + M - low, 0) + N - 1) // N, last), tiles)
    return last, first, tiles


@triton.jit
def query_ranges(first_key, length, count, low, high, M: tl.constexpr, N: tl.constexpr):
    """Tiles of queries before the first number read the first slot with all these keys; from the second on,
    the last slot."""
    tiles = tl.cdiv(count, M)
    first = tl.minimum(tl.maximum(first_key + low, 0) // M, tiles)
    last = tl.minimum(tl.maximum((tl.maximum(first_key + N - 1 + high, 0) + M - 1) // M, first), tiles)
    return first, last, tiles


@triton.jit
def attend_to(
    total, peak, acc, q, K, V, C, P, SLOTS, MASK, start, count, i, i_inside, i_real, k_token, v_token,
    scale, length, rows, dropout, seed, begin, end,
    WHERE: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The softmax of some queries, further by the keys of the tiles from `begin` to `end`."""
    for tile in range(begin, end):
        j = tile * N + tl.arange(0, N)
        j_inside = j < count
        j_real = load_real(MASK, start, j, j_inside, MASKED)
        k = load_rows(K, start + j, k_token, j_inside, WIDTH, PADDED)
        s = score(
            q, k, C, first_row(P, tile * N, rows), SLOTS, i, j, i_inside, j_inside, i_real, j_real,
            scale, length, rows, WHERE, C2P, P2C, MASKED, PRECISION,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(s, 1))
        shrink = tl.exp2(peak - higher)
        weights = tl.exp2(s - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if DROPOUT:
            weights *= keep(seed, i, j, length, dropout)
        v = load_rows(V, start + j, v_token, j_inside, WIDTH, PADDED)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = higher
    return total, peak, acc


@triton.jit(do_not_specialize=CHANGING)
def forward(
    Q, K, V, C, P, SLOTS, CU, MASK, OUT, LSE,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    tokens, heads, rows, length, low, high, scale, dropout, seed,
    C2P: tl.constexpr, P2C: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The context of some queries, and the logarithm, in base 2, of the sum of each one's weights."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    first_query = tl.program_id(0) * M
    start = tl.load(CU + sequence)
    count = tl.load(CU + sequence + 1) - start
    if first_query < count:
        i = first_query + tl.arange(0, M)
        i_inside = i < count
        i_real = load_real(MASK, start, i, i_inside, MASKED)
        q = load_rows(Q + head.to(tl.int64) * q_head, start + i, q_token, i_inside, WIDTH, PADDED)
        K += head.to(tl.int64) * k_head
        V += head.to(tl.int64) * v_head
        C += (head.to(tl.int64) * tokens + start + first_query) * rows
        P += (head.to(tl.int64) * tokens + start) * rows
        stream = seed + sequence.to(tl.int64) * heads + head
        total = tl.zeros((M,), tl.float32)
        peak = tl.full((M,), float("-inf"), tl.float32)
        acc = tl.zeros((M, PADDED), tl.float32)
        last, first, tiles = key_ranges(first_query, length, count, low, high, M, N)
        if C2P or P2C:
            total, peak, acc = attend_to(
                total, peak, acc, q, K, V, C, P, SLOTS, MASK, start, count, i, i_inside, i_real,
                k_token, v_token, scale, length, rows, dropout, stream, 0, last,
                LAST, C2P, P2C, MASKED, DROPOUT, PRECISION, WIDTH, PADDED, N,
            )  # fmt: skip
            total, peak, acc = attend_to(
                total, peak, acc, q, K, V, C, P, SLOTS, MASK, start, count, i, i_inside, i_real,
                k_token, v_token, scale, length, rows, dropout, stream, last, first,
                BAND, C2P, P2C, MASKED, DROPOUT, PRECISION, WIDTH, PADDED, N,
            )  # fmt: skip
        else:
            first = 0
        total, peak, acc = attend_to(
            total, peak, acc, q, K, V, C, P, SLOTS, MASK, start, count, i, i_inside, i_real,
            k_token, v_token, scale, length, rows, dropout, stream, first, tiles,
            FIRST, C2P, P2C, MASKED, DROPOUT, PRECISION, WIDTH, PADDED, N,
        )  # fmt: skip
        OUT += head.to(tl.int64) * out_head
        store_rows(OUT, start + i, out_token, i_inside, acc / total[:, None], WIDTH, PADDED)
        tl.store(LSE + head.to(tl.int64) * tokens + start + i, peak + tl.log2(total), mask=i_inside)


@triton.jit
def score_gradient(
    q, k, v, grad, lse, delta, C, P, SLOTS, i, j, i_inside, j_inside, i_real, j_real,
    scale, length, rows, dropout, seed,
    WHERE: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights after dropout, and the gradient of the scores: both [queries, keys]."""
    s = score(
        q, k, C, P, SLOTS, i, j, i_inside, j_inside, i_real, j_real, scale, length, rows,
        WHERE, C2P, P2C, MASKED, PRECISION,
    )  # fmt: skip
    weights = tl.exp2(s - lse[:, None])
    d_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    kept = weights
    if DROPOUT:
        factor = keep(seed, i, j, length, dropout)
        kept = weights * factor
        d_weights *= factor
    d_scores = weights * (d_weights - delta[:, None])
    if MASKED:
        # The weights of a query that is padding do not depend on its scores.
        d_scores = tl.where(i_real[:, None], d_scores, 0.0)
    return kept, d_scores


@triton.jit
def store_band(BANDS, row, d_scores, distance, inside, low, high, columns):
    """The gradients of scores whose distance is in the band, each where no other pair writes.

    BANDS begins with the first row of the program's, and rows count from it.
    """
    pointers = BANDS + (row * columns + (distance - low + 1))
    tl.store(
        pointers, d_scores.to(BANDS.dtype.element_ty), mask=inside & (distance >= low) & (distance < high)
    )


@triton.jit
def store_edges(BANDS, row, inside, of_first, of_last, low, high, columns):
    """The sums of the gradients of scores on the first slot and on the last one, around the band."""
    row = BANDS + row * columns
    tl.store(row, of_first.to(BANDS.dtype.element_ty), mask=inside)
    tl.store(row + (high - low + 1), of_last.to(BANDS.dtype.element_ty), mask=inside)


@triton.jit
def add_queries_gradient(
    d_q, of_first, of_last, q, grad, lse, delta, K, V, C, P, SLOTS, MASK, BANDS, start, count,
    i, i_inside, i_real, k_token, v_token, scale, length, rows, low, high, columns, dropout, seed, begin, end,
    WHERE: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradient of some queries, further by the keys of the tiles from `begin` to `end`."""
    for tile in range(begin, end):
        j = tile * N + tl.arange(0, N)
        j_inside = j < count
        j_real = load_real(MASK, start, j, j_inside, MASKED)
        k = load_rows(K, start + j, k_token, j_inside, WIDTH, PADDED)
        v = load_rows(V, start + j, v_token, j_inside, WIDTH, PADDED)
        _, d_scores = score_gradient(
            q, k, v, grad, lse, delta, C, first_row(P, tile * N, rows), SLOTS, i, j, i_inside, j_inside,
            i_real, j_real, scale, length, rows, dropout, seed, WHERE, C2P, P2C, MASKED, DROPOUT, PRECISION,
        )  # fmt: skip
        d_q += tl.dot(d_scores.to(k.dtype), k, input_precision=PRECISION)
        if C2P:
            if WHERE == FIRST:
                of_first += tl.sum(d_scores, 1)
            elif WHERE == LAST:
                of_last += tl.sum(d_scores, 1)
            else:
                distance = i[:, None] - j[None, :]
                inside = i_inside[:, None] & j_inside[None, :]
                row = tl.arange(0, i.shape[0])[:, None]
                store_band(BANDS, row, d_scores, distance, inside, low, high, columns)
                of_first += tl.sum(tl.where(distance < low, d_scores, 0.0), 1)
                of_last += tl.sum(tl.where(distance >= high, d_scores, 0.0), 1)
    return d_q, of_first, of_last


@triton.jit(do_not_specialize=CHANGING)
def backward_of_queries(
    Q, K, V, C, P, SLOTS, CU, MASK, OUT, LSE, GRAD, DELTA, D_Q, BANDS,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, grad_token, grad_head,
    tokens, heads, rows, columns, length, low, high, scale, dropout, seed,
    C2P: tl.constexpr, P2C: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Gradients of some queries, by content; of their scores by distance; and `backward_of_keys`' sums."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    first_query = tl.program_id(0) * M
    start = tl.load(CU + sequence)
    count = tl.load(CU + sequence + 1) - start
    if first_query < count:
        i = first_query + tl.arange(0, M)
        i_inside = i < count
        i_real = load_real(MASK, start, i, i_inside, MASKED)
        q = load_rows(Q + head.to(tl.int64) * q_head, start + i, q_token, i_inside, WIDTH, PADDED)
        out = load_rows(OUT + head.to(tl.int64) * out_head, start + i, out_token, i_inside, WIDTH, PADDED)
        grad = load_rows(GRAD + head.to(tl.int64) * grad_head, start + i, grad_token, i_inside, WIDTH, PADDED)
        K += head.to(tl.int64) * k_head
        V += head.to(tl.int64) * v_head
        C += (head.to(tl.int64) * tokens + start + first_query) * rows
        P += (head.to(tl.int64) * tokens + start) * rows
        BANDS += (head.to(tl.int64) * tokens + start + first_query) * columns
        stream = seed + sequence.to(tl.int64) * heads + head
        token = head.to(tl.int64) * tokens + start + i
        lse = tl.load(LSE + token, mask=i_inside, other=float("inf"))
        delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        tl.store(DELTA + token, delta, mask=i_inside)
        d_q = tl.zeros((M, PADDED), tl.float32)
        of_first = tl.zeros((M,), tl.float32)
        of_last = tl.zeros((M,), tl.float32)
        last, first, tiles = key_ranges(first_query, length, count, low, high, M, N)
        if C2P or P2C:
            d_q, of_first, of_last = add_queries_gradient(
                d_q, of_first, of_last, q, grad, lse, delta, K, V, C, P, SLOTS, MASK, BANDS, start, count,
                i, i_inside, i_real, k_token, v_token, scale, length, rows, low, high, columns,
                dropout, stream, 0, last, LAST, C2P, P2C, MASKED, DROPOUT, PRECISION, WIDTH, PADDED, N,
            )  # fmt: skip
            d_q, of_first, of_last = add_queries_gradient(
                d_q, of_first, of_last, q, grad, lse, delta, K, V, C, P, SLOTS, MASK, BANDS, start, count,
                i, i_inside, i_real, k_token, v_token, scale, length, rows, low, high, columns,
                dropout, stream, last, first, BAND, C2P, P2C, MASKED, DROPOUT, PRECISION, WIDTH, PADDED, N,
            )  # fmt: skip
        else:
            first = 0
        d_q, of_first, of_last = add_queries_gradient(
            d_q, of_first, of_last, q, grad, lse, delta, K, V, C, P, SLOTS, MASK, BANDS, start, count,
            i, i_inside, i_real, k_token, v_token, scale, length, rows, low, high, columns,
            dropout, stream, first, tiles, FIRST, C2P, P2C, MASKED, DROPOUT, PRECISION, WIDTH, PADDED, N,
        )  # fmt: skip
        D_Q += head.to(tl.int64) * tokens * WIDTH
        store_rows(D_Q, start + i, WIDTH, i_inside, d_q * scale, WIDTH, PADDED)
        if C2P:
            store_edges(BANDS, tl.arange(0, M), i_inside, of_first, of_last, low, high, columns)


@triton.jit
def add_keys_gradient(
    d_k, d_v, of_first, of_last, k, v, Q, GRAD, LSE, DELTA, C, P, SLOTS, MASK, BANDS, start, count,
    j, j_inside, j_real, q_token, grad_token, scale, length, rows, low, high, columns, dropout, seed,
    begin, end,
    WHERE: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The gradients of some keys and values, further by the queries of the tiles from `begin` to `end`."""
    for tile in range(begin, end):
        i = tile * M + tl.arange(0, M)
        i_inside = i < count
        i_real = load_real(MASK, start, i, i_inside, MASKED)
        q = load_rows(Q, start + i, q_token, i_inside, WIDTH, PADDED)
        grad = load_rows(GRAD, start + i, grad_token, i_inside, WIDTH, PADDED)
        lse = tl.load(LSE + start + i, mask=i_inside, other=float("inf"))
        delta = tl.load(DELTA + start + i, mask=i_inside, other=0.0)
        weights, d_scores = score_gradient(
            q, k, v, grad, lse, delta, first_row(C, tile * M, rows), P, SLOTS, i, j, i_inside, j_inside,
            i_real, j_real, scale, length, rows, dropout, seed, WHERE, C2P, P2C, MASKED, DROPOUT, PRECISION,
        )  # fmt: skip
        d_v += tl.dot(tl.trans(weights.to(grad.dtype)), grad, input_precision=PRECISION)
        d_k += tl.dot(tl.trans(d_scores.to(q.dtype)), q, input_precision=PRECISION)
        if P2C:
            if WHERE == FIRST:
                of_first += tl.sum(d_scores, 0)
            elif WHERE == LAST:
                of_last += tl.sum(d_scores, 0)
            else:
                distance = i[:, None] - j[None, :]
                inside = i_inside[:, None] & j_inside[None, :]
                row = tl.arange(0, j.shape[0])[None, :]
                store_band(BANDS, row, d_scores, distance, inside, low, high, columns)
                of_first += tl.sum(tl.where(distance < low, d_scores, 0.0), 0)
                of_last += tl.sum(tl.where(distance >= high, d_scores, 0.0), 0)
    return d_k, d_v, of_first, of_last


@triton.jit(do_not_specialize=CHANGING)
def backward_of_keys(
    Q, K, V, C, P, SLOTS, CU, MASK, LSE, GRAD, DELTA, D_K, D_V, BANDS,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    tokens, heads, rows, columns, length, low, high, scale, dropout, seed,
    C2P: tl.constexpr, P2C: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys, by content, and values; of their scores by distance."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    first_key = tl.program_id(0) * N
    start = tl.load(CU + sequence)
    count = tl.load(CU + sequence + 1) - start
    if first_key < count:
        j = first_key + tl.arange(0, N)
        j_inside = j < count
        j_real = load_real(MASK, start, j, j_inside, MASKED)
        k = load_rows(K + head.to(tl.int64) * k_head, start + j, k_token, j_inside, WIDTH, PADDED)
        v = load_rows(V + head.to(tl.int64) * v_head, start + j, v_token, j_inside, WIDTH, PADDED)
        Q += head.to(tl.int64) * q_head
        GRAD += head.to(tl.int64) * grad_head
        LSE += head.to(tl.int64) * tokens
        DELTA += head.to(tl.int64) * tokens
        C += (head.to(tl.int64) * tokens + start) * rows
        P += (head.to(tl.int64) * tokens + start + first_key) * rows
        BANDS += (head.to(tl.int64) * tokens + start + first_key) * columns
        stream = seed + sequence.to(tl.int64) * heads + head
        d_k = tl.zeros((N, PADDED), tl.float32)
        d_v = tl.zeros((N, PADDED), tl.float32)
        of_first = tl.zeros((N,), tl.float32)
        of_last = tl.zeros((N,), tl.float32)
        first, last, tiles = query_ranges(first_key, length, count, low, high, M, N)
        if C2P or P2C:
            d_k, d_v, of_first, of_last = add_keys_gradient(
                d_k, d_v, of_first, of_last, k, v, Q, GRAD, LSE, DELTA, C, P, SLOTS, MASK, BANDS, start,
                count, j, j_inside, j_real, q_token, grad_token, scale, length, rows, low, high, columns,
                dropout, stream, 0, first, FIRST, C2P, P2C, MASKED, DROPOUT, PRECISION, WIDTH, PADDED, M,
            )  # fmt: skip
            d_k, d_v, of_first, of_last = add_keys_gradient(
                d_k, d_v, of_first, of_last, k, v, Q, GRAD, LSE, DELTA, C, P, SLOTS, MASK, BANDS, start,
                count, j, j_inside, j_real, q_token, grad_token, scale, length, rows, low, high, columns,
                dropout, stream, first, last, BAND, C2P, P2C, MASKED, DROPOUT, PRECISION, WIDTH, PADDED, M,
            )  # fmt: skip
        else:
            last = 0
        d_k, d_v, of_first, of_last = add_keys_gradient(
            d_k, d_v, of_first, of_last, k, v, Q, GRAD, LSE, DELTA, C, P, SLOTS, MASK, BANDS, start, count,
            j, j_inside, j_real, q_token, grad_token, scale, length, rows, low, high, columns,
            dropout, stream, last, tiles, LAST, C2P, P2C, MASKED, DROPOUT, PRECISION, WIDTH, PADDED, M,
        )  # fmt: skip
        D_K += head.to(tl.int64) * tokens * WIDTH
        D_V += head.to(tl.int64) * tokens * WIDTH
        store_rows(D_K, start + j, WIDTH, j_inside, d_k * scale, WIDTH, PADDED)
        store_rows(D_V, start + j, WIDTH, j_inside, d_v, WIDTH, PADDED)
        if P2C:
            store_edges(BANDS, tl.arange(0, N), j_inside, of_first, of_last, low, high, columns)
