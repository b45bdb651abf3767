"""The plan of one param group of matrices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ds_muon import flat_layout, make_plan
from ds_muon.plan.partition import GroupPlan

Shape = tuple[int, int]


def group_plan(shapes: list[Shape], world_size: int, *, turn: int = 0, **options: Any) -> GroupPlan:
    """With ``turn``, so many ranks after the planned one own each matrix, holders or not."""
    layout = flat_layout([math.prod(shape) for shape in shapes], world_size, **options)
    named = [(f"p{i}", shape) for i, shape in enumerate(shapes)]
    plan = make_plan([named], [layout], world_size, lambda rows, cols: rows * cols).groups[0]
    return replace(plan, units=tuple(replace(m, owner=(m.owner + turn) % world_size) for m in plan.units))
