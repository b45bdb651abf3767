"""Words, numbers, columns and JSON, as the commands print and write them."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_core import to_json


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 matrix``, ``2 matrices``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def number(value: float) -> str:
    """In two digits; an exact 0 as such."""
    return "0" if value == 0 else f"{value:.1e}"


def columns(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Rows as lines of equal columns, two blanks apart.

    Args:
        rows: of cells. A row may end early: its last cell is then a remark that runs on to the right.
        sides: of each column ``<`` or ``>``, flush left or right, and maybe its least width, such as ``"< >8 >"``.
    """
    widths = [int(side[1:] or 0) for side in sides.split()]
    for row in rows:
        for i, cell in enumerate(row if len(row) == len(widths) else row[:-1]):
            widths[i] = max(widths[i], len(cell))
    lines = []
    for row in rows:
        cells = [f"{cell:{side[0]}{width}}" for cell, side, width in zip(row, sides.split(), widths, strict=False)]
        if len(row) < len(widths):
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return lines


def json_text(value: object, indent: int | None = None) -> str:
    """Dataclasses become objects. JSON has no NaN or infinity: they become strings that ``float`` reads."""
    return to_json(value, indent=indent, inf_nan_mode="strings").decode()
