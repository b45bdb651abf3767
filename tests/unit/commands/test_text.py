"""``ds_muon.text``: what the commands print in columns, and their JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
from pydantic import TypeAdapter

from ds_muon.text import columns, count, json_text, number


def test_columns_are_as_wide_as_their_widest_cell_or_wider_if_asked() -> None:
    rows = [("name", "error", "note"), ("a.weight", "1", ""), ("b", "12", "wrong")]
    assert columns(rows, "< >7 <") == [
        "name        error  note",
        "a.weight        1",
        "b              12  wrong",
    ]
    assert columns([], "< >") == []


def test_the_last_cell_of_a_short_row_runs_on_and_widens_nothing() -> None:
    rows = [("name", "ms", "MiB"), ("a", "is not installed here"), ("much longer than all",)]
    assert columns(rows, "< > >") == ["name  ms  MiB", "a     is not installed here", "much longer than all"]


def test_words_and_numbers() -> None:
    assert [count(n, "matrix", "matrices") for n in (0, 1, 1200)] == ["0 matrices", "1 matrix", "1,200 matrices"]
    assert [number(x) for x in (0.0, 1.26e-7, math.nan, math.inf)] == ["0", "1.3e-07", "nan", "inf"]


@dataclass(frozen=True)
class Measured:
    times: tuple[float, ...]
    note: str | None = None


@pytest.mark.parametrize("value", [0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf])
def test_json_keeps_every_number_and_is_json(value: float) -> None:
    text = json_text({"of": Measured((value, math.nan))})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    first, second = json.loads(text, parse_constant=refuse)["of"]["times"]
    assert float(first) == value and math.isnan(float(second))
    read = TypeAdapter(dict[str, Measured]).validate_json(text)["of"]
    assert read.times[0] == value and math.isnan(read.times[1]) and read.note is None
