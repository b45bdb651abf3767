"""A Newton-Schulz backend that returns NaN for matrices of one shape, on the ranks and in the steps it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_muon.orthogonalize import BACKENDS, Triple
from ds_muon.orthogonalize.torch_backend import TorchOperations
from tests.unit.support.models import change_newton_schulz


class Faulty(TorchOperations):
    """Torch's products; the last one of the iteration returns a NaN for matrices of sorted shape ``sick``."""

    sick: tuple[int, int] | None = None

    def product(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        return self._poisoned(super().product(a, b, out))

    def step(self, r: Tensor, triple: Triple, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._poisoned(super().step(r, triple, x, out))

    def _poisoned(self, x: Tensor) -> Tensor:
        if tuple(x.shape[-2:]) == self.sick:
            x[..., 0, 0] = torch.nan
        return x


@contextmanager
def faulty_backend(engine: Any) -> Iterator[None]:
    """Within this context the engine's backend is ``Faulty``, which is well until ``sick`` is set."""
    with mock.patch.dict(BACKENDS, {"faulty": Faulty}):
        change_newton_schulz(engine, backend="faulty")
        try:
            yield
        finally:
            Faulty.sick = None


@contextmanager
def sick(shape: tuple[int, int] | None) -> Iterator[None]:
    """Within this context matrices of ``shape`` come out with a NaN."""
    with mock.patch.object(Faulty, "sick", None if shape is None else tuple(sorted(shape))):
        yield
