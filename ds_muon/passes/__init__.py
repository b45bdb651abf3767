"""The elementwise passes of a step over its flat partitions.

``torch_passes`` defines each pass and runs on any device. On NVIDIA GPUs with Triton, a kernel of the same name does it
in one launch, and on the host, after ``compile_for_host``, a compiled loop; with the same bits (but for the last ones
of ``sum_of_squares``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ds_muon.kernels.available import why_not
from ds_muon.passes import torch_passes
from ds_muon.passes.lift import Goal, LiftFailed
from ds_muon.passes.segments import Held, Moves, Segments
from ds_muon.passes.torch_passes import LARGEST_IN_LIST, chunk_on, rows_of
from ds_muon.say import log

__all__ = [
    "LARGEST_IN_LIST",
    "Goal",
    "Held",
    "Moves",
    "Segments",
    "advance_momentum_",
    "apply_update_",
    "chunk_on",
    "compile_ahead",
    "compile_for_host",
    "rows_of",
    "store_updates",
    "sum_of_squares",
]

P = ParamSpec("P")
T = TypeVar("T")

# Types of device, with the names of the passes whose kernel could not be launched there.
_FAILED: set[tuple[str, str]] = set()

# With "host", the passes that are compiled for it.
_COMPILED: dict[str, ModuleType] = {}


def compile_for_host() -> ModuleType | None:
    """Let passes over memory of the host run compiled from now on. Takes seconds the first time on a machine.

    Returns:
        These passes, with ``adamw_`` among them; None if they cannot be compiled.
    """
    try:
        from ds_muon.passes import host_passes

        _COMPILED["host"] = host_passes
    except Exception as error:  # no compiler, no ninja, a folder that cannot be written
        log(f"the host's part of a step runs on torch's operations, many times slower: {error}", logger=__name__)
    return _COMPILED.get("host")


def compile_ahead(device: torch.device, **settings: Any) -> None:
    """Have the kernels of a first step compiled side by side, where there are any: ``triton_passes.compile_ahead``."""
    if device.type != "cpu" and (kernels := _in_triton(device)) is not None:
        with suppress(Exception):  # whatever it is, the first launch says what is wrong
            kernels.compile_ahead(device, **settings)


def _kernels(device: torch.device) -> ModuleType | None:
    """The passes in Triton, or compiled for the host; None where neither can run."""
    return _COMPILED.get("host") if device.type == "cpu" else _in_triton(device)


@cache
def _in_triton(device: torch.device) -> ModuleType | None:
    if why_not(device) is not None:
        return None
    try:
        from ds_muon.passes import triton_passes
    except Exception as error:  # no Triton, or one that cannot take the kernels
        log(f"the passes of a step run on torch's operations, several for each: {error}", logger=__name__)
        return None
    return triton_passes


def _fused(in_torch: Callable[Concatenate[Tensor, P], T]) -> Callable[Concatenate[Tensor, P], T]:
    """``in_torch``, or its kernel if that can run on the device of the first argument."""
    name = in_torch.__name__

    @wraps(in_torch)
    def run(first: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        place = (first.device.type, name)
        kernels = None if place in _FAILED else _kernels(first.device)
        if kernels is None:
            return in_torch(first, *args, **kwargs)
        try:
            done: T = getattr(kernels, name)(first, *args, **kwargs)
        except (torch.OutOfMemoryError, LiftFailed):
            raise
        except Exception as error:  # an older Triton, no C compiler: nothing has been written
            # If the fault is the caller's, or the device's, torch will say so.
            done = in_torch(first, *args, **kwargs)
            if first.is_cuda and torch.cuda.is_current_stream_capturing():  # the kernel is not at fault
                return done
            _FAILED.add(place)
            log(f"{name} on {first.device.type} runs on torch's operations: its kernel fails, {error}", logger=__name__)
        return done

    return run


advance_momentum_ = _fused(torch_passes.advance_momentum_)
store_updates = _fused(torch_passes.store_updates)
apply_update_ = _fused(torch_passes.apply_update_)
sum_of_squares = _fused(torch_passes.sum_of_squares)
