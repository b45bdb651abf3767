"""The passes as one launch each, with the bits of ``torch_passes``, where their contracts are.

Import this module only where Triton is installed. Whatever raises here has written nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_muon.kernel_launch import addresses_of, ceil_div, on
from ds_muon.passes import triton_kernels

# Elements of a flat tensor that one program works on: eight for each of its threads.
BLOCK = 1024
# Side of the square of a matrix that one program works on.
SIDE = 64
# Elements that one program sums up, and elements of it at a time.
SPAN = 1 << 16
SUMMED = 2048

# A product and a sum round twice, as in torch.
EXACT = {"num_warps": 4, "enable_fp_fusion": False}


def advance_momentum_(
    gradient: Tensor, momentum_buffer: Tensor, *, momentum: float, nesterov: bool, where: Tensor | None = None
) -> None:
    """See ``torch_passes.advance_momentum_``."""
    numel = _elements(gradient, momentum_buffer)
    if numel:
        with on(gradient.device):
            triton_kernels.advance_momentum[(ceil_div(numel, BLOCK),)](
                gradient, momentum_buffer, where, numel, float(momentum), float(1 - momentum),
                NEAR_GRADIENT=momentum < 0.5, NESTEROV=bool(nesterov), BLOCK=BLOCK, **EXACT,
            )  # fmt: skip


def store_updates(
    outputs: Tensor, targets: Sequence[Tensor], *, scale: float = 1.0, factors: Tensor | None = None
) -> None:
    """See ``torch_passes.store_updates``."""
    batch, rows, cols = outputs.shape
    for target in targets:
        if target.shape != (rows, cols):
            raise ValueError(f"a target of shape {tuple(target.shape)} takes no output of {rows} x {cols}")
        _elements(target)
    if len(targets) != batch or (factors is not None and factors.shape != (batch, rows, 1)):
        raise ValueError(f"{batch} outputs need as many targets, and a factor for each of their rows")
    if outputs.numel():
        addresses, aligned = addresses_of(targets)
        tile_cols = ceil_div(cols, SIDE)
        tiles = ceil_div(rows, SIDE) * tile_cols
        with on(outputs.device):
            triton_kernels.store_updates[(batch * tiles,)](
                outputs, addresses, None if factors is None else factors.contiguous(),
                tiles, tile_cols, rows, cols, float(scale), *outputs.stride(),
                ALIGNED=aligned, SIDE=SIDE, **EXACT,
            )  # fmt: skip


def apply_update_(weight: Tensor, update: Tensor, *, lr: float, weight_decay: float) -> None:
    """See ``torch_passes.apply_update_``."""
    numel = _elements(weight, update)
    if numel:
        with on(weight.device):
            triton_kernels.apply_update[(ceil_div(numel, BLOCK),)](
                weight, update, numel, float(lr), float(1 - lr * weight_decay),
                DECAYS=bool(weight_decay != 0), BLOCK=BLOCK, **EXACT,
            )  # fmt: skip


def sum_of_squares(x: Tensor) -> Tensor:
    """See ``torch_passes.sum_of_squares``. Sums of exact squares; torch's go through roots and have other last bits."""
    numel = _elements(x)
    sums = torch.empty(ceil_div(numel, SPAN), dtype=torch.float64, device=x.device)
    if numel:
        with on(x.device):
            triton_kernels.sums_of_squares[(sums.numel(),)](x, sums, numel, SPAN=SPAN, BLOCK=SUMMED, num_warps=4)
    return sums.sum()


def _elements(first: Tensor, *others: Tensor) -> int:
    """How many elements the tensors have, in memory that the kernels may walk through.

    Raises:
        ValueError: they have not equally many, have gaps or are on several devices, or the first is not in fp32.
    """
    for tensor in (first, *others):
        if tensor.numel() != first.numel() or not tensor.is_contiguous() or tensor.device != first.device:
            raise ValueError("the kernels need contiguous tensors of equally many elements on one device")
    if first.dtype != torch.float32:
        raise ValueError(f"the kernels need fp32, not {first.dtype}")
    return first.numel()
