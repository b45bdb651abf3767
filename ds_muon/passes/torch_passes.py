"""The elementwise passes of a step in torch, on any device: the definition of what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_muon.layout import Piece
from ds_muon.passes.segments import Moves, Segments

# Elements that a pass works on at a time. Bounds temporaries: in fp32 to 64 MiB, in fp64 or of indices to 128 MiB.
_CHUNK = 1 << 24
# The same on a CPU, whose caches then hold what the operations of a pass hand on.
_CHUNK_OF_CPU = 1 << 20

LARGEST_IN_LIST = 2**30
"""Most elements of a tensor in torch's operations on lists (``_foreach_*``, fused AdamW). Before torch 2.8 these count
in 32 bits, and silently go wrong above."""


def chunk_on(device: torch.device) -> int:
    """Elements that a pass works on at a time."""
    return min(_CHUNK, _CHUNK_OF_CPU) if device.type == "cpu" else _CHUNK


def advance_momentum_(
    gradient: Tensor,
    momentum_buffer: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    moves: Tensor | Moves | None = None,
    into: Tensor | None = None,
) -> None:
    """Advance the momentum by one gradient and overwrite the gradient with U.

    Any slice of a matrix gives that slice of U, bit for bit, because each operation is elementwise and rounds once. A
    fused multiply-add is avoided: a vectorized loop might use it in its body and not in its tail.

    Args:
        gradient: fp32, any shape, contiguous; overwritten with U.
        momentum_buffer: fp32 or bf16, same number of elements, contiguous; overwritten with the new M. The
            arithmetic is in fp32 either way.
        momentum: weight of the past, in [0, 1).
        nesterov: look ahead by one step.
        moves: bool scalar on the same device, or one flag for each matrix of flat tensors; None stands for true. False
            leaves the momentum as it is and makes U exactly zero, whatever the gradient holds. The host does not wait.
        into: on the host, where U goes in place of the gradient, which then stays: fp32, as many elements, contiguous.
    """
    size = chunk_on(gradient.device)
    tensors = (gradient, momentum_buffer, gradient if into is None else into)
    for index, (g, m, u) in enumerate(zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)):
        before = m.to(torch.float32)
        step = g - before
        # From the nearer end, as torch.lerp does. Else a large M, of which little stays, would cost digits of G.
        average = g - step.mul_(momentum) if momentum < 0.5 else step.mul_(1 - momentum).add_(before)
        flags = _flags(moves, index * size, g)
        if flags is None:
            m.copy_(average)
        else:
            torch.where(flags, average, before, out=before)
            m.copy_(before)
        if nesterov:
            # Equal to G + momentum (M - G), without its cancellation where M is small.
            torch.mul(g, 1 - momentum, out=u).add_(average.mul_(momentum))
        else:
            u.copy_(average)
        if flags is not None:
            u.masked_fill_(flags.logical_not(), 0)


def store_updates(
    outputs: Tensor, targets: Sequence[Tensor], *, scale: float = 1.0, factors: Tensor | None = None
) -> None:
    """Write O times the factors, then times ``scale``. Each product rounds once, to fp32.

    Args:
        outputs: (batch, rows, cols), any strides, half precision or fp32; not modified.
        targets: (rows, cols) fp32 for each matrix, contiguous; overwritten. They share no memory with anything else.
        scale: of the whole batch.
        factors: fp32, of rows (batch, rows, 1) or of columns (batch, 1, cols); None stands for ones.
    """
    written = list(targets)
    if not written:
        return
    if factors is None:
        torch._foreach_copy_(written, outputs.unbind())
    else:
        for output, factor, target in zip(outputs, factors, written, strict=True):
            torch.mul(output, factor, out=target)
    if scale != 1:
        torch._foreach_mul_(written, scale)


def apply_update_(
    weight: Tensor,
    update: Tensor,
    *,
    lr: float,
    weight_decay: float,
    moves: Moves | None = None,
    scale: float = 1.0,
    rounded: Tensor | None = None,
) -> None:
    """``W <- W (1 - lr weight_decay) - lr scale update``. Each operation rounds once.

    Args:
        weight: fp32, contiguous; overwritten.
        update: fp32, same shape, contiguous; overwritten with undefined values. On the host half precision as well.
        lr: learning rate.
        weight_decay: decoupled. With 0, W is not multiplied at all.
        moves: one flag for each matrix of flat tensors. Matrices with false do not decay; their update must be zero.
        scale: as ``store_updates`` takes it, on the host.
        rounded: on the host, is overwritten with the new weights: any float dtype, as many elements, contiguous.
    """
    size = chunk_on(weight.device)
    pieces = (torch.split(tensor.view(-1), size) for tensor in (weight, update))
    for index, (w, u) in enumerate(zip(*pieces, strict=True)):
        if weight_decay != 0:
            decays = _flags(moves, index * size, w)
            if decays is None:
                w.mul_(1 - lr * weight_decay)
            else:
                torch.where(decays, w * (1 - lr * weight_decay), w, out=w)
        u = u.to(torch.float32)
        w.sub_((u if scale == 1 else u.mul_(scale)).mul_(lr))
    if rounded is not None:
        rounded.copy_(weight)


def sum_of_squares(x: Tensor, segments: Segments | None = None) -> Tensor:
    """The sum of squares of a flat tensor, or of each of its matrices.

    Args:
        x: flat, fp32; not modified.
        segments: of ``x``; None for one sum over all of it.

    Returns:
        A scalar, or (matrices,) for the segments: fp64, on the device of ``x``. A sum is zero exactly if all its
        elements are. If one is not finite, some sum is not.
    """
    if segments is None:
        return _sum(x)
    if not len(segments):
        return torch.empty(0, dtype=torch.float64, device=x.device)
    return of_matrices(torch.stack([_sum(segment) for segment in torch.split(x, list(segments.sizes))]), x, segments)


def of_matrices(
    totals: Tensor, x: Tensor, segments: Segments, across: Callable[[Tensor, Piece, int], Tensor] | None = None
) -> Tensor:
    """The sum of squares of each matrix: (matrices,), from those of the segments, (segments,) fp64.

    Args:
        across: does what ``sums_across`` does.
    """
    if segments.striped is None:
        return totals
    sums = torch.empty(segments.matrices, dtype=totals.dtype, device=totals.device)
    of_plain, plain = segments.striped.plain
    sums[plain] = totals[of_plain]
    for held, first, members in segments.striped.parts:
        part = x.narrow(0, held.offset, held.numel)
        # A product, because sums into places that several share have no fixed order on GPUs.
        torch.mv(members, (across or sums_across)(part, held.piece, held.start), out=sums[first : first + len(members)])
    return sums


def sums_across(part: Tensor, piece: Piece, start: int) -> Tensor:
    """The sum of squares of each row (axis 0) or column (axis 1) of a piece, in what ``part`` has of it."""
    across = torch.zeros(piece.cols if piece.axis else piece.rows, dtype=torch.float64, device=part.device)
    for rows, row, col in rows_of(part, piece.cols, start):
        begin = col if piece.axis else row
        for chunk in torch.split(rows, max(1, _CHUNK // rows.shape[1])):
            norms = torch.linalg.vector_norm(chunk, dim=1 - piece.axis, dtype=torch.float64)
            across[begin : begin + norms.numel()] += norms.square_()
            begin += 0 if piece.axis else norms.numel()
    return across


def rows_of(part: Tensor, cols: int, start: int) -> list[tuple[Tensor, int, int]]:
    """Elements of a matrix of ``cols`` columns, from ``start`` on, as whole and broken rows.

    Args:
        part: the elements, flat.

    Returns:
        At most three (rows, cols) views of ``part``, each with its first row and column in the matrix.
    """
    row, col = divmod(start, cols)
    head = min(part.numel(), cols - col) if col else 0
    body = (part.numel() - head) // cols * cols
    below = row + bool(head)
    found = [
        (part[:head].view(1, -1), row, col),
        (part[head : head + body].view(-1, cols), below, 0),
        (part[head + body :].view(1, -1), below + body // cols, 0),
    ]
    return [(rows, row, col) for rows, row, col in found if rows.numel()]


def _sum(x: Tensor) -> Tensor:
    # In chunks, because torch makes an fp64 copy of what it sums.
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in torch.split(x, chunk_on(x.device))]
    return torch.stack(norms).square_().sum()


def _flags(moves: Tensor | Moves | None, start: int, chunk: Tensor) -> Tensor | None:
    """The flags of the chunk from this element on: a scalar, or one for each element. None stands for true."""
    if not isinstance(moves, Moves):
        return moves
    return moves.of_elements(start, start + chunk.numel()) if len(moves.segments) else None
