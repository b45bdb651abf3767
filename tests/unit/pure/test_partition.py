"""The plan as a pure function: it agrees with ZeRO's own code, loses no element, and every rank has its part."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero import stage_1_and_2 as zero
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from ds_muon import Rates, flat_layout
from ds_muon.plan.zero_layout import FlatLayout, cut
from tests.unit.support.random_plans import FREE, HOLDERS, Shape, plan_of, routes, shapes_of_a_group, world_sizes

HARD = {
    "all_four_hold_a_piece": (4, [(48, 48)]),
    "one_element_of_the_second": (2, [(63, 63), (63, 63)]),
    "three_ranks_one_matrix": (3, [(32, 32)]),
    "ranks_with_padding_only": (4, [(2, 3)]),
    "one_rank": (1, [(48, 32), (32, 48)]),
}


DEAR = Rates(1.0, 0.5, exchange_seconds=500.0, least_gain=0.05)


# ---- against ZeRO's own code ----------------------------------------------------------------------------------------


def padding_code() -> Any:
    """The statements of ``DeepSpeedZeroOptimizer.__init__`` that place the parameters of group ``i``, compiled."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(zero.DeepSpeedZeroOptimizer.__init__)))
    wanted = {"alignment", "param_dtype", "element_size", "param_alignment", "param_padding", "param_offsets"}
    wanted |= {"current_offset", "padded_group_numel"}
    (groups,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For)
        and ast.unparse(node.iter) == "enumerate(self.optimizer.param_groups)"
        and "param_padding" in ast.unparse(node)
    ]
    statements = [
        node
        for node in groups.body
        if (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in wanted)
        or (isinstance(node, ast.For) and ast.unparse(node.iter) == "enumerate(meta_tensors)")
    ]
    assert len(statements) == len(wanted) + 1, "DeepSpeed's constructor reads otherwise than this test expects"
    return compile(ast.Module(statements, type_ignores=[]), zero.__file__, "exec")


PADDING = padding_code()


@contextmanager
def zero_of(
    shapes: list[Shape], world_size: int, element_size: int, parameter_alignment: bool, round_robin: bool
) -> Iterator[Any]:
    """A bare ZeRO optimizer with one group, laid out by DeepSpeed's own code on weights without memory."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[element_size]
    params = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes]
    self = object.__new__(zero.DeepSpeedZeroOptimizer)
    self.bit16_groups, self.real_dp_process_group = [params], [None]
    self.nccl_start_alignment_factor, self.parameter_alignment = 2, parameter_alignment
    self.flatten = lambda tensors: torch.cat([tensor.reshape(-1) for tensor in tensors])
    self.param_id = {id(p): index for index, p in enumerate(params)}
    with mock.patch.object(zero.dist, "get_world_size", lambda group=None: world_size):
        order, indices = (
            self._round_robin_reorder(params, world_size) if round_robin else (params, list(range(len(params))))
        )
        place: dict[str, Any] = {"self": self, "i": 0, "meta_tensors": order, "torch": torch, "math": math}
        exec(PADDING, {**vars(zero), **place}, place)
        self.round_robin_bit16_groups, self.round_robin_bit16_indices = [order], [indices]
        self.round_robin_bit16_meta = [[torch.empty_like(p, device="meta") for p in order]]
        self.round_robin_bit16_padding = [place["param_padding"]]
        self.round_robin_bit16_offsets = [place["param_offsets"]]
        flat = self.flatten_dense_tensors_aligned(order, place["alignment"], param_padding=place["param_padding"])
        self.bit16_groups_flat = [flat.detach()]
        partitions = self.get_data_parallel_partitions(flat, 0)
        assert len({partition.numel() for partition in partitions}) == 1
        self.partition_size = [partitions[0].numel()]
        self._update_model_bit16_weights(0)
        yield self


def gradient_slices(self: Any, partition_id: int) -> dict[int, tuple[int, int]]:
    """DeepSpeed's own bookkeeping of one partition: parameter -> (first element of it, where it lies)."""
    for name in ("param_to_partition_ids", "total_grads_in_partition"):
        setattr(self, name, {0: {}})
    for name in ("is_grad_computed", "grad_partition_insertion_offset", "grad_start_offset"):
        setattr(self, name, {0: {partition_id: {}}})
    self.initialize_gradient_partition(0, self.round_robin_bit16_groups[0], partition_id)
    starts, offsets = self.grad_start_offset[0][partition_id], self.grad_partition_insertion_offset[0][partition_id]
    return {param: (starts[param], offsets[param]) for param in starts}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    shapes=shapes_of_a_group,
    world_size=world_sizes,
    element_size=st.sampled_from([2, 4]),
    parameter_alignment=st.booleans(),
    round_robin=st.booleans(),
)
@example(HARD["all_four_hold_a_piece"][1], 4, 4, False, False)
@example(HARD["one_element_of_the_second"][1], 2, 4, False, False)
@example(HARD["one_element_of_the_second"][1], 2, 2, True, True)
@example(HARD["three_ranks_one_matrix"][1], 3, 4, False, False)
@example(HARD["ranks_with_padding_only"][1], 4, 2, True, False)
def test_layout_and_slices_are_those_of_zeros_own_code(
    shapes: list[Shape], world_size: int, element_size: int, parameter_alignment: bool, round_robin: bool
) -> None:
    options = {"parameter_alignment": parameter_alignment, "round_robin": round_robin}
    layout = flat_layout([math.prod(shape) for shape in shapes], world_size, element_size=element_size, **options)
    plan = plan_of([shapes], world_size, element_size=element_size, **options).groups[0]
    with zero_of(shapes, world_size, element_size, parameter_alignment, round_robin) as bare:
        params = bare.bit16_groups[0]
        assert all(params[k] is p for k, p in zip(layout.order, bare.round_robin_bit16_groups[0], strict=True))
        assert layout.offsets == tuple(bare.round_robin_bit16_offsets[0])
        # Where the weights really are: views of DeepSpeed's flat buffer.
        assert layout.offsets == tuple(p.storage_offset() for p in bare.round_robin_bit16_groups[0])
        assert plan.partition_size == layout.partition_size == bare.partition_size[0]

        used = {piece.rank for matrix in plan.units for piece in matrix.slices}
        edges = {0, world_size - 1, *used, *(r + 1 for r in used), *(r - 1 for r in used)}
        for rank in sorted(edges & set(range(world_size)))[:40]:
            ours = {
                bare.get_param_id(params[int(matrix.name.rpartition("p")[2])]): (piece.start, piece.offset)
                for matrix, piece in plan.held(rank)
            }
            assert ours == gradient_slices(bare, rank)
            inside, outside, first = bare.get_partition_info(
                bare.round_robin_bit16_groups[0], layout.partition_size, rank, bare.round_robin_bit16_padding[0]
            )
            assert [bare.get_param_id(p) for p in inside] == list(ours)
            assert len(inside) + len(outside) == len(params)
            assert first == next(iter(ours.values()), (0, 0))[0]


def test_round_robin_deals_parameters_like_cards() -> None:
    layout = flat_layout([10, 20, 30, 40, 50], 2, round_robin=True)
    assert layout == FlatLayout(order=(0, 2, 4, 1, 3), offsets=(0, 10, 40, 90, 110), partition_size=76)


def test_aligned_parameters_start_on_16_bytes() -> None:
    assert flat_layout([3, 9, 5], 2, parameter_alignment=True, element_size=4).offsets == (0, 4, 16)
    assert flat_layout([3, 9, 5], 2, parameter_alignment=True, element_size=2).offsets == (0, 8, 24)
    assert flat_layout([3, 9, 5], 2).offsets == (0, 3, 12)


# ---- slices ---------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    groups=st.lists(shapes_of_a_group, min_size=1, max_size=3),
    world_size=world_sizes,
    parameter_alignment=st.booleans(),
    round_robin=st.booleans(),
)
def test_slices_tile_every_matrix_once_and_never_overlap(
    groups: list[list[Shape]], world_size: int, parameter_alignment: bool, round_robin: bool
) -> None:
    plan = plan_of(groups, world_size, parameter_alignment=parameter_alignment, round_robin=round_robin)
    for group in plan.groups:
        occupied: list[tuple[int, int]] = []
        for matrix in group.units:
            assert matrix.holders == tuple(range(matrix.holders[0], matrix.holders[0] + len(matrix.slices)))
            assert matrix.straddles == (len(matrix.slices) > 1)
            end = 0
            for piece in matrix.slices:
                assert piece.start == end and piece.numel >= 1
                assert 0 <= piece.rank < world_size
                assert piece.offset >= 0 and piece.offset + piece.numel <= group.partition_size
                flat = piece.rank * group.partition_size + piece.offset
                occupied.append((flat, flat + piece.numel))
                end += piece.numel
            assert end == matrix.rows * matrix.cols
        # In flat order, and nothing twice.
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(occupied))


def test_every_matrix_of_every_group_is_in_the_plan_with_its_name_and_shape() -> None:
    groups = [[(4, 6), (7, 3)], [(5, 5)]]
    for round_robin in (False, True):
        plan = plan_of(groups, 2, round_robin=round_robin)
        assert sorted((m.name, m.rows, m.cols) for m in plan.units) == [
            ("g0.p0", 4, 6),
            ("g0.p1", 7, 3),
            ("g1.p0", 5, 5),
        ]


def test_cut_by_hand() -> None:
    assert [(s.rank, s.start, s.numel, s.offset) for s in cut(7, 10, 5)] == [(1, 0, 3, 2), (2, 3, 5, 0), (3, 8, 2, 0)]
    assert [(s.rank, s.start, s.numel, s.offset) for s in cut(5, 5, 5)] == [(1, 0, 5, 0)]
    assert [(s.rank, s.start, s.numel, s.offset) for s in cut(4, 2, 5)] == [(0, 0, 1, 4), (1, 1, 1, 0)]


def test_the_hard_cases_are_cut_where_zero_cuts_them() -> None:
    def slices(case: str) -> list[list[tuple[int, int]]]:
        world_size, shapes = HARD[case]
        return [[(s.rank, s.numel) for s in m.slices] for m in plan_of([shapes], world_size).units]

    assert slices("all_four_hold_a_piece") == [[(0, 576), (1, 576), (2, 576), (3, 576)]]
    # 2 * 3969 = 7938 elements, 2 more to divide by 4: the first rank gets one element of the second matrix.
    assert slices("one_element_of_the_second") == [[(0, 3969)], [(0, 1), (1, 3968)]]
    assert slices("three_ranks_one_matrix") == [[(0, 342), (1, 342), (2, 340)]]
    assert slices("ranks_with_padding_only") == [[(0, 2), (1, 2), (2, 2)]]
    assert slices("one_rank") == [[(0, 1536)], [(0, 1536)]]


# ---- what moves -----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    groups=st.lists(shapes_of_a_group, min_size=1, max_size=2),
    world_size=st.integers(1, 12),
    rates=st.sampled_from([HOLDERS, FREE, DEAR]),
)
@example([HARD["all_four_hold_a_piece"][1]], 4, HOLDERS)
@example([HARD["one_element_of_the_second"][1]], 2, HOLDERS)
@example([HARD["three_ranks_one_matrix"][1]], 3, HOLDERS)
@example([HARD["ranks_with_padding_only"][1]], 4, HOLDERS)
@example([[(8, 8)] * 5], 4, FREE)
def test_what_one_rank_sends_is_what_the_other_expects(
    groups: list[list[Shape]], world_size: int, rates: Rates
) -> None:
    plan = plan_of(groups, world_size, rates)
    elements = 0
    for group in plan.groups:
        expected = routes(group)
        outgoing = [group.outgoing(rank) for rank in range(world_size)]
        incoming = [group.incoming(rank) for rank in range(world_size)]
        for sender, receiver in itertools.product(range(world_size), repeat=2):
            sent = outgoing[sender][receiver]
            assert sent == incoming[receiver][sender]
            assert [(m.name, s.start, s.numel) for m, s in sent] == expected.get((sender, receiver), [])
            elements += sum(piece.numel for _, piece in sent)
        for rank in range(world_size):
            assert len(outgoing[rank]) == len(incoming[rank]) == world_size
            assert outgoing[rank][rank] == ()
            assert group.owned_travellers(rank) == tuple(m for m in group.travellers if m.owner == rank)
            assert group.held(rank) == tuple((m, s) for m in group.units for s in m.slices if s.rank == rank)
    assert plan.moved_elements() == elements
    for matrix in plan.units:
        assert matrix.travels == any(piece.rank != matrix.owner for piece in matrix.slices)
        assert matrix.given_away == all(piece.rank != matrix.owner for piece in matrix.slices)


def test_matrices_inside_a_partition_do_not_move() -> None:
    plan = plan_of([[(8, 8)] * 4], 4)
    assert plan.groups[0].straddlers == ()
    assert plan.moved_elements() == 0
    assert all(route == () for rank in range(4) for route in plan.groups[0].outgoing(rank))


def test_a_rank_with_padding_only_holds_and_owns_nothing() -> None:
    world_size, shapes = HARD["ranks_with_padding_only"]
    group = plan_of([shapes], world_size).groups[0]
    assert group.held(3) == () and group.owned_travellers(3) == ()
    assert group.outgoing(3) == group.incoming(3) == ((), (), (), ())


def test_one_rank_holds_and_owns_everything() -> None:
    plan = plan_of([[(48, 32), (32, 48)], [(5, 7)]], 1)
    assert all(matrix.owner == 0 and not matrix.straddles for matrix in plan.units)
    assert plan.moved_elements() == 0


# ---- for a log, and for worlds nobody here has ----------------------------------------------------------------------


def test_the_summary_counts_matrices_moves_and_balance() -> None:
    assert plan_of([[(48, 48)]], 4).summary() == (
        "1 matrices on 4 ranks, 1 straddle a partition boundary, 0 move to a rank that holds nothing of them "
        "(1,728 elements exchanged each way), most loaded rank 4.00 times the mean"
    )
    assert plan_of([[(8, 8), (8, 8)], [(6, 6), (6, 6)]], 2).summary() == (
        "4 matrices on 2 ranks, 0 straddle a partition boundary, 0 move to a rank that holds nothing of them "
        "(0 elements exchanged each way), most loaded rank 1.00 times the mean"
    )
    assert "0 matrices on 3 ranks" in plan_of([], 3).summary()


def llama_3_8b() -> list[Shape]:
    block = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    return block * 32


def test_a_plan_for_1000_ranks_takes_no_time() -> None:
    start = time.perf_counter()
    group = plan_of([llama_3_8b()], 1000).groups[0]
    # What one rank asks for at its start, then what a tool asks for that shows them all.
    assert group.held(500) and group.outgoing(500) and group.incoming(500)
    assert time.perf_counter() - start < 2
    sent = sum(piece.numel for rank in range(1000) for route in group.outgoing(rank) for _, piece in route)
    received = sum(piece.numel for rank in range(1000) for route in group.incoming(rank) for _, piece in route)
    assert time.perf_counter() - start < 15
    assert sent == received > 0


@pytest.mark.parametrize("rates", [Rates(), FREE])
def test_owners_of_1000_matrices_on_4096_ranks_are_found_in_seconds(rates: Rates) -> None:
    start = time.perf_counter()
    plan = plan_of([llama_3_8b() * 5], 4096, rates)
    assert time.perf_counter() - start < 5
    assert len(plan.units) == 1120 and len(plan.loads) == 4096


def test_a_balanced_model_stays_balanced() -> None:
    plan = plan_of([llama_3_8b()], 64)
    assert max(plan.loads) < 1.3 * sum(plan.loads) / 64
    # No more crosses the network than the straddling matrices hold.
    assert plan.moved_elements() < sum(m.rows * m.cols for group in plan.groups for m in group.straddlers)


def test_plans_compare_and_print() -> None:
    plan = plan_of([[(4, 6)]], 2)
    assert plan == plan_of([[(4, 6)]], 2) != plan_of([[(6, 4)]], 2)
    assert hash(plan) == hash(plan_of([[(4, 6)]], 2))
    assert "g0.p0" in repr(plan)
