"""What one rank of thousands does and keeps, counted: it does not grow with the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_muon import agree
from ds_muon.exchange import Exchange
from ds_muon.normuon import RowVariance
from ds_muon.plan.partition import GroupPlan
from tests.unit.support.plans import group_plan

RANKS = 4096


class Operations(TorchFunctionMode):
    """Counts tensors, of every operation: one that takes or makes a list of a hundred counts as a hundred."""

    tensors = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        lists = [value for value in (*args, result) if isinstance(value, list | tuple)]
        self.tensors += 1 + sum(isinstance(x, torch.Tensor) for of in lists for x in of)
        return result


def operations(plan: GroupPlan, rank: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of an exchange there and back."""
    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **options: None)
    exchange, partition = Exchange(plan, rank, None), torch.zeros(plan.partition_size)
    with Operations() as counted:
        units = exchange.gather(partition).wait()
        exchange.scatter([unit.half() for unit in units], partition, torch.float16).wait()
    return counted.tensors


@pytest.mark.parametrize("owner", [0, 0.5, 1], ids=["the first holder", "in the middle", "the last"])
def test_an_owner_copies_no_more_often_from_many_holders_than_from_a_few(
    owner: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for ranks in (4, 512):
        plan, rank = group_plan([(64, 64)], ranks), int(owner * (ranks - 1))
        assert len(plan.units[0].slices) == ranks
        plan = replace(plan, units=tuple(replace(unit, owner=rank) for unit in plan.units))
        counts.append(operations(plan, rank, monkeypatch))
    assert counts[0] == counts[1]


def test_a_matrix_whose_owner_holds_nothing_of_it_arrives_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for ranks in (8, 512):
        plan = group_plan([(64, 64)] * 2, ranks)
        # The owner is at the far end of the other matrix, whose own owner is here.
        first, second = plan.units
        plan = replace(plan, units=(replace(first, owner=ranks - 1), replace(second, owner=0)))
        counts.append(operations(plan, 0, monkeypatch))
    assert counts[0] == counts[1]


@pytest.fixture
def thousands() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("thousands")
def test_ranks_that_agree_do_not_gather_what_each_of_them_says(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[int] = []
    usual = dist.all_reduce
    monkeypatch.setattr(agree, "gather", None)
    monkeypatch.setattr(dist, "all_reduce", lambda t, **options: reduced.append(t.nbytes) or usual(t, **options))
    agree.agree("parameters", {f"layer.{i}": "to muon" for i in range(1000)}, "build the same model")
    agree.raise_together(None)
    assert reduced == [128, 8]


class CountingStore:
    """A store in this process."""

    def __init__(self) -> None:
        self.keys: dict[str, int] = {}
        self.requests = 0

    def set(self, key: str, value: str) -> None:
        self.keys[key] = 0

    def add(self, key: str, amount: int) -> int:
        self.requests += 1
        self.keys[key] = self.keys.get(key, 0) + amount
        return self.keys[key]

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return all(key in self.keys for key in keys)


@pytest.mark.usefixtures("thousands")
def test_a_late_rank_does_not_make_every_other_ask_for_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store, roll_call = CountingStore(), agree.RollCall()
    monkeypatch.setattr(agree, "_store", lambda: store)
    for rank in range(RANKS):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        agree.leave_word()
        agree.leave_word()  # does not count twice
        if rank != 1234:
            store.set(f"here/{rank}", "")
    store.requests = 0
    assert roll_call._of_strangers(store, "here", 60.0) is None
    assert store.requests == 1
    assert roll_call._missing(store, "here") == [1234]
    assert store.requests <= 2 + 2 * math.log2(RANKS)


@pytest.mark.usefixtures("thousands")
def test_strangers_are_named_among_thousands(monkeypatch: pytest.MonkeyPatch) -> None:
    store, roll_call = CountingStore(), agree.RollCall()
    monkeypatch.setattr(agree, "_store", lambda: store)
    for rank in set(range(RANKS)) - {7, 99}:
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        agree.leave_word()
        if rank != 1234:
            store.set(f"here/{rank}", "")
    said = roll_call._of_strangers(store, "here", 60.0)
    assert said is not None and "ranks [7, 99] have not imported" in said


def test_normuon_keeps_no_number_for_each_row() -> None:
    plan = group_plan([(512, 4), (256, 4)], 2)
    kept = [value.numel() for value in vars(RowVariance(plan, ["p0", "p1"], 0.95, None)).values()
            if isinstance(value, torch.Tensor)]  # fmt: skip
    assert sum(kept) <= 4 * len(plan.matrices)
