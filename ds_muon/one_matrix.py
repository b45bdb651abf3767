"""One Muon update of a whole matrix, on one device: the rule of ``update`` as a public function, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_muon.dtypes import name_of
from ds_muon.layout import Layout, out_and_in
from ds_muon.orthogonalize import NewtonSchulz, orthogonalize
from ds_muon.orthogonalize.defaults import NS_BACKEND, NS_COEFFICIENTS, NS_DTYPE, NS_EPS, NS_METHOD, NS_STEPS
from ds_muon.passes import advance_momentum_, store_updates
from ds_muon.update import advance_row_variance, update_scale


@torch.no_grad()
def muon_update(
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    adjust_lr_fn: str = "original",
    ns_steps: int | None = NS_STEPS,
    ns_method: str = NS_METHOD,
    ns_coefficients: str | Sequence[Sequence[float]] = NS_COEFFICIENTS,
    ns_dtype: str = NS_DTYPE,
    ns_eps: float = NS_EPS,
    ns_backend: str = NS_BACKEND,
    row_variance: Tensor | None = None,
    beta2: float | None = None,
    layout: Layout = "out_in",
) -> Tensor:
    """One Muon update of a whole matrix: the change of the weight is ``-lr`` times the result.

        M <- M + (1 - momentum) (G - M)                  ``momentum_buffer``, ``grad``
        U  = G + momentum (M - G)  if nesterov else M
        O  = NewtonSchulz(U / ||U||_F)

    Keller Jordan, Muon (2024), https://kellerjordan.github.io/posts/muon/. NorMuon, between O and the result: Li et al.
    (2025), arXiv:2510.05491.

    Args:
        grad: (rows, cols) full, averaged, unscaled gradient, any float dtype; not modified.
        momentum_buffer: (rows, cols) fp32 or bf16, contiguous; advanced in place.
        momentum, nesterov, adjust_lr_fn, ns_*: as in the optimizer's config.
        row_variance: makes the update NorMuon's: one number for each output, (rows,), or (cols,) if ``layout`` is
            "in_out", fp32; advanced in place.
        beta2: NorMuon's weight of the past, in [0, 1); 0.95 by default.
        layout: "out_in" for a weight as nn.Linear stores it, "in_out" for one as transformers' Conv1D does.

    Returns:
        ``s * O``, (rows, cols) fp32, where ``s`` is the factor of ``adjust_lr_fn``. Zeros if the gradient is zero
        everywhere: ``momentum_buffer`` and ``row_variance`` then stay as they are, and the caller must not decay the
        weight.

    Raises:
        ValueError: a gradient that is not a matrix of floats; a buffer that does not fit it in shape, dtype, device or
            strides; ``momentum``, ``beta2`` or ``ns_eps`` out of range; ``beta2`` without ``row_variance``; an unknown
            name in a setting. Nothing has been modified then.
    """
    if grad.ndim != 2 or grad.shape != momentum_buffer.shape:
        raise ValueError(
            f"muon_update needs a matrix and a momentum_buffer of its shape, "
            f"got {tuple(grad.shape)} and {tuple(momentum_buffer.shape)}"
        )
    device = grad.device
    if not grad.is_floating_point():
        raise ValueError(f"muon_update needs a gradient of floats, got {name_of(grad.dtype)}")
    if (
        momentum_buffer.dtype not in (torch.float32, torch.bfloat16)
        or not momentum_buffer.is_contiguous()
        or momentum_buffer.device != device
    ):
        raise ValueError(
            f"muon_update needs a contiguous momentum_buffer in float32 or bfloat16 on {device}, got one "
            f"in {name_of(momentum_buffer.dtype)} with strides {momentum_buffer.stride()} on {momentum_buffer.device}"
        )
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum = {momentum!r}: set a number from 0 to below 1, such as 0.95")
    if row_variance is None and beta2 is not None:
        raise ValueError(f"beta2 = {beta2!r} has no effect without row_variance")
    beta2 = 0.95 if beta2 is None else beta2
    if not 0 <= beta2 < 1:
        raise ValueError(f"beta2 = {beta2!r}: set a number from 0 to below 1, such as 0.95")
    if layout not in ("out_in", "in_out"):
        raise ValueError(f'layout = {layout!r}: choose "out_in" or "in_out"')
    rows, cols = out_and_in(grad.shape[0], grad.shape[1], layout)
    if row_variance is not None and (
        row_variance.shape != (rows,) or row_variance.dtype != torch.float32 or row_variance.device != device
    ):
        raise ValueError(
            f"muon_update needs a row_variance of shape {(rows,)} in float32 on {device}, "
            f"got {tuple(row_variance.shape)} in {name_of(row_variance.dtype)} on {row_variance.device}"
        )
    settings = NewtonSchulz.resolve(
        device,
        ns_steps=ns_steps,
        ns_method=ns_method,
        ns_coefficients=ns_coefficients,
        ns_dtype=ns_dtype,
        ns_eps=ns_eps,
        ns_backend=ns_backend,
    )
    scale = update_scale(adjust_lr_fn, rows, cols)
    direction = grad.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    # A NaN counts as not zero.
    moves = direction.any()
    advance_momentum_(direction, momentum_buffer, momentum=momentum, nesterov=nesterov, moves=moves)
    (output,) = orthogonalize([direction], settings)
    factors = None
    if row_variance is not None:
        advanced, factors = advance_row_variance(output[None], row_variance[None], beta2=beta2, layout=layout)
        row_variance.copy_(torch.where(moves, advanced[0], row_variance))
    update = direction
    store_updates(output[None], [update], scale=scale, factors=factors)
    return update
