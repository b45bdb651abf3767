"""Matrices that lie in strips of a unit: copied out for Newton-Schulz, and put back. A whole unit is not copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_muon.layout import Piece
from ds_muon.passes import rows_of
from ds_muon.plan.partition import Matrix, Unit


class Copies:
    """Copies of the strips in a batch. Of a unit with even strips all at once, for every head may be a strip."""

    def __init__(self) -> None:
        self._of_units: dict[int, Sequence[Tensor]] = {}
        self._stacks: dict[int, Tensor] = {}

    def of(self, matrix: Matrix, unit: Tensor) -> Tensor:
        """The matrix, (rows, cols), contiguous: a copy where it is scattered in ``unit``, else a view."""
        piece = matrix.piece
        if not piece.strips:
            return unit
        if id(unit) not in self._of_units:
            even = piece.stacked(unit)
            if even is None:
                self._of_units[id(unit)] = [piece.matrix(unit, number) for number in range(len(piece.strips))]
            else:
                stack = even.contiguous()
                self._stacks[id(unit)] = stack
                self._of_units[id(unit)] = stack.view(-1, matrix.rows, matrix.cols).unbind()
        return self._of_units[id(unit)][matrix.number]

    def put_back(self, matrices: Sequence[tuple[Matrix, Tensor]]) -> None:
        """Write the copies of these matrices to their units."""
        of_units: dict[int, list[tuple[Matrix, Tensor]]] = {}
        for matrix, unit in matrices:
            if matrix.piece.scattered:  # else it is a view
                of_units.setdefault(id(unit), []).append((matrix, unit))
        for key, strips in of_units.items():
            (first, unit), copies = strips[0], self._of_units[key]
            even = first.piece.stacked(unit) if len(strips) == len(copies) else None
            if even is not None:
                even.copy_(self._stacks[key])
                continue
            for matrix, _ in strips:
                matrix.piece.store(copies[matrix.number], unit, matrix.number)


def assembled(unit: Unit, results: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The results of a unit's matrices, by name, as one (rows, cols)."""
    outputs = [results[matrix.name] for matrix in unit.matrices]
    if not unit.piece.strips:
        return outputs[0]
    whole = torch.empty(unit.rows, unit.cols, dtype=dtype, device=outputs[0].device)
    for matrix, output in zip(unit.matrices, outputs, strict=True):
        matrix.piece.store(output, whole, matrix.number)
    return whole


def scale_strips_(elements: Tensor, piece: Piece, start: int, scales: Tensor) -> None:
    """Multiply the elements of a piece from ``start`` on, flat, by a scale for each of its rows (axis 0) or columns."""
    for rows, row, col in rows_of(elements, piece.cols, start):
        rows.mul_(scales[col : col + rows.shape[1]] if piece.axis else scales[row:, None][: len(rows)])
