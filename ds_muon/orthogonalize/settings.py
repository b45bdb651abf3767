"""The settings of Newton-Schulz, as a config or a caller gives them, resolved for one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ds_muon.dtypes import DTYPES
from ds_muon.orthogonalize import newton_schulz
from ds_muon.orthogonalize.backends import choose_backend
from ds_muon.orthogonalize.coefficients import Triple, schedule
from ds_muon.orthogonalize.defaults import NS_BACKEND, NS_COEFFICIENTS, NS_DTYPE, NS_EPS, NS_METHOD, NS_STEPS
from ds_muon.orthogonalize.newton_schulz import Iteration


@dataclass(frozen=True)
class NewtonSchulz:
    """Settings of the iteration, resolved for one device.

    Attributes:
        triples: coefficients of each step.
        method: ``"gram"`` or ``"standard"``, see ``newton_schulz.blocks``.
        dtype: dtype of the iteration and of its result.
        eps: guards the division by a zero norm, and nothing else.
        backend: a name in ``BACKENDS``.
    """

    triples: tuple[Triple, ...]
    method: str
    dtype: torch.dtype
    eps: float
    backend: str = "torch"

    @classmethod
    def resolve(
        cls,
        device: torch.device,
        *,
        ns_steps: int | None = NS_STEPS,
        ns_method: str = NS_METHOD,
        ns_coefficients: str | Sequence[Sequence[float]] = NS_COEFFICIENTS,
        ns_dtype: str = NS_DTYPE,
        ns_eps: float = NS_EPS,
        ns_backend: str = NS_BACKEND,
    ) -> NewtonSchulz:
        """Settle ``"auto"``: fp16 on accelerators, as fast as bf16 with 8 times less error; fp32 on CPU.

        Raises:
            ValueError: an unknown method, dtype, backend or coefficient table, ``ns_eps`` out of range, or a backend
                that cannot run on ``device``. Names the key and its value.
        """
        if ns_method not in ("gram", "standard"):
            raise ValueError(f'ns_method = {ns_method!r}: choose "gram" or "standard"')
        dtypes = {**DTYPES, "auto": torch.float32 if device.type == "cpu" else torch.float16}
        if ns_dtype not in dtypes:
            raise ValueError(f"ns_dtype = {ns_dtype!r}: choose one of {sorted(dtypes)}")
        if not 0 <= ns_eps < 1:
            raise ValueError(f"ns_eps = {ns_eps!r}: set a number from 0 to below 1, such as 1e-15")
        dtype = dtypes[ns_dtype]
        backend = choose_backend(ns_backend, device, dtype)
        return cls(schedule(ns_coefficients, ns_steps), ns_method, dtype, ns_eps, backend)

    def iteration(self, rows: int, cols: int) -> Iteration:
        """The iteration for matrices of this shape: its steps in blocks, dtype and eps."""
        return _iteration(self, rows, cols)

    def cost(self, rows: int, cols: int) -> int:
        """Floating-point operations for one (rows, cols) matrix."""
        return self.iteration(rows, cols).flops(rows, cols)

    def form(self, rows: int, cols: int) -> str:
        """``"gram"`` or ``"standard"``: the form of the iteration for a (rows, cols) matrix."""
        return self.iteration(rows, cols).form


@lru_cache(maxsize=1024)
def _iteration(settings: NewtonSchulz, rows: int, cols: int) -> Iteration:
    blocks = newton_schulz.blocks(rows, cols, settings.triples, settings.dtype, settings.method)
    return Iteration(blocks, settings.dtype, settings.eps)
