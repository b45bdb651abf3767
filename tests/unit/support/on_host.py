"""CPU offload beside the run without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

ON_HOST = {"offload_optimizer": {"device": "cpu"}}


def assert_same(left: Any, right: Any, where: str = "", of_adamw: Sequence[str] = ()) -> None:
    """Of nested containers, bit for bit, but for AdamW's part, whose loop on the host rounds as it likes."""
    adamws = where.rsplit(".", 1)[-1] in of_adamw
    on_gpu = get_accelerator().device_name() != "cpu"
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left.keys() - {"fused"}:  # AdamW's, on accelerators alone
            assert_same(left[key], right[key], f"{where}.{key}", of_adamw)
    elif isinstance(left, Tensor):
        rtol = 1e-2 if on_gpu or left.dtype != torch.float32 else 1e-5
        assert torch.allclose(left, right, rtol=rtol, atol=1e-6) if adamws else torch.equal(left, right), where
    else:
        assert (left == pytest.approx(right, rel=1e-6)) if isinstance(left, float) else left == right, where
