"""The cases that the tests themselves choose: nothing that they promise to show is left out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.support.cases import covering, first_of, in_turns, pairwise

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=sizes, strength=st.integers(1, 3))
def test_every_combination_of_so_many_axes_is_found(sizes: list[int], strength: int) -> None:
    strength = min(strength, len(sizes))
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    found = covering(axes, strength)
    assert found == covering(axes, strength) and len(set(found)) == len(found)
    for chosen in itertools.combinations(range(len(axes)), strength):
        seen = {tuple(case[axis] for axis in chosen) for case in found}
        assert seen == set(itertools.product(*(axes[axis] for axis in chosen)))


def cases_of(mark: pytest.MarkDecorator) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """Those that run by default, and those that run with ``--all`` only."""
    cases = mark.args[1]
    later = [case.values for case in cases if hasattr(case, "marks") and case.marks[0].name == "full"]
    return cases[: len(cases) - len(later)], later


def test_by_default_a_few_cases_run_and_with_all_the_whole_product() -> None:
    axes = {"world_size": [1, 2, 3, 4], "stage": [1, 2], "dtype": ["fp32", "bf16"], "groups": [1, 2]}
    pairs, others = cases_of(pairwise(**axes))
    assert len(pairs) <= 10 and sorted(pairs + others) == sorted(itertools.product(*axes.values()))
    turns, others = cases_of(in_turns(**axes))
    assert len(turns) == 4 and sorted(turns + others) == sorted(itertools.product(*axes.values()))
    pairs, others = cases_of(pairwise(of_all=3, **axes))
    assert len(pairs) <= 10 < len(pairs + others) < 32


def test_the_first_runs_by_default() -> None:
    first, second = first_of(["a", "b"])
    assert first == "a" and second.values == ("b",) and second.marks[0].name == "full"
