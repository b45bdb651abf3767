"""Which elements of a flat tensor belong to which matrix."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ds_muon.layout import Piece

BLOCK = 1024
"""Elements of a flat tensor for one program of a kernel: eight for each of its threads."""

SPAN = 1 << 16
"""Most elements that one program sums up."""


@dataclass(frozen=True)
class Held:
    """A part of a piece in a flat tensor.

    Attributes:
        piece: with its strips, if it has any.
        start: the first element here, counted in the piece.
        offset: the same, counted in the flat tensor.
        numel: elements.
    """

    piece: Piece
    start: int
    offset: int
    numel: int


@dataclass(frozen=True, eq=False)
class Striped:
    """Where segments hold several matrices in strips: how an element finds its matrix. Tables on the device.

    Element ``e`` of the flat tensor, in segment ``s``, is of matrix ``labels[first + max(e + shift, 0) // inner %
    side]``, with the row of ``s`` in ``table``.

    Attributes:
        table: (segments, 4) int64: shift, inner, side, first.
        labels: int32: for each row or column of every piece, the number of its matrix.
        plain: (n,) int64 each: the segments that are one matrix, and the numbers of these matrices.
        parts: the other segments: what is held, the number of the first matrix, and (strips, rows or columns) fp64 with
            1 where a row or column is in a strip.
    """

    table: Tensor
    labels: Tensor
    plain: tuple[Tensor, Tensor]
    parts: tuple[tuple[Held, int, Tensor], ...]

    @classmethod
    def of(cls, held: Sequence[Held], device: torch.device) -> Striped | None:
        """None if no piece has strips."""
        if not any(part.piece.strips for part in held):
            return None
        table: list[tuple[int, ...]] = []
        labels: list[int] = []
        plain: list[tuple[int, int]] = []
        parts: list[tuple[Held, int, Tensor]] = []
        members: dict[tuple[object, ...], Tensor] = {}
        count = 0
        for segment, part in enumerate(held):
            piece = part.piece
            of_piece = piece.labels()
            inner = piece.cols if piece.strips and piece.axis == 0 else 1
            table.append((part.start - part.offset, inner, len(of_piece), len(labels)))
            labels += [count + label for label in of_piece]
            if piece.strips:
                alike = (piece.strips, len(of_piece))
                if alike not in members:
                    numbers = torch.tensor(of_piece, dtype=torch.int64, device="cpu")
                    one_hot = torch.nn.functional.one_hot(numbers, len(piece.strips))
                    members[alike] = one_hot.mT.to(device, torch.float64).contiguous()
                parts.append((part, count, members[alike]))
            else:
                plain.append((segment, count))
            count += len(piece.strips) or 1
        columns = torch.tensor(plain, dtype=torch.int64, device="cpu").view(-1, 2).to(device)
        return cls(
            torch.tensor(table, dtype=torch.int64, device="cpu").to(device),
            torch.tensor(labels, dtype=torch.int32, device="cpu").to(device),
            (columns[:, 0].contiguous(), columns[:, 1].contiguous()),
            tuple(parts),
        )


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of a flat tensor, in tables on its device: made once, read in every step.

    A segment is one matrix, or its part in this tensor; or several matrices that lie in strips, in the columns of one
    piece. Segments cover the whole tensor: a gap belongs to the segment before it, a gap at the start to the first. A
    tensor without matrices has no segments.

    Attributes:
        sizes: elements of each.
        matrices: how many there are.
        bounds: (count + 1,) int64: where each begins, and the end of the last.
        of_block: (blocks + 1,) int32: the segment in which each block of ``BLOCK`` elements begins, and the last one.
        pieces: (pieces + 1,) int64: ``bounds`` and the multiples of ``SPAN`` between them.
        first_pieces: (count + 1,) int64: where each segment begins in ``pieces``.
        striped: None where every segment is one matrix.
    """

    sizes: tuple[int, ...]
    matrices: int
    bounds: Tensor
    of_block: Tensor
    pieces: Tensor
    first_pieces: Tensor
    striped: Striped | None = None

    @classmethod
    def of(cls, held: Sequence[Held], numel: int, device: torch.device) -> Segments:
        """The segments of a tensor of ``numel`` elements: one for each part of a piece in it, in order."""
        starts = [part.offset for part in held]
        bounds = torch.tensor([0, *starts[1:], numel] if starts else [numel], dtype=torch.int64, device="cpu")
        blocks = torch.arange(0, numel + BLOCK, BLOCK, dtype=torch.int64, device="cpu")
        spans = torch.arange(0, numel, SPAN, dtype=torch.int64, device="cpu")
        pieces = torch.unique(torch.cat([bounds, spans[spans > bounds[0]]]))
        return cls(
            tuple(end - start for start, end in pairwise(bounds.tolist())),
            sum(len(part.piece.strips) or 1 for part in held),
            bounds.to(device),
            (torch.searchsorted(bounds[:-1], blocks, right=True) - 1).to(device, torch.int32),
            pieces.to(device),
            torch.searchsorted(pieces, bounds).to(device),
            Striped.of(held, device),
        )

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def edges(self) -> list[int]:
        """``bounds``, for the host."""
        edges: list[int] = self.bounds.tolist()
        return edges


@dataclass(frozen=True, eq=False)
class Moves:
    """Which matrices of a flat tensor move.

    Attributes:
        flags: one for each matrix: (matrices,) bool, contiguous, on the tensor's device.
        start: the element of that tensor with which begins what a pass works on.

    Raises:
        ValueError: the numbers of flags and of matrices differ.
    """

    segments: Segments
    flags: Tensor
    start: int = 0

    def __post_init__(self) -> None:
        if self.flags.shape != (self.segments.matrices,):
            raise ValueError(f"{self.segments.matrices} matrices need as many flags, not {tuple(self.flags.shape)}")

    def starting(self, start: int) -> Moves:
        """The same for what begins with this element of the flat tensor."""
        return replace(self, start=start)

    def runs(self, numel: int) -> list[tuple[int, int, bool]] | None:
        """First element, end and flag of each segment in ``numel`` elements; None if a segment may have several flags.

        The host looks at the flags.
        """
        if not len(self.segments) or self.flags.all():
            return [(0, numel, True)]
        if self.segments.striped is not None:
            return None
        edges, end, found = self.segments.edges, self.start + numel, []
        at = self.start
        while at < end:
            segment = bisect_right(edges, at) - 1
            until = min(end, edges[segment + 1])
            found.append((at - self.start, until - self.start, bool(self.flags[segment])))
            at = until
        return found

    def of_elements(self, start: int, end: int) -> Tensor:
        """The flag of each element from ``start`` to before ``end``: (end - start,) bool. The host does not wait."""
        start, end = start + self.start, end + self.start
        counts = self.segments.bounds.clamp(start, end).diff()
        striped = self.segments.striped
        if striped is None:
            return torch.repeat_interleave(self.flags, counts, output_size=end - start)
        rows = torch.repeat_interleave(striped.table, counts, dim=0, output_size=end - start)
        shift, inner, side, first = rows.unbind(1)
        elements = torch.arange(start, end, dtype=torch.int64, device=self.flags.device)
        # A gap gets any flag of its segment.
        return self.flags[striped.labels[first + (elements + shift).clamp_(min=0) // inner % side]]
