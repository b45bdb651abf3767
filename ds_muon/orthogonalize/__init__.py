"""Newton-Schulz of matrices, over the backends in this folder. A *step* here is one of ``ns_steps``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ds_muon.orthogonalize.backends import BACKENDS, release
from ds_muon.orthogonalize.coefficients import COEFFICIENTS, CoefficientTable, Triple, schedule
from ds_muon.orthogonalize.reference import reference_newton_schulz
from ds_muon.orthogonalize.settings import NewtonSchulz
from ds_muon.orthogonalize.torch_backend import exact_products

__all__ = [
    "BACKENDS",
    "COEFFICIENTS",
    "CoefficientTable",
    "NewtonSchulz",
    "Triple",
    "batches",
    "orthogonalize",
    "orthogonalize_batch",
    "reference_newton_schulz",
    "release",
    "schedule",
]

# Most bytes of temporaries for one batch. More matrices of a shape run as several batches of about equal size.
WORKSPACE_BYTES = 2 << 30


def orthogonalize(matrices: Sequence[Tensor], settings: NewtonSchulz) -> list[Tensor]:
    """Newton-Schulz of every matrix; those of one shape run as one batch.

    Args:
        matrices: (rows, cols) fp32 tensors on one device; not modified, and may be views of one buffer.
        settings: see ``NewtonSchulz``.

    Returns:
        One (rows, cols) tensor of dtype ``settings.dtype`` for each input, in order. Together they keep as much memory
        alive as a copy of the inputs. A zero matrix gives exact zeros.

    A result does not depend on the other matrices of its batch. The Triton backend sums in the same order in any batch.
    The torch backend runs every matrix alone on CPU and in fp32. In half precision on GPUs it relies on the vendor's
    batched product and sum; docs/newton-schulz.md says where that holds.
    """
    outputs: dict[int, Tensor] = {}
    compact = BACKENDS[settings.backend]().compact
    shapes = [(matrix.shape[0], matrix.shape[1]) for matrix in matrices]
    for indices in batches(shapes, matrices[0].device if matrices else torch.device("cpu"), settings):
        batch = orthogonalize_batch([matrices[i] for i in indices], settings)
        batch = batch if compact else batch.clone()
        outputs.update(zip(indices, batch.unbind(), strict=True))
    return [outputs[index] for index in range(len(matrices))]


def batches(
    shapes: Sequence[tuple[int, int]], device: torch.device, settings: NewtonSchulz, most: int | None = None
) -> Iterator[Sequence[int]]:
    """Which matrices to orthogonalize together: indices of equal shapes, as many as the workspace allows.

    Args:
        shapes: (rows, cols) of each matrix.
        device: where they are.
        settings: of the iteration.
        most: bytes of the input of a batch; a larger matrix is alone. None for no such bound.
    """
    backend = BACKENDS[settings.backend]()
    alone = backend.alone(device, settings.dtype)
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(index)
    for (rows, cols), indices in by_shape.items():
        buffers = settings.iteration(rows, cols).buffers
        limit = WORKSPACE_BYTES // max(1, backend.workspace(rows, cols, settings.dtype, buffers))
        if most is not None:
            limit = min(limit, most // max(1, rows * cols * torch.float32.itemsize))
        chunks = len(indices) if alone else -(-len(indices) // max(1, limit))
        for chunk in range(chunks):
            yield indices[len(indices) * chunk // chunks : len(indices) * (chunk + 1) // chunks]


def orthogonalize_batch(matrices: Sequence[Tensor], settings: NewtonSchulz) -> Tensor:
    """Newton-Schulz of matrices of one shape in one batch.

    Args:
        matrices: (rows, cols) fp32 tensors on one device, at least one; not modified.
        settings: see ``NewtonSchulz``.

    Returns:
        (batch, rows, cols) of dtype ``settings.dtype``. It may keep all memory of the iteration alive.

    Raises:
        ValueError: the matrices differ in shape or device, or are not fp32.
    """
    rows, cols = matrices[0].shape
    if any(m.shape != (rows, cols) or m.dtype != torch.float32 or m.device != matrices[0].device for m in matrices):
        raise ValueError(f"orthogonalize_batch takes fp32 matrices of one shape on one device, here ({rows}, {cols})")
    if rows * cols == 0:
        return torch.empty(len(matrices), rows, cols, dtype=settings.dtype, device=matrices[0].device)
    backend = BACKENDS[settings.backend]()
    exact = exact_products() if settings.dtype == torch.float32 else nullcontext()
    # A caller's autocast must not change the iteration's dtype.
    with torch.no_grad(), torch.autocast(matrices[0].device.type, enabled=False), exact:
        return backend.run(matrices, settings.iteration(rows, cols))
