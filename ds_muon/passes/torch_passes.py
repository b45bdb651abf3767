"""The elementwise passes of a step in torch: what they compute, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_muon.passes.segments import Segments, Where

# Elements that a pass works on at a time: bounds a temporary in fp32 to 64 MiB, one in fp64 or of indices to 128 MiB.
_CHUNK = 1 << 24


def advance_momentum_(
    gradient: Tensor,
    momentum_buffer: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    where: Tensor | Where | None = None,
) -> None:
    """Advance the momentum by one gradient and overwrite the gradient with U.

    Elementwise, so that any slice of a matrix gives that slice of U, bit for bit: each operation rounds once, with no
    fused multiply-add that a vectorized loop might use in its body and not in its tail.

    Args:
        gradient: fp32, any shape, contiguous; overwritten with U.
        momentum_buffer: fp32 or bf16, same number of elements, contiguous; overwritten with the new M. The
            arithmetic is in fp32 either way.
        momentum: weight of the past, in [0, 1).
        nesterov: look ahead by one step.
        where: bool scalar on the same device, or one flag for each segment of flat tensors. False leaves the momentum
            as it is and makes U exactly zero, whatever the gradient holds: a decision that the host does not know yet
            can be obeyed. None stands for true.
    """
    pieces = (torch.split(tensor.view(-1), _CHUNK) for tensor in (gradient, momentum_buffer))
    for index, (g, m) in enumerate(zip(*pieces, strict=True)):
        before = m.to(torch.float32)
        step = g - before
        # From the end that is nearer, as torch.lerp does: else a large M of which little stays takes digits of G along.
        average = g - step.mul_(momentum) if momentum < 0.5 else step.mul_(1 - momentum).add_(before)
        moves = _flags(where, index, g)
        if moves is None:
            m.copy_(average)
        else:
            torch.where(moves, average, before, out=before)
            m.copy_(before)
        if nesterov:
            # (1 - momentum) G + momentum M, the same without the cancellation of G + momentum (M - G) where M is small.
            g.mul_(1 - momentum).add_(average.mul_(momentum))
        else:
            g.copy_(average)
        if moves is not None:
            g.masked_fill_(moves.logical_not(), 0)


def store_updates(
    outputs: Tensor, targets: Sequence[Tensor], *, scale: float = 1.0, factors: Tensor | None = None
) -> None:
    """Write ``scale`` times the factors times O. Each product rounds once, to fp32; the factors' is first.

    Args:
        outputs: (batch, rows, cols), any strides, half precision or fp32; not modified.
        targets: as many (rows, cols) fp32 tensors, contiguous; overwritten. They share no memory with anything else.
        scale: of the whole batch.
        factors: (batch, rows, 1) or (batch, 1, cols) fp32, of rows or of columns; None stands for ones.
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
    weight: Tensor, update: Tensor, *, lr: float, weight_decay: float, where: Where | None = None
) -> None:
    """``W <- W (1 - lr weight_decay) - lr update``, where each of the three operations rounds once.

    Args:
        weight: fp32, contiguous; overwritten.
        update: fp32, same shape, contiguous; used up: nothing can be said of what it holds afterwards.
        lr: learning rate.
        weight_decay: decoupled. With 0, W is not multiplied at all.
        where: one flag for each segment of flat tensors. What it is false for does not decay; its update is zero.
    """
    if weight_decay != 0:
        for index, w in enumerate(torch.split(weight.view(-1), _CHUNK)):
            decays = _flags(where, index, w)
            if decays is None:
                w.mul_(1 - lr * weight_decay)
            else:
                torch.where(decays, w * (1 - lr * weight_decay), w, out=w)
    weight.sub_(update.mul_(lr))


def sum_of_squares(x: Tensor, segments: Segments | None = None) -> Tensor:
    """Of a flat fp32 tensor, which is not modified: fp64 on its device.

    Args:
        x: the tensor.
        segments: of ``x``; None for one sum over all of it.

    Returns:
        A scalar, or (count,), a sum for each segment: zero exactly if all of it is, finite exactly if all of it is.
    """
    if segments is None:
        return _sum(x)
    if not len(segments):
        return torch.empty(0, dtype=torch.float64, device=x.device)
    return torch.stack([_sum(segment) for segment in torch.split(x, list(segments.sizes))])


def _sum(x: Tensor) -> Tensor:
    # In pieces, for torch makes an fp64 copy of what it sums.
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in torch.split(x, _CHUNK)]
    return torch.stack(norms).square_().sum()


def _flags(where: Tensor | Where | None, index: int, chunk: Tensor) -> Tensor | None:
    """What ``where`` says of the chunk of this index: a scalar, or a flag for each element."""
    if not isinstance(where, Where):
        return where
    start = index * _CHUNK
    return where.of_elements(start, start + chunk.numel()) if len(where.segments) else None
