"""Which elements of a checkpoint's shards a rank will hold: a pure function of two ways to cut the same parameters.

A parameter lies somewhere in a flat buffer, which is cut into equal pieces, wherever the cuts fall. Its name is all
that two runs need to have in common: number of ranks, param groups, order and gaps may be others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_muon.plan.zero_layout import cut

Offsets = list[list[tuple[str, int]]]
"""For each param group, name and offset of its parameters in flat order."""


@dataclass(frozen=True)
class Buffers:
    """The flat buffers of a run: where parameters begin, and elements per rank, padding included, by param group."""

    offsets: Offsets
    partition_sizes: Sequence[int]

    def places(self) -> dict[str, tuple[int, int]]:
        """Param group and offset of every parameter, in flat order."""
        return {name: (i, offset) for i, group in enumerate(self.offsets) for name, offset in group}


@dataclass(frozen=True)
class Stretch:
    """Elements of one parameter that one shard holds, and this rank will.

    Attributes:
        shard: the rank that saved them.
        saved_group, saved_offset: where they lie in its partitions.
        group, offset: where they will lie in this rank's.
        numel: number of elements, at least 1.
    """

    shard: int
    saved_group: int
    saved_offset: int
    group: int
    offset: int
    numel: int


def stretches(saved: Buffers, ours: Buffers, numels: Mapping[str, int], rank: int) -> Iterator[Stretch]:
    """All that ``rank`` will hold, in the order of its partitions.

    Args:
        saved, ours: buffers of the same parameters.
        numels: elements of each parameter, by name.
        rank: one of those that ``ours`` is cut for.
    """
    then = saved.places()
    for name, (group, offset) in ours.places().items():
        saved_group, saved_offset = then[name]
        for here in cut(offset, numels[name], ours.partition_sizes[group]):
            if here.rank != rank:
                continue
            for there in cut(saved_offset, numels[name], saved.partition_sizes[saved_group]):
                start = max(here.start, there.start)
                end = min(here.start + here.numel, there.start + there.numel)
                if start < end:
                    yield Stretch(
                        there.rank,
                        saved_group,
                        there.offset + start - there.start,
                        group,
                        here.offset + start - here.start,
                        end - start,
                    )
