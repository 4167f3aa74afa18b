"""The Triton source of `triton_attention.py`; only it imports this file.

Shapes: T slots, H query heads over K key heads, head size D (BLOCK_D: padded to a power of two). A tile of BLOCK_M
query rows holds BLOCK_M / PACK slots of PACK heads that share a key head: tiles span fewer slots, so that fewer of them
lie over a border between documents, and one pass over the rows serves PACK heads. REST: packs of a key head.

A query sees the keys start[slot] <= key <= slot (and key > slot - WINDOW); a key is seen by key <= slot < end[key].
Blocks that lie wholly inside need no mask and have a loop of their own. Scores are kept in units of log2.
"""

# No postponed annotations here: Triton reads `tl.constexpr` off the parameters themselves.
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
"""The highest score before any was seen: finite, so that a row of masked scores (-inf) leaves no NaN behind."""


@triton.jit
def document_bounds(table, bounds, entries, slots, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """bounds int32 [2, slots]: where each slot's document starts, and one past its last slot, by bisection.

    table [entries]: documents' starts, ascending, repeats allowed; slots past its end are one more document.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), dtype=tl.int32)  # table[low] <= slot
    high = low + entries  # table[high] > slot, past the end by definition
    for _ in range(STEPS):
        middle = (low + high) // 2
        behind = tl.load(table + middle).to(tl.int32) <= slot
        between = high - low > 1
        low = tl.where(between & behind, middle, low)
        high = tl.where(between & (behind == 0), middle, high)
    start = tl.load(table + low).to(tl.int32)
    end = tl.minimum(tl.load(table + high, mask=high < entries, other=slots).to(tl.int32), slots)
    tl.store(bounds + slot, start, mask=slot < slots)
    tl.store(bounds + slots + slot, end, mask=slot < slots)


@triton.jit
def _rows(base, first, head, slot_stride, head_stride, slots, BLOCK: tl.constexpr, PACK: tl.constexpr,
          HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, INSIDE: tl.constexpr):  # fmt: skip
    """[BLOCK, BLOCK_D]: the rows (slot, head) from slot `first` and head `head` on, PACK heads a slot; zeros outside.

    INSIDE: no row lies past the last slot. Offsets from the tile's corner fit int32, the corner itself need not.
    """
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    corner = base + tl.cast(first, tl.int64) * slot_stride + tl.cast(head, tl.int64) * head_stride
    at = (row // PACK) * slot_stride
    if PACK > 1:
        at += (row % PACK) * head_stride
    pointers = corner + at[:, None] + column[None, :]
    if INSIDE:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers)
        return tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0.0)
    inside = (first + row // PACK < slots)[:, None]
    if HEAD_DIM != BLOCK_D:
        inside = inside & (column < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _store_rows(base, values, first, head, heads, slots, BLOCK: tl.constexpr, PACK: tl.constexpr,
                HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Writes a tile of rows into a contiguous [slots, heads, HEAD_DIM]."""
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    corner = base + (tl.cast(first, tl.int64) * heads + head) * HEAD_DIM
    at = ((row // PACK) * heads + row % PACK) * HEAD_DIM
    inside = (first + row // PACK < slots)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(corner + at[:, None] + column[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _capped(raw, scale, cap):
    """tanh(raw * scale / cap), where a library's tanh would not run in the interpreter."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(raw * (2.0 * LOG2E * scale / cap)))


@triton.jit
def _key_blocks(bounds, first, last, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Blocks of keys that the queries first..last see: (low, a, b). [a, b) needs no mask, [low, a) and [b, last] do."""
    oldest = tl.load(bounds + first)
    newest = tl.load(bounds + last)  # of all starts in the tile
    if WINDOW > 0:
        oldest = tl.maximum(oldest, first - WINDOW + 1)
        newest = tl.maximum(newest, last - WINDOW + 1)
    low = oldest // BLOCK * BLOCK
    b = (first + 1) // BLOCK * BLOCK
    a = tl.minimum((newest + BLOCK - 1) // BLOCK * BLOCK, b)
    return low, a, b


@triton.jit
def _forward_block(acc, highest, total, query, k, v, n, kv_head, slot, start,
                   k_slot, k_head, v_slot, v_head, slots, scale, cap, MASKED: tl.constexpr,
                   BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
                   SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    keys = _rows(k, n, kv_head, k_slot, k_head, slots, BLOCK_N, 1, HEAD_DIM, BLOCK_D, not MASKED)
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
    if SOFTCAP:
        scores = _capped(scores, scale, cap)
        factor = cap * LOG2E
    else:
        factor = scale * LOG2E
    if MASKED:
        key = (n + tl.arange(0, BLOCK_N))[None, :]
        seen = (key >= start[:, None]) & (key <= slot[:, None])
        if WINDOW > 0:
            seen = seen & (key > slot[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * factor)  # the factor is positive
    weights = tl.exp2(scores * factor - higher[:, None])
    fade = tl.exp2(highest - higher)
    total = total * fade + tl.sum(weights, 1)
    values = _rows(v, n, kv_head, v_slot, v_head, slots, BLOCK_N, 1, HEAD_DIM, BLOCK_D, not MASKED)
    acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision=PRECISION)
    return acc, higher, total


@triton.jit(do_not_specialize=["slots"])
def attention_forward(
    q, k, v, bounds, out, lse,
    slots, scale, cap,
    q_slot: tl.constexpr, q_head: tl.constexpr, k_slot: tl.constexpr, k_head: tl.constexpr,
    v_slot: tl.constexpr, v_head: tl.constexpr,
    HEADS: tl.constexpr, REST: tl.constexpr, PACK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries a program: out [T, H, D], lse float32 [H / PACK, T, PACK] (log2 of the
    sum of exp2 of the scores; laid out as the rows of a tile are)."""
    SPAN: tl.constexpr = BLOCK_M // PACK
    program = tl.program_id(0)
    pack = program % (HEADS // PACK)  # heads follow each other: they share keys in the cache
    first = program // (HEADS // PACK) * SPAN
    last = tl.minimum(first + SPAN, slots) - 1
    head, kv_head = pack * PACK, pack // REST
    row = tl.arange(0, BLOCK_M)
    slot = first + row // PACK
    start = tl.load(bounds + slot, mask=slot < slots, other=2147483647)  # no key is seen past the last slot
    query = _rows(q, first, head, q_slot, q_head, slots, BLOCK_M, PACK, HEAD_DIM, BLOCK_D, False)

    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    highest = tl.full((BLOCK_M,), NOTHING, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    low, a, b = _key_blocks(bounds, first, last, BLOCK_N, WINDOW)
    for n in range(a, b, BLOCK_N):
        acc, highest, total = _forward_block(
            acc, highest, total, query, k, v, n, kv_head, slot, start, k_slot, k_head, v_slot, v_head, slots, scale,
            cap, False, BLOCK_N, HEAD_DIM, BLOCK_D, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
    before = (a - low) // BLOCK_N
    for index in range(before + (last - b + BLOCK_N) // BLOCK_N):
        n = tl.where(index < before, low + index * BLOCK_N, b + (index - before) * BLOCK_N)
        acc, highest, total = _forward_block(
            acc, highest, total, query, k, v, n, kv_head, slot, start, k_slot, k_head, v_slot, v_head, slots, scale,
            cap, True, BLOCK_N, HEAD_DIM, BLOCK_D, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip

    total = tl.where(total == 0.0, 1.0, total)  # rows past the last slot
    _store_rows(out, acc / total[:, None], first, head, HEADS, slots, BLOCK_M, PACK, HEAD_DIM, BLOCK_D)
    at = (tl.cast(pack, tl.int64) * slots + first) * PACK + row
    tl.store(lse + at, highest + tl.log2(total), mask=slot < slots)


@triton.jit
def _query_block(acc, query, grad, level, delta, k, v, n, kv_head, slot, start,
                 k_slot, k_head, v_slot, v_head, slots, scale, cap, MASKED: tl.constexpr,
                 BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
                 SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    keys = _rows(k, n, kv_head, k_slot, k_head, slots, BLOCK_N, 1, HEAD_DIM, BLOCK_D, not MASKED)
    values = _rows(v, n, kv_head, v_slot, v_head, slots, BLOCK_N, 1, HEAD_DIM, BLOCK_D, not MASKED)
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
    if SOFTCAP:
        scores = _capped(scores, scale, cap)
        weights = tl.exp2(scores * (cap * LOG2E) - level[:, None])
    else:
        weights = tl.exp2(scores * (scale * LOG2E) - level[:, None])
    if MASKED:
        key = (n + tl.arange(0, BLOCK_N))[None, :]
        seen = (key >= start[:, None]) & (key <= slot[:, None])
        if WINDOW > 0:
            seen = seen & (key > slot[:, None] - WINDOW)
        weights = tl.where(seen, weights, 0.0)
    sent = weights * (tl.dot(grad, tl.trans(values), input_precision=PRECISION) - delta[:, None])
    if SOFTCAP:
        sent *= 1.0 - scores * scores
    return tl.dot(sent.to(keys.dtype), keys, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["slots"])
def attention_backward_queries(
    q, k, v, bounds, out, grad_out, lse, delta, grad_q,
    slots, scale, cap,
    q_slot: tl.constexpr, q_head: tl.constexpr, k_slot: tl.constexpr, k_head: tl.constexpr,
    v_slot: tl.constexpr, v_head: tl.constexpr, g_slot: tl.constexpr, g_head: tl.constexpr,
    HEADS: tl.constexpr, REST: tl.constexpr, PACK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries a program: grad_q [T, H, D], and delta = sum(out * grad_out), laid out
    as lse and read by the keys' launch."""
    SPAN: tl.constexpr = BLOCK_M // PACK
    program = tl.program_id(0)
    pack = program % (HEADS // PACK)
    first = program // (HEADS // PACK) * SPAN
    last = tl.minimum(first + SPAN, slots) - 1
    head, kv_head = pack * PACK, pack // REST
    row = tl.arange(0, BLOCK_M)
    slot = first + row // PACK
    start = tl.load(bounds + slot, mask=slot < slots, other=2147483647)
    query = _rows(q, first, head, q_slot, q_head, slots, BLOCK_M, PACK, HEAD_DIM, BLOCK_D, False)
    grad = _rows(grad_out, first, head, g_slot, g_head, slots, BLOCK_M, PACK, HEAD_DIM, BLOCK_D, False)
    found = _rows(out, first, head, HEADS * HEAD_DIM, HEAD_DIM, slots, BLOCK_M, PACK, HEAD_DIM, BLOCK_D, False)
    along = tl.sum(found.to(tl.float32) * grad.to(tl.float32), 1)
    at = (tl.cast(pack, tl.int64) * slots + first) * PACK + row
    tl.store(delta + at, along, mask=slot < slots)
    level = tl.load(lse + at, mask=slot < slots, other=0.0)

    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    low, a, b = _key_blocks(bounds, first, last, BLOCK_N, WINDOW)
    for n in range(a, b, BLOCK_N):
        acc = _query_block(
            acc, query, grad, level, along, k, v, n, kv_head, slot, start, k_slot, k_head, v_slot, v_head, slots, scale,
            cap, False, BLOCK_N, HEAD_DIM, BLOCK_D, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
    before = (a - low) // BLOCK_N
    for index in range(before + (last - b + BLOCK_N) // BLOCK_N):
        n = tl.where(index < before, low + index * BLOCK_N, b + (index - before) * BLOCK_N)
        acc = _query_block(
            acc, query, grad, level, along, k, v, n, kv_head, slot, start, k_slot, k_head, v_slot, v_head, slots, scale,
            cap, True, BLOCK_N, HEAD_DIM, BLOCK_D, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
    _store_rows(grad_q, acc * scale, first, head, HEADS, slots, BLOCK_M, PACK, HEAD_DIM, BLOCK_D)


@triton.jit
def _key_block(acc_k, acc_v, keys, values, q, grad_out, lse, delta, m, pack, key, end,
               q_slot, q_head, g_slot, g_head, slots, scale, cap, MASKED: tl.constexpr, PACK: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
               WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    query = _rows(q, m, pack * PACK, q_slot, q_head, slots, BLOCK_M, PACK, HEAD_DIM, BLOCK_D, not MASKED)
    grad = _rows(grad_out, m, pack * PACK, g_slot, g_head, slots, BLOCK_M, PACK, HEAD_DIM, BLOCK_D, not MASKED)
    slot = m + row // PACK
    at = (tl.cast(pack, tl.int64) * slots + m) * PACK + row
    if MASKED:
        level = tl.load(lse + at, mask=slot < slots, other=0.0)
        along = tl.load(delta + at, mask=slot < slots, other=0.0)
    else:
        level, along = tl.load(lse + at), tl.load(delta + at)
    scores = tl.dot(keys, tl.trans(query), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]: keys down, queries across
    if SOFTCAP:
        scores = _capped(scores, scale, cap)
        weights = tl.exp2(scores * (cap * LOG2E) - level[None, :])
    else:
        weights = tl.exp2(scores * (scale * LOG2E) - level[None, :])
    if MASKED:
        seen = (slot[None, :] >= key[:, None]) & (slot[None, :] < end[:, None])
        if WINDOW > 0:
            seen = seen & (slot[None, :] < key[:, None] + WINDOW)
        weights = tl.where(seen, weights, 0.0)
    acc_v = tl.dot(weights.to(grad.dtype), grad, acc_v, input_precision=PRECISION)
    sent = weights * tl.dot(
        values, tl.trans(grad), tl.broadcast_to(-along[None, :], (BLOCK_N, BLOCK_M)), input_precision=PRECISION
    )
    if SOFTCAP:
        sent *= 1.0 - scores * scores
    acc_k = tl.dot(sent.to(query.dtype), query, acc_k, input_precision=PRECISION)
    return acc_k, acc_v


@triton.jit(do_not_specialize=["slots"])
def attention_backward_keys(
    q, k, v, bounds, grad_out, lse, delta, grad_k, grad_v,
    slots, scale, cap,
    q_slot: tl.constexpr, q_head: tl.constexpr, k_slot: tl.constexpr, k_head: tl.constexpr,
    v_slot: tl.constexpr, v_head: tl.constexpr, g_slot: tl.constexpr, g_head: tl.constexpr,
    HEADS: tl.constexpr, REST: tl.constexpr, PACK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of keys a program, over all queries and heads that see it: grad_k, grad_v [T, K, D]. No atomics: sums
    run in the same order every time."""
    SPAN: tl.constexpr = BLOCK_M // PACK
    KV_HEADS: tl.constexpr = HEADS // PACK // REST
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    first = program // KV_HEADS * BLOCK_N
    last = tl.minimum(first + BLOCK_N, slots) - 1
    keys = _rows(k, first, kv_head, k_slot, k_head, slots, BLOCK_N, 1, HEAD_DIM, BLOCK_D, False)
    values = _rows(v, first, kv_head, v_slot, v_head, slots, BLOCK_N, 1, HEAD_DIM, BLOCK_D, False)

    # Tiles of queries: [a, b) needs no mask, [low, a) lies over the diagonal, [b, stop) over an end.
    stop = tl.load(bounds + slots + last)
    soonest = tl.load(bounds + slots + first)  # of all ends in the tile
    if WINDOW > 0:
        stop = tl.minimum(stop, last + WINDOW)
        soonest = tl.minimum(soonest, first + WINDOW)
    low = first // SPAN * SPAN
    a = (last + SPAN - 1) // SPAN * SPAN
    b = tl.maximum(soonest // SPAN * SPAN, a)
    before = (a - low) // SPAN
    masked = before + tl.maximum(stop - b + SPAN - 1, 0) // SPAN

    acc_k = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    acc_v = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    for rest in range(REST):
        pack = kv_head * REST + rest
        for m in tl.range(a, b, SPAN, num_stages=STAGES):
            acc_k, acc_v = _key_block(
                acc_k, acc_v, keys, values, q, grad_out, lse, delta, m, pack, 0, 0, q_slot, q_head, g_slot, g_head,
                slots, scale, cap, False, PACK, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, WINDOW, SOFTCAP, PRECISION,
            )  # fmt: skip
        # Read here, not above: over the other loop they would hold registers.
        key = first + tl.arange(0, BLOCK_N)
        end = tl.load(bounds + slots + key, mask=key < slots, other=0)
        for index in tl.range(0, masked, num_stages=MASKED_STAGES):
            m = tl.where(index < before, low + index * SPAN, b + (index - before) * SPAN)
            acc_k, acc_v = _key_block(
                acc_k, acc_v, keys, values, q, grad_out, lse, delta, m, pack, key, end, q_slot, q_head, g_slot, g_head,
                slots, scale, cap, True, PACK, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, WINDOW, SOFTCAP, PRECISION,
            )  # fmt: skip
    _store_rows(grad_k, acc_k * scale, first, kv_head, KV_HEADS, slots, BLOCK_N, 1, HEAD_DIM, BLOCK_D)
    _store_rows(grad_v, acc_v, first, kv_head, KV_HEADS, slots, BLOCK_N, 1, HEAD_DIM, BLOCK_D)
