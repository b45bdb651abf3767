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
def _flags(where, bounds, of_block, table, labels, offsets):
    """One flag, or if there are ``bounds`` of segments one for each element of a block, by the segment it lies in.

    ``table`` and ``labels``: of ``Striped``, where segments hold matrices in strips; or None.
    """
    if bounds is None:
        flags = tl.load(where)
    else:
        # Most blocks lie in one segment: then nothing is walked through.
        first = tl.load(of_block + tl.program_id(0))
        last = tl.load(of_block + tl.program_id(0) + 1)
        flags = _of_segment(where, table, labels, first, offsets)
        for segment in range(first + 1, last + 1):
            here = _of_segment(where, table, labels, segment, offsets)
            flags = tl.where(offsets >= tl.load(bounds + segment), here, flags)
    return flags


@triton.jit
def _of_segment(where, table, labels, segment, offsets):
    """What the flags of a block are, if all its elements are of this segment."""
    if table is None:
        flags = tl.load(where + segment) & (offsets >= 0)
    else:
        side = tl.load(table + 4 * segment + 2).to(tl.int32)
        first = tl.load(table + 4 * segment + 3)
        if side == 1:
            flags = tl.load(where + tl.load(labels + first)) & (offsets >= 0)
        else:
            # Divisions of every element are dear in 64 bits: of the first one alone, and of the rest in 32.
            block = tl.program_id(0).to(tl.int64) * offsets.shape[0]
            begin = block + tl.load(table + 4 * segment)
            inner = tl.load(table + 4 * segment + 1)
            start = tl.maximum(begin, 0)
            row = (start // inner % side).to(tl.int32)
            ahead = (offsets - block + tl.minimum(begin, 0)).to(tl.int32)
            within = (start % inner).to(tl.int32) + tl.maximum(ahead, 0)
            flags = tl.load(where + tl.load(labels + first + (row + within // inner.to(tl.int32)) % side))
    return flags


@triton.jit
def _advance(
    gradient, momentum_buffer, where, bounds, of_block, table, labels, offsets, mask, momentum, rest,
    NEAR_GRADIENT: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    g = tl.load(gradient, mask=mask)
    before = tl.load(momentum_buffer, mask=mask).to(tl.float32)
    step = g - before
    average = g - step * momentum if NEAR_GRADIENT else before + step * rest
    u = g * rest + average * momentum if NESTEROV else average
    if where is not None:
        # Behind the loads above, which are under way meanwhile.
        moves = _flags(where, bounds, of_block, table, labels, offsets)
        average = tl.where(moves, average, before)
        u = tl.where(moves, u, 0.0)
    tl.store(momentum_buffer, average.to(momentum_buffer.dtype.element_ty), mask=mask)
    tl.store(gradient, u, mask=mask)


@triton.jit(do_not_specialize=["numel"])
def advance_momentum(
    gradient, momentum_buffer, where, bounds, of_block, table, labels, numel, momentum, rest,
    NEAR_GRADIENT: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``rest`` is 1 - momentum, NEAR_GRADIENT whether momentum < 0.5.

    ``where``: a bool scalar, or a flag for each matrix, with the tables of ``Segments``; or None.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    block = tl.arange(0, BLOCK)
    gradient += start + block
    momentum_buffer += start + block
    # A mask that ends anywhere would have every block read element by element.
    if start + BLOCK <= numel:
        _advance(
            gradient, momentum_buffer, where, bounds, of_block, table, labels, start + block, None, momentum, rest,
            NEAR_GRADIENT, NESTEROV,
        )  # fmt: skip
    else:
        _advance(
            gradient, momentum_buffer, where, bounds, of_block, table, labels, start + block, block < numel - start,
            momentum, rest, NEAR_GRADIENT, NESTEROV,
        )  # fmt: skip


@triton.jit
def _apply(weight, update, where, bounds, of_block, table, labels, offsets, mask, lr, decay, DECAYS: tl.constexpr):
    w = tl.load(weight, mask=mask)
    change = tl.load(update, mask=mask) * lr
    if DECAYS:
        decayed = w * decay
        w = decayed if where is None else tl.where(_flags(where, bounds, of_block, table, labels, offsets), decayed, w)
    tl.store(weight, w - change, mask=mask)


@triton.jit(do_not_specialize=["numel"])
def apply_update(
    weight, update, where, bounds, of_block, table, labels, numel, lr, decay, DECAYS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``decay`` is what the weight is multiplied with, if DECAYS: ``where`` is true, as in ``advance_momentum``."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    block = tl.arange(0, BLOCK)
    weight += start + block
    update += start + block
    if start + BLOCK <= numel:
        _apply(weight, update, where, bounds, of_block, table, labels, start + block, None, lr, decay, DECAYS)
    else:
        _apply(
            weight,
            update,
            where,
            bounds,
            of_block,
            table,
            labels,
            start + block,
            block < numel - start,
            lr,
            decay,
            DECAYS,
        )


@triton.jit(do_not_specialize=["tile_cols", "tiles"])
def store_updates(
    outputs, targets, factors, tiles, tile_cols, rows, cols, scale, batch_stride, row_stride, col_stride,
    OF_ROWS: tl.constexpr, ALIGNED: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """One program per SIDE x SIDE tile, ``tiles`` of them in a matrix: what lies transposed is turned in between.

    ``outputs``: (batch, rows, cols), any strides. ``targets``: addresses of contiguous fp32 matrices, ALIGNED to 16
    bytes. ``factors``: (batch, rows) if OF_ROWS, else (batch, cols); or None.
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
        if OF_ROWS:
            x *= tl.load(factors + matrix * rows + row, mask=row < rows)[:, None]
        else:
            x *= tl.load(factors + matrix * cols + col, mask=col < cols)[None, :]
    target = tl.load(targets + matrix).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    tl.store(target + wide_row * cols + wide_col, x * scale, mask=inside)


@triton.jit(do_not_specialize=["numel"])
def sums_of_squares(x, pieces, sums, numel, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of squares, in fp64, of every piece: in an order that no number of programs changes.

    ``pieces``: where they begin, all multiples of SPAN among them, and the end of the last; or None for whole SPANs.
    """
    if pieces is None:
        begin = tl.program_id(0).to(tl.int64) * SPAN
        end = tl.minimum(begin + SPAN, numel)
    else:
        begin = tl.load(pieces + tl.program_id(0))
        end = tl.load(pieces + tl.program_id(0) + 1)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    # Where the block lies that holds the first element: so all are read from aligned addresses.
    start = begin // BLOCK * BLOCK
    x += start + offsets
    # The square of an fp32 number is exact in fp64, and far inside its range.
    if end - begin == SPAN:
        for first in range(0, SPAN, BLOCK):
            value = tl.load(x + first).to(tl.float64)
            total += value * value
    else:
        for read in range(0, end - start, BLOCK):
            if (start + read >= begin) & (start + read + BLOCK <= end):
                value = tl.load(x + read).to(tl.float64)
            else:
                inside = (offsets >= begin - start - read) & (offsets < end - start - read)
                value = tl.load(x + read, mask=inside, other=0.0).to(tl.float64)
            total += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit
def sums_of_segments(sums, first_pieces, totals, BLOCK: tl.constexpr):
    """One program for each segment: the sum of those of its pieces, which lie side by side."""
    first = tl.load(first_pieces + tl.program_id(0))
    end = tl.load(first_pieces + tl.program_id(0) + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(first, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.load(sums + index, mask=index < end, other=0.0)
    tl.store(totals + tl.program_id(0), tl.sum(total))
