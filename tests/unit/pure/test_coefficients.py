"""The coefficient tables and the schedule of a run."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_muon.orthogonalize import COEFFICIENTS, schedule

# Where five steps take singular values between 0.1 and 1, worked out in fp64. The cubic one needs more for the small.
FIVE_STEPS = {
    "quintic": (0.68, 1.14),
    "polar_express": (0.86, 1.13),
    "you": (0.97, 1.04),
    "cubic": (0.65, 1.01),
}


def apply(triples: Any, x: Tensor) -> Tensor:
    for a, b, c in triples:
        x = a * x + b * x**3 + c * x**5
    return x


def test_every_table_names_its_source_with_a_year() -> None:
    for name, table in COEFFICIENTS.items():
        assert re.search(r"\b(19|20)\d\d\b", table.source), name


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_five_steps_bring_singular_values_near_one(name: str) -> None:
    low, high = FIVE_STEPS[name]
    reached = apply(schedule(name, 5), torch.logspace(-1, 0, 20001, dtype=torch.float64))
    assert low <= reached.min() and reached.max() <= high


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_more_steps_than_a_table_has_stay_near_one(name: str) -> None:
    # The last triple repeats, so it must hold what the others have reached.
    low, high = FIVE_STEPS[name]
    steps = len(COEFFICIENTS[name].triples) + 20
    reached = apply(schedule(name, steps), torch.logspace(-1, 0, 20001, dtype=torch.float64))
    assert low <= reached.min() and reached.max() <= high


@pytest.mark.parametrize("name", [name for name in COEFFICIENTS if name != "quintic"])
def test_the_last_triple_of_a_table_leaves_one_where_it_is(name: str) -> None:
    # Not quintic: it trades convergence for slope at zero, as its table says.
    assert math.isclose(sum(COEFFICIENTS[name].triples[-1]), 1.0, abs_tol=0.02)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_zero_is_pushed_up_by_every_step(name: str) -> None:
    assert all(a > 1 for a, _, _ in COEFFICIENTS[name].triples)


def test_polar_express_leaves_one_percent_of_room_until_its_last_triple() -> None:
    # arXiv:2505.16932, Algorithm 1: p(x / 1.01) for all triples but the last.
    published = (8.28721201814563, -23.595886519098837, 17.300387312530933)
    x = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(apply(COEFFICIENTS["polar_express"].triples[:1], x), apply([published], x / 1.01))
    assert COEFFICIENTS["polar_express"].triples[-1] == (1.875, -1.25, 0.375)


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("steps", [1, 2, 5, 8, 9, 20])
def test_a_schedule_is_the_table_cut_short_or_with_its_last_triple_repeated(name: str, steps: int) -> None:
    table = COEFFICIENTS[name].triples
    triples = schedule(name, steps)
    assert len(triples) == steps
    assert triples[: len(table)] == table[:steps]
    assert all(triple == table[-1] for triple in triples[len(table) :])


def test_custom_triples_make_a_schedule_of_floats() -> None:
    assert schedule([[2, -1, 0], (1.5, -0.5, 0)], 3) == ((2.0, -1.0, 0.0), (1.5, -0.5, 0.0), (1.5, -0.5, 0.0))
    assert schedule([[2, -1, 0], [1.5, -0.5, 0]], 1) == ((2.0, -1.0, 0.0),)
    assert all(type(x) is float for triple in schedule([[2, -1, 0]], 2) for x in triple)


@pytest.mark.parametrize("steps", [0, -1])
def test_fewer_than_one_step_is_refused_with_the_value(steps: int) -> None:
    with pytest.raises(ValueError, match=f"ns_steps = {steps}"):
        schedule("quintic", steps)


def test_an_unknown_table_is_refused_with_the_names_to_choose_from() -> None:
    with pytest.raises(ValueError, match=r"ns_coefficients = 'quintik'.*cubic.*polar_express.*quintic.*you"):
        schedule("quintik", 5)


@pytest.mark.parametrize(
    "coefficients",
    [[], (), [[1.0, 2.0]], [[1.0, 2.0, 3.0, 4.0]], [3.4445, -4.7750, 2.0315], [[1.5, -0.5, 0.0], 3.0], ["abc"]]
    + [[[1.5, bad, 0.0]] for bad in (float("nan"), float("-inf"), 10**400, 1e39)],
    ids=lambda coefficients: f"{coefficients!r:.40}",
)
def test_anything_but_triples_of_finite_numbers_is_refused(coefficients: Any) -> None:
    with pytest.raises(ValueError, match=r"ns_coefficients = .*triples"):
        schedule(coefficients, 5)
