"""Matrices in strips of a unit: each is copied out whole, and put back to where it was."""

from __future__ import annotations

import pytest
import torch

from ds_muon.layout import Piece, Strip
from ds_muon.plan.partition import Matrix
from ds_muon.strips import Copies

STRIPS = {
    "even": tuple(Strip(4 * number, 4) for number in range(3)),
    "uneven": (Strip(0, 6), Strip(6, 2), Strip(8, 4)),
    "in turns": tuple(Strip(2 * number, 2, 6, 2) for number in range(3)),
    "one by one in turns": tuple(Strip(number, 1, 3, 4) for number in range(3)),
}


@pytest.mark.parametrize("all_at_once", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("strips", STRIPS.values(), ids=STRIPS)
def test_strips_are_copied_out_whole_and_put_back(strips: tuple[Strip, ...], axis: int, all_at_once: bool) -> None:
    shape = (5, 12) if axis else (12, 5)
    unit, piece = torch.arange(60.0).view(shape), Piece((), 0, *shape, strips, axis)
    matrices = [Matrix("weight", *sides, "out_in", piece, number) for number, sides in enumerate(piece.shapes())]
    before, copies = unit.clone(), Copies()
    for matrix, strip in zip(matrices, strips, strict=True):
        found = copies.of(matrix, unit)
        assert torch.equal(found, before.index_select(axis, torch.tensor(strip.indices()))) and found.is_contiguous()
        found.mul_(2)
    for batch in [matrices] if all_at_once else [[matrix] for matrix in matrices]:
        copies.put_back([(matrix, unit) for matrix in batch])
    assert torch.equal(unit, 2 * before)
