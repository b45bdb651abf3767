"""A checksum of weights: every bit and every place counts."""

from __future__ import annotations

import pytest
import torch

from ds_muon.checkpoints import same_weights
from ds_muon.checkpoints.same_weights import checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8])
def test_every_bit_and_every_place_counts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(1, 131).to(dtype)
    value = checksum(whole)
    monkeypatch.setattr(same_weights, "_CHUNK", 32)
    assert value == checksum(whole) == checksum(whole.view(13, 10)) and 0 <= value < 2**62
    bits = torch.randint(0, 8 * dtype.itemsize, whole.shape)
    for i in range(len(whole)):
        changed = whole.clone()
        changed.view(torch.uint8)[i * dtype.itemsize + bits[i] // 8] ^= 1 << int(bits[i] % 8)
        assert checksum(changed) != value
        swapped = whole.roll(1)
        assert checksum(swapped) != value
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3))
    assert checksum(torch.empty(0, dtype=dtype)) == 0
