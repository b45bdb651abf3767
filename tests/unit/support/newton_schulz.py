"""Newton-Schulz of one matrix, and the settings that it is tried with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_muon.orthogonalize import (
    NewtonSchulz,
    orthogonalize,
)

CPU = torch.device("cpu")

DTYPES = ["float32", "float16", "bfloat16"]

METHODS = ["gram", "standard"]


def ns(matrix: Tensor, **settings: Any) -> Tensor:
    (output,) = orthogonalize([matrix], NewtonSchulz.resolve(matrix.device, **settings))
    return output
