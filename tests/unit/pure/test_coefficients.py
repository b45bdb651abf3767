"""The coefficient tables and the schedule of a run."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_muon.orthogonalize import COEFFICIENTS, schedule

# From which singular value on a table's own steps take them where, worked out in fp64, and where they take all smaller.
REACHED = {
    "quintic": (0.007, 0.68, 1.14, 1.203),
    "polar_express": (0.0021, 0.87, 1.13, 1.13),
    "you": (0.007, 0.97, 1.04, 1.15),
    "minimax": (0.0021, 0.67, 1.306, 1.306),
    "cubic5": (0.007, 0.74, 1.3001, 1.3001),
    "deepseekv4": (0.0021, 0.999, 1.001, 1.01),
    "cubic": (0.1, 0.65, 1.01, 1.01),
}
# Those whose last triple is for its slope, not for its fixed point: their tables say where values end.
OF_FIVE = [name for name in COEFFICIENTS if name != "deepseekv4"]
WITHOUT_FIXED_POINT = ["quintic", "minimax", "cubic5"]


def apply(triples: Any, x: Tensor) -> Tensor:
    for a, b, c in triples:
        x = a * x + b * x**3 + c * x**5
    return x


def values(least: float, most: float = 1.0) -> Tensor:
    """Singular values from ``least`` to ``most``, evenly on a logarithmic scale, both ends among them."""
    spread = torch.linspace(math.log(least), math.log(most), 100_001, dtype=torch.float64).exp()
    return torch.cat([torch.tensor([least], dtype=torch.float64), spread[1:-1], torch.tensor([most]).double()])


def test_every_table_names_its_source_with_a_year() -> None:
    for name, table in COEFFICIENTS.items():
        assert re.search(r"\b(19|20)\d\d\b", table.source), name


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_a_table_takes_singular_values_where_it_says(name: str) -> None:
    least, low, high, highest = REACHED[name]
    reached = apply(schedule(name), values(least))
    assert low <= reached.min() <= low + 0.02 and high - 0.02 <= reached.max() <= high
    below = apply(schedule(name), values(1e-7)).max()
    assert highest - 0.02 <= below <= highest


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_more_steps_than_a_table_has_stay_near_one(name: str) -> None:
    # The last triple repeats, so it must hold what the others have reached.
    least, low, high, _ = REACHED[name]
    steps = max(COEFFICIENTS[name].steps, len(COEFFICIENTS[name].triples)) + 20
    reached = apply(schedule(name, steps), values(least))
    assert low <= reached.min() and reached.max() <= high


@pytest.mark.parametrize("name", [name for name in COEFFICIENTS if name not in WITHOUT_FIXED_POINT])
def test_the_last_triple_of_a_table_leaves_one_where_it_is(name: str) -> None:
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


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "minimax_coefficients.py"))


def test_minimax_is_what_its_script_computes_with_one_percent_of_room(script: dict[str, Any]) -> None:
    triples, error = script["composition"]()
    assert math.isclose(error, 0.3054, abs_tol=1e-4)
    table = COEFFICIENTS["minimax"].triples
    assert len(table) == COEFFICIENTS["minimax"].steps == 4
    for step in range(1, 5):
        x = values(1e-3, 1.0)
        expected = x
        for triple in triples[:step]:
            expected = apply([triple], expected / 1.01)
        torch.testing.assert_close(apply(table[:step], x), expected, rtol=1e-9, atol=1e-9)


def test_what_the_script_computes_is_what_others_have_published(script: dict[str, Any]) -> None:
    # Grishina et al. (2025), arXiv:2506.10935: five steps from 1e-3 on, to four digits.
    published = [(8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630)]
    published += [(3.2866, -2.4647, 0.5074), (2.2737, -1.6447, 0.4162)]
    triples, _ = script["composition"](1e-3, 5)
    torch.testing.assert_close(torch.tensor(triples), torch.tensor(published), rtol=0, atol=6e-5)


@pytest.mark.parametrize(("least", "most"), [(1e-3, 1.0), (2.1e-3, 1.0), (0.02, 1.9), (0.3, 1.7), (0.69, 1.31)])
def test_no_quintic_is_nearer_to_one_than_that_of_the_script(script: dict[str, Any], least: float, most: float) -> None:
    # Chebyshev: of three coefficients, the nearest is the one whose largest error alternates at four points.
    triple, error = script["nearest_to_one"](least, most)
    gap = 1 - apply([triple], torch.linspace(least, most, 1_000_001, dtype=torch.float64))
    assert math.isclose(gap.abs().max(), abs(error), rel_tol=1e-9)
    touched = torch.sign(gap[gap.abs() > abs(error) * (1 - 1e-9)])
    assert int((touched[1:] != touched[:-1]).sum()) == 3


def test_minimax_and_cubic5_have_room_for_what_roundings_push_above_one(script: dict[str, Any]) -> None:
    above = values(0.9, 1.01)
    assert apply(script["composition"]()[0], torch.tensor(1.005, dtype=torch.float64)) > 1e12
    assert apply([(3.3656576, -3.3420992, 0.0)], torch.tensor(1.005, dtype=torch.float64)) < 0
    for name in ("minimax", "cubic5"):
        for steps in (None, 8, 24):
            reached = apply(schedule(name, steps), above)
            assert 0.65 < reached.min() and reached.max() < 1.31, (name, steps)


def test_cubic5_is_the_composition_that_its_paper_describes() -> None:
    # arXiv:2606.00371: each step takes both ends of what the one before reached to one value, and none above 1.3.
    low, high = 7e-3, 1.0
    for triple in COEFFICIENTS["cubic5"].triples:
        spread = low**2 + low * high + high**2
        b = -1.95 * 3**0.5 / spread**1.5
        torch.testing.assert_close(triple, (-b * spread / 1.01, b / 1.01**3, 0.0), rtol=1e-6, atol=0)
        low, high = -b * spread * low + b * low**3, 1.3


@pytest.mark.parametrize(("name", "steps"), [(name, 4 if name == "minimax" else 5) for name in OF_FIVE])
def test_without_ns_steps_a_table_has_its_own_number(name: str, steps: int) -> None:
    assert schedule(name) == schedule(name, steps)


def test_without_ns_steps_deepseekv4_takes_ten_and_a_list_each_of_its_triples_once() -> None:
    assert len(schedule("deepseekv4")) == 10
    assert schedule([[2, -1, 0], [1.5, -0.5, 0]]) == ((2.0, -1.0, 0.0), (1.5, -0.5, 0.0))
    assert len(schedule([[2, -1, 0]] * 7)) == 7


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
