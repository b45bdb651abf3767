"""The passes that are compiled for the host against the same in torch, bit for bit."""

from __future__ import annotations

import ctypes
import itertools
import platform
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_muon import passes
from ds_muon.layout import Piece, Strip
from ds_muon.passes import Held, Moves, Segments, host_passes, lift, torch_passes
from tests.unit.support.cases import pairwise

# Less than a vector, ends of vectors, more than a thread's block.
LENGTHS = [1, 7, 1000, 40001]
_address = ctypes.c_void_p
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def numbers(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 10 ** torch.randn(count, generator=generator)
    return (magnitudes * torch.randn(count, generator=generator)).to(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    integers = torch.int32 if left.element_size() == 4 else torch.int16
    return left.dtype == right.dtype and torch.equal(left.view(integers), right.view(integers))


def some_move(count: int, flags: str) -> Moves | None:
    """Three matrices, or fewer, of which the second does not move."""
    if flags == "none":
        return None
    edges = [*sorted({0, count // 3, count // 2}), count]
    held = [Held(Piece((), 0, 1, end - start), 0, start, end - start) for start, end in itertools.pairwise(edges)]
    segments = Segments.of(held, count, torch.device("cpu"))
    return Moves(segments, torch.tensor([flags == "all" or i != 1 for i in range(len(held))]))


@pairwise(
    length=LENGTHS,
    momentum=[0.0, 0.3, 0.5, 0.95],
    nesterov=[True, False],
    dtype=[torch.float32, torch.bfloat16],
    flags=["none", "all", "some"],
    elsewhere=[True, False],
)
def test_the_momentum_has_the_bits_of_torch(
    length: int, momentum: float, nesterov: bool, dtype: torch.dtype, flags: str, elsewhere: bool
) -> None:
    moves = some_move(length, flags)
    expected, found = ((numbers(length, 1), numbers(length, 2, dtype)) for _ in range(2))
    settings = {"momentum": momentum, "nesterov": nesterov}
    torch_passes.advance_momentum_(*expected, **settings, moves=moves)  # type: ignore[arg-type]
    u = torch.full((length,), torch.nan) if elsewhere else found[0]
    # In two parts, the second of which begins within a matrix.
    for part in (slice(0, length // 4), slice(length // 4, length)):
        here = None if moves is None else moves.starting(part.start)
        into = u[part] if elsewhere else None
        g, m = (tensor[part] for tensor in found)
        host_passes.advance_momentum_(g, m, **settings, moves=here, into=into)  # type: ignore[arg-type]
    assert all(same_bits(a, b) for a, b in zip((u, found[1]), expected, strict=True))
    if elsewhere:
        assert same_bits(found[0], numbers(length, 1))
        g, m = numbers(length, 1), numbers(length, 2, dtype)
        torch_passes.advance_momentum_(g, m, **settings, moves=moves, into=u.fill_(torch.nan))  # type: ignore[arg-type]
        assert all(same_bits(a, b) for a, b in zip((u, m, g), (*expected, found[0]), strict=True))


@pairwise(
    length=LENGTHS,
    dtype=DTYPES,
    scale=[1.0, 0.2, 2.5],
    weight_decay=[0.0, 0.1],
    flags=["none", "all", "some"],
    rounded=[None, *DTYPES],
)
def test_an_update_that_is_scaled_on_the_way_has_the_bits_of_one_that_was_stored_first(
    length: int, dtype: torch.dtype, scale: float, weight_decay: float, flags: str, rounded: torch.dtype | None
) -> None:
    moves = some_move(length, flags)
    output, update = numbers(length, 3, dtype), torch.empty(length)
    if moves is not None:
        output[~moves.of_elements(0, length)] = 0
    by_torch, by_torch_at_once, found = (numbers(length, 4) for _ in range(3))
    torch_passes.store_updates(output.view(1, 1, -1), [update.view(1, -1)], scale=scale)
    settings = {"lr": 0.02, "weight_decay": weight_decay, "moves": moves}
    torch_passes.apply_update_(by_torch, update, **settings)  # type: ignore[arg-type]
    goals = [None if rounded is None else torch.full((length,), torch.nan, dtype=rounded) for _ in range(2)]
    host_passes.apply_update_(found, output, **settings, scale=scale, rounded=goals[0])  # type: ignore[arg-type]
    torch_passes.apply_update_(by_torch_at_once, output.clone(), **settings, scale=scale, rounded=goals[1])  # type: ignore[arg-type]
    assert same_bits(found, by_torch) and same_bits(by_torch_at_once, by_torch)
    assert all(goal is None or same_bits(goal, by_torch.to(goal.dtype)) for goal in goals)


def test_every_half_is_read_as_torch_reads_it() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        weight = torch.zeros(halves.shape)
        host_passes.apply_update_(weight, halves, lr=-1.0, weight_decay=0.0)
        assert torch.equal(weight.isnan(), halves.isnan())
        assert torch.equal(weight.nan_to_num(), halves.float().nan_to_num())


def test_every_number_is_rounded_as_torch_rounds_it() -> None:
    """Of those that decide: halfway between two, a bit beside, below the normal numbers, above all."""
    for dtype in (torch.float16, torch.bfloat16):
        halves = torch.arange(0, 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
        halves = halves[halves.isfinite()]
        between = torch.cat([halves, (halves[1:].double() + halves[:-1].double()).div(2).float()])
        bits = between.view(torch.int32)
        beside = [(bits + step).clamp(min=0).view(torch.float32) for step in (-1, 0, 1)]
        largest = torch.tensor([65519.0, 65520.0, 65535.0, 65536.0, 1e30, 3.4e38, torch.inf])
        weight = torch.cat([*beside, largest])
        weight = torch.cat([weight, -weight])
        found = torch.empty(weight.shape, dtype=dtype)
        host_passes.apply_update_(weight.clone(), torch.zeros_like(weight), lr=1.0, weight_decay=0.0, rounded=found)
        assert same_bits(found, weight.to(dtype))
        host_passes.apply_update_(
            torch.full((9,), torch.nan), torch.zeros(9), lr=1.0, weight_decay=0.0, rounded=found[:9]
        )
        assert found[:9].isnan().all()


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_of_squares_are_exact_and_say_what_is_zero_or_not_finite(length: int) -> None:
    x, moves = numbers(length, 5), some_move(length, "all")
    assert moves is not None
    sizes = moves.segments.sizes
    expected = [float(part.double().square().sum()) for part in torch.split(x, sizes)]
    assert host_passes.sum_of_squares(x, moves.segments).tolist() == pytest.approx(expected, rel=1e-13)
    assert float(host_passes.sum_of_squares(x)) == pytest.approx(sum(expected), rel=1e-13)
    assert float(host_passes.sum_of_squares(torch.zeros(length))) == 0
    for bad in (torch.inf, torch.nan):
        x[length // 2] = bad
        assert not host_passes.sum_of_squares(x).isfinite()
    tiny = torch.full((length,), torch.finfo(torch.float32).smallest_normal / 2)
    assert float(host_passes.sum_of_squares(tiny)) > 0


class Driver:
    """An accelerator whose copies are made late: when a slot is asked for again and again, or at the end."""

    def __init__(self, slot_bytes: int, fails_at: int | None = None) -> None:
        with mock.patch.object(lift, "SLOT_BYTES", slot_bytes):
            self.lift = lift.Lift(torch.device("cpu"), pinned=False)
        self.queued: list[tuple[int, int, int]] = []
        self.copies = self.asked = 0
        self.before: dict[int, int] = {}
        self._fails_at = fails_at
        self._events = (ctypes.c_void_p * lift.SLOTS)(*range(1, lift.SLOTS + 1))
        self.lift.events, self.lift.stream = ctypes.addressof(self._events), 7
        kinds = {"copy": [_address, _address, ctypes.c_size_t, _address], "record": [_address] * 2, "query": [_address]}
        self._functions = [ctypes.CFUNCTYPE(ctypes.c_int, *kinds[name])(getattr(self, name)) for name in kinds]
        for name, function in zip(kinds, self._functions, strict=True):
            setattr(self.lift, name, ctypes.cast(function, ctypes.c_void_p).value)

    def copy(self, to: int, source: int, count: int, stream: int) -> int:
        self.copies += 1
        self.queued.append((to, source, count))
        return 1 if self.copies == self._fails_at or stream != 7 else 0

    def record(self, event: int, stream: int) -> int:
        self.before[event] = self.copies
        return 0 if stream == 7 else 1

    def query(self, event: int) -> int:
        self.asked += 1
        if self.asked % 3 == 0:
            self.finish(self.before.get(event, 0))
        return 600 if self.copies - len(self.queued) < self.before.get(event, 0) else 0

    def finish(self, copies: int) -> None:
        while self.queued and self.copies - len(self.queued) < copies:
            ctypes.memmove(*self.queued.pop(0))


@pairwise(length=LENGTHS, slot=[4000, 1 << 16, 1 << 20], dtype=DTYPES, flags=["none", "all", "some"], threads=[1, 2])
def test_what_is_lifted_arrives_through_slots_that_are_written_again_once_they_have_gone_up(
    length: int, slot: int, dtype: torch.dtype, flags: str, threads: int
) -> None:
    moves, driver = some_move(length, flags), Driver(slot)
    (g, m), (other, same) = ((numbers(length, 1), numbers(length, 2)) for _ in range(2))
    weight, moved, output = numbers(length, 3), numbers(length, 3), numbers(length, 4, dtype)
    u, expected = torch.full((2, length), torch.nan)
    rounded, also = torch.full((2, length), torch.nan, dtype=dtype)
    blend: dict[str, Any] = {"momentum": 0.95, "nesterov": True, "moves": moves}
    move: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "moves": moves, "scale": 0.5}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    host_passes.advance_momentum_(g, m, **blend, into=lift.Goal(u, driver.lift))
    host_passes.apply_update_(weight, output, **move, rounded=lift.Goal(rounded, driver.lift))
    torch.set_num_threads(before)
    driver.finish(driver.copies)
    host_passes.advance_momentum_(other, same, **blend, into=expected)
    host_passes.apply_update_(moved, output, **move, rounded=also)
    assert same_bits(u, expected) and same_bits(m, same) and same_bits(g, numbers(length, 1))
    assert same_bits(rounded, also) and same_bits(weight, moved)
    host_passes.round_to(weight, lift.Goal(also.fill_(torch.nan), driver.lift))
    driver.finish(driver.copies)
    assert same_bits(also, weight.to(dtype))


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_lifted_together_is_what_is_lifted_one_by_one(threads: int) -> None:
    lengths = (5, 0, 40001, 1 << 22, 300)  # so many that blocks are large
    parts = [slice(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]
    driver, alone = Driver(1 << 20), Driver(1 << 20)
    weight, moved = (numbers(sum(lengths), 1) for _ in range(2))
    updates = [numbers(count, 2, torch.float16 if i % 2 else torch.float32) for i, count in enumerate(lengths)]
    rounded, expected = torch.full((2, sum(lengths)), torch.nan, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for w, r, by in ((weight, rounded, driver), (moved, expected, alone)):
        with by.lift.together() if by is driver else nullcontext():
            for i, part in enumerate(parts):
                how: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1 * (i // 4), "scale": 0.5 + i}
                host_passes.apply_update_(w[part], updates[i], rounded=lift.Goal(r[part], by.lift), **how)
            assert by is alone or same_bits(w[parts[-1]], numbers(sum(lengths), 1)[parts[-1]])
        by.finish(by.copies)
    torch.set_num_threads(before)
    assert same_bits(weight, moved) and same_bits(rounded, expected)


def test_nothing_is_done_with_what_waits_if_something_is_raised() -> None:
    driver, weight, rounded = Driver(1 << 16), numbers(100, 3), torch.zeros(100)
    with pytest.raises(KeyError), driver.lift.together():
        host_passes.round_to(weight, lift.Goal(rounded, driver.lift))
        raise KeyError
    host_passes.round_to(weight[:1], lift.Goal(rounded[:1], driver.lift))
    driver.finish(driver.copies)
    assert driver.copies == 1 and rounded.nonzero().tolist() == [[0]]


def test_a_copy_that_cannot_be_queued_is_said_and_not_tried_again_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_COMPILED", {})
    passes.compile_for_host()
    driver, weight = Driver(1 << 16, fails_at=2), numbers(40001, 3)
    with pytest.raises(lift.LiftFailed, match="CUDA error 1"):
        passes.apply_update_(weight, weight.clone(), lr=0.1, weight_decay=0.0, rounded=lift.Goal(weight, driver.lift))
    assert driver.copies == 2 and "apply_update_" not in passes._FAILED


def test_slots_are_kept_until_they_have_gone_up() -> None:
    made = lift.Lift(torch.device("cpu"), pinned=False)
    memory, there = weakref.ref(made._memory), []
    event: Any = SimpleNamespace(synchronize=lambda: there.append(memory() is not None))
    made._events = [event] * lift.SLOTS
    del made
    assert there == [True] * lift.SLOTS and memory() is None


@pytest.mark.parametrize("kind", ["xpu", "cuda"])
def test_without_a_driver_of_cuda_there_is_no_lift_and_nothing_is_said(
    kind: str, capsys: pytest.CaptureFixture
) -> None:
    with mock.patch.object(ctypes, "CDLL", side_effect=OSError("libcuda.so.1: cannot open shared object file")):
        assert lift.lift_to(torch.device(kind), pinned=False) is None
    assert capsys.readouterr() == ("", "")
    assert lift.lift_to(torch.device("cpu"), pinned=False) is not None


@pytest.mark.parametrize("axis", [0, 1])
def test_matrices_in_strips_of_which_some_do_not_move_have_the_bits_of_torch(axis: int) -> None:
    piece = Piece((), 0, *((30, 40), (40, 30))[axis], (Strip(0, 10), Strip(10, 20)), axis)
    # It begins within a row, and lacks the last ones.
    segments = Segments.of([Held(piece, 55, 0, 1000)], 1000, torch.device("cpu"))
    moves = Moves(segments, torch.tensor([True, False]))
    expected, found = ((numbers(1000, 1), numbers(1000, 2)) for _ in range(2))
    torch_passes.advance_momentum_(*expected, momentum=0.9, nesterov=True, moves=moves)
    host_passes.advance_momentum_(*found, momentum=0.9, nesterov=True, moves=moves)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert host_passes.sum_of_squares(found[0], segments).tolist() == pytest.approx(
        torch_passes.sum_of_squares(found[0], segments).tolist(), rel=1e-13
    )


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.95)])
def test_adamw_has_torchs_moments_and_weights_within_their_rounding(betas: tuple[float, float]) -> None:
    lr, (beta1, beta2), eps, weight_decay = 3e-3, betas, 1e-8, 0.1
    weight, exp_avg, exp_avg_sq = expected = [numbers(40001, 6), torch.zeros(40001), torch.zeros(40001)]
    found = [tensor.clone() for tensor in expected]
    for step in range(1, 4):
        gradient = numbers(40001, 6 + step)
        # As torch.optim.AdamW does it where it is not fused.
        weight.mul_(1 - lr * weight_decay)
        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
        weight.addcdiv_(exp_avg, root, value=-lr / (1 - beta1**step))
        w, *moments = found
        host_passes.adamw_(w, gradient, *moments, step=step, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    torch.testing.assert_close(found[0], weight, rtol=1e-6, atol=1e-8)
    for moment, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(moment, other, rtol=1e-6, atol=0)


def test_what_the_loops_cannot_walk_through_is_refused_before_anything_is_written() -> None:
    x, m = numbers(100, 1), numbers(100, 2)
    for bad in (m.double(), m[::2], m[:50]):
        with pytest.raises(ValueError, match="the loops need"):
            host_passes.advance_momentum_(x, bad, momentum=0.9, nesterov=True)
    assert same_bits(x, numbers(100, 1))


def test_passes_on_the_host_are_compiled_once_asked_for_and_torchs_where_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "_COMPILED", {})
    assert passes._kernels(torch.device("cpu")) is None
    with mock.patch.dict(sys.modules, {"ds_muon.passes.host_passes": None}), mock.patch.object(passes, "log") as log:
        monkeypatch.delattr(passes, "host_passes", raising=False)
        assert passes.compile_for_host() is None and passes._kernels(torch.device("cpu")) is None
    assert "torch's operations, many times slower" in log.call_args.args[0]
    monkeypatch.undo()
    monkeypatch.setattr(passes, "_COMPILED", {})
    assert passes.compile_for_host() is host_passes and passes._kernels(torch.device("cpu")) is host_passes


def test_a_rank_that_compiles_waits_for_no_lock_and_keeps_the_library_where_it_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    monkeypatch.setattr(host_passes, "_FLAGS", [flag for flag in host_passes._FLAGS if flag != "-O3"])  # sooner done
    with mock.patch.object(host_passes, "writing", side_effect=PermissionError("read-only")):
        assert host_passes._compiled().ds_muon_squares and not folder.exists()
    assert host_passes._compiled().ds_muon_squares
    (kept,) = folder.iterdir()
    with mock.patch.object(subprocess, "run", side_effect=AssertionError("compiled again")):
        assert host_passes._compiled()._name == str(kept)


def test_the_compilers_words_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "c++ -include no_such_header.h")
    with pytest.raises(RuntimeError, match=r"(?s)no_such_header.* fails: .*No such file"):
        host_passes._compiled()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
@pytest.mark.parametrize(("version", "levels"), [(11, False), (12, True)])
def test_gcc_before_12_is_given_features_in_place_of_levels(version: int, levels: bool) -> None:
    source = Path(host_passes.__file__).with_name("host.cpp")
    command = ["g++", "-std=c++2a", "-U__GNUC__", f"-D__GNUC__={version}", "-E", str(source)]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ("arch=x86-64" in read, '"avx512f"' in read) == (levels, not levels)
