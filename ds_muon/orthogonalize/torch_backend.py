"""The operations through torch's own batched matrix products: any device, any dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ds_muon.orthogonalize.coefficients import Triple
from ds_muon.orthogonalize.newton_schulz import Iteration


class TorchOperations:
    """``Operations`` and ``Backend`` in one. Vendor libraries compute both triangles of a symmetric product."""

    compact = True

    def alone(self, device: torch.device, dtype: torch.dtype) -> bool:
        # Vendors choose another order of summation for another batch, in fp32 nearly always.
        return device.type == "cpu" or dtype == torch.float32

    def workspace(self, rows: int, cols: int, dtype: torch.dtype, buffers: int) -> int:
        m, n = sorted((rows, cols))
        # A copy in fp32, one in fp64 for the norm; X before and after.
        return 12 * m * n + dtype.itemsize * (2 * m * n + buffers * m * m)

    def run(self, matrices: Sequence[Tensor], iteration: Iteration) -> Tensor:
        x = normalize(matrices, iteration.dtype, iteration.eps)
        tall = x.shape[1] > x.shape[2]
        return iteration.run(x.mT, self).mT if tall else iteration.run(x, self)

    def release(self) -> None:
        """Nothing is kept."""

    def for_trial(self, device: torch.device, dtype: torch.dtype) -> Sequence[TorchOperations]:
        return [self]

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b)

    def polynomial(self, r: Tensor, triple: Triple) -> Tensor:
        a, b, c = triple
        w = torch.baddbmm(r, r, r, alpha=c, beta=b) if c else r * b
        # The diagonal in fp32, for a second rounding there would bend all singular values the same way.
        diagonal = r.diagonal(dim1=-2, dim2=-1).float() * b + a
        if c:
            diagonal.add_(torch.linalg.vector_norm(r, dim=-1, dtype=torch.float32).square_(), alpha=c)
        w.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
        return w

    def product(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)

    def step(self, r: Tensor, triple: Triple, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.dtype != torch.float32:
            return self.product(self.polynomial(r, triple), x, out)
        # a I is not rounded into the polynomial: half the error, and every step is one of these in fp32.
        a, b, c = triple
        z = torch.baddbmm(r, r, r, alpha=c, beta=b) if c else r * b
        return torch.baddbmm(x, z, x, beta=a) if out is None else torch.baddbmm(x, z, x, beta=a, out=out)


def normalize(matrices: Sequence[Tensor], dtype: torch.dtype, eps: float) -> Tensor:
    """Each (rows, cols) fp32 matrix over its largest magnitude, then over its Frobenius norm, as one batch."""
    batch, tiny = torch.stack(list(matrices)), torch.finfo(torch.float32).tiny
    magnitude = torch.linalg.vector_norm(batch, ord=float("inf"), dim=(-2, -1), keepdim=True)
    batch.div_(magnitude.clamp_min(tiny))
    # A batch may choose its own order of summation. In fp64, rounded once, that all but never shows in the norm.
    norm = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True, dtype=torch.float64).to(torch.float32)
    # After the first division the norm of anything but zero is at least 1, far above eps.
    return batch.div_(norm.clamp_min(max(eps, tiny))).to(dtype)


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
