"""Plans of groups of random shapes, and what they move."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from ds_muon import Rates, flat_layout, make_plan
from ds_muon.plan.partition import GroupPlan, Plan

Shape = tuple[int, int]

shapes_of_a_group = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)

world_sizes = st.one_of(st.integers(1, 9), st.integers(1, 1000))

# Moving costs nothing; and moving pays sometimes, for matrices of the sizes that are drawn here.
FREE = Rates(1.0, math.inf, exchange_seconds=0.0, least_gain=0.0)

# Owners are always holders.
HOLDERS = Rates(least_gain=1.0)


def cost(rows: int, cols: int) -> int:
    return min(rows, cols) ** 2 * max(rows, cols)


def plan_of(groups: list[list[Shape]], world_size: int, rates: Rates = HOLDERS, **layout: Any) -> Plan:
    """Owners are holders, unless rates are given."""
    named = [[(f"g{g}.p{i}", shape) for i, shape in enumerate(group)] for g, group in enumerate(groups)]
    layouts = [flat_layout([math.prod(shape) for shape in group], world_size, **layout) for group in groups]
    return make_plan(named, layouts, world_size, cost, rates=rates)


def routes(group: GroupPlan) -> dict[tuple[int, int], list[tuple[str, int, int]]]:
    """(sender, receiver) -> the slices that a plan of all ranks would move to owners, from the slices alone."""
    moved: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for matrix in group.units:
        for piece in matrix.slices:
            if piece.rank != matrix.owner:
                moved.setdefault((piece.rank, matrix.owner), []).append((matrix.name, piece.start, piece.numel))
    return moved
