"""Where ZeRO-1/2 puts the parameters of a param group: end to end in one flat buffer, which is cut into partitions.

There are as many partitions as ranks, all of one size, and a cut may fall anywhere. Pure functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# ZeRO pads a partition to a multiple of this many elements, so that every partition starts on a 4-byte boundary.
_ELEMENTS_PER_RANK = 2
# ZeRO's ``parameter_alignment`` starts every parameter on a boundary of this many bytes.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class FlatLayout:
    """Where ZeRO puts the parameters of one group.

    Attributes:
        order: position in the flat buffer -> index of the parameter in the group.
        offsets: first element of each parameter, by position in the flat buffer.
        partition_size: elements per rank, padding included.
    """

    order: tuple[int, ...]
    offsets: tuple[int, ...]
    partition_size: int


@dataclass(frozen=True)
class Slice:
    """The elements of a matrix that one rank holds.

    Attributes:
        rank: the holder.
        start: first element, counted in the flattened matrix.
        numel: number of elements, at least 1.
        offset: first element, counted in the holder's partition.
    """

    rank: int
    start: int
    numel: int
    offset: int


def flat_layout(
    numels: Sequence[int],
    world_size: int,
    *,
    element_size: int = 4,
    parameter_alignment: bool = False,
    round_robin: bool = False,
) -> FlatLayout:
    """ZeRO's own layout of one param group.

    Args:
        numels: elements of each parameter, in the group's order; all positive.
        world_size: ranks that share the group.
        element_size: bytes per element of the model's dtype; has an effect with ``parameter_alignment`` only.
        parameter_alignment: ``zero_optimization.parameter_alignment``.
        round_robin: ``zero_optimization.round_robin_gradients``: deal the parameters to the ranks like cards.
    """
    dealt = [range(first, len(numels), world_size) for first in range(world_size if round_robin else 1)]
    order = tuple(index for hand in dealt for index in hand) if round_robin else tuple(range(len(numels)))
    boundary = start_multiple(element_size, parameter_alignment)
    offsets = []
    end = 0
    for index in order:
        start = -(-end // boundary) * boundary
        offsets.append(start)
        end = start + numels[index]
    multiple = _ELEMENTS_PER_RANK * world_size
    return FlatLayout(order, tuple(offsets), -(-end // multiple) * multiple // world_size)


def start_multiple(element_size: int, parameter_alignment: bool) -> int:
    """Every parameter starts at a multiple of this many elements. Arguments as for ``flat_layout``."""
    return _ALIGNMENT_BYTES // math.gcd(_ALIGNMENT_BYTES, element_size) if parameter_alignment else 1


def cut(offset: int, numel: int, partition_size: int) -> tuple[Slice, ...]:
    """The slices of a parameter that starts at ``offset`` of the flat buffer, in order of rank."""
    slices = []
    start = 0
    while start < numel:
        rank, inside = divmod(offset + start, partition_size)
        taken = min(numel - start, partition_size - inside)
        slices.append(Slice(rank, start, taken, inside))
        start += taken
    return tuple(slices)
