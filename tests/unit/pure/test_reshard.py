"""Which elements of which shard a rank holds, against buffers that are cut by hand."""

from __future__ import annotations

import random

import pytest

from ds_muon.checkpoints.reshard import Buffers, stretches
from ds_muon.plan.zero_layout import flat_layout

Numels = dict[str, int]


def buffers_of(numels: Numels, ranks: int, chance: random.Random) -> Buffers:
    """The same parameters in some groups and order, as ZeRO lays them out on so many ranks."""
    names = chance.sample([*numels], len(numels))
    cuts = sorted(chance.sample(range(1, len(names)), min(chance.randrange(3), len(names) - 1)))
    offsets, sizes = [], []
    for start, end in zip([0, *cuts], [*cuts, len(names)], strict=True):
        group = names[start:end]
        layout = flat_layout(
            [numels[name] for name in group],
            ranks,
            element_size=2,
            parameter_alignment=chance.random() < 0.5,
            round_robin=chance.random() < 0.5,
        )
        offsets.append([(group[k], offset) for k, offset in zip(layout.order, layout.offsets, strict=True)])
        sizes.append(layout.partition_size)
    return Buffers(offsets, sizes)


def partitions(buffers: Buffers, numels: Numels, ranks: int) -> list[list[list[object]]]:
    """For each rank and param group, its partition, in which every element is its name and number, and a gap is 0."""
    flat: list[list[object]] = [[0] * (ranks * size) for size in buffers.partition_sizes]
    for group, offsets in zip(flat, buffers.offsets, strict=True):
        for name, offset in offsets:
            group[offset : offset + numels[name]] = [(name, i) for i in range(numels[name])]
    sizes = buffers.partition_sizes
    return [[group[k * n : (k + 1) * n] for group, n in zip(flat, sizes, strict=True)] for k in range(ranks)]


@pytest.mark.parametrize("seed", range(100))
def test_every_element_is_found_once_whatever_the_two_layouts(seed: int) -> None:
    chance = random.Random(seed)
    numels = {f"p{i}": chance.choice([1, 2, 3, 7, 40, 129]) for i in range(chance.randint(1, 9))}
    then, now = chance.randint(1, 8), chance.randint(1, 8)
    saved, ours = buffers_of(numels, then, chance), buffers_of(numels, now, chance)
    shards, wanted = partitions(saved, numels, then), partitions(ours, numels, now)
    for rank in range(now):
        held: list[list[object]] = [[0] * size for size in ours.partition_sizes]
        for stretch in stretches(saved, ours, numels, rank):
            start = stretch.saved_offset
            elements = shards[stretch.shard][stretch.saved_group][start : start + stretch.numel]
            target = held[stretch.group]
            assert target[stretch.offset : stretch.offset + stretch.numel] == [0] * stretch.numel
            target[stretch.offset : stretch.offset + stretch.numel] = elements
        assert held == wanted[rank]


def test_a_rank_that_keeps_its_place_reads_its_own_shard_alone() -> None:
    numels = {"a": 100, "b": 33, "c": 7}
    layout = flat_layout([*numels.values()], 3)
    same = Buffers([[*zip(numels, layout.offsets, strict=True)]], [layout.partition_size])
    for rank in range(3):
        found = [*stretches(same, same, numels, rank)]
        assert {stretch.shard for stretch in found} == {rank}
        assert all(stretch.offset == stretch.saved_offset for stretch in found)
