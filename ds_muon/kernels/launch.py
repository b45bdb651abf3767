"""What every launch of a kernel needs: addresses on the device, the device made current, numbers of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor


def addresses_of(tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Where tensors of one device lie, at least one: (count,) int64 on it; and whether all at multiples of 16 bytes.

    Raises:
        RuntimeError: a CUDA graph is being captured. Its replays would go to the addresses of today.
    """
    device, stream = tensors[0].device, 0
    if device.type == "cuda":
        with on(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("kernels that are told addresses cannot be captured in a CUDA graph of yours")
            stream = torch.cuda.current_stream().cuda_stream
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    return _on_device(addresses, device, stream), all(address % 16 == 0 for address in addresses)


@lru_cache(maxsize=256)
def _on_device(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """By stream, for the copy is complete only on that which made it."""
    # Torch's allocator hands out the same addresses in every step. From pinned memory a copy does not wait.
    pointers = torch.tensor(addresses, dtype=torch.int64, device="cpu")
    return pointers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else pointers


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)
