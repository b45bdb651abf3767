"""The Triton kernels of the passes: every element is read once and written once.

Each operation rounds once, as in ``torch_passes``: launch them with ``enable_fp_fusion=False``, so that no product and
sum become a fused multiply-add.
"""

# Kernels are Triton, not Python with types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _advance(
    gradient, momentum_buffer, where, mask, momentum, rest,
    NEAR_GRADIENT: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    g = tl.load(gradient, mask=mask)
    average = tl.load(momentum_buffer, mask=mask).to(tl.float32)
    if where is not None:
        g = tl.where(tl.load(where), g, average)
    step = g - average
    average = g - step * momentum if NEAR_GRADIENT else average + step * rest
    tl.store(momentum_buffer, average.to(momentum_buffer.dtype.element_ty), mask=mask)
    tl.store(gradient, g * rest + average * momentum if NESTEROV else average, mask=mask)


@triton.jit(do_not_specialize=["numel"])
def advance_momentum(
    gradient, momentum_buffer, where, numel, momentum, rest,
    NEAR_GRADIENT: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``rest`` is 1 - momentum, NEAR_GRADIENT whether momentum < 0.5. ``where``: a bool scalar, or None."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    gradient += start + offsets
    momentum_buffer += start + offsets
    # A mask that ends anywhere would have every block read element by element.
    if start + BLOCK <= numel:
        _advance(gradient, momentum_buffer, where, None, momentum, rest, NEAR_GRADIENT, NESTEROV)
    else:
        mask = offsets < numel - start
        _advance(gradient, momentum_buffer, where, mask, momentum, rest, NEAR_GRADIENT, NESTEROV)


@triton.jit
def _apply(weight, update, mask, lr, decay, DECAYS: tl.constexpr):
    w = tl.load(weight, mask=mask)
    if DECAYS:
        w *= decay
    tl.store(weight, w - tl.load(update, mask=mask) * lr, mask=mask)


@triton.jit(do_not_specialize=["numel"])
def apply_update(weight, update, numel, lr, decay, DECAYS: tl.constexpr, BLOCK: tl.constexpr):
    """``decay`` is what the weight is multiplied with, if DECAYS."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    weight += start + offsets
    update += start + offsets
    if start + BLOCK <= numel:
        _apply(weight, update, None, lr, decay, DECAYS)
    else:
        _apply(weight, update, offsets < numel - start, lr, decay, DECAYS)


@triton.jit(do_not_specialize=["tile_cols", "tiles"])
def store_updates(
    outputs, targets, factors, tiles, tile_cols, rows, cols, scale, batch_stride, row_stride, col_stride,
    ALIGNED: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """One program per SIDE x SIDE tile, ``tiles`` of them in a matrix: what lies transposed is turned in between.

    ``outputs``: (batch, rows, cols), any strides. ``targets``: addresses of contiguous fp32 matrices, ALIGNED to 16
    bytes. ``factors``: (batch, rows), or None.
    """
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = tile // tile_cols * SIDE + tl.arange(0, SIDE)
    col = tile % tile_cols * SIDE + tl.arange(0, SIDE)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    wide_row, wide_col = row.to(tl.int64)[:, None], col.to(tl.int64)[None, :]
    x = tl.load(outputs + matrix * batch_stride + wide_row * row_stride + wide_col * col_stride, mask=inside)
    x = x.to(tl.float32)
    if factors is not None:
        x *= tl.load(factors + matrix * rows + row, mask=row < rows)[:, None]
    target = tl.load(targets + matrix).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    tl.store(target + wide_row * cols + wide_col, x * scale, mask=inside)


@triton.jit(do_not_specialize=["numel"])
def sums_of_squares(x, sums, numel, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of squares, in fp64, of every SPAN elements: in an order that no number of programs changes."""
    start = tl.program_id(0).to(tl.int64) * SPAN
    offsets = tl.arange(0, BLOCK)
    x += start + offsets
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    # The square of an fp32 number is exact in fp64, and far inside its range.
    if start + SPAN <= numel:
        for first in range(0, SPAN, BLOCK):
            value = tl.load(x + first).to(tl.float64)
            total += value * value
    else:
        for first in range(0, SPAN, BLOCK):
            value = tl.load(x + first, mask=offsets < numel - start - first, other=0.0).to(tl.float64)
            total += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total))
