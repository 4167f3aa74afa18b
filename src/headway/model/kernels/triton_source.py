"""The Triton source of `triton_kernels.py`; only it imports this file."""

# No postponed annotations here: Triton reads `tl.constexpr` off the parameters themselves.
import triton
import triton.language as tl


@triton.jit
def cross_entropy(
    logits, stride, labels, each, z_loss, smoothing,
    VOCABULARY: tl.constexpr, IGNORE: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: its loss and nll into each[row], its gradient over the row."""
    row = tl.program_id(0).to(tl.int64)  # rows times vocabulary passes 2**31
    logits += row * stride
    label = tl.load(labels + row)
    trained = label != IGNORE
    target = tl.load(logits + tl.where(trained, label, 0)).to(tl.float32)
    highest = float("-inf")
    total = 0.0  # of exp(x - highest)
    plain = 0.0  # of x
    for start in range(0, VOCABULARY, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < VOCABULARY, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher))
        highest = higher
        plain += tl.sum(tl.where(columns < VOCABULARY, x, 0.0))
    lse = highest + tl.log(total)
    nll = lse - target
    loss = (1.0 - smoothing) * nll + smoothing * (lse - plain / VOCABULARY) + z_loss * lse * lse
    tl.store(each + 2 * row, tl.where(trained, loss, 0.0))
    tl.store(each + 2 * row + 1, tl.where(trained, nll, 0.0))
    if GRADIENT:
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(logits + columns, mask=columns < VOCABULARY, other=float("-inf")).to(tl.float32)
            grad = tl.exp(x - lse) * (1.0 + 2.0 * z_loss * lse) - smoothing / VOCABULARY
            grad -= tl.where(columns == label, 1.0 - smoothing, 0.0)
            tl.store(logits + columns, tl.where(trained, grad, 0.0), mask=columns < VOCABULARY)


@triton.jit
def residual_norm_forward(x, residual, weight, total, normed, scale, width, eps, BLOCK: tl.constexpr):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    branch = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    summed = branch + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    # Rounded as it is stored: the norm sees what the next layer sees.
    summed = summed.to(total.dtype.element_ty)
    tl.store(total + at, summed, mask=inside)
    summed = summed.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(summed * summed) / width + eps)
    tl.store(scale + row, inverse)
    tl.store(
        normed + at, summed * inverse * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32), mask=inside
    )


@triton.jit
def residual_norm_backward(
    grad_normed, grad_total, total, weight, scale, grad, shares, rows, width, TURNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Every programs-th row a program: gradients of the sum, and this program's share of the weight's."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros((BLOCK,), dtype=tl.float32)
    for turn in range(TURNS):
        row = (program + turn * programs).to(tl.int64)
        here = inside & (row < rows)
        at = row * width + columns
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)
        unit = tl.load(total + at, mask=here, other=0.0).to(tl.float32) * inverse
        above = tl.load(grad_normed + at, mask=here, other=0.0).to(tl.float32)
        share += above * unit
        along = tl.sum(above * factor * unit) / width
        found = (above * factor - unit * along) * inverse
        tl.store(grad + at, found + tl.load(grad_total + at, mask=here, other=0.0).to(tl.float32), mask=here)
    tl.store(shares + program * width + columns, share, mask=inside)
