"""The passes as one launch each, with the bits of ``torch_passes``, where their contracts are.

Import this module only where Triton is installed. Whatever raises here has written nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_muon.kernels import ahead, elementwise
from ds_muon.kernels.launch import addresses_of, ceil_div, on
from ds_muon.layout import Piece
from ds_muon.passes.segments import BLOCK, SPAN, Held, Moves, Segments
from ds_muon.passes.torch_passes import of_matrices

# Side of the square of a matrix that one program works on.
SIDE = 64
# Elements that a program sums up at a time, and sums of pieces.
SUMMED, PIECES = 2048, 256

# A product and a sum round twice, as in torch.
EXACT = {"num_warps": 4, "enable_fp_fusion": False}


def advance_momentum_(
    gradient: Tensor,
    momentum_buffer: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    moves: Tensor | Moves | None = None,
    into: None = None,
) -> None:
    """See ``torch_passes.advance_momentum_``. ``into`` is for the host alone."""
    if into is not None:
        raise ValueError("the kernels write U in place of the gradient")
    numel = _elements(gradient, momentum_buffer)
    if numel:
        with on(gradient.device):
            elementwise.advance_momentum[(ceil_div(numel, BLOCK),)](
                gradient, momentum_buffer, *_flags(moves), numel, float(momentum), float(1 - momentum),
                NEAR_GRADIENT=momentum < 0.5, NESTEROV=bool(nesterov), BLOCK=BLOCK, **EXACT,
            )  # fmt: skip


def store_updates(
    outputs: Tensor, targets: Sequence[Tensor], *, scale: float = 1.0, factors: Tensor | None = None
) -> None:
    """See ``torch_passes.store_updates``."""
    batch, rows, cols = outputs.shape
    for target in targets:  # not by a function for each, for there may be thousands
        if target.shape != (rows, cols):
            raise ValueError(f"a target of shape {tuple(target.shape)} takes no output of {rows} x {cols}")
        if target.dtype != torch.float32 or not target.is_contiguous() or target.device != outputs.device:
            raise ValueError("the kernels need contiguous targets in fp32 on the device of the outputs")
    shapes = (None, (batch, rows, 1), (batch, 1, cols))
    if len(targets) != batch or (None if factors is None else factors.shape) not in shapes:
        raise ValueError(f"{batch} outputs need as many targets, and a factor for each of their rows or columns")
    if outputs.numel():
        addresses, aligned = addresses_of(targets)
        tile_cols = ceil_div(cols, SIDE)
        tiles = ceil_div(rows, SIDE) * tile_cols
        with on(outputs.device):
            elementwise.store_updates[(batch * tiles,)](
                outputs, addresses, None if factors is None else factors.contiguous(),
                tiles, tile_cols, rows, cols, float(scale), *outputs.stride(),
                OF_ROWS=factors is None or factors.shape == (batch, rows, 1), ALIGNED=aligned, SIDE=SIDE, **EXACT,
            )  # fmt: skip


def apply_update_(
    weight: Tensor,
    update: Tensor,
    *,
    lr: float,
    weight_decay: float,
    moves: Moves | None = None,
    scale: float = 1.0,
    rounded: None = None,
) -> None:
    """See ``torch_passes.apply_update_``. A scale and ``rounded`` are for the host alone."""
    if scale != 1.0 or rounded is not None:
        raise ValueError(f"the kernels apply updates as they are, not times {scale:g}, and round no weights")
    numel = _elements(weight, update)
    decays = bool(weight_decay != 0)
    if numel:
        with on(weight.device):
            elementwise.apply_update[(ceil_div(numel, BLOCK),)](
                weight, update, *_flags(moves if decays else None), numel, float(lr), float(1 - lr * weight_decay),
                DECAYS=decays, BLOCK=BLOCK, **EXACT,
            )  # fmt: skip


def sum_of_squares(x: Tensor, segments: Segments | None = None) -> Tensor:
    """See ``torch_passes.sum_of_squares``. Sums of exact squares; torch's go through roots and have other last bits."""
    numel = _elements(x)
    pieces = ceil_div(numel, SPAN) if segments is None else len(segments.pieces) - 1
    sums = torch.empty(pieces, dtype=torch.float64, device=x.device)
    if pieces:
        with on(x.device):
            elementwise.sums_of_squares[(pieces,)](
                x, None if segments is None else segments.pieces, sums, numel, SPAN=SPAN, BLOCK=SUMMED, num_warps=4
            )
    if segments is None:
        return sums.sum()
    totals = torch.empty(len(segments), dtype=torch.float64, device=x.device)
    if len(segments):
        with on(x.device):
            elementwise.sums_of_segments[(len(segments),)](
                sums, segments.first_pieces, totals, BLOCK=PIECES, num_warps=1
            )
    return totals if segments.striped is None else of_matrices(totals, x, segments)


def compile_ahead(
    device: torch.device,
    *,
    momentum: float,
    nesterov: bool,
    momentum_dtype: torch.dtype,
    result_dtype: torch.dtype,
    weight_decay: float,
) -> None:
    """Compile side by side what the first step launches with these settings, but for NorMuon's rows and strips."""
    rows, cols = SIDE, 2 * SIDE
    flat = torch.empty(rows * cols, dtype=torch.float32, device=device)
    segments = Segments.of([Held(Piece((), 0, rows, cols), 0, 0, flat.numel())], flat.numel(), device)
    moves = Moves(segments, torch.ones(1, dtype=torch.bool, device=device))
    outputs = torch.empty(2, rows, cols, dtype=result_dtype, device=device)

    def launch() -> None:
        sum_of_squares(flat)
        sum_of_squares(flat, segments)
        buffer = flat.to(momentum_dtype)
        advance_momentum_(flat, buffer, momentum=momentum, nesterov=nesterov, moves=moves)
        store_updates(outputs, [flat.view(rows, cols)] * len(outputs))
        apply_update_(flat, flat, lr=0.0, weight_decay=weight_decay, moves=moves)

    ahead.compile_ahead(elementwise, launch)


def _flags(moves: Tensor | Moves | None) -> tuple[Tensor | None, ...]:
    """The flags, and the tables by which blocks and elements find theirs."""
    if not isinstance(moves, Moves):
        return moves, None, None, None, None
    segments = moves.segments
    if not len(segments):  # nothing but padding
        return None, None, None, None, None
    striped = segments.striped
    tables = (None, None) if striped is None else (striped.table, striped.labels)
    return moves.flags, segments.bounds, segments.of_block, *tables


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
