"""The four operations through torch's own batched matrix products: any device, any dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class TorchOperations:
    """See ``newton_schulz.Operations``. Vendor libraries compute both triangles of a symmetric product."""

    replays = False

    def alone(self, device: torch.device, dtype: torch.dtype) -> bool:
        # Vendors choose another order of summation for another batch, in fp32 nearly always.
        return device.type == "cpu" or dtype == torch.float32

    def normalize(self, matrices: Sequence[Tensor], dtype: torch.dtype, eps: float) -> Tensor:
        batch, tiny = torch.stack(list(matrices)), torch.finfo(torch.float32).tiny
        magnitude = torch.linalg.vector_norm(batch, ord=float("inf"), dim=(-2, -1), keepdim=True)
        batch.div_(magnitude.clamp_min(tiny))
        # Summed in fp64 and rounded once, the norm is the same for any order of summation: a batch may choose its own.
        norm = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True, dtype=torch.float64).to(torch.float32)
        # After the first division the norm of anything but zero is at least 1, far above eps.
        return batch.div_(norm.clamp_min(max(eps, tiny))).to(dtype)

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b)

    def symmetric_plus(self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float) -> Tensor:
        return torch.baddbmm(c, a, b, alpha=alpha, beta=beta)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b)

    def product_plus(self, a: Tensor, b: Tensor, c: Tensor, *, beta: float) -> Tensor:
        return torch.baddbmm(c, a, b, beta=beta)


@contextmanager
def exact_products() -> Iterator[None]:
    """fp32 products in fp32, whatever the user chose for the model: tf32 would cost three digits."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
        return
    # The older function refuses to answer where the user has set these; these answer wherever the older one was used.
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    chosen = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, chosen, strict=True):
            backend.fp32_precision = precision
