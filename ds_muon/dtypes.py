"""Names of dtypes, as configs, files and messages write them."""

from __future__ import annotations

import torch

LARGEST = torch.finfo(torch.float32).max
"""The largest number in fp32, which all settings end up in."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def name_of(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
