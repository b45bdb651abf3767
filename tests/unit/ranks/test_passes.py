"""The passes as Triton kernels against the same in torch, bit for bit.

On a GPU the kernels run; elsewhere Triton's interpreter runs them.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_muon import muon_update, passes
from ds_muon.layout import Piece, Strip
from ds_muon.passes import Held, Moves, Segments, torch_passes
from tests.unit.support.cases import in_turns, pairwise, some
from tests.unit.support.interpreter import GPU, defining_kernels, interpreting
from tests.unit.support.models import ds_config
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import SHAPES, assert_equal
from tests.unit.support.steps import train as train_on_exact_gradients

with defining_kernels():
    from ds_muon.passes import triton_passes

DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
LENGTHS = [1, 15, 1000, 4097, 70001]
MOMENTUMS = [0.0, 0.3, 0.95]
DTYPES = [torch.float32, torch.bfloat16]
# With NaNs or without, and how far the two tensors are from aligned addresses, of which the interpreter knows nothing.
INPUTS = list(itertools.product((False, True), [(0, 0), (1, 1), (0, 1)])) if GPU else [(False, (0, 0)), (True, (0, 1))]
# The interpreter's numpy says so of every NaN that comes up.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter rounds bf16 as GPUs do only if taught to."""
    if GPU:
        yield
        return
    from triton.runtime import interpreter

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        # Triton 3.7 cuts off what does not fit into bf16, and loses denormals on the way back.
        if source.is_fp32() and target.is_bf16():
            return torch.tensor(data).to(torch.bfloat16).view(torch.uint16).numpy()
        if source.is_bf16() and target.is_fp32():
            return torch.tensor(data).view(torch.bfloat16).to(torch.float32).numpy()
        return original(data, source, target, rounding)

    original = interpreter._convert_float
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    with interpreting():
        yield


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels serve every device, and none of them fails."""
    monkeypatch.setattr(passes, "_FAILED", set())
    monkeypatch.setattr(passes, "_kernels", lambda _: triton_passes)
    yield
    assert not passes._FAILED


def numbers(count: int, seed: int = 0, *, poison: bool = False) -> Tensor:
    """fp32 of all sizes, denormal and near overflow too, with zeros among them; ``poison``: and what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    x[::3] *= 10.0 ** torch.randint(-44, 38, (len(x[::3]),), generator=generator)
    x[5::11] = 0
    if poison:
        for index, value in enumerate((math.nan, math.inf, -math.inf)):
            x[index::7] = value
    return x.to(DEVICE)


class Framed:
    """A tensor between numbers that nobody may overwrite."""

    def __init__(self, inner: Tensor, shift: int) -> None:
        start = 64 + shift
        self._memory = torch.randn(inner.numel() + start + 64, device=inner.device).to(inner.dtype)
        self._before, self._after = self._memory[:start], self._memory[start + inner.numel() :]
        self._expected = self._before.clone(), self._after.clone()
        self.view = self._memory[start : start + inner.numel()].view(inner.shape)
        self.view.copy_(inner)

    def is_intact(self) -> bool:
        return self._before.equal(self._expected[0]) and self._after.equal(self._expected[1])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of any two NaNs too: which one comes out, an instruction may choose."""
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    nan = a.isnan()
    same = nan.equal(b.isnan()) and a.dtype == b.dtype
    return same and torch.equal(a[~nan].view(integers), b[~nan].view(integers))


def scalar(value: bool | None) -> Tensor | None:
    return None if value is None else torch.tensor(value, device=DEVICE)


# ---- momentum -------------------------------------------------------------------------------------------------------


@pairwise(numel=LENGTHS, momentum=MOMENTUMS, nesterov=[True, False], dtype=DTYPES, moves=[None, True, False])
def test_the_momentum_has_the_bits_of_torch(
    numel: int, momentum: float, nesterov: bool, dtype: torch.dtype, moves: bool | None
) -> None:
    rule = {"momentum": momentum, "nesterov": nesterov, "moves": scalar(moves)}
    for poison, (g_shift, m_shift) in INPUTS:
        gradient, buffer = numbers(numel, poison=poison), numbers(numel, seed=1).to(dtype)
        expected_u, expected_m = gradient.clone(), buffer.clone()
        torch_passes.advance_momentum_(expected_u, expected_m, **rule)
        u, m = Framed(gradient, g_shift), Framed(buffer, m_shift)
        triton_passes.advance_momentum_(u.view, m.view, **rule)
        assert same_bits(u.view, expected_u) and same_bits(m.view, expected_m)
        assert u.is_intact() and m.is_intact()


@in_turns(momentum=MOMENTUMS, nesterov=[True, False], dtype=DTYPES)
def test_a_forbidden_step_leaves_the_momentum_and_gives_zeros(
    momentum: float, nesterov: bool, dtype: torch.dtype
) -> None:
    buffer = numbers(4097, seed=1).to(dtype)
    for module in (torch_passes, triton_passes):
        gradient, kept = torch.full((4097,), math.nan, device=DEVICE), buffer.clone()
        module.advance_momentum_(gradient, kept, momentum=momentum, nesterov=nesterov, moves=scalar(False))
        assert same_bits(kept, buffer) and same_bits(gradient, torch.zeros_like(gradient))


# Where matrices begin, and elements of the partition: one, many in a block, several blocks each, a gap in front. Those
# that are long are cut where sums are.
SHORT: dict[str, tuple[list[int], int]] = {
    "one": ([0], 3000),
    "tiny": ([0, 1, 3, 900, 1023, 1024, 1025, 2047, 2048], 2049),
    "several blocks": ([5, 2500, 6144], 8000),
    "none": ([], 1500),
}
CUTS = SHORT | {"long": ([5, 70_000, 140_000], 200_000), "aligned": ([0, 65_536, 131_072], 196_608)}


def segments_of(starts: list[int], numel: int) -> Segments:
    """A matrix of one row from each start to the next."""
    ends = [*starts[1:], numel][: len(starts)]
    held = [Held(Piece((), 0, 1, end - start), 0, start, end - start) for start, end in zip(starts, ends, strict=True)]
    return Segments.of(held, numel, DEVICE)


def cut(name: str, pattern: int) -> Moves:
    """Segments, of which every second does not move: the first one, or the second."""
    starts, numel = CUTS[name]
    flags = [bool((index + pattern) % 2) for index in range(len(starts))]
    return Moves(segments_of(starts, numel), torch.tensor(flags, dtype=torch.bool, device=DEVICE))


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize(("dtype", "nesterov", "momentum"), [(DTYPES[0], True, 0.95), (DTYPES[1], False, 0.3)])
def test_every_segment_moves_or_stays_by_its_own_flag(
    name: str, dtype: torch.dtype, nesterov: bool, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (starts, numel), rule = CUTS[name], {"momentum": momentum, "nesterov": nesterov}
    for pattern in (0, 1):
        moves = cut(name, pattern)
        gradient, buffer = numbers(numel, poison=pattern == 1), numbers(numel, seed=1).to(dtype)
        weight, update = numbers(numel, seed=2), numbers(numel, seed=3)
        moved_u, moved_m = gradient.clone(), buffer.clone()
        torch_passes.advance_momentum_(moved_u, moved_m, **rule)
        decayed = weight.clone()
        torch_passes.apply_update_(decayed, update.clone(), lr=0.02, weight_decay=0.1)
        kept = weight - update * 0.02
        u, m, w = moved_u.clone(), moved_m.clone(), decayed.clone()
        for index, (start, end) in enumerate(itertools.pairwise([0, *starts[1:], numel] if starts else [])):
            if not (index + pattern) % 2:
                u[start:end], m[start:end], w[start:end] = 0, buffer[start:end], kept[start:end]
        for module, chunk in ((triton_passes, 1 << 24), (torch_passes, 1 << 24), (torch_passes, 1000)):
            monkeypatch.setattr(torch_passes, "_CHUNK", chunk)
            found_u, found_m, found_w = Framed(gradient, 0), Framed(buffer, 0), Framed(weight, 0)
            module.advance_momentum_(found_u.view, found_m.view, **rule, moves=moves)
            module.apply_update_(found_w.view, update.clone(), lr=0.02, weight_decay=0.1, moves=moves)
            assert same_bits(found_u.view, u) and same_bits(found_m.view, m) and same_bits(found_w.view, w)
            assert found_u.is_intact() and found_m.is_intact() and found_w.is_intact()


COLUMNS = (Strip(0, 6), Strip(6, 2), Strip(8, 10))
TURNS = tuple(Strip(first, 1, 4, 8) for first in range(4))
# What lies in a flat tensor of 5000: part of a piece, from an element of it on. The first begins behind a gap.
PARTS: dict[str, list[Held]] = {
    "columns": [
        Held(Piece((), 0, 90, 18, COLUMNS), 7, 5, 1200),
        Held(Piece((), 0, 1, 70), 0, 1205, 70),
        Held(Piece((), 0, 200, 18, COLUMNS), 0, 1275, 3600),
    ],
    "rows": [
        Held(Piece((), 0, 32, 50, TURNS, 0), 170, 0, 1430),
        Held(Piece((), 0, 1, 900), 0, 1500, 900),
        Held(Piece((), 0, 32, 70, TURNS, 0), 0, 2400, 2239),
    ],
}


def matrices_of(held: list[Held]) -> Tensor:
    """For each element of a flat tensor of 5000 the number of its matrix; -1 in gaps."""
    found, count = torch.full((5000,), -1), 0
    for part in held:
        piece = part.piece
        labels = torch.tensor(piece.labels()).repeat(piece.rows) if piece.strips and piece.axis else None
        labels = torch.tensor(piece.labels()).repeat_interleave(piece.cols) if piece.axis == 0 else labels
        of_piece = torch.zeros(piece.numel, dtype=torch.int64) if labels is None else labels
        found[part.offset : part.offset + part.numel] = count + of_piece[part.start : part.start + part.numel]
        count += len(piece.strips) or 1
    return found.to(DEVICE)


@pytest.mark.parametrize("name", PARTS)
def test_strips_move_or_stay_by_their_own_flags_and_are_summed_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = PARTS[name]
    segments, matrix = Segments.of(held, 5000, DEVICE), matrices_of(held)
    count = int(matrix.max()) + 1
    flags = torch.arange(count, device=DEVICE) % 2 == 0
    stays = (matrix >= 0) & ~flags[matrix.clamp(min=0)]
    x, buffer = numbers(5000), numbers(5000, seed=1)
    x[matrix < 0] = 0
    moved_u, moved_m = x.clone(), buffer.clone()
    torch_passes.advance_momentum_(moved_u, moved_m, momentum=0.9, nesterov=True)
    exact = [float(x[matrix == number].double().square().sum()) for number in range(count)]
    for module, chunk in ((triton_passes, 1 << 24), (torch_passes, 1 << 24), (torch_passes, 1000)):
        monkeypatch.setattr(torch_passes, "_CHUNK", chunk)
        u, m = x.clone(), buffer.clone()
        module.advance_momentum_(u, m, momentum=0.9, nesterov=True, moves=Moves(segments, flags))
        real = matrix >= 0
        assert same_bits(u[real], torch.where(stays, 0, moved_u)[real])
        assert same_bits(m[real], torch.where(stays, buffer, moved_m)[real])
        sums = module.sum_of_squares(x, segments)
        assert sums.tolist() == pytest.approx(exact, rel=1e-14, abs=0)


def test_there_is_a_flag_for_each_segment() -> None:
    segments = segments_of([0, 5], 9)
    for count in (1, 3):
        with pytest.raises(ValueError, match="2 matrices need as many flags"):
            Moves(segments, torch.ones(count, dtype=torch.bool, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_momentum_is_kept_to_the_nearest_bf16_with_ties_to_even(dtype: torch.dtype) -> None:
    # With momentum 0 the momentum becomes the gradient: halfway between two neighbours in bf16, and a bit off.
    gradient = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 255.5, 3.4e38], device=DEVICE)
    buffer = torch.zeros(5, dtype=dtype, device=DEVICE)
    triton_passes.advance_momentum_(gradient.clone(), buffer, momentum=0.0, nesterov=False)
    assert torch.equal(buffer, gradient.to(dtype))


def test_integers_for_settings_are_numbers_too() -> None:
    u, m = numbers(100), numbers(100, seed=1)
    expected_u, expected_m = u.clone(), m.clone()
    triton_passes.advance_momentum_(u, m, momentum=0, nesterov=True)
    torch_passes.advance_momentum_(expected_u, expected_m, momentum=0, nesterov=True)
    assert same_bits(u, expected_u) and same_bits(m, expected_m)
    w = m.clone()
    triton_passes.apply_update_(w, u, lr=1, weight_decay=0)
    assert same_bits(w, m - u)


# ---- staging --------------------------------------------------------------------------------------------------------


def stored(batch: int, rows: int, cols: int, dtype: torch.dtype, kind: str) -> Tensor:
    """(batch, rows, cols) as Newton-Schulz returns it: dense, in rows with a gap behind, or transposed."""
    if kind == "transposed":
        return stored(batch, cols, rows, dtype, "pitched").mT
    pitch = cols if kind == "dense" else -(-cols // 8) * 8
    memory = torch.randn(batch * rows * pitch, generator=torch.Generator().manual_seed(3)).to(dtype)
    memory[::13] = math.nan
    memory[1::17] = math.inf
    memory[2::19] = 1e-7
    return memory.to(DEVICE).view(batch, rows, pitch)[..., :cols]


@pytest.mark.parametrize("shape", [(1, 5), (5, 1)])
def test_factors_of_a_row_and_of_a_column_are_told_apart(shape: tuple[int, int]) -> None:
    rows, cols = shape
    outputs = stored(2, *shape, torch.float32, "dense").nan_to_num(1.0, 2.0)
    for factors in (numbers(2 * rows, seed=2).view(2, rows, 1), numbers(2 * cols, seed=3).view(2, 1, cols)):
        expected, found = ([torch.zeros(shape, device=DEVICE) for _ in outputs] for _ in range(2))
        torch_passes.store_updates(outputs, expected, factors=factors)
        triton_passes.store_updates(outputs, found, factors=factors)
        assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))


@pairwise(
    shape=[(1, 1), (3, 50), (50, 3), (64, 128), (130, 65)],
    dtype=[torch.float16, torch.bfloat16, torch.float32],
    kind=["dense", "pitched", "transposed"],
    factors_of=[None, "rows", "columns"],
)
def test_updates_are_stored_with_the_bits_of_torch(
    shape: tuple[int, int], dtype: torch.dtype, kind: str, factors_of: str | None
) -> None:
    outputs = stored(3, *shape, dtype, kind)
    before = outputs.clone()
    rows, cols = shape
    factors = {
        None: None,
        "rows": numbers(3 * rows, seed=2).view(3, rows, 1),
        "columns": numbers(3 * cols, seed=2).view(3, 1, cols),
    }[factors_of]
    for scale, shift in itertools.product((1.0, 0.2 * math.sqrt(3)), (0, 1)):
        expected = [torch.zeros(shape, device=DEVICE) for _ in outputs]
        torch_passes.store_updates(outputs, expected, scale=scale, factors=factors)
        targets = [Framed(torch.zeros(shape, device=DEVICE), shift) for _ in outputs]
        triton_passes.store_updates(outputs, [target.view for target in targets], scale=scale, factors=factors)
        for target, wanted in zip(targets, expected, strict=True):
            assert same_bits(target.view, wanted) and target.is_intact()
    assert same_bits(outputs.contiguous(), before.contiguous())


def test_no_outputs_need_no_targets() -> None:
    for module in (torch_passes, triton_passes):
        module.store_updates(torch.empty(0, 4, 6, device=DEVICE), [], scale=2.0)
        module.store_updates(
            torch.empty(0, 4, 6, device=DEVICE), [], scale=2.0, factors=torch.empty(0, 4, 1, device=DEVICE)
        )


# ---- weights --------------------------------------------------------------------------------------------------------


@pairwise(numel=LENGTHS, lr=[0.0, 0.02], weight_decay=[0.0, 0.1])
def test_weights_have_the_bits_of_torch(numel: int, lr: float, weight_decay: float) -> None:
    for poison, (w_shift, u_shift) in INPUTS:
        weight, update = numbers(numel), numbers(numel, seed=1, poison=poison)
        expected = weight.clone()
        torch_passes.apply_update_(expected, update.clone(), lr=lr, weight_decay=weight_decay)
        w, u = Framed(weight, w_shift), Framed(update, u_shift)
        triton_passes.apply_update_(w.view, u.view, lr=lr, weight_decay=weight_decay)
        assert same_bits(w.view, expected)
        assert w.is_intact() and u.is_intact()


# ---- norms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [*LENGTHS, 1 << 16, (1 << 17) + 2049])
def test_squares_are_summed_to_fp64_precision(numel: int) -> None:
    x = numbers(numel)
    exact = math.fsum(value * value for value in x.double().tolist())
    for shift in (0, 1):
        found = triton_passes.sum_of_squares(Framed(x, shift).view)
        assert found.dtype == torch.float64 and found.shape == ()
        assert float(found) == pytest.approx(exact, rel=1e-14, abs=0)
        assert torch.equal(found, triton_passes.sum_of_squares(Framed(x, shift).view))
    for poison in (math.nan, math.inf):
        x[numel // 2] = poison
        assert not triton_passes.sum_of_squares(x).isfinite()


@pytest.mark.parametrize("name", CUTS)
def test_squares_of_each_segment_are_summed_alone(name: str) -> None:
    starts, numel = CUTS[name]
    x, segments = numbers(numel), segments_of(starts, numel)
    if len(starts) > 1:
        x[starts[1] : [*starts, numel][2]] = 0
    pieces = torch.split(x, segments.sizes) if starts else ()
    exact = [math.fsum(value * value for value in piece.double().tolist()) for piece in pieces]
    for module in (torch_passes, triton_passes):
        found = module.sum_of_squares(x, segments)
        assert found.dtype == torch.float64 and found.tolist() == pytest.approx(exact, rel=1e-14, abs=0)
        assert torch.equal(found, module.sum_of_squares(x, segments))
        assert [value == 0 for value in found.tolist()] == [not piece.any() for piece in pieces]
    for index, (piece, poison) in enumerate(zip(pieces, itertools.cycle((math.nan, math.inf)), strict=False)):
        kept = piece[-1].clone()
        piece[-1] = poison
        for module in (torch_passes, triton_passes):
            finite = module.sum_of_squares(x, segments).isfinite().tolist()
            assert finite == [other != index for other in range(len(starts))]
        piece[-1] = kept


def test_the_least_number_counts() -> None:
    x = torch.zeros(3000, device=DEVICE)
    x[1700] = 1e-45
    segments = segments_of([0, 1024], 3000)
    for module in (torch_passes, triton_passes):
        assert module.sum_of_squares(x, segments).ne(0).tolist() == [False, True]


# ---- edges ----------------------------------------------------------------------------------------------------------


def test_an_empty_partition_is_left_alone() -> None:
    empty = torch.empty(0, device=DEVICE)
    for module in (torch_passes, triton_passes):
        module.advance_momentum_(empty, empty.clone(), momentum=0.9, nesterov=True)
        module.apply_update_(empty, empty.clone(), lr=0.1, weight_decay=0.1)
        assert module.sum_of_squares(empty) == 0


def test_a_kernel_takes_what_the_pass_takes_and_refuses_what_is_for_the_host() -> None:
    for name in ("advance_momentum_", "store_updates", "apply_update_", "sum_of_squares"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (triton_passes, torch_passes))
        assert list(ours) == list(theirs)
    first, second = torch.ones(2, 8, device=DEVICE)
    for host in ({"scale": 2.0}, {"rounded": torch.zeros(8)}):
        with pytest.raises(ValueError, match="the kernels apply updates as they are"):
            triton_passes.apply_update_(first, second, lr=0.1, weight_decay=0.0, **host)
    with pytest.raises(ValueError, match="in place of the gradient"):
        triton_passes.advance_momentum_(first, second, momentum=0.9, nesterov=True, into=torch.zeros(8))
    assert (first == 1).all() and (second == 1).all()


def test_what_a_kernel_cannot_walk_through_is_refused_untouched() -> None:
    good = torch.ones(12, device=DEVICE)
    gaps = torch.ones(24, device=DEVICE)[::2]
    for first, second in [(good, torch.ones(11, device=DEVICE)), (good, gaps), (gaps, good), (good.double(), good)]:
        with pytest.raises(ValueError, match="the kernels need"):
            triton_passes.advance_momentum_(first, second, momentum=0.9, nesterov=True)
        with pytest.raises(ValueError, match="the kernels need"):
            triton_passes.apply_update_(first, second, lr=0.1, weight_decay=0.0)
        assert all((x == 1).all() for x in (first, second))
    outputs = torch.zeros(2, 3, 4, device=DEVICE)
    for targets, factors in [
        ([good.view(3, 4)], None),
        ([good.view(3, 4), good.view(4, 3)], None),
        ([good.view(3, 4), gaps.view(3, 4)], None),
        ([good.view(3, 4), good.view(3, 4)], torch.zeros(2, 4, 1, device=DEVICE)),
    ]:
        with pytest.raises(ValueError):
            triton_passes.store_updates(outputs, targets, factors=factors)
        assert (good == 1).all()


@needs_gpu
def test_elements_beyond_2_to_the_31_are_reached() -> None:
    numel, tail = (1 << 31) + 1501, 4000
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of GPU memory")
    x, m = torch.zeros(numel, device=DEVICE), torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    x[-tail:] = numbers(tail)
    u_end, m_end = x[-tail:].clone(), m[-tail:].clone()
    square = float(u_end.double().square().sum())
    moves = Moves(segments_of([0, numel - tail], numel), torch.tensor([False, True], device=DEVICE))
    assert float(triton_passes.sum_of_squares(x)) == pytest.approx(square, rel=1e-14)
    assert triton_passes.sum_of_squares(x, moves.segments).tolist() == pytest.approx([0, square], rel=1e-14, abs=0)
    triton_passes.advance_momentum_(x, m, momentum=0.95, nesterov=True, moves=moves)
    torch_passes.advance_momentum_(u_end, m_end, momentum=0.95, nesterov=True)
    assert same_bits(x[-tail:], u_end) and same_bits(m[-tail:], m_end)
    assert x[:-tail].count_nonzero() == 0


# ---- which one runs -------------------------------------------------------------------------------------------------


def test_the_cpu_has_no_kernels_until_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_COMPILED", {})  # another test may have
    assert passes._kernels(torch.device("cpu")) is None


@needs_gpu
def test_a_gpu_has_kernels_and_none_of_them_fails() -> None:
    assert passes._kernels(DEVICE) is triton_passes
    x, outputs = numbers(1000), stored(2, 10, 50, torch.float16, "dense")
    passes.sum_of_squares(x)
    passes.advance_momentum_(x, x.clone(), momentum=0.9, nesterov=True, moves=scalar(True))
    passes.store_updates(outputs, [x[:500].view(10, 50), x[500:].view(10, 50)], scale=2.0)
    passes.apply_update_(x, x.clone(), lr=0.1, weight_decay=0.1)
    assert not passes._FAILED


@needs_gpu
def test_a_capture_of_the_caller_takes_torch_and_blames_no_kernel() -> None:
    outputs, target = stored(1, 10, 50, torch.float16, "dense"), numbers(500).view(10, 50)
    passes.store_updates(outputs, [target], scale=2.0)
    expected = target.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes.store_updates(outputs, [target.zero_()], scale=2.0)
    graph.replay()
    assert same_bits(target, expected) and not passes._FAILED


@in_turns(shape=[(17, 40), (40, 17), (16, 16)], variant=["normuon", "muon"])
def test_muon_update_has_the_same_bits_with_kernels(
    shape: tuple[int, int], variant: str, kernels_everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps() -> list[Tensor]:
        buffer = torch.zeros(shape, device=DEVICE)
        variance = torch.zeros(shape[0], device=DEVICE) if variant == "normuon" else None
        gradients = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(3)]
        updates = [muon_update(g, buffer, row_variance=variance) for g in gradients]
        return [*updates, buffer, *([] if variance is None else [variance])]

    by_kernels = steps()
    monkeypatch.setattr(passes, "_kernels", lambda _: None)
    assert all(same_bits(a, b) for a, b in zip(by_kernels, steps(), strict=True))


# Whole and straddling at two ranks, wide, tall and square: the interpreter is slow.
SMALL: list[tuple[int, ...]] = [(16, 16), (17, 40), (40, 17), (7, 13), (11,)]


def train(config: dict[str, Any], kernels: bool) -> tuple[dict[str, Tensor], int]:
    """Weights after three steps on this rank, and how many passes ran as kernels; without ``kernels``, none."""
    calls = mock.Mock(wraps=triton_passes)
    with (
        nullcontext() if GPU else interpreting(),
        mock.patch.object(passes, "_kernels", lambda _: calls if kernels else None),
        mock.patch.object(passes, "_FAILED", set()) as failed,
    ):
        weights = train_on_exact_gradients(SHAPES if GPU else SMALL, config, 3)
    assert not failed
    return weights, len(calls.mock_calls)


@pytest.mark.ranks
@some([(2, "normuon")], world_size=[1, 2], variant=["muon", "normuon"])
def test_an_engine_trains_with_the_same_bits_with_kernels(world_size: int, variant: str) -> None:
    """Whole and straddling matrices with weight decay, and AdamW beside them."""
    config = ds_config({"variant": variant, "weight_decay": 0.1}, gradient_clipping=0)
    in_torch, by_kernels = (run_ranks(world_size, train, config, kernels) for kernels in (False, True))
    for (expected, none), (weights, ran) in zip(in_torch, by_kernels, strict=True):
        # Two norms, the momentum, its apply, and at least one batch, three times.
        assert none == 0 and ran >= 15
        assert_equal(weights, expected)


def failing(calls: list[str], name: str) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        calls.append(name)
        raise RuntimeError("no compiler")

    return fail


def test_a_kernel_that_cannot_be_launched_is_tried_once_and_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    broken = SimpleNamespace(apply_update_=failing(calls, "apply"), advance_momentum_=triton_passes.advance_momentum_)
    monkeypatch.setattr(passes, "_FAILED", set())
    monkeypatch.setattr(passes, "_kernels", lambda _: broken)
    weight, update = numbers(100), numbers(100, seed=1)
    expected = weight.clone()
    for _ in range(3):
        torch_passes.apply_update_(expected, update.clone(), lr=0.1, weight_decay=0.1)
        passes.apply_update_(weight, update.clone(), lr=0.1, weight_decay=0.1)
    assert same_bits(weight, expected)
    passes.advance_momentum_(update, weight, momentum=0.9, nesterov=True)
    assert calls == ["apply"] and passes._FAILED == {(DEVICE.type, "apply_update_")}


def test_a_kernel_that_fails_on_the_host_stays_in_use_on_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    host = SimpleNamespace(apply_update_=failing(calls, "host"))
    accelerator = SimpleNamespace(apply_update_=lambda *_, **__: calls.append("accelerator"))
    monkeypatch.setattr(passes, "_FAILED", set())
    monkeypatch.setattr(passes, "_kernels", lambda device: host if device.type == "cpu" else accelerator)
    for device in ("cpu", "meta", "cpu", "meta"):
        passes.apply_update_(*torch.ones(2, 4, device=device), lr=0.1, weight_decay=0.1)
    assert calls == ["host", "accelerator", "accelerator"]


def test_a_fault_of_the_caller_is_raised_and_the_kernel_stays_in_use(kernels_everywhere: None) -> None:
    buffer = torch.zeros(6, 4, device=DEVICE).mT
    with pytest.raises(RuntimeError):
        passes.advance_momentum_(torch.ones(4, 6, device=DEVICE), buffer, momentum=0.9, nesterov=True)
    assert buffer.count_nonzero() == 0
