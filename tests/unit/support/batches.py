"""Batches as on a GPU, where one call takes many matrices of a shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ds_muon.orthogonalize import NewtonSchulz


def cut_into(size: int) -> Callable[..., Iterator[Sequence[int]]]:
    """In place of ``batches``: up to ``size`` matrices of a shape at a time, as on a GPU."""

    def batches(
        shapes: Sequence[tuple[int, int]], device: torch.device, settings: NewtonSchulz, most: int | None = None
    ) -> Iterator[Sequence[int]]:
        for shape in dict.fromkeys(shapes):
            indices = [index for index, other in enumerate(shapes) if other == shape]
            yield from (indices[start : start + size] for start in range(0, len(indices), size))

    return batches
