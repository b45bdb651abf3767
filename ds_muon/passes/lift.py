"""How what the host's compiled loops write reaches the accelerator while they go on writing.

A loop has the next slot to fill every tenth of a millisecond, and Python would need as long to queue the copy of the
one before. So the loop queues it, by three functions of CUDA's driver that torch has loaded already; their addresses
are all that is known of CUDA here, and nothing has to be compiled or linked against it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

SLOT_BYTES, SLOTS = 8 << 20, 4
"""Few, so that the copies find them in the host's caches. Each is large enough for the bus, and for all threads."""


class LiftFailed(RuntimeError):
    """A copy to the accelerator could not be queued. Some of what was to be written has been."""


class Lift(ctypes.Structure):
    """Slots of pinned memory that are filled in turn, each once it has gone up. The layout is that of host.cpp.

    Args:
        device: where things go. If that is the host, they are copied at once.
        pinned: whether the host's memory is pinned.

    Raises:
        OSError: there is no driver of CUDA's.
    """

    _fields_ = [
        ("slots", c_void_p),
        ("bytes", c_int64),
        ("count", c_int64),
        ("events", c_void_p),
        ("copy", c_void_p),
        ("record", c_void_p),
        ("query", c_void_p),
        ("stream", c_void_p),
        ("slot", c_int64),
    ]

    stream: int | None
    events: int
    _events: Sequence[torch.cuda.Event] = ()

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self._memory = torch.empty((SLOTS, SLOT_BYTES), dtype=torch.uint8, device="cpu", pin_memory=pinned)
        super().__init__(slots=self._memory.data_ptr(), bytes=SLOT_BYTES, count=SLOTS)
        if device.type != "cpu":
            driver = ctypes.CDLL("libcuda.so.1")
            names = {"copy": "cuMemcpyAsync", "record": "cuEventRecord", "query": "cuEventQuery"}
            for key, name in names.items():
                setattr(self, key, ctypes.cast(getattr(driver, name), c_void_p).value)
            self.stream = torch.cuda.current_stream(device).cuda_stream
            self._events = [torch.cuda.current_stream(device).record_event() for _ in range(SLOTS)]
            self._handles = (c_void_p * SLOTS)(*(event.cuda_event for event in self._events))
            self.events = ctypes.addressof(self._handles)

    def __del__(self) -> None:
        # Torch does not know of the copies, and would give the slots to others.
        try:
            for event in self._events:
                event.synchronize()
        except RuntimeError:  # the device has failed
            pass


def lift_to(device: torch.device, *, pinned: bool) -> Lift | None:
    """A lift; None to accelerators that are not of CUDA, as those of ROCm and XPU."""
    if device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None):
        try:
            return Lift(device, pinned=pinned)
        except OSError:
            pass
    return None


@dataclass(frozen=True)
class Goal:
    """Memory of the accelerator to which a loop writes through a lift.

    Attributes:
        tensor: flat, contiguous.
        lift: whose stream is the current one.
    """

    tensor: Tensor
    lift: Lift

    def numel(self) -> int:
        return self.tensor.numel()
