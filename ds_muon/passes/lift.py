"""How what the host's compiled loops write reaches the accelerator while they go on writing.

A loop has the next slot to fill every tenth of a millisecond, and Python would need as long to queue the copy of the
one before. So the loop queues it, by three functions of CUDA's driver that torch has loaded already; their addresses
are all that is known of CUDA here, and nothing has to be compiled or linked against it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

SLOT_BYTES, SLOTS = 8 << 20, 4
"""Few, so that the copies find them in the host's caches. Each is large enough for the bus, and for all threads."""


class LiftFailed(RuntimeError):
    """A copy to the accelerator could not be queued. Some of what was to be written has been."""


class Load(ctypes.Structure):
    """What a loop reads, and where it writes to: addresses and a number of elements. The layout is that of host.cpp."""

    _fields_ = [
        ("x", c_void_p),
        ("y", c_void_p),
        ("goal", c_void_p),
        ("count", c_int64),
        ("piece", c_int64),
        ("scale", c_float),
        ("dtype", c_int32),
    ]


Loop: TypeAlias = Callable[..., int]
"""A function of host.cpp that takes loads, their number, a lift, and settings."""


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
        self._loads: list[Load] = []
        self._how: tuple[Loop, tuple[float, ...]] | None = None
        self._waits = False
        if device.type != "cpu":
            driver = ctypes.CDLL("libcuda.so.1")
            names = {"copy": "cuMemcpyAsync", "record": "cuEventRecord", "query": "cuEventQuery"}
            for key, name in names.items():
                setattr(self, key, ctypes.cast(getattr(driver, name), c_void_p).value)
            self.stream = torch.cuda.current_stream(device).cuda_stream
            self._events = [torch.cuda.current_stream(device).record_event() for _ in range(SLOTS)]
            self._handles = (c_void_p * SLOTS)(*(event.cuda_event for event in self._events))
            self.events = ctypes.addressof(self._handles)

    def take(self, loop: Loop, load: Load, settings: tuple[float, ...]) -> None:
        """Let a loop run over a load, at once or ``together`` with others.

        Raises:
            LiftFailed: see there.
        """
        if self._how != (loop, settings):
            self._go()
            self._how = loop, settings
        self._loads.append(load)
        if not self._waits:
            self._go()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let loads wait until the end: threads that stop and begin with each would cost a tenth of the time.

        What they refer to must be there until then. If something is raised, nothing is done with those that wait.
        """
        self._waits = True
        try:
            yield
            self._go()
        finally:
            self._waits = False
            self._loads.clear()

    def _go(self) -> None:
        loads, self._loads = self._loads, []
        if loads and self._how is not None:
            loop, settings = self._how
            if error := loop((Load * len(loads))(*loads), len(loads), ctypes.byref(self), *settings):
                raise LiftFailed(f"a copy to the accelerator fails: CUDA error {error}")

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
