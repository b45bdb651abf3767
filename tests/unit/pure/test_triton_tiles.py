"""Which tile a product takes, and what is counted of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_muon.orthogonalize import backends
from tests.unit.support.triton_tiles import (
    DEVICE,
    POINTERS,
    POINTERS_FP32,
    QUARTERS,
    SMALL,
    TILES,
    WIDE,
    Tile,
    by_torch,
    interpreter,  # noqa: F401
    triton_backend,
)

# ---- choice of the tile ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [SMALL, WIDE, QUARTERS, POINTERS, POINTERS_FP32, *TILES.values()], ids=str)
def test_count_is_the_number_of_blocks(tile: Tile) -> None:
    for m, n in itertools.product((1, 127, 128, 129, 255, 257, 1000, 4096), repeat=2):
        rows, cols = range(0, m, tile.rows), range(0, n, tile.cols)
        assert tile.count(m, n, symmetric=False) == len(rows) * len(cols)
        # Those with something on or below the diagonal of their row of blocks.
        lower = [(row, col) for row in rows for col in range(0, row + tile.rows, tile.cols)]
        assert tile.count(m, m, symmetric=True) == len(lower)


@pytest.mark.parametrize("symmetric", [False, True])
def test_descriptors_are_for_half_precision_on_hopper(symmetric: bool) -> None:
    for batch, m, n in itertools.product((1, 7, 100), (1, 100, 1024, 4096), (1, 1024, 11008)):
        for dtype in (torch.float16, torch.bfloat16):
            hopper = triton_backend.choose_tile(
                batch, m, n, m, symmetric=symmetric, sms=132, capability=(9, 0), dtype=dtype
            )
            assert hopper in ((SMALL, WIDE, QUARTERS) if symmetric else (SMALL, WIDE))
            for capability in ((8, 0), (8, 9), (10, 0), (12, 0), (0, 0)):
                other = triton_backend.choose_tile(
                    batch, m, n, m, symmetric=symmetric, sms=132, capability=capability, dtype=dtype
                )
                assert other == POINTERS
        fp32 = triton_backend.choose_tile(
            batch, m, n, m, symmetric=symmetric, sms=132, capability=(9, 0), dtype=torch.float32
        )
        assert fp32 == POINTERS_FP32


@pytest.mark.parametrize(
    ("shape", "symmetric", "tile"),
    [
        ((24, 1024, 1024), True, SMALL),
        ((12, 1024, 1024), True, SMALL),
        ((6, 2048, 2048), True, WIDE),
        ((4, 2048, 8192), True, WIDE),
        ((3, 4096, 4096), True, WIDE),
        ((2, 4096, 4096), True, WIDE),
        ((2, 4096, 11008), True, WIDE),
        ((1, 4096, 4096), True, SMALL),
        ((1, 1024, 1024), True, SMALL),
        ((1, 2048, 2048), True, QUARTERS),
        ((1, 2048, 8192), True, QUARTERS),
        ((4, 1024, 4096), True, QUARTERS),
        ((48, 512, 512), False, SMALL),
        ((24, 1024, 1024), False, WIDE),
        ((12, 2048, 2048), False, WIDE),
        ((6, 4096, 4096), False, WIDE),
        ((1, 1024, 1024), False, SMALL),
    ],
)
def test_the_tile_is_the_one_measured_faster_on_h100(shape: tuple[int, int, int], symmetric: bool, tile: Tile) -> None:
    batch, m, k = shape
    chosen = triton_backend.choose_tile(
        batch, m, m, k, symmetric=symmetric, sms=132, capability=(9, 0), dtype=torch.bfloat16
    )
    assert chosen == tile


@pytest.mark.parametrize("symmetric", [False, True])
def test_nothing_but_the_tiles_of_a_gpu_is_chosen_there(symmetric: bool) -> None:
    for capability, dtype in itertools.product(((8, 0), (9, 0), (10, 0)), (torch.float16, torch.float32)):
        chosen = {
            triton_backend.choose_tile(batch, m, n, m, symmetric=symmetric, sms=132, capability=capability, dtype=dtype)
            for batch, m, n in itertools.product((1, 4, 24), (100, 1024, 2048), (1024, 2048, 8192))
        }
        possible = set(triton_backend.tiles_for(capability, dtype))
        assert chosen == (possible if symmetric else possible - {QUARTERS})


Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor, tuple[float, float, float], bool, Tile], None]


def trial_on(capability: tuple[int, int], dtype: torch.dtype, multiply: Multiply) -> str | None:
    """The trial at start as on such a GPU, with ``multiply`` in place of the products."""
    backends._trial.cache_clear()
    with pytest.MonkeyPatch.context() as place:
        place.setattr(triton_backend, "_properties", lambda device: (132, capability))
        place.setattr(triton_backend, "multiply_descriptors", multiply)
        place.setattr(triton_backend, "multiply_pointers", multiply)
        try:
            return backends._trial(DEVICE, dtype)
        finally:
            backends._trial.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "tiles"),
    [
        ((9, 0), torch.float16, (SMALL, WIDE, QUARTERS)),
        ((9, 0), torch.bfloat16, (SMALL, WIDE, QUARTERS)),
        ((8, 0), torch.float16, (POINTERS,)),
        ((8, 0), torch.float32, (POINTERS_FP32,)),
        ((9, 0), torch.float32, (POINTERS_FP32,)),
    ],
    ids=["hopper-fp16", "hopper-bf16", "ampere-fp16", "ampere-fp32", "hopper-fp32"],
)
def test_the_trial_at_start_covers_every_tile_in_every_kind_of_product(
    capability: tuple[int, int], dtype: torch.dtype, tiles: tuple[Tile, ...]
) -> None:
    tried = set()

    def multiply(a: Tensor, b: Tensor, c: Tensor | None, *rest: Any) -> None:
        tried.add((rest[-1], rest[-2], c is not None))
        by_torch(a, b, c, *rest)

    assert trial_on(capability, dtype, multiply) is None
    kinds = [(tile, symmetric, with_c) for tile in tiles for symmetric, with_c in ((True, False), (True, True))]
    kinds += [(tile, False, False) for tile in tiles if not tile.quarters]
    assert tried == set(kinds)


@pytest.mark.parametrize("tile", [SMALL, WIDE, QUARTERS], ids=["small", "wide", "quarters"])
def test_a_single_tile_that_fails_or_is_wrong_fails_the_trial(tile: Tile) -> None:
    def too_large(*arguments: Any) -> None:
        if arguments[-1] == tile:
            raise RuntimeError("out of resource: shared memory")
        by_torch(*arguments)

    def wrong(*arguments: Any) -> None:
        by_torch(*arguments)
        if arguments[-1] == tile:
            arguments[3].mul_(1.2)

    reason = trial_on((9, 0), torch.float16, too_large)
    assert reason is not None and "out of resource: shared memory" in reason
    reason = trial_on((9, 0), torch.float16, wrong)
    assert reason is not None and "wrong here" in reason


def test_a_descriptor_fits_aligned_storage_only() -> None:
    x = torch.empty(3, 16, 24, dtype=torch.float16)
    for view, fits in [
        (x, True),
        (x.mT, False),
        (x[:, :, :17], True),
        (x[:, :, 1:], False),
        (x[:, :, ::2], False),
        (x[:, 1::2], True),
        (x[:1].expand(3, -1, -1), False),
        (torch.empty(3, 16, 20, dtype=torch.float16), False),
    ]:
        assert triton_backend._describable(view) == fits
        stored, transposed = triton_backend._stored(view)
        assert triton_backend._describable(stored) and (stored.mT if transposed else stored).shape == view.shape
