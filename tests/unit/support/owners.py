"""Engines in which matrices have other owners than planned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from ds_muon import Plan, Rates, make_plan

FREE = Rates(1.0, math.inf, exchange_seconds=0.0, least_gain=0.0)


def plan_with(turn: int, *args: Any, **kwargs: Any) -> Plan:
    """So many ranks after the planned one own each matrix."""
    plan = make_plan(*args, **kwargs)
    ranks = len(plan.loads)
    groups = (
        replace(group, units=tuple(replace(m, owner=(m.owner + turn) % ranks) for m in group.units))
        for group in plan.groups
    )
    return replace(plan, groups=tuple(groups))


# How owners are chosen: as if moving were free, or other ranks than planned.
OWNERS: dict[str, Any] = {
    "planned": make_plan,
    "balanced": lambda *args, **kwargs: make_plan(*args, **kwargs | {"rates": FREE}),
    "next": partial(plan_with, 1),
    "second next": partial(plan_with, 2),
}


@contextmanager
def owned(how: str) -> Iterator[None]:
    """Engines that are built in this context choose owners so."""
    with mock.patch("ds_muon.zero_plan.make_plan", OWNERS[how]):
        yield
