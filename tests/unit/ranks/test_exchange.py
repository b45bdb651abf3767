"""Travelling matrices reach their owner whole and come back in the right places, and nothing else is touched."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_muon import exchange as exchange_module
from ds_muon.exchange import Exchange
from ds_muon.plan.partition import GroupPlan
from tests.unit.support.plans import group_plan
from tests.unit.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

Shape = tuple[int, int]
DTYPES = ["float32", "float16", "bfloat16"]
CASES = {
    "all_hold_a_piece_of_one": [(48, 48)],
    "neighbours": [(63, 63), (63, 63)],
    "thirds": [(32, 32)],
    "padding_only": [(2, 3)],
    "one_element_each": [(1, 4)],
    "many_shapes": [(16, 16), (64, 16), (16, 64), (7, 13), (13, 7), (3, 2), (33, 5), (2, 41)],
    "nothing_straddles": [(12, 12)] * 12,
}


def flat_values(plan: GroupPlan, dtype: torch.dtype, seed: int) -> Tensor:
    """The whole flat buffer, the same on every rank: NaN wherever no matrix lies."""
    flat = torch.full((plan.world_size * plan.partition_size,), math.nan)
    generator = torch.Generator().manual_seed(seed)
    for matrix in plan.units:
        for piece in matrix.slices:
            values = torch.randn(piece.numel, generator=generator)
            flat[piece.rank * plan.partition_size + piece.offset :][: piece.numel] = values
    return flat.to(dtype)


def wholes(plan: GroupPlan, flat: Tensor) -> dict[str, Tensor]:
    """Every matrix, read off the whole flat buffer."""
    first = {m.name: m.slices[0].rank * plan.partition_size + m.slices[0].offset for m in plan.units}
    return {m.name: flat[first[m.name] :][: m.rows * m.cols].view(m.rows, m.cols) for m in plan.units}


def bits(tensor: Tensor) -> Tensor:
    """Compares NaN with NaN, and -0 with 0 as different."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def there_and_back(shapes: list[Shape], sent: str, returned: str, options: dict[str, Any], ranks: Any = None) -> int:
    """Gather and scatter on every rank, checked element by element; returns the number of collectives."""
    group = None if ranks is None else dist.new_group(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return 0
    rank, device = dist.get_rank(group), torch.device(get_accelerator().current_device_name())
    plan = group_plan(shapes, dist.get_world_size(group), **options)
    own = slice(rank * plan.partition_size, (rank + 1) * plan.partition_size)

    flat = flat_values(plan, getattr(torch, sent), seed=1)
    partition = flat[own].to(device)
    before = partition.clone()
    results = flat_values(plan, getattr(torch, returned), seed=2)
    # The fp32 partition that takes the results starts as NaN everywhere: what scatter leaves alone stays NaN.
    target = torch.full((plan.partition_size,), math.nan, device=device)
    expected = torch.full((plan.partition_size,), math.nan)
    for matrix, piece in plan.held(rank):
        if matrix.travels:
            expected[piece.offset :][: piece.numel] = results[own][piece.offset :][: piece.numel].float()

    names = ["all_to_all_single", "all_to_all", "all_gather", "all_reduce", "broadcast", "send", "recv", "barrier"]
    with mock.patch.multiple(dist, **{name: mock.Mock(wraps=getattr(dist, name)) for name in names}):
        exchange = Exchange(plan, rank, group)
        gathered = exchange.gather(partition).wait()
        outputs = [wholes(plan, results)[matrix.name].to(device) for matrix in exchange.owned]
        # Results of tall matrices are transposed views.
        outputs = [x.mT.contiguous().mT if x.shape[0] > x.shape[1] else x for x in outputs]
        kept = [x.clone() for x in outputs]
        exchange.scatter(outputs, target, getattr(torch, returned)).wait()
        calls = sum(getattr(dist, name).call_count for name in names)

    assert exchange.owned == plan.owned_travellers(rank)
    for matrix, whole in zip(exchange.owned, gathered, strict=True):
        assert whole.shape == (matrix.rows, matrix.cols) and whole.dtype == partition.dtype
        assert torch.equal(whole.cpu(), wholes(plan, flat)[matrix.name]), matrix.name
        assert whole.untyped_storage().data_ptr() != partition.untyped_storage().data_ptr()
    assert torch.equal(bits(partition), bits(before))
    assert all(torch.equal(output, copy) for output, copy in zip(outputs, kept, strict=True))
    assert torch.equal(bits(target.cpu()), bits(expected))
    return calls


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_matrices_arrive_whole_and_results_land_in_their_slices(case: str, world_size: int) -> None:
    calls = run_ranks(world_size, there_and_back, CASES[case], "float32", "float32", {})
    travels = bool(group_plan(CASES[case], world_size).travellers)
    assert travels == (case != "nothing_straddles")
    # One collective each way, on every rank, also one that holds nothing; none where nothing travels.
    assert calls == [2 if travels else 0] * world_size


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_an_owner_may_hold_nothing_of_a_matrix(case: str, world_size: int, turn: int) -> None:
    calls = run_ranks(world_size, there_and_back, CASES[case], "float32", "float16", {"turn": turn})
    plan = group_plan(CASES[case], world_size, turn=turn)
    assert calls == [2 if plan.travellers else 0] * world_size
    if case == "nothing_straddles":
        assert all(matrix.given_away for matrix in plan.units) == (turn < world_size)


@pytest.mark.parametrize("returned", DTYPES)
@pytest.mark.parametrize("sent", DTYPES)
def test_every_dtype_travels_bit_for_bit(sent: str, returned: str) -> None:
    run_ranks(3, there_and_back, CASES["many_shapes"], sent, returned, {})


@pytest.mark.parametrize("options", [{"round_robin": True}, {"parameter_alignment": True, "element_size": 2}], ids=str)
def test_other_layouts_travel_as_well(options: dict[str, Any]) -> None:
    run_ranks(4, there_and_back, CASES["many_shapes"], "float32", "bfloat16", options)


def test_a_group_within_the_world_counts_its_own_ranks() -> None:
    assert run_ranks(3, there_and_back, CASES["neighbours"], "float32", "float16", {}, [1, 2]) == [0, 2, 2]


def test_the_cases_include_ranks_that_hold_or_own_nothing() -> None:
    padding = group_plan(CASES["padding_only"], 4)
    assert padding.held(3) == () and [bool(padding.owned_travellers(rank)) for rank in range(4)].count(True) == 1
    single = group_plan(CASES["all_hold_a_piece_of_one"], 4)
    assert all(single.held(rank) for rank in range(4)) and len(single.straddlers) == 1


def exchange_twice(shapes: list[Shape]) -> None:
    rank = dist.get_rank()
    plan = group_plan(shapes, dist.get_world_size())
    exchange = Exchange(plan, rank, None)
    own = slice(rank * plan.partition_size, (rank + 1) * plan.partition_size)
    device = torch.device(get_accelerator().current_device_name())
    first, second = (flat_values(plan, torch.float32, seed) for seed in (1, 2))
    earlier = exchange.gather(first[own].to(device)).wait()
    later = exchange.gather(second[own].to(device)).wait()
    for matrix, one, two in zip(exchange.owned, earlier, later, strict=True):
        assert torch.equal(one.cpu(), wholes(plan, first)[matrix.name])
        assert torch.equal(two.cpu(), wholes(plan, second)[matrix.name])


def test_a_later_exchange_leaves_the_results_of_an_earlier_one_alone() -> None:
    run_ranks(2, exchange_twice, CASES["many_shapes"])


def test_what_is_sent_stays_alive_until_it_has_been_waited_for() -> None:
    plan = group_plan([(6, 14), (7, 9)], 2)
    sent: list[weakref.ref[Tensor]] = []
    waits: list[bool] = []

    class Work:
        def wait(self) -> None:
            waits.append(sent[-1]() is not None)

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        packed = pack(*args, **kwargs)
        sent.append(weakref.ref(packed))
        return packed

    pack = exchange_module._pack
    for rank in (0, 1):  # the owner, which returns slices, and the other holder, which sends them
        exchange, partition = Exchange(plan, rank, None), torch.zeros(plan.partition_size)
        with (
            mock.patch.object(exchange_module, "_pack", noted),
            mock.patch.object(dist, "all_to_all_single", lambda *args, **kwargs: Work()),
        ):
            results = [torch.zeros(matrix.rows, matrix.cols) for matrix in exchange.owned]
            both_ways = (
                partial(exchange.gather, partition),
                partial(exchange.scatter, results, partition, torch.float32),
            )
            for start in both_ways:
                transfer = start()
                transfer.wait()
                gc.collect()
                assert sent[-1]() is None
    assert waits == [True] * 4


def scatter_too_few() -> str:
    plan = group_plan([(6, 6)], 2)
    try:
        Exchange(plan, 0, None).scatter([], torch.zeros(plan.partition_size), torch.float32)
    except ValueError as error:
        return str(error)
    return ""


def test_a_missing_result_is_an_error_and_not_a_silent_gap() -> None:
    # Both ranks play rank 0, the owner: the mistake is found before anything is sent.
    assert all(run_ranks(2, scatter_too_few))
