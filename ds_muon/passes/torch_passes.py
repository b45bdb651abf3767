"""The elementwise passes of a step in torch: what they compute, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Elements that a pass works on at a time: bounds a temporary in fp32 to 64 MiB, one in fp64 to 128 MiB.
_CHUNK = 1 << 24


def advance_momentum_(
    gradient: Tensor, momentum_buffer: Tensor, *, momentum: float, nesterov: bool, where: Tensor | None = None
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
        where: bool scalar on the same device. False leaves the momentum equal to what it is, whatever the gradient
            holds, and makes U that of a gradient equal to the momentum: a decision that the host does not know yet can
            be obeyed. None stands for true.
    """
    pieces = (torch.split(tensor.view(-1), _CHUNK) for tensor in (gradient, momentum_buffer))
    for g, m in zip(*pieces, strict=True):
        average = m.to(torch.float32)
        if where is not None:
            torch.where(where, g, average, out=g)
        step = g - average
        # From the end that is nearer, as torch.lerp does: else a large M of which little stays takes digits of G along.
        if momentum < 0.5:
            torch.sub(g, step.mul_(momentum), out=average)
        else:
            average.add_(step.mul_(1 - momentum))
        if average is not m:
            m.copy_(average)
        if nesterov:
            # (1 - momentum) G + momentum M, the same without the cancellation of G + momentum (M - G) where M is small.
            g.mul_(1 - momentum).add_(torch.mul(average, momentum, out=step))
        else:
            g.copy_(average)


def store_updates(
    outputs: Tensor, targets: Sequence[Tensor], *, scale: float = 1.0, factors: Tensor | None = None
) -> None:
    """Write ``scale`` times the factors of the rows times O. Each product rounds once, to fp32; the factors' is first.

    Args:
        outputs: (batch, rows, cols), any strides, half precision or fp32; not modified.
        targets: as many (rows, cols) fp32 tensors, contiguous; overwritten. They share no memory with anything else.
        scale: of the whole batch.
        factors: (batch, rows, 1) fp32; None stands for ones.
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


def apply_update_(weight: Tensor, update: Tensor, *, lr: float, weight_decay: float) -> None:
    """``W <- W (1 - lr weight_decay) - lr update``, where each of the three operations rounds once.

    Args:
        weight: fp32, contiguous; overwritten.
        update: fp32, same shape, contiguous; used up: nothing can be said of what it holds afterwards.
        lr: learning rate.
        weight_decay: decoupled. With 0, W is not multiplied at all.
    """
    if weight_decay != 0:
        weight.mul_(1 - lr * weight_decay)
    weight.sub_(update.mul_(lr))


def sum_of_squares(x: Tensor) -> Tensor:
    """Of a flat fp32 tensor, which is not modified: an fp64 scalar on its device, finite exactly when ``x`` is."""
    # In pieces, for torch makes an fp64 copy of what it sums.
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in torch.split(x, _CHUNK)]
    return torch.stack(norms).square_().sum()
