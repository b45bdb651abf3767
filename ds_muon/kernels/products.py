"""The Triton kernels: ``out = alpha A B + beta C + identity I`` for a batch of matrices, in two ways to reach memory.

``matmul_descriptors`` and ``matmul_quarters`` move tiles with the TMA unit of Hopper GPUs; ``matmul_pointers`` loads
and stores through masked pointers and runs on every GPU. All accumulate in fp32, walk K upwards in one piece, and end
in the same expression, so that neither the tile nor the batch changes a bit of the result.

A symmetric product computes the tiles that hold something on or below the diagonal, and stores what lies below
transposed as well. Squares of 128 x 128 (or the tile's height) on the diagonal are stored as they come out: A B of
commuting matrices is symmetric there but for its rounding.

Shapes: A is (batch, m, k), B is (batch, k, n), C and out are (batch, m, n) with contiguous rows. Only symmetric
products have a C and an identity.
"""

# Kernels are Triton, not Python with types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _triangle(index, RATIO: tl.constexpr):
    """Row and column of tile ``index`` where row ``r = 0, 1, ...`` holds ``r // RATIO + 1`` tiles, row by row."""
    # RATIO p (p + 1) / 2 tiles lie above band p of RATIO rows. The square root is approximate: settle it in integers.
    band = ((tl.sqrt(index.to(tl.float32) * (8.0 / RATIO) + 1.0) - 1.0) * 0.5).to(tl.int32)
    band = tl.where(RATIO * band * (band + 1) // 2 > index, band - 1, band)
    band = tl.where(RATIO * (band + 1) * (band + 2) // 2 <= index, band + 1, band)
    rest = index - RATIO * band * (band + 1) // 2
    return band * RATIO + rest // (band + 1), rest % (band + 1)


@triton.jit
def _position(index, tile_rows, tile_cols, RATIO: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Row and column of tile ``index``: GROUP rows at a time, column by column: neighbours share operands in L2.

    Of a symmetric product only tiles with something on or below the diagonal count. RATIO is tile width over height.
    """
    if SYMMETRIC:
        row, _ = _triangle(index, RATIO)
        first = row // GROUP * GROUP
        height = tl.minimum(tile_rows - first, GROUP)
        # A group is a rectangle of whole columns, then the triangle at the diagonal.
        width = first // RATIO
        index -= first * (width + 1) // 2
        corner_row, corner_col = _triangle(tl.maximum(index - width * height, 0), RATIO)
        row = tl.where(index < width * height, index % height, corner_row)
        col = tl.where(index < width * height, index // height, width + corner_col)
    else:
        first = index // (GROUP * tile_cols) * GROUP
        height = tl.minimum(tile_rows - first, GROUP)
        index -= first * tile_cols
        row = index % height
        col = index // height
    return first + row, col


@triton.jit
def _blend(acc, c, alpha, beta):
    """``alpha acc + beta c`` in fp32. Spelled out: left to the compiler, the fusion could differ between kernels."""
    return tl.fma(c.to(tl.float32), beta, acc * alpha)


@triton.jit
def _add_identity(acc, row, col, identity):
    """The block ``acc``, which starts at (row, col), plus ``identity`` on the diagonal of the matrix."""
    rows = row + tl.arange(0, acc.shape[0])
    cols = col + tl.arange(0, acc.shape[1])
    return tl.where(rows[:, None] == cols[None, :], acc + identity, acc)


@triton.jit
def _halves(x):
    """Left and right half of the columns. The columns of an accumulator lie in registers: nothing moves."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _load(desc, matrix, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The (ROWS, COLS) block at (row, col). TRANSPOSED: the storage that ``desc`` describes holds the transpose."""
    if TRANSPOSED:
        return tl.trans(tl.reshape(desc.load([matrix, col, row]), (COLS, ROWS)))
    else:
        return tl.reshape(desc.load([matrix, row, col]), (ROWS, COLS))


@triton.jit
def _store_slice(desc, x, matrix, row, col, FIRST: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Columns FIRST and on of a square that starts at (row, col) of the storage, or of its transpose."""
    if TRANSPOSED:
        desc.store([matrix, row + FIRST, col], tl.reshape(tl.trans(x), (1, x.shape[1], x.shape[0])))
    else:
        desc.store([matrix, row, col + FIRST], tl.reshape(x, (1, x.shape[0], x.shape[1])))


@triton.jit
def _store(desc, x, matrix, row, col, PIECES: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Store the square ``x``, or its transpose, at (row, col) of the storage, in 1 or 4 slices of its columns."""
    if PIECES == 1:
        _store_slice(desc, x, matrix, row, col, 0, TRANSPOSED)
    else:
        tl.static_assert(PIECES == 4)
        width: tl.constexpr = x.shape[1] // 4
        left, right = _halves(x)
        one, two = _halves(left)
        three, four = _halves(right)
        _store_slice(desc, one, matrix, row, col, 0, TRANSPOSED)
        _store_slice(desc, two, matrix, row, col, width, TRANSPOSED)
        _store_slice(desc, three, matrix, row, col, 2 * width, TRANSPOSED)
        _store_slice(desc, four, matrix, row, col, 3 * width, TRANSPOSED)


@triton.jit
def _multiply(
    a, b, matrix, row, col, k,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """(ROWS, COLS) of A B in fp32, from element (row, col)."""
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for step in range(tl.cdiv(k, DEPTH)):
        x = _load(a, matrix, row, step * DEPTH, ROWS, DEPTH, A_TRANSPOSED)
        y = _load(b, matrix, step * DEPTH, col, DEPTH, COLS, B_TRANSPOSED)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def _finish(
    acc, c, out, mirror, matrix, row, col, stored, mirrored, alpha, beta, identity,
    PIECES: tl.constexpr, SYMMETRIC: tl.constexpr, HAS_C: tl.constexpr,
):  # fmt: skip
    """Blend with C and store one square block of the accumulator, whose first element is (row, col).

    Of a symmetric product it goes to columns ``stored`` and on, and its transpose to columns ``mirrored`` and on: a
    multiple of the block beyond the last column makes the hardware drop it. A branch would keep Triton 3.6 from
    flattening the loop.
    """
    if HAS_C:
        acc = _blend(acc, _load(c, matrix, row, col, acc.shape[0], acc.shape[1], False), alpha, beta)
        acc = _add_identity(acc, row, col, identity)
    x = acc.to(out.dtype)
    if SYMMETRIC:
        _store(out, x, matrix, row, stored, PIECES, False)
        _store(mirror, x, matrix, col, mirrored, PIECES, True)
    else:
        _store(out, x, matrix, row, col, PIECES, False)


@triton.jit(do_not_specialize=["batch", "tiles", "m", "n", "k"])
def matmul_descriptors(
    a, b, c, out, mirror, batch, tiles, m, n, k, alpha, beta, identity,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr,
    FLATTEN: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    SYMMETRIC: tl.constexpr, HAS_C: tl.constexpr,
):  # fmt: skip
    """Persistent: program p works on tiles p, p + programs, ... of all ``batch * tiles`` tiles.

    ``a``, ``b``, ``c``, ``out`` and ``mirror`` are descriptors with exact bounds per matrix, so no ragged side needs a
    mask. ``out`` and ``mirror`` describe the same storage; their blocks are a slice of a square and its transpose.
    FLATTEN makes one loop of the tiles and of K, which loads the next tile while this one is being stored.
    """
    tl.static_assert(COLS == ROWS or COLS == 2 * ROWS)
    tile_rows = tl.cdiv(m, ROWS)
    tile_cols = tl.cdiv(n, COLS)
    end = tl.cdiv(n, ROWS) * ROWS
    start = tl.program_id(0)
    programs = tl.num_programs(0)
    # The epilogue counts its tiles itself: it must not hold back the loads of the next tile.
    finished = start - programs
    for index in tl.range(start, batch * tiles, programs, flatten=FLATTEN):
        matrix = index // tiles
        row, col = _position(index % tiles, tile_rows, tile_cols, COLS // ROWS, GROUP, SYMMETRIC)
        acc = _multiply(a, b, matrix, row * ROWS, col * COLS, k, ROWS, COLS, DEPTH, A_TRANSPOSED, B_TRANSPOSED)
        finished += programs
        matrix = finished // tiles
        row, col = _position(finished % tiles, tile_rows, tile_cols, COLS // ROWS, GROUP, SYMMETRIC)
        row *= ROWS
        col *= COLS
        mirrored = tl.where(col < row, row, end)
        if COLS == ROWS:
            _finish(
                acc, c, out, mirror, matrix, row, col, col, mirrored, alpha, beta, identity, PIECES, SYMMETRIC, HAS_C
            )
        else:
            left, right = _halves(acc)
            _finish(
                left, c, out, mirror, matrix, row, col, col, mirrored, alpha, beta, identity, PIECES, SYMMETRIC, HAS_C
            )
            col += ROWS
            # What a wide tile holds above the diagonal belongs to another tile.
            stored = tl.where(col <= row, col, end)
            mirrored = tl.where(col < row, row, end)
            _finish(
                right, c, out, mirror, matrix, row, col, stored, mirrored, alpha, beta, identity,
                PIECES, SYMMETRIC, HAS_C,
            )  # fmt: skip


@triton.jit(do_not_specialize=["whole", "tiles", "m", "k"])
def matmul_quarters(
    a, b, c, out, mirror, a_half, b_half, c_half, out_half, whole, tiles, m, k, alpha, beta, identity,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, HAS_C: tl.constexpr,
):  # fmt: skip
    """A symmetric product in square tiles: one program for each of the first ``whole``, four for each of the rest.

    For few matrices: where every multiprocessor has a tile and a few have a second, the quarters of those few spread
    over the others. The descriptors named ``half`` are those of blocks half as wide and high, stores included.
    """
    HALF: tl.constexpr = SIDE // 2
    program = tl.program_id(0)
    beyond = tl.maximum(program - whole, 0)
    index = tl.minimum(program, whole) + beyond // 4
    side = tl.cdiv(m, SIDE)
    row, col = _position(index % tiles, side, side, 1, GROUP, True)
    matrix = index // tiles
    row *= SIDE
    col *= SIDE
    below = col < row
    end = side * SIDE
    if program < whole:
        acc = _multiply(a, b, matrix, row, col, k, SIDE, SIDE, DEPTH, A_TRANSPOSED, B_TRANSPOSED)
        mirrored = tl.where(below, row, end)
        _finish(acc, c, out, mirror, matrix, row, col, col, mirrored, alpha, beta, identity, PIECES, True, HAS_C)
    else:
        row += beyond % 4 // 2 * HALF
        col += beyond % 2 * HALF
        part = _multiply(a_half, b_half, matrix, row, col, k, HALF, HALF, DEPTH, A_TRANSPOSED, B_TRANSPOSED)
        mirrored = tl.where(below, row, end)
        _finish(
            part, c_half, out_half, out_half, matrix, row, col, col, mirrored, alpha, beta, identity, 1, True, HAS_C
        )


@triton.jit(do_not_specialize=["tiles"])
def matmul_pointers(
    a, b, c, out, tiles, m, n, k, alpha, beta, identity,
    a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row, out_batch, out_row,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr, HAS_C: tl.constexpr,
):  # fmt: skip
    """One program per tile. A and B have any strides, in elements; rows of C and out are contiguous."""
    index = tl.program_id(0)
    # A batch may span more than 2^31 elements.
    matrix = (index // tiles).to(tl.int64)
    row, col = _position(index % tiles, tl.cdiv(m, ROWS), tl.cdiv(n, COLS), COLS // ROWS, GROUP, SYMMETRIC)
    first_row = row.to(tl.int64) * ROWS
    first_col = col.to(tl.int64) * COLS
    rows = tl.arange(0, ROWS).to(tl.int64)
    cols = tl.arange(0, COLS).to(tl.int64)
    depth = tl.arange(0, DEPTH).to(tl.int64)
    in_rows = rows < m - first_row
    in_cols = cols < n - first_col

    a += matrix * a_batch + first_row * a_row
    b += matrix * b_batch + first_col * b_col
    a_offsets = rows[:, None] * a_row + depth[None, :] * a_col
    b_offsets = depth[:, None] * b_row + cols[None, :] * b_col
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for step in range(tl.cdiv(k, DEPTH)):
        in_depth = depth < k - step * DEPTH
        x = tl.load(a + a_offsets, mask=in_rows[:, None] & in_depth[None, :], other=0.0)
        y = tl.load(b + b_offsets, mask=in_depth[:, None] & in_cols[None, :], other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        a += DEPTH * a_col
        b += DEPTH * b_row

    inside = in_rows[:, None] & in_cols[None, :]
    if HAS_C:
        c += matrix * c_batch + first_row * c_row + first_col
        acc = _blend(acc, tl.load(c + rows[:, None] * c_row + cols[None, :], mask=inside, other=0.0), alpha, beta)
        acc = _add_identity(acc, first_row, first_col, identity)
    x = acc.to(out.dtype.element_ty)
    out += matrix * out_batch
    if SYMMETRIC:
        tl.static_assert(COLS == ROWS)
        if row != col:
            mirrored = out + first_col * out_row + first_row
            offsets = cols[:, None] * out_row + rows[None, :]
            tl.store(mirrored + offsets, tl.trans(x), mask=in_cols[:, None] & in_rows[None, :])
    out += first_row * out_row + first_col
    tl.store(out + rows[:, None] * out_row + cols[None, :], x, mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def affine(
    r, out, tiles, m, beta, identity, r_batch, r_row, r_col, out_batch, out_row,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``out = beta R + identity I``, one program per tile. R has any strides; rows of ``out`` are contiguous.

    To be launched without fusion of operations: the product is rounded to fp32 before the sum is.
    """
    index = tl.program_id(0)
    matrix = (index // tiles).to(tl.int64)
    tile_cols = tl.cdiv(m, COLS)
    first_row = (index % tiles // tile_cols).to(tl.int64) * ROWS
    first_col = (index % tiles % tile_cols).to(tl.int64) * COLS
    rows = first_row + tl.arange(0, ROWS)
    cols = first_col + tl.arange(0, COLS)
    inside = (rows < m)[:, None] & (cols < m)[None, :]
    x = tl.load(r + matrix * r_batch + rows[:, None] * r_row + cols[None, :] * r_col, mask=inside, other=0.0)
    w = _add_identity(x.to(tl.float32) * beta, first_row, first_col, identity)
    tl.store(
        out + matrix * out_batch + rows[:, None] * out_row + cols[None, :], w.to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _matrix_and_part(pointers, index, parts, ALIGNED: tl.constexpr):
    """Number, first element and part of the matrix that program ``index`` works on."""
    matrix = index // parts
    x = tl.load(pointers + matrix).to(tl.pointer_type(tl.float32))
    return matrix, tl.multiple_of(x, 16) if ALIGNED else x, index % parts


# What programs read and write one by one may be aligned or not where a sub-batch begins: no reason to compile twice.
@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["pointers", "largest", "squares"])
def measure(
    pointers, largest, squares, numel, parts, part_size, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Largest magnitude and, in fp64, sum of squares of each of the ``parts`` parts of every matrix.

    ``pointers``: addresses of fp32 matrices of ``numel`` elements each. ``largest`` and ``squares`` are (batch, parts).
    """
    matrix, x, part = _matrix_and_part(pointers, tl.program_id(0), parts, ALIGNED)
    start = part.to(tl.int64) * part_size
    magnitude = tl.zeros((BLOCK,), dtype=tl.float32)
    square = tl.zeros((BLOCK,), dtype=tl.float64)
    for step in range(0, part_size, BLOCK):
        offsets = start + step + tl.arange(0, BLOCK)
        value = tl.load(x + offsets, mask=offsets < numel, other=0.0)
        magnitude = tl.maximum(magnitude, tl.abs(value))
        # Squares of fp32 are far inside the range of fp64.
        square += value.to(tl.float64) * value.to(tl.float64)
    tl.store(largest + matrix * parts + part, tl.max(magnitude))
    tl.store(squares + matrix * parts + part, tl.sum(square))


@triton.jit(do_not_specialize_on_alignment=["factors"])
def combine(largest, squares, factors, eps, PARTS: tl.constexpr):
    """Write the inverse of each matrix's largest magnitude, and of its norm after that division, to ``factors``."""
    matrix = tl.program_id(0)
    parts = matrix * PARTS + tl.arange(0, PARTS)
    tiny = 1.1754943508222875e-38
    magnitude = tl.maximum(tl.max(tl.load(largest + parts)), tiny)
    norm = (tl.sqrt(tl.sum(tl.load(squares + parts))) / magnitude.to(tl.float64)).to(tl.float32)
    # A NaN must not be taken for zero: the sum holds it, where a maximum may drop it.
    norm = tl.maximum(norm, eps, propagate_nan=tl.PropagateNan.ALL)
    # In range, for tiny is at most what both are; that of the largest numbers is subnormal and still good to 21 bits.
    tl.store(factors + 2 * matrix, (1.0 / magnitude.to(tl.float64)).to(tl.float32))
    tl.store(factors + 2 * matrix + 1, (1.0 / norm.to(tl.float64)).to(tl.float32))


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["pointers", "factors"])
def scale(
    pointers, factors, out, numel, parts, part_size, rows, cols, pitch,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Write every matrix, times both its ``factors``, to ``out``: (batch, rows, pitch). DENSE: that is ``cols``."""
    # From the end: what ``measure`` read last is still in L2.
    matrix, x, part = _matrix_and_part(pointers, tl.num_programs(0) - 1 - tl.program_id(0), parts, ALIGNED)
    first = tl.load(factors + 2 * matrix)
    second = tl.load(factors + 2 * matrix + 1)
    out += matrix.to(tl.int64) * rows * pitch
    start = part.to(tl.int64) * part_size
    for step in range(0, part_size, BLOCK):
        offsets = start + step + tl.arange(0, BLOCK)
        inside = offsets < numel
        value = tl.load(x + offsets, mask=inside, other=0.0) * first * second
        target = offsets if DENSE else offsets // cols * pitch + offsets % cols
        tl.store(out + target, value.to(out.dtype.element_ty), mask=inside)
