"""Other people's Newton-Schulz, each as its users call it; what is not installed raises when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Orthogonalize = Callable[[Sequence[Tensor]], object]


def _deepspeed(method: str) -> Callable[[], Orthogonalize]:
    def load() -> Orthogonalize:
        from deepspeed.runtime.zero.muon import original_muon

        name = "zeropower_via_gram_newtonschulz" if method == "gram" else "zeropower_via_newtonschulz5"
        function = getattr(original_muon, name)
        return lambda matrices: [function(matrix, steps=5) for matrix in matrices]

    return load


def _gram_newton_schulz(kernels: bool) -> Callable[[], Orthogonalize]:
    def load() -> Orthogonalize:
        from gram_newton_schulz.gram_newton_schulz import GramNewtonSchulz

        quintic = [[3.4445, -4.7750, 2.0315]] * 5
        function = GramNewtonSchulz(ns_coefficients=quintic, ns_use_kernels=kernels)
        return lambda matrices: function(torch.stack(list(matrices))).clone()

    return load


def _emerging_optimizers() -> Orthogonalize:
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    return lambda matrices: [newton_schulz(matrix, steps=5, coefficient_type="simple") for matrix in matrices]


PEERS: dict[str, Callable[[], Orthogonalize]] = {
    "DeepSpeed, gram": _deepspeed("gram"),
    "DeepSpeed, standard": _deepspeed("standard"),
    "gram-newton-schulz, torch": _gram_newton_schulz(kernels=False),
    "gram-newton-schulz, quack": _gram_newton_schulz(kernels=True),
    "Emerging-Optimizers": _emerging_optimizers,
}
