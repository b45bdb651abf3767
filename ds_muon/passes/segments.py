"""Which elements of a flat tensor belong to which matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 1024
"""Elements of a flat tensor for one program of a kernel: eight for each of its threads."""

SPAN = 1 << 16
"""Most elements that one program sums up."""


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of a flat tensor, one for each matrix, in tables on its device: made once, read in every step.

    Segments cover the whole tensor: a gap belongs to the matrix before it, a gap at the start to the first matrix. A
    tensor without matrices has no segments.

    Attributes:
        sizes: elements of each.
        bounds: (count + 1,) int64: where each begins, and the end of the last.
        of_block: (blocks + 1,) int32: the segment in which each block of ``BLOCK`` elements begins, and the last one.
        pieces: (pieces + 1,) int64: ``bounds`` and the multiples of ``SPAN`` between them.
        first_pieces: (count + 1,) int64: where each segment begins in ``pieces``.
    """

    sizes: tuple[int, ...]
    bounds: Tensor
    of_block: Tensor
    pieces: Tensor
    first_pieces: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], numel: int, device: torch.device) -> Segments:
        """The segments of a tensor of ``numel`` elements, whose matrices begin at ``starts``, in order."""
        bounds = torch.tensor([0, *starts[1:], numel] if starts else [numel], dtype=torch.int64, device="cpu")
        blocks = torch.arange(0, numel + BLOCK, BLOCK, dtype=torch.int64, device="cpu")
        spans = torch.arange(0, numel, SPAN, dtype=torch.int64, device="cpu")
        pieces = torch.unique(torch.cat([bounds, spans[spans > bounds[0]]]))
        return cls(
            tuple(end - start for start, end in pairwise(bounds.tolist())),
            bounds.to(device),
            (torch.searchsorted(bounds[:-1], blocks, right=True) - 1).to(device, torch.int32),
            pieces.to(device),
            torch.searchsorted(pieces, bounds).to(device),
        )

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, eq=False)
class Where:
    """One flag for each segment of a flat tensor: (count,) bool, contiguous, on its device.

    Raises:
        ValueError: the numbers of flags and of segments differ.
    """

    segments: Segments
    flags: Tensor

    def __post_init__(self) -> None:
        if self.flags.shape != (len(self.segments),):
            raise ValueError(f"{len(self.segments)} segments need as many flags, not {tuple(self.flags.shape)}")

    def of_elements(self, start: int, end: int) -> Tensor:
        """The flag of each element from ``start`` to before ``end``: (end - start,) bool. The host does not wait."""
        counts = self.segments.bounds.clamp(start, end).diff()
        return torch.repeat_interleave(self.flags, counts, output_size=end - start)
