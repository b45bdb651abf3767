"""Owners of matrices: near the mean by cost, holders or not, where that pays."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_muon import Rates
from ds_muon.plan.owners import Work, choose_owners
from tests.unit.support.random_plans import FREE, Shape, cost, plan_of, routes, shapes_of_a_group, world_sizes

# ---- owners and load ------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(groups=st.lists(shapes_of_a_group, min_size=1, max_size=3), world_size=world_sizes, round_robin=st.booleans())
def test_owners_are_holders_and_loads_are_what_they_own(
    groups: list[list[Shape]], world_size: int, round_robin: bool
) -> None:
    plan = plan_of(groups, world_size, round_robin=round_robin)
    loads = [0.0] * world_size
    for matrix in plan.units:
        assert matrix.owner in matrix.holders
        loads[matrix.owner] += cost(matrix.rows, matrix.cols)
    assert plan.loads == pytest.approx(tuple(loads))
    assert sum(plan.loads) == pytest.approx(sum(cost(*shape) for group in groups for shape in group))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(groups=st.lists(shapes_of_a_group, min_size=1, max_size=3), world_size=world_sizes)
def test_a_plan_is_a_function_of_its_arguments(groups: list[list[Shape]], world_size: int) -> None:
    assert plan_of(groups, world_size) == plan_of(groups, world_size)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    groups=st.lists(st.lists(st.tuples(st.integers(2, 12), st.integers(2, 12)), min_size=1, max_size=4), max_size=2),
    world_size=st.integers(1, 5),
)
def test_the_most_loaded_rank_is_within_the_bound_of_greedy_assignment(
    groups: list[list[Shape]], world_size: int
) -> None:
    plan = plan_of(groups, world_size)
    best = math.inf
    for owners in itertools.product(*(matrix.holders for matrix in plan.units)):
        loads = [0] * world_size
        for matrix, owner in zip(plan.units, owners, strict=True):
            loads[owner] += cost(matrix.rows, matrix.cols)
        best = min(best, max(loads))
    # Azar, Naor and Rom (1995): the least loaded of the admissible machines, against the best assignment of all.
    assert max(plan.loads) <= (math.ceil(math.log2(world_size)) + 1) * best


def test_owners_spread_over_the_holders() -> None:
    # Each rank holds a slice of two neighbouring matrices; without a look at the loads one would own both.
    plan = plan_of([[(30, 30)] * 3], 4)
    assert all(matrix.straddles for matrix in plan.units)
    assert max(plan.loads) == cost(30, 30)
    # A single matrix over all ranks goes to the first, all slices being equal; in doubt, to the largest slice.
    assert plan_of([[(48, 48)]], 4).units[0].owner == 0
    assert plan_of([[(63, 63), (63, 63)]], 2).units[1].owner == 1


def test_loads_count_all_groups() -> None:
    # The second group's matrix is held by both ranks; the first group's work already lies with rank 0.
    plan = plan_of([[(20, 20), (2, 30)], [(10, 10)]], 2, round_robin=True)
    first, second = plan.groups
    assert first.units[0].owner == 0 and second.units[0].straddles
    assert second.units[0].owner == 1


# ---- owners that hold nothing ---------------------------------------------------------------------------------------

rates_of_a_machine = st.builds(
    Rates,
    st.sampled_from([1.0, 30.0]),
    st.sampled_from([0.1, 0.5, 1.0, 10.0, math.inf]),
    exchange_seconds=st.sampled_from([0.0, 500.0]),
    least_gain=st.sampled_from([0.0, 0.05]),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    groups=st.lists(shapes_of_a_group, min_size=1, max_size=3),
    world_size=st.integers(1, 64),
    rates=rates_of_a_machine,
    round_robin=st.booleans(),
)
def test_no_step_is_slower_by_the_model_than_with_holders_as_owners(
    groups: list[list[Shape]], world_size: int, rates: Rates, round_robin: bool
) -> None:
    plan = plan_of(groups, world_size, rates, round_robin=round_robin)
    assert plan == plan_of(groups, world_size, rates, round_robin=round_robin)
    by_holders = plan_of(groups, world_size, round_robin=round_robin)
    assert [(m.name, m.slices) for m in plan.units] == [(m.name, m.slices) for m in by_holders.units]
    assert plan == by_holders or plan.seconds(rates) < by_holders.seconds(rates) * (1 - rates.least_gain)
    # The model, from the plan alone: every matrix once, every slice away from its owner both ways.
    operations, moved, exchanged = [0] * world_size, [0] * world_size, 0
    for group in plan.groups:
        for matrix in group.units:
            operations[matrix.owner] += cost(matrix.rows, matrix.cols)
        routes_of_group = routes(group)
        exchanged += bool(routes_of_group)
        for (sender, receiver), slices in routes_of_group.items():
            elements = sum(numel for _, _, numel in slices)
            moved[sender] += elements
            moved[receiver] += elements
    assert plan.loads == tuple(operations) and plan.moved_by_rank() == tuple(moved)
    times = [w / rates.flops + 6 * n / rates.bytes_per_second for w, n in zip(operations, moved, strict=True)]
    assert plan.seconds(rates) == pytest.approx(max(times) + exchanged * rates.exchange_seconds)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(groups=st.lists(shapes_of_a_group, min_size=1, max_size=3), world_size=st.integers(1, 64))
def test_if_moving_is_free_no_rank_does_more_than_the_mean_and_one_matrix(
    groups: list[list[Shape]], world_size: int
) -> None:
    plan = plan_of(groups, world_size, FREE)
    largest = max(cost(*shape) for group in groups for shape in group)
    mean = sum(plan.loads) / world_size
    assert max(plan.loads) <= 1.0001 * (mean + largest * (1 - 1 / world_size))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    sides=st.lists(st.integers(20, 25), min_size=80, max_size=120),
    world_size=st.integers(2, 3),
    round_robin=st.booleans(),
)
def test_if_moving_is_free_and_no_matrix_large_all_ranks_are_within_5_percent(
    sides: list[int], world_size: int, round_robin: bool
) -> None:
    plan = plan_of([[(side, side) for side in sides]], world_size, FREE, round_robin=round_robin)
    assert plan.balance <= 1.05


def best_load(costs: list[int], world_size: int) -> float:
    """The least load of the most loaded rank, of all assignments."""
    best = math.inf

    def deal(index: int, loads: list[int]) -> None:
        nonlocal best
        if max(loads) >= best:
            return
        if index == len(costs):
            best = max(loads)
            return
        for load in sorted(set(loads)):  # ranks that have done the same are alike
            rank = loads.index(load)
            deal(index + 1, [*loads[:rank], load + costs[index], *loads[rank + 1 :]])

    deal(0, [0] * world_size)
    return best


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.tuples(st.integers(2, 30), st.integers(2, 30)), min_size=1, max_size=8),
    world_size=st.integers(1, 5),
)
def test_if_moving_is_free_the_balance_is_close_to_the_best_one(shapes: list[Shape], world_size: int) -> None:
    costs = sorted((cost(*shape) for shape in shapes), reverse=True)
    # Graham's bound (1969) for the costliest first to the least loaded rank. Here it is no theorem, but it holds.
    assert max(plan_of([shapes], world_size, FREE).loads) <= 4 / 3 * best_load(costs, world_size)


def test_a_whole_matrix_moves_where_that_pays_and_only_there() -> None:
    # Four matrices on rank 0, eight of half their size on rank 1, with half of the work.
    shapes = [(16, 16)] * 4 + [(16, 8)] * 8
    by_holders = plan_of([shapes], 2)
    assert by_holders.groups[0].straddlers == () and by_holders.loads == (4 * 4096, 8 * 1024)
    # Too slow a link; one that is fast enough for one matrix; too high a price; too little gain.
    assert plan_of([shapes], 2, Rates(1.0, 0.1)) == by_holders
    moved = plan_of([shapes], 2, Rates(1.0, 2.0, exchange_seconds=0.0))
    assert sum(matrix.given_away for matrix in moved.units) == 1
    assert moved.loads == (3 * 4096, 3 * 4096)
    assert plan_of([shapes], 2, Rates(1.0, 2.0, exchange_seconds=4096.0)) == by_holders
    assert plan_of([shapes], 2, Rates(1.0, 2.0, exchange_seconds=0.0, least_gain=0.5)) == by_holders


def test_a_matrix_may_move_for_the_work_in_another_group() -> None:
    plan = plan_of([[(20, 20), (2, 30)], [(10, 10), (10, 10)]], 2, FREE)
    assert plan.groups[1].units[0].owner == plan.groups[1].units[1].owner == 1
    assert plan.groups[1].units[0].given_away


# ---- nodes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [Rates(ranks_per_node=4), replace(FREE, ranks_per_node=4)], ids=["usual", "free"])
def test_among_idle_ranks_the_owner_is_in_the_node_that_holds_most(rates: Rates) -> None:
    # Of 16 equal slices in four nodes of four, the first matrix has 6 and the second 10.
    first, second = plan_of([[(6, 32), (10, 32)]], 16, rates).units
    assert (first.holders, second.holders) == (tuple(range(6)), tuple(range(6, 16)))
    assert first.owner // 4 == 0 and second.owner // 4 in (2, 3)
    unknown = plan_of([[(6, 32), (10, 32)]], 16, Rates()).units
    assert unknown[1].owner // 4 == 1


def test_a_matrix_moves_within_its_node_if_a_rank_there_has_time() -> None:
    # Rank 4 of eight has two large matrices, and each other rank a small one.
    works = [Work(0, 10, ((4, 100),))] * 2 + [Work(0, 1, ((rank, 10),)) for rank in range(8) if rank != 4]
    rates = Rates(1.0, 1e9, exchange_seconds=0.0)
    assert set(choose_owners(works, 8, rates, 1)[:2]) == {4, 0}
    assert set(choose_owners(works, 8, replace(rates, ranks_per_node=4), 1)[:2]) == {4, 5}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(groups=st.lists(shapes_of_a_group, min_size=1, max_size=3), world_size=st.integers(1, 9))
def test_one_node_is_as_if_nodes_were_not_known(groups: list[list[Shape]], world_size: int) -> None:
    nodes = Rates(1.0, 0.01, ranks_per_node=world_size)
    assert plan_of(groups, world_size, nodes) == plan_of(groups, world_size, replace(nodes, ranks_per_node=0))


def test_what_stays_in_a_node_takes_the_time_of_the_link_there() -> None:
    plan = plan_of([[(6, 32), (10, 32)]], 16, Rates(ranks_per_node=4))
    rates = Rates(math.inf, 2.0, exchange_seconds=0.0, bytes_per_second_in_node=8.0, ranks_per_node=4)
    # The busiest owner gets 9 slices of 32 elements, of which 6 come from other nodes.
    assert max(plan.moved_by_rank()) == 9 * 32 and max(plan.moved_by_rank(4)) == 6 * 32
    assert plan.seconds(rates, element_bytes=1) == 6 * 32 / 2.0 + 3 * 32 / 8.0
    assert plan.seconds(replace(rates, ranks_per_node=0), element_bytes=1) == 9 * 32 / 2.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flops", 0.0),
        ("bytes_per_second", -1.0),
        ("bytes_per_second_in_node", 0.0),
        ("exchange_seconds", -1e-3),
        ("ranks_per_node", -1),
        ("least_gain", 1.5),
    ],
)
def test_rates_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"Rates\.{name} = {value}"):
        Rates(**{name: value})
    with pytest.raises(ValueError, match=f"Rates.{name} = nan"):
        Rates(**{name: math.nan})
