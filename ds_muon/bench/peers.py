"""Other people's Newton-Schulz, each as its users call it; what is not installed raises when it is loaded.

All of them take the list of matrices, as ours does. Those that know batches get one batch, whose stacking counts: an
optimizer has separate matrices, and those of their users stack them, too. ``Stacked`` tells which they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Orthogonalize = Callable[[Sequence[Tensor]], object]


@dataclass(frozen=True)
class Stacked:
    """Takes matrices, and gives ``function`` one batch of them."""

    function: Callable[[Tensor], object]

    def __call__(self, matrices: Sequence[Tensor]) -> object:
        return self.function(stack(matrices))


def stack(matrices: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(matrices))


_QUINTIC = [[3.4445, -4.7750, 2.0315]] * 5


def _compile_each_shape() -> None:
    """Have torch.compile make code for every shape of the bench, not for a general one, and not stop at eight."""
    import torch._dynamo.config as dynamo

    dynamo.automatic_dynamic_shapes = False
    dynamo.recompile_limit = max(dynamo.recompile_limit, 64)


def _deepspeed(method: str) -> Orthogonalize:
    from deepspeed.runtime.zero.muon import original_muon

    _compile_each_shape()
    name = "zeropower_via_gram_newtonschulz" if method == "gram" else "zeropower_via_newtonschulz5"
    function = getattr(original_muon, name)
    return lambda matrices: [function(matrix, steps=5) for matrix in matrices]


def _gram_newton_schulz(*, kernels: bool) -> Orthogonalize:
    """Squares go through its standard iteration, in fp16 as the other. Its output for fp32 input needs no clone: the
    cast back to fp32 has left the memory of the CUDA graph."""
    from gram_newton_schulz.gram_newton_schulz import SYMMETRIC_KERNEL_TILE_SIZE, GramNewtonSchulz

    _compile_each_shape()
    function = GramNewtonSchulz(ns_coefficients=_QUINTIC, ns_use_kernels=kernels)

    def run(batch: Tensor) -> object:
        if kernels and min(batch.shape[1:]) < SYMMETRIC_KERNEL_TILE_SIZE:
            raise ValueError(f"without kernels for sides below {SYMMETRIC_KERNEL_TILE_SIZE}")
        return function(batch)

    return Stacked(run)


def _emerging_optimizers(*, symmetric: bool) -> Orthogonalize:
    """``medium`` is the default of its Muon and means products in bf16; its Triton kernel takes part in no other."""
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
    from emerging_optimizers.utils import fp32_matmul_precision

    def run(batch: Tensor) -> object:
        with fp32_matmul_precision("medium"):
            return newton_schulz(batch, steps=5, coefficient_type="simple", use_syrk=symmetric)

    return Stacked(run)


def _dion() -> Orthogonalize:
    """Five steps as well, but of coefficients of its own that cannot be set: its error here is that difference."""
    from dion.newton_schulz_triton import newton_schulz_triton

    return Stacked(newton_schulz_triton)


PEERS: dict[str, Callable[[], Orthogonalize]] = {
    "DeepSpeed, gram": partial(_deepspeed, "gram"),
    "DeepSpeed, standard": partial(_deepspeed, "standard"),
    "gram-newton-schulz, torch": partial(_gram_newton_schulz, kernels=False),
    "gram-newton-schulz, quack": partial(_gram_newton_schulz, kernels=True),
    "Emerging-Optimizers, cuBLAS": partial(_emerging_optimizers, symmetric=False),
    "Emerging-Optimizers, syrk": partial(_emerging_optimizers, symmetric=True),
    "Dion, triton, its coefficients": _dion,
}
