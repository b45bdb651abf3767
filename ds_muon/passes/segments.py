"""Which elements of a flat tensor belong to which matrix, as the passes look it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 1024
"""Elements of a flat tensor that one program of a kernel works on: eight for each of its threads."""

SPAN = 1 << 16
"""Elements that one program sums up, at most."""


@dataclass(frozen=True, eq=False)
class Segments:
    """A flat tensor in segments, one for each matrix, and tables of them on its device: made once, read in every step.

    A segment reaches to where the next one begins, the first one from 0 and the last one to the end: what lies between
    matrices belongs to the one before. Of a tensor without matrices there are none.

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
        """Of a tensor of ``numel`` elements, whose matrices have their first ones at ``starts``, in order."""
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
        ValueError: there are not as many flags as segments.
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
