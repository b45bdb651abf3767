"""Cases of several settings: by default a few of the product, chosen so that nothing goes unseen."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def full(*values: Any) -> Any:
    """A case that runs with ``--all`` only."""
    return pytest.param(*values, marks=pytest.mark.full)


def first_of(values: Iterable[Any], count: int = 1) -> list[Any]:
    """The first ``count`` of the values, and the rest with ``--all`` only."""
    return [value if index < count else full(value) for index, value in enumerate(values)]


def some(few: Sequence[tuple[Any, ...]], **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """These few cases; with ``--all`` every combination."""
    more = [case for case in itertools.product(*axes.values()) if case not in few]
    assert len(more) == math.prod(len(axis) for axis in axes.values()) - len(few)
    return pytest.mark.parametrize([*axes], [*few, *(full(*case) for case in more)], ids=_name)


def in_turns(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Every value of every axis at least once; with ``--all`` every combination."""
    return _parametrize(axes, 1, len(axes))


def pairwise(*, of_all: int | None = None, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Every pair of values of two axes at least once.

    With ``--all`` every combination, or, with ``of_all``, every combination of so many axes: a fault needs two
    settings to meet, or now and then three.
    """
    return _parametrize(axes, 2, of_all or len(axes))


def _parametrize(axes: dict[str, Sequence[Any]], strength: int, of_all: int) -> pytest.MarkDecorator:
    few = covering([*axes.values()], strength)
    every = few if of_all == strength else covering([*axes.values()], of_all)
    more = [case for case in every if case not in few]
    cases: list[Any] = [case if len(axes) > 1 else case[0] for case in few]
    return pytest.mark.parametrize([*axes], cases + [full(*case) for case in more], ids=_name)


def _name(value: Any) -> str:
    """Of a value, the same in every process: functions print their address."""
    if isinstance(value, dict):
        return ",".join(f"{key}={_name(of_key)}" for key, of_key in value.items()) or "default"
    if isinstance(value, (tuple, list)):
        return ",".join(map(_name, value))
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


def covering(axes: Sequence[Sequence[Any]], strength: int) -> list[tuple[Any, ...]]:
    """Cases among which every combination of values of any ``strength`` axes is found.

    One after another: the case with most combinations that are new, then with most of one axis more, then of values
    that were used least. So it is always the same for the same axes.
    """
    if strength == len(axes):
        return list(itertools.product(*axes))
    cases = list(itertools.product(*(range(len(axis)) for axis in axes)))
    exact, wider = _shown(cases, strength), _shown(cases, min(strength + 1, len(axes)))
    missing, unseen, found = functools.reduce(operator.or_, exact), functools.reduce(operator.or_, wider), []
    uses: Counter[tuple[int, int]] = Counter()

    while missing:
        # What takes longest is counted last, of the few cases that are left.
        left = _most(range(len(cases)), [(shown & missing).bit_count() for shown in exact])
        left = _most(left, [(wider[index] & unseen).bit_count() for index in left])
        best, *_ = _most(left, [-sum(map(uses.__getitem__, enumerate(cases[index]))) for index in left])
        found.append(tuple(axis[value] for axis, value in zip(axes, cases[best], strict=True)))
        missing &= ~exact[best]
        unseen &= ~wider[best]
        uses.update(enumerate(cases[best]))
    return found


def _most(indices: Sequence[int], gains: Sequence[int]) -> list[int]:
    """Those whose gain is largest."""
    most = max(gains)
    return [index for index, gain in zip(indices, gains, strict=True) if gain == most]


def _shown(cases: list[tuple[int, ...]], strength: int) -> list[int]:
    """Which combinations of so many axes each case shows: a bit for each of them."""
    shown, count = [0] * len(cases), 0
    for axes in itertools.combinations(range(len(cases[0])), strength):
        values = [*map(operator.itemgetter(*axes), cases)]
        bits = {value: 1 << number for number, value in enumerate(dict.fromkeys(values), count)}
        shown = [before | bits[value] for before, value in zip(shown, values, strict=True)]
        count += len(bits)
    return shown
