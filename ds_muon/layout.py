"""How a matrix is stored, and which of its sides is which."""

from __future__ import annotations

from typing import Literal, TypeAlias

Layout: TypeAlias = Literal["out_in", "in_out"]
"""Rows are outputs, as in nn.Linear, or inputs, as in transformers' Conv1D."""


def out_and_in(rows: int, cols: int, layout: Layout) -> tuple[int, int]:
    """Numbers of outputs and of inputs of a matrix that is stored as (rows, cols)."""
    return (rows, cols) if layout == "out_in" else (cols, rows)
