"""Where Triton kernels can run: one rule for all of them."""

from __future__ import annotations

import torch


def why_not(device: torch.device) -> str | None:
    """Why no kernel can run on the device, whatever is installed; None if they can."""
    if device.type != "cuda":
        return f"Triton needs a GPU, and this is {device.type}"
    if not torch.cuda.is_available():
        return "Triton needs a GPU, and torch finds none"
    if torch.version.hip:
        return "the Triton kernels are for NVIDIA GPUs, and this is an AMD one"
    # Which bf16 needs, too.
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"Triton needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    return None
