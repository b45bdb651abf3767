"""Time, host time included, until the device is done; and a large matmul, whose rate is the yardstick."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from ds_muon.dtypes import name_of

# Side and dtype of the matmul.
YARDSTICK = {"cuda": (8192, torch.bfloat16), "cpu": (512, torch.float32)}


def synchronize(device: torch.device) -> None:
    """Wait for all streams of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """What a call takes from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


class Yardstick:
    """A matmul to be timed in turns with what is measured. Holds its two operands on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.side, self.dtype = YARDSTICK[device.type]
        a, b = (torch.randn(self.side, self.side, dtype=self.dtype, device=device) for _ in range(2))
        self._matmul = partial(torch.mm, a, b)

    def milliseconds(self) -> float:
        """Of one matmul, now."""
        return milliseconds(self._matmul, self._device)

    def before(self, call: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds of one matmul, and from its end until the device is done with what ``call`` launches."""
        if self._device.type != "cuda":
            return self.milliseconds(), milliseconds(call, self._device)
        start, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        synchronize(self._device)
        start.record()
        self._matmul()
        between.record()
        call()
        end.record()
        synchronize(self._device)
        return start.elapsed_time(between), between.elapsed_time(end)

    def rate(self, ms: float) -> float:
        """Operations per second, if one matmul takes so many ms."""
        return 2 * self.side**3 / (1e-3 * ms)

    def __str__(self) -> str:
        return f"{self.side}^3 {name_of(self.dtype)} matmul"
