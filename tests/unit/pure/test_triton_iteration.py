"""Whole iterations by the Triton backend: against the reference, in any batch, through graphs, in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_muon.orthogonalize import (
    BACKENDS,
    COEFFICIENTS,
    NewtonSchulz,
    graphs,
    orthogonalize,
    orthogonalize_batch,
    reference_newton_schulz,
    schedule,
)
from tests.unit.support.cases import in_turns, some
from tests.unit.support.spectra import (
    HALF_BOUNDS,
    distance,
    half_bound,
    iteration_of,
    log_uniform,
    rank_deficient,
    rounded_input,
)
from tests.unit.support.triton_tiles import (
    DEVICE,
    DTYPES,
    GPU,
    by_torch,
    gaussian,
    interpreter,  # noqa: F401
    needs_gpu,
    triton_backend,
    unit,
)

# ---- whole iterations -----------------------------------------------------------------------------------------------

TOLERANCES = {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.06}


def iterate(x: Tensor, form: str) -> Tensor:
    wide = x.mT if x.shape[1] > x.shape[2] else x
    out = iteration_of(form, schedule("quintic", 5), x.dtype).run(wide, triton_backend.TritonProducts())
    return out.mT if x.shape[1] > x.shape[2] else out


@in_turns(form=["standard", "gram"], dtype=DTYPES)
def test_iterations_match_the_reference(form: str, dtype: torch.dtype) -> None:
    sides = [(15, 15), (31, 37), *(((67, 61), (16, 1024), (130, 40)) if GPU else ((40, 33),))]
    # The rounding of so few elements moves the norm, which the reference puts right.
    sides += [(1, 1), (2, 3)] if dtype == torch.float32 else []
    for rows, cols in [*sides, *(((1000, 1000), (512, 2050)) if GPU else ())]:
        x = unit(2, rows, cols, dtype, False)
        before = x.clone()
        out = iterate(x, form)
        assert torch.equal(x, before) and out.shape == x.shape and out.dtype == dtype
        for result, matrix in zip(out, x, strict=True):
            exact = reference_newton_schulz(matrix)
            assert (result.double() - exact).norm() <= TOLERANCES[dtype] * exact.norm(), (rows, cols)


@in_turns(form=["standard", "gram"], dtype=DTYPES)
def test_an_iteration_does_not_depend_on_the_batch(form: str, dtype: torch.dtype) -> None:
    for rows, cols in [(17, 40), *(((40, 17), (1024, 1024), (256, 2048), (1000, 500)) if GPU else ())]:
        # On a GPU enough matrices for choose_tile to change its mind.
        x = unit(30 if GPU else 2, rows, cols, dtype, False)
        out = iterate(x, form)
        for part in (slice(0, 1), slice(1, 3)):
            assert torch.equal(iterate(x[part], form), out[part])


# ---- through orthogonalize ------------------------------------------------------------------------------------------


def by_triton(dtype: torch.dtype, method: str = "gram", table: str = "quintic") -> NewtonSchulz:
    return NewtonSchulz(schedule(table), method, dtype, 1e-15, "triton")


@in_turns(method=["gram", "standard"], dtype=DTYPES[::-1])
def test_orthogonalize_is_the_reference_for_every_shape_in_any_company(method: str, dtype: torch.dtype) -> None:
    shapes = [(17, 40), (40, 17), (16, 16), (1, 9), (17, 40)]
    shapes += [(512, 512), (300, 777), (777, 300), (512, 512)] if GPU else []
    matrices = [gaussian(rows, cols, seed=index) for index, (rows, cols) in enumerate(shapes)]
    before = [matrix.clone() for matrix in matrices]
    tolerance = {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.06}[dtype]
    outputs = orthogonalize(matrices, by_triton(dtype, method))
    for index, (matrix, kept, output) in enumerate(zip(matrices, before, outputs, strict=True)):
        expected = reference_newton_schulz(matrix)
        assert output.shape == matrix.shape and output.dtype == dtype and torch.equal(matrix, kept)
        assert float((output.double() - expected).norm()) <= tolerance * float(expected.norm())
        if GPU or index < 2:  # one with another of its shape, and a tall one
            assert torch.equal(orthogonalize([matrix], by_triton(dtype, method))[0], output)


HALF = [dtype for dtype in DTYPES if dtype != torch.float32]
# One of each form, and a tall one.
HARD_SHAPES = [(128, 128), (96, 200), *(((512, 128), (1024, 1024), (1024, 3000), (3000, 1024)) if GPU else ())]


@cache
def hard(rows: int, cols: int, condition: float) -> Tensor:
    return log_uniform(rows, cols, condition).to(DEVICE)


@some(
    [(("quintic", 1e4), shape, HALF[0]) for shape in HARD_SHAPES[:2]],
    case=[*HALF_BOUNDS],
    shape=HARD_SHAPES,
    dtype=HALF,
)
def test_the_error_of_every_table_is_under_its_bound(
    case: tuple[str, float], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    table, condition = case
    matrix = hard(*shape, condition)
    for method in ("gram", "standard") if GPU else ("gram",):
        (output,) = orthogonalize([matrix], by_triton(dtype, method, table))
        error = distance(output, reference_newton_schulz(matrix, ns_coefficients=table))
        assert error <= half_bound(table, condition, dtype), (method, error)


@some([("quintic", HARD_SHAPES[1], HALF[0])], table=[*COEFFICIENTS], shape=HARD_SHAPES, dtype=HALF)
def test_rank_deficient_matrices_stay_within_the_same_bounds(
    table: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    for matrix in rank_deficient(*shape):
        matrix = matrix.to(DEVICE)
        exact = reference_newton_schulz(matrix, ns_coefficients=table)
        rounding = distance(reference_newton_schulz(rounded_input(matrix, dtype), ns_coefficients=table), exact)
        (output,) = orthogonalize([matrix], by_triton(dtype, "gram", table))
        assert distance(output, exact) <= half_bound(table, 1e7, dtype) + 2 * rounding


@needs_gpu
@pytest.mark.parametrize("shape", [(64, 64), (1024, 1024), (512, 2048), (2048, 512), (300, 777)])
def test_a_replayed_graph_gives_the_same_bits_as_its_kernels(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = by_triton(torch.float16)
    replaying, launching = triton_backend.TritonBackend(), triton_backend.TritonBackend()

    def launch(key: object, source: Tensor, memory: Tensor, work: Callable[..., object]) -> None:
        work(source, memory)

    monkeypatch.setattr(launching._graphs, "run", launch)
    replays = []
    replay = graphs._Graph.replay
    monkeypatch.setattr(graphs._Graph, "replay", lambda self, source: (replays.append(step), replay(self, source))[1])
    earlier: list[list[list[Tensor]]] = []
    for step in range(8):
        matrices = [gaussian(*shape, seed=3 * step + i) for i in range(3)]
        results = []
        for operations in (replaying, launching):
            monkeypatch.setitem(BACKENDS, "triton", lambda operations=operations: operations)
            results.append(orthogonalize(matrices, settings))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        if step >= 4:
            earlier.append(results)
        del results
        # What came out before is left alone.
        assert all(torch.equal(*pair) for kept in earlier for pair in zip(*kept, strict=True))
    # Nothing was kept in the first four: it came by at an address again.
    assert any(step < 4 for step in replays)


@needs_gpu
def test_between_batches_nothing_is_kept() -> None:
    settings = by_triton(torch.float16)
    matrices = [gaussian(1024, 1024, seed=index) for index in range(8)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(4):
        orthogonalize(matrices, settings)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert BACKENDS["triton"]()._graphs._graphs
    # Addresses for each graph, and nothing in a pool of its own that nobody else could use.
    assert torch.cuda.memory_allocated() - allocated <= 1 << 16
    assert torch.cuda.memory_reserved() - reserved <= 4 << 20


@needs_gpu
@pytest.mark.parametrize("shape", [(1024, 1024), (512, 2048), (300, 777)])
def test_a_batch_allocates_what_it_says(shape: tuple[int, int]) -> None:
    settings = by_triton(torch.float16)
    backend = BACKENDS["triton"]()
    matrices = [gaussian(*shape, seed=index) for index in range(8)]
    said = len(matrices) * backend.workspace(*shape, settings.dtype, settings.iteration(*shape).buffers)
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        orthogonalize_batch(matrices, settings)
        assert 0.9 * said <= torch.cuda.max_memory_allocated() - before <= said + (1 << 20)


@in_turns(shape=[(17, 40), (40, 17), (33, 70)], form=["gram", "standard"])
def test_squares_in_turns_are_as_good_as_squares_of_their_own(
    shape: tuple[int, int], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not GPU:  # which memory a product goes to is no matter of the kernels, and the interpreter is slow

        def multiply(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, *rest: Any) -> None:
            assert all(x is None or x.data_ptr() != out.data_ptr() for x in (a, b, c))
            by_torch(a, b, c, out, *rest)

        monkeypatch.setattr(triton_backend, "multiply_descriptors", multiply)
        monkeypatch.setattr(triton_backend, "multiply_pointers", multiply)
    dtype = torch.float16
    batch, side = 2, min(shape)
    wide = unit(batch, side, max(shape), dtype, shape[0] > shape[1])
    for table, steps in itertools.product(("quintic", "polar_express", "cubic"), (1, 3, 5, 7)):
        iteration = iteration_of(form, schedule(table, steps), dtype)
        squares = [triton_backend._empty(batch, side, side, dtype, DEVICE) for _ in range(iteration.buffers)]
        in_turns = iteration.run(wide, triton_backend.TritonProducts(squares))
        assert torch.equal(in_turns, iteration.run(wide, triton_backend.TritonProducts()))
