"""What a plan says that a rank allocates inside a step is what an engine's ranks do allocate."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ds_muon.exchange import Exchange
from ds_muon.orthogonalize import BACKENDS, NewtonSchulz, orthogonalize_batch
from ds_muon.orthogonalize.newton_schulz import Iteration
from ds_muon.orthogonalize.torch_backend import TorchOperations
from ds_muon.step_memory import Part, StepMemory, parts, step_memory
from tests.unit.models import change_newton_schulz, ds_config, start_groups, train_step
from tests.unit.ranks import run_ranks
from tests.unit.test_exchange import CASES, group_plan
from tests.unit.test_owners import owned
from tests.unit.test_step import exact_gradients

CPU = torch.device("cpu")


class Allocations(TorchDispatchMode):
    """Counts the bytes of all storages that operations make in this context, while they live.

    Attributes:
        peak: the most at one time.
        peak_of_others: of those that were not made within ``apart``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.peak_of_others = self._now = self._others = 0
        self._apart = False
        self._known: set[int] = set()
        self._finalizers: list[weakref.finalize] = []

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._note(tensor, made_here=False)
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor, made_here=True)
        return result

    def _note(self, tensor: Tensor, *, made_here: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        nbytes = storage.nbytes() if made_here else 0
        others = 0 if self._apart else nbytes
        self._finalizers.append(weakref.finalize(storage, self._forget, key, nbytes, others))
        self._now, self._others = self._now + nbytes, self._others + others
        self.peak, self.peak_of_others = max(self.peak, self._now), max(self.peak_of_others, self._others)

    def _forget(self, key: int, nbytes: int, others: int) -> None:
        self._known.discard(key)
        self._now, self._others = self._now - nbytes, self._others - others


class Work:
    """A collective under way, which keeps what it sends and receives alive for as long as somebody keeps it."""

    def __init__(self, work: Any, arriving: Tensor, output: Tensor, source: Tensor) -> None:
        self._work, self._arriving, self._output, self._source = work, arriving, output, source

    def wait(self) -> None:
        with _disable_current_modes():
            self._work.wait()
            self._output.copy_(self._arriving)


def all_to_all(output: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Work:
    """The collective on copies that do not count: gloo's own thread may drop what it sent after the caller has."""
    with _disable_current_modes():
        arriving = torch.empty_like(output)
        return Work(_ALL_TO_ALL(arriving, source.clone(), *args, **kwargs), arriving, output, source)


_ALL_TO_ALL = dist.all_to_all_single


class Exact(TorchOperations):
    """Allocates exactly its workspace. The result is zeros: in a piece of it, or, compact, in storage of its own."""

    allocations: Allocations
    compact = False

    def alone(self, device: torch.device, dtype: torch.dtype) -> bool:
        return False

    def run(self, matrices: Sequence[Tensor], iteration: Iteration) -> Tensor:
        rows, cols = matrices[0].shape
        nbytes = len(matrices) * self.workspace(rows, cols, iteration.dtype, iteration.squares)
        result_bytes = len(matrices) * rows * cols * iteration.dtype.itemsize
        with Exact.allocations.apart():
            memory = torch.empty(nbytes - (result_bytes if self.compact else 0), dtype=torch.uint8)
            result = torch.empty(result_bytes, dtype=torch.uint8) if self.compact else memory[:result_bytes]
        return result.view(iteration.dtype).view(len(matrices), rows, cols).zero_()


class Compact(Exact):
    compact = True


SHAPES = [(24, 24), (16, 40), (40, 16), (24, 24), (16, 16), (24, 24), (7, 13), (64, 48), (16, 40), (24, 24), (11,)]


def step_of_an_engine(
    params: dict[str, Any], how: str, backend: str, dtype: torch.dtype
) -> tuple[list[Part], list[tuple[int, int]], StepMemory]:
    """All parts, the peaks that were counted on this rank in each of two steps, and those of the plan."""
    with owned(how):
        engine = start_groups(SHAPES, ds_config(params))
    zero, found = engine.optimizer, []
    settings = change_newton_schulz(engine, backend=backend, dtype=dtype)
    (group,) = zero.muon_groups
    begin, finish = group.begin, group.finish

    def begin_counting(*args: Any) -> None:
        Exact.allocations = Allocations()
        Exact.allocations.__enter__()
        begin(*args)

    def finish_counting() -> None:
        finish()
        Exact.allocations.__exit__(None, None, None)
        found.append((Exact.allocations.peak, Exact.allocations.peak_of_others))

    with (
        mock.patch.dict(BACKENDS, {"exact": Exact, "compact": Compact}),
        mock.patch.object(dist, "all_to_all_single", all_to_all),
        mock.patch.object(group, "begin", begin_counting),
        mock.patch.object(group, "finish", finish_counting),
    ):
        for step in range(2):
            train_step(engine, exact_gradients(SHAPES, step, engine.device))
        of_ranks = parts(zero.plan.groups[0])
        planned = step_memory(
            of_ranks[dist.get_rank()], settings, normuon=params.get("variant") == "normuon", device=CPU
        )
    engine.destroy()
    return of_ranks, found, planned


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["planned", "next"])
@pytest.mark.parametrize(("backend", "dtype"), [("exact", torch.float16), ("compact", torch.float32)], ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_allocates_what_the_plan_says(world_size: int, backend: str, dtype: torch.dtype, how: str) -> None:
    ranks = run_ranks(world_size, step_of_an_engine, {}, how, backend, dtype)
    assert any(part.sent for part in ranks[0][0]) and any(part.owned for part in ranks[0][0])
    for _, counted, planned in ranks:
        assert counted == [(planned.peak, planned.exchange)] * 2


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
def test_normuon_sends_what_lies_in_u_and_copies_nothing(world_size: int) -> None:
    ranks = run_ranks(world_size, step_of_an_engine, {"variant": "normuon"}, "next", "exact", torch.float16)
    # Moments and norms of the rows, in fp32 and fp64.
    slack = 64 * sum(shape[0] for shape in SHAPES)
    for _, counted, planned in ranks:
        for peak, exchange in counted:
            assert planned.peak <= peak <= planned.peak + slack
            assert planned.exchange <= exchange <= planned.exchange + slack


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
def test_torchs_own_batches_stay_within_their_workspace(world_size: int) -> None:
    for _, counted, planned in run_ranks(world_size, step_of_an_engine, {}, "planned", "torch", torch.float32):
        assert all(planned.peak / 3 < peak <= planned.peak for peak, _ in counted)


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_parts_are_those_of_the_exchange(case: str, world_size: int, turn: int) -> None:
    plan = group_plan(CASES[case], world_size, turn=turn)
    found = parts(plan)
    assert len(found) == world_size and sum(part.runs for part in found) == len(plan.matrices)
    for rank, part in enumerate(found):
        exchange = Exchange(plan, rank, None)
        assert part.owned == tuple((m.rows, m.cols) for m in exchange.owned)
        assert part.whole == tuple((m.rows, m.cols) for m, _ in plan.held(rank) if not m.travels)
        assert part.sent == sum(piece.numel for route in plan.outgoing(rank) for _, piece in route)
        assert part.received == sum(piece.numel for route in plan.incoming(rank) for _, piece in route)


def test_a_rank_with_nothing_to_do_allocates_nothing() -> None:
    assert step_memory(Part(), NewtonSchulz.resolve(CPU)) == StepMemory(0, 0)
    # A sender holds what it sends, and what comes back.
    assert step_memory(Part(sent=1000), NewtonSchulz.resolve(CPU, ns_dtype="float16")) == StepMemory(4000, 4000)


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32)])
def test_torchs_workspace_holds_what_it_allocates(shape: tuple[int, int]) -> None:
    settings = NewtonSchulz.resolve(CPU)
    matrices = [torch.randn(shape)]
    with Allocations() as allocations:
        orthogonalize_batch(matrices, settings)
    assert 0 < allocations.peak <= step_memory(Part(whole=(shape,)), settings, device=CPU).peak
