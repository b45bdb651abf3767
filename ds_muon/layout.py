"""How the matrices of a tensor lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from torch import Tensor

Layout: TypeAlias = Literal["out_in", "in_out"]
"""Rows are outputs, as in nn.Linear, or inputs, as in transformers' Conv1D."""


def out_and_in(rows: int, cols: int, layout: Layout) -> tuple[int, int]:
    """Numbers of outputs and of inputs of a matrix that is stored as (rows, cols)."""
    return (rows, cols) if layout == "out_in" else (cols, rows)


@dataclass(frozen=True)
class Strip:
    """Some rows or columns of a piece: ``size`` from ``first`` on, and as many after every ``period``, ``count`` times.

    The piece has ``count * period`` of them, if ``count`` is more than 1.
    """

    first: int
    size: int
    period: int = 0
    count: int = 1

    def __len__(self) -> int:
        return self.size * self.count

    def of(self, piece: Tensor, axis: int) -> Tensor:
        """These rows (axis 0) or columns (axis 1) of a (rows, cols) tensor, side by side. A view where one can be."""
        strips = self._strips(piece, axis)
        return strips.flatten(axis, axis + 1)

    def store(self, matrix: Tensor, piece: Tensor, axis: int) -> None:
        """Write ``matrix`` to these rows or columns of ``piece``, in place."""
        strips = self._strips(piece, axis)
        strips.copy_(matrix.reshape(strips.shape))

    def _strips(self, piece: Tensor, axis: int) -> Tensor:
        """(count, size, cols) or (rows, count, size), a view of ``piece``."""
        if self.count == 1:
            return piece.narrow(axis, self.first, self.size).unsqueeze(axis)
        shape = [*piece.shape[:axis], self.count, self.period, *piece.shape[axis + 1 :]]
        return piece.view(shape).narrow(axis + 1, self.first, self.size)

    def indices(self) -> list[int]:
        """The numbers of these rows or columns."""
        return [i * self.period + self.first + j for i in range(self.count) for j in range(self.size)]


@dataclass(frozen=True)
class Piece:
    """A contiguous piece of a tensor, as a (rows, cols) matrix: one of the tensor's matrices, or several in strips.

    ZeRO may cut a piece. It is held, sent and owned as a whole.

    Attributes:
        index: its place among the tensor's matrices, such as (3,) for expert 3; () for the whole tensor.
        start: its first element, counted in the flattened tensor.
        rows, cols: as stored.
        strips: which rows or columns are a matrix; () if the piece is one. Together they are all, each once.
        axis: what the strips are: 0 for rows, 1 for columns.
    """

    index: tuple[int, ...]
    start: int
    rows: int
    cols: int
    strips: tuple[Strip, ...] = ()
    axis: int = 1

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @cached_property
    def scattered(self) -> bool:
        """Whether a matrix of it lies in several places of the flat piece."""
        return any(self.axis == 1 or strip.count > 1 for strip in self.strips)

    def shapes(self) -> list[tuple[int, int]]:
        """The (rows, cols) of each matrix, as stored."""
        if not self.strips:
            return [(self.rows, self.cols)]
        sides = [len(strip) for strip in self.strips]
        return [(self.rows, side) if self.axis else (side, self.cols) for side in sides]

    def matrix(self, elements: Tensor, number: int) -> Tensor:
        """Copy a strip, or return ``elements``, (rows, cols), themselves if there are none: contiguous."""
        return self.strips[number].of(elements, self.axis).contiguous() if self.strips else elements

    def store(self, matrix: Tensor, elements: Tensor, number: int) -> None:
        """Write what ``matrix`` has copied back to its strip. Nothing if there are none."""
        if self.strips:
            self.strips[number].store(matrix, elements, self.axis)

    @cached_property
    def _even(self) -> tuple[int, int, int] | None:
        """How often equal strips take turns, how many they are, and of what size; None if they are uneven."""
        number, (first, *others) = len(self.strips), self.strips
        alike = (Strip(i * first.size, first.size, first.period, first.count) for i in range(number))
        side = self.cols if self.axis else self.rows
        even = (first, *others) == tuple(alike) and number * first.size * first.count == side
        return (first.count, number, first.size) if even else None

    def stacked(self, elements: Tensor) -> Tensor | None:
        """All strips as one view of ``elements``, strips first, to be copied at once; None if they are uneven."""
        shape = self._even
        if shape is None:
            return None
        if self.axis:
            return elements.view(self.rows, *shape).permute(2, 0, 1, 3)
        return elements.view(*shape, self.cols).permute(1, 0, 2, 3)

    def name(self, tensor: str) -> str:
        """What to call it, in the tensor of this name: ``experts.up[3]``, or ``up.weight`` if it is all of that."""
        return _indexed(tensor, self.index)

    def names(self, tensor: str) -> list[str]:
        """What to call each matrix: the name of the piece, or ``attn.qkv.weight[0]`` and so on for the strips in it."""
        return [_indexed(tensor, (*self.index, i)) for i in range(len(self.strips))] or [self.name(tensor)]

    def labels(self) -> list[int]:
        """For each row (axis 0) or column (axis 1) the number of its strip; [0] if there are none."""
        labels = [0] * (self.cols if self.axis else self.rows) if self.strips else [0]
        for number, strip in enumerate(self.strips):
            for index in strip.indices():
                labels[index] = number
        return labels

    def holding(self, elements: Tensor) -> list[int]:
        """The numbers of the matrices in which elements lie, by their places, (n,) int64, in the flattened piece."""
        if not self.strips:
            return [0]
        labels, along = self.labels(), elements % self.cols if self.axis else elements // self.cols
        return sorted({labels[index] for index in along.tolist()})


def _indexed(tensor: str, index: tuple[int, ...]) -> str:
    return f"{tensor}[{','.join(map(str, index))}]" if index else tensor


def whole(rows: int, cols: int) -> tuple[Piece, ...]:
    """The pieces of a tensor that is one matrix."""
    return (Piece((), 0, rows, cols),)


def outputs(pieces: Sequence[Piece], layout: Layout) -> int:
    """The number of outputs of all matrices in these pieces, added up: NorMuon keeps a number for each."""
    return sum(out_and_in(*shape, layout)[0] for piece in pieces for shape in piece.shapes())


def order_of_outputs(pieces: Sequence[Piece], layout: Layout) -> str:
    """In words, where those outputs lie in the pieces: two tensors of one shape and order have the same outputs.

    Parts of the outputs that follow one another leave the order as it is. How many outputs there are tells whether the
    inputs are in even runs, and in how many.
    """
    of_outputs = 0 if layout == "out_in" else 1
    splits = set()
    for piece in pieces:
        if piece.strips and (piece.axis != of_outputs or any(strip.count > 1 for strip in piece.strips)):
            parts = (
                f"{strip.first}:{strip.first + strip.size}" + (f" of every {strip.period}" if strip.count > 1 else "")
                for strip in piece.strips
            )
            splits.add(f"{'outputs' if piece.axis == of_outputs else 'inputs'} {', '.join(parts)}")
    # Pieces that are a matrix each are runs of rows: of inputs, where a matrix is stored so.
    runs = [piece.rows for piece in pieces if layout == "in_out" and not piece.strips]
    if len(set(runs)) > 1:
        period = next(n for n in range(2, len(runs) + 1) if runs == runs[:n] * (len(runs) // n))
        splits.add(f"inputs in runs of {', '.join(map(str, runs[:period]))}")
    return "; ".join([f"stored {layout}", *sorted(splits)])
