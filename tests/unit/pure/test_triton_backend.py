"""The Triton kernels against fp64: every operation, both ways to memory, ragged and transposed operands; the tiles."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_muon.orthogonalize import NewtonSchulz, schedule, torch_backend
from tests.unit.support.cases import in_turns, some
from tests.unit.support.triton_tiles import (
    CASES,
    DEVICE,
    DTYPES,
    GPU,
    ONE_DTYPE,
    QUARTERS,
    SMALL,
    TILES,
    WIDE,
    Tile,
    gaussian,
    interpreter,  # noqa: F401
    needs_hopper,
    triton_backend,
    unit,
)

choose_tile, matmul = triton_backend.choose_tile, triton_backend.matmul


def product(a: Tensor, b: Tensor, tile: Tile, out: Tensor | None = None) -> Tensor:
    """Plain products, which know no quarters: they are those of the small tile then, where others show them too."""
    return matmul(a, b, tile=TILES["small"] if tile.quarters else tile, out=out)


def commuting(batch: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two polynomials of one symmetric matrix, each equal to its transpose; the rounding of their product is not."""
    r = unit(batch, m, m, torch.float64, False)
    r = r @ r.mT
    first, second = ((c * r + r @ r).to(dtype) for c in (0.5, -0.7))
    return mirrored(first), mirrored(second)


def mirrored(x: Tensor, side: int = 1) -> Tensor:
    """What lies below squares of ``side`` on the diagonal, the same above them, and the squares as they are."""
    squares = torch.arange(x.shape[-1], device=x.device) // side
    row, col = squares[:, None], squares[None, :]
    zero = torch.zeros_like(x)
    below = torch.where(row > col, x, zero)
    return below + below.mT + torch.where(row == col, x, zero)


def assert_rounded(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    identity: float = 0.0,
    symmetric: int = 0,
) -> None:
    """``out`` is ``alpha a @ b + beta c + identity I``, summed in fp32 and rounded once; no worse than torch's product.

    ``symmetric``: operands commute but for their own rounding; what is above squares of this side on the diagonal is
    the transpose of what is below.
    """
    a64, b64, c64 = a.double(), b.double(), torch.zeros_like(out).double() if c is None else c.double()
    one = identity * torch.eye(*out.shape[1:], dtype=torch.float64, device=DEVICE)
    exact = alpha * (a64 @ b64) + beta * c64 + one
    torchs = torch.bmm(a, b) if c is None else torch.baddbmm(c, a, b, alpha=alpha, beta=beta) + one.to(a.dtype)
    magnitude = abs(alpha) * (a64.abs() @ b64.abs()) + abs(beta) * c64.abs() + one.abs()
    if symmetric:
        exact, torchs, magnitude = (mirrored(x, symmetric) for x in (exact, torchs, magnitude))
    eps, limits = torch.finfo(torch.float32).eps, torch.finfo(out.dtype)
    summed = (a.shape[-1] + 2) * eps * magnitude
    error = (out.double() - exact).abs()
    assert out.dtype == a.dtype and out.shape == exact.shape
    assert bool((error <= limits.eps / 2 * (exact.abs() + summed) + summed + limits.smallest_normal * limits.eps).all())
    # Half precision: rounding at the end hides the order of summation. In fp32 it shows: in the interpreter, whose
    # blocks the same kind of library multiplies, the error was at most 1.003 times torch's. On a GPU K is one chain of
    # sums, whose roundings add up at random, where a vendor may cut it in pieces: there no tighter bound was measured.
    factor, chain = 1.01, 1.0
    if out.dtype == torch.float32:
        factor, chain = (4, math.sqrt(a.shape[-1])) if GPU else (1.1, 0.1)
    allowed = factor * float((torchs.double() - exact).norm()) + chain * eps * float(exact.norm())
    assert float(error.norm()) <= allowed


# Blocks and addresses are a matter of the kernel, and the wide tile runs the one of the small tile.
OF_EACH_KERNEL = [
    pytest.param(*case.values, id=case.id, marks=[pytest.mark.full] if case.id.startswith("small") else [])
    for case in ONE_DTYPE
]

# ---- single operations ----------------------------------------------------------------------------------------------

# Small blocks need small matrices to be many.
SHAPES = [(1, 1, 1), (2, 15, 15), (1, 16, 16), (3, 17, 17)]  # squares
SHAPES += [(1, 127, 127), (1, 129, 129), (2, 1024, 1024)] if GPU else [(1, 63, 63), (1, 65, 65)]
SHAPES += [(2, 1, 17), (3, 13, 31), (1, 61, 67)]
SHAPES += [(1, 16, 1024), (33, 5, 7), (33, 257, 300), (3, 1000, 1003)] if GPU else [(1, 16, 200), (5, 5, 7)]


WAYS = {
    f"{case.id}-{'tall' if tall else 'wide'}": (*case.values, tall)
    for cases, tall in ((CASES, False), (ONE_DTYPE, True))
    for case in cases
}


# Each way at a ragged matrix of several blocks, and the shapes in turns.
@some(
    [*dict.fromkeys([*((way, (1, 61, 67)) for way in WAYS), *zip(itertools.cycle(WAYS), SHAPES, strict=False)])],
    way=[*WAYS],
    shape=SHAPES,
)
def test_operations_match_fp64(way: str, shape: tuple[int, int, int]) -> None:
    (tile, dtype, tall), (batch, m, n) = WAYS[way], shape
    x = unit(batch, m, n, dtype, tall)
    r = matmul(x, x.mT, symmetric=True, tile=tile)
    assert_rounded(r, x, x.mT)
    assert torch.equal(r, mirrored(r, tile.rows))
    w = matmul(r, r, r, alpha=2.0315, beta=-4.775, identity=3.4445, symmetric=True, tile=tile)
    assert_rounded(w, r, r, r, alpha=2.0315, beta=-4.775, identity=3.4445, symmetric=tile.rows)
    assert torch.equal(w, mirrored(w, tile.rows))
    p = product(w, x, tile)
    assert_rounded(p, w, x)
    # A transposed matrix stays so: nothing is copied on the way through an iteration.
    if min(m, n) > 1:
        assert (p.mT if tall else p).stride(2) == 1
    for memory in (
        triton_backend._empty(batch, m, n, dtype, DEVICE),
        triton_backend._empty(batch, n, m, dtype, DEVICE).mT,
    ):
        assert product(w, x, tile, out=memory).data_ptr() == memory.data_ptr()
        assert_rounded(memory, w, x)


@some(
    [*((case.id, 67 if GPU else 35) for case in CASES), (CASES[0].id, 1), (CASES[-1].id, 16)],
    case=[case.id for case in CASES],
    m=[1, 16, 35, 67, *((129, 1000, 2048) if GPU else ())],
)
def test_symmetric_results_equal_their_transpose_beyond_the_squares_on_the_diagonal(case: str, m: int) -> None:
    tile, dtype = next(other.values for other in CASES if other.id == case)
    r, z = commuting(2, m, dtype)
    for c in (r, r.mT):
        t = matmul(r, z, c, alpha=1.5, beta=-0.3, identity=-0.7, symmetric=True, tile=tile)
        assert torch.equal(t, mirrored(t, tile.rows))
        assert_rounded(t, r, z, r, alpha=1.5, beta=-0.3, identity=-0.7, symmetric=tile.rows)
    t = matmul(r, z, symmetric=True, tile=tile)
    assert torch.equal(t, mirrored(t, tile.rows))
    assert_rounded(t, r, z, symmetric=tile.rows)


@pytest.mark.parametrize(("tile", "dtype"), OF_EACH_KERNEL)
def test_blocks_are_visited_once_each_in_every_group(
    tile: Tile, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More rows of blocks than are worked on together, the last group ragged, in a batch.
    if not GPU:  # where as many as are shipped are slow
        monkeypatch.setattr(triton_backend, "_GROUP", 4)  # a multiple of cols / rows
    x = unit(2, (triton_backend._GROUP + 2) * tile.rows - 3, 16, dtype, False)
    r = matmul(x, x.mT, symmetric=True, tile=tile)
    assert torch.equal(r, mirrored(r, tile.rows))
    assert_rounded(r, x, x.mT)
    if not tile.quarters:
        y = unit(2, 16, 3 * tile.cols + 1, dtype, False)
        assert_rounded(product(x, y, tile), x, y)


@pytest.mark.parametrize(("tile", "dtype"), OF_EACH_KERNEL)
def test_nothing_outside_a_matrix_reaches_the_result(tile: Tile, dtype: torch.dtype) -> None:
    for rows, cols, pitch in [(17, 23, 40), (17, 23, 37), (40, 24, 24)]:
        batch = 3 if GPU else 2
        buffer = torch.full((batch, rows + 5, pitch), float("nan"), dtype=dtype, device=DEVICE)
        x = buffer[:, 2 : rows + 2, :cols]
        x.copy_(unit(batch, rows, cols, dtype, False))
        for operand in (x, x.mT):
            r = matmul(operand, operand.mT, symmetric=True, tile=tile)
            assert torch.equal(r, matmul(operand.clone(), operand.mT.clone(), symmetric=True, tile=tile))
            assert_rounded(product(r, operand, tile), r, operand)


@pytest.mark.parametrize(("tile", "dtype"), OF_EACH_KERNEL)
def test_any_strides_are_read(tile: Tile, dtype: torch.dtype) -> None:
    x = unit(3, 34, 50, dtype, False) if GPU else unit(2, 12, 40, dtype, False)
    for view in (x[::2, ::2, ::2], x[:1].expand(3, -1, -1), x[1:, 1:, 1:], x[:, :, 3:].mT, x.permute(1, 0, 2)):
        y = view.mT
        assert_rounded(product(view, y, tile), view, y)
        r = matmul(view, y, symmetric=True, tile=tile)
        assert_rounded(product(r, view, tile), r, view)


@pytest.mark.parametrize(("tile", "dtype"), OF_EACH_KERNEL)
def test_no_operand_is_modified_and_no_batch_gives_no_result(tile: Tile, dtype: torch.dtype) -> None:
    x = unit(2, 17, 40, dtype, False)
    r = matmul(x, x.mT, symmetric=True, tile=tile)
    before = x.clone(), r.clone()
    matmul(r, r, r, alpha=2.0, beta=0.5, symmetric=True, tile=tile)
    product(r, x, tile)
    assert torch.equal(x, before[0]) and torch.equal(r, before[1])
    assert matmul(x[:0], x[:0].mT, symmetric=True, tile=tile).shape == (0, 17, 17)
    assert product(r[:0], x[:0], tile).shape == (0, 17, 40)


@pytest.mark.parametrize(("tile", "dtype"), OF_EACH_KERNEL)
def test_zero_gives_zero_and_nan_stays_in_its_matrix(tile: Tile, dtype: torch.dtype) -> None:
    x = unit(3, 33, 45, dtype, False)
    x[0] = 0
    x[1, 3, 4] = float("nan")
    r = matmul(x, x.mT, symmetric=True, tile=tile)
    p = product(r, x, tile)
    assert r[0].count_nonzero() == 0 and p[0].count_nonzero() == 0
    assert r[1].isnan().any() and p[1].isnan().any()
    assert r[2].isfinite().all() and p[2].isfinite().all()


@in_turns(m=[1, 17, 64, 130, *((1000, 1024) if GPU else ())], dtype=DTYPES)
def test_a_polynomial_without_a_product_is_the_plain_one_and_allocates_nothing(m: int, dtype: torch.dtype) -> None:
    a, b = 1.5, -0.5037
    x = unit(3, m, m + 7, dtype, False)
    r = triton_backend._empty(3, m, m, dtype, DEVICE).copy_(x @ x.mT)
    plain = torch.mul(r, b)
    plain.diagonal(dim1=-2, dim2=-1).copy_(r.diagonal(dim1=-2, dim2=-1).float() * b + a)
    out = triton_backend._empty(3, m, m, dtype, DEVICE).fill_(torch.nan)
    products = triton_backend.TritonProducts([out])
    for operand in (r, r.mT.contiguous().mT):
        made = Allocating({r.untyped_storage().data_ptr(), operand.untyped_storage().data_ptr(), out.data_ptr()})
        products.polynomial(operand, (a, b, 0.0))  # compiles
        with made:
            w = products.polynomial(operand, (a, b, 0.0))
        assert w.data_ptr() == out.data_ptr() and torch.equal(w, plain)
        assert made.others == []
    assert torch.equal(triton_backend.TritonProducts().polynomial(r, (a, b, 0.0)), plain)


class Allocating(TorchDispatchMode):
    """Notes torch's operations whose result lies in other memory than ``known``."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._known, self.others = known, list[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        # The interpreter makes empty tensors, to be put where an argument lies.
        if isinstance(result, Tensor) and result.numel() and result.untyped_storage().data_ptr() not in self._known:
            self.others.append(str(operation))
        return result


# ---- the result does not depend on the batch ------------------------------------------------------------------------


@in_turns(case=[case.id for case in ONE_DTYPE], tall=[False, True])
def test_a_result_does_not_depend_on_its_batch(case: str, tall: bool) -> None:
    tile, dtype = next(other.values for other in ONE_DTYPE if other.id == case)
    for m, n in [(17, 40), (48, 48), *(((16, 133), (300, 777), (1024, 1024), (128, 16384)) if GPU else ())]:
        x = unit(5 if GPU else 3, m, n, dtype, tall)
        r = matmul(x, x.mT, symmetric=True, tile=tile)
        p = None if tile.quarters else product(r, x, tile)
        for part in (slice(0, 1), slice(4, 5), slice(1, 4)) if GPU else (slice(0, 1), slice(1, 3)):
            alone = matmul(x[part], x[part].mT, symmetric=True, tile=tile)
            assert torch.equal(alone, r[part])
            assert p is None or torch.equal(product(alone, x[part], tile), p[part])


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiles_agree_bit_for_bit(dtype: torch.dtype) -> None:
    # choose_tile looks at the batch: only so may it.
    for m, n in [(17, 40), (300, 777), (1024, 1024), (512, 8192), (2048, 2048)]:
        for tall in (False, True):
            x = unit(2, m, n, dtype, tall)
            r, *others = (matmul(x, x.mT, symmetric=True, tile=tile) for tile in (SMALL, WIDE, QUARTERS))
            assert all(torch.equal(r, other) for other in others)
            scalars = {"alpha": 2.0315, "beta": -4.775, "identity": 3.4445}
            w, *others = (matmul(r, r, r, **scalars, symmetric=True, tile=tile) for tile in (SMALL, WIDE, QUARTERS))
            assert all(torch.equal(w, other) for other in others)
            t, *others = (matmul(w, r, symmetric=True, tile=tile) for tile in (SMALL, WIDE, QUARTERS))
            assert all(torch.equal(t, other) for other in others)
            small, wide = (matmul(w, x, tile=tile) for tile in (SMALL, WIDE))
            assert torch.equal(small, wide)


# ---- normalization --------------------------------------------------------------------------------------------------


def normalized(matrices: list[Tensor], dtype: torch.dtype, eps: float = 1e-15) -> Tensor:
    addresses = torch.tensor([matrix.data_ptr() for matrix in matrices], device=DEVICE)
    aligned = all(matrix.data_ptr() % 16 == 0 for matrix in matrices)
    layout = triton_backend._Layout(len(matrices), *matrices[0].shape, dtype, buffers=0)
    out, _, *sums = layout.tensors(torch.empty(layout.nbytes, dtype=torch.uint8, device=DEVICE))
    triton_backend.normalize(addresses, out, eps, sums, aligned=aligned)
    return out


def views(rows: int, cols: int, magnitude: float = 1.0) -> list[Tensor]:
    """Matrices in one buffer, at offsets of every alignment."""
    flat = gaussian(4 * rows * cols + 30) * magnitude
    return [flat[start : start + rows * cols].view(rows, cols) for start in (0, rows * cols + 1, 2 * rows * cols + 18)]


@in_turns(shape=[(1, 1), (17, 40), (16, 64), (129, 70), *(((1000, 3001), (4096, 4096)) if GPU else ())], dtype=DTYPES)
def test_normalize_is_the_plain_normalization(shape: tuple[int, int], dtype: torch.dtype) -> None:
    settings = NewtonSchulz(schedule("quintic", 5), "gram", dtype, 1e-15)
    for magnitude in (1.0, 1e-30, 1e25, 5e37, 1e-40, 1e-45, 0.0):
        matrices = views(*shape, magnitude)
        before = [matrix.clone() for matrix in matrices]
        out = normalized(matrices, dtype, settings.eps)
        plain = torch_backend.normalize(matrices, settings.dtype, settings.eps)
        assert out.shape == plain.shape and out.dtype == dtype and triton_backend._describable(out)
        # Factors instead of divisors, and a norm that may be rounded otherwise.
        limits = torch.finfo(dtype)
        error = (out.double() - plain.double()).abs()
        # The inverse of the largest numbers is subnormal.
        roundings = 4 if dtype == torch.float32 else 1
        assert bool((error <= roundings * limits.eps * (plain.double().abs() + limits.smallest_normal)).all())
        assert all(torch.equal(matrix, other) for matrix, other in zip(matrices, before, strict=True))
        for index, matrix in enumerate(matrices if GPU or magnitude in (1.0, 1e-40) else ()):
            alone = matrix.clone()
            assert torch.equal(normalized([alone], dtype, settings.eps)[0], out[index])


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_an_eps_zero_stays_zero(dtype: torch.dtype) -> None:
    assert normalized(views(17, 40, 0.0), dtype, eps=0.0).count_nonzero() == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_normalize_shows_what_is_not_finite_in_its_matrix_only(poison: float) -> None:
    matrices = views(17, 40)
    matrices[1][3, 4] = poison
    out = normalized(matrices, torch.float16)
    assert bool(out[1].isnan().all()) and bool(out[::2].isfinite().all())


# ---- large batches --------------------------------------------------------------------------------------------------


# On CPU memory that nobody touches costs nothing, but for address space; a GPU has to have it.
@pytest.mark.parametrize(("tile", "dtype"), OF_EACH_KERNEL)
def test_offsets_beyond_2_to_the_31_are_reached(tile: Tile, dtype: torch.dtype) -> None:
    m, n, gap = 40, 72 if GPU else 40, 1 << 30
    memory = torch.empty(2 * gap + m * n, dtype=dtype, device=DEVICE)

    def spread(rows: int, cols: int) -> Tensor:
        """Three matrices at 0, 2^30 and 2^31 elements."""
        return memory.as_strided((3, rows, cols), (gap, cols, 1))

    x = unit(3, m, n, dtype, False)
    for tall in (False, True):
        far = spread(n, m).mT if tall else spread(m, n)
        far.copy_(x)
        # As it lies there: what numpy multiplies for the interpreter depends on that.
        near = x.mT.contiguous().mT if tall else x
        r = matmul(far, far.mT, symmetric=True, tile=tile)
        assert torch.equal(r, matmul(near, near.mT, symmetric=True, tile=tile))
        assert tile.quarters or torch.equal(product(r, far, tile), product(r, near, tile))
    out = spread(m, m).zero_()
    multiply = triton_backend.multiply_descriptors if tile.descriptors else triton_backend.multiply_pointers
    multiply(near, near.mT, None, out, (1.0, 1.0, 0.0), True, tile)
    assert torch.equal(out, r)


def test_a_normalized_matrix_beyond_2_to_the_31_lies_where_it_should() -> None:
    batch, rows, cols, pitch = 3, 4, 8, 1 << 28
    memory = torch.empty((batch * rows - 1) * pitch + cols, dtype=torch.float16, device=DEVICE)
    out = memory.as_strided((batch, rows, cols), (rows * pitch, pitch, 1))
    matrices = [gaussian(rows, cols, seed=index) for index in range(batch)]
    addresses = torch.tensor([matrix.data_ptr() for matrix in matrices], device=DEVICE)
    layout = triton_backend._Layout(batch, rows, cols, torch.float16, buffers=0)
    _, _, *sums = layout.tensors(torch.empty(layout.nbytes, dtype=torch.uint8, device=DEVICE))
    triton_backend.normalize(addresses, out, 1e-15, sums)
    assert torch.equal(out, normalized(matrices, torch.float16))
