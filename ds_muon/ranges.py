"""Ranges in torch's profiler, such as ``ds_muon::stage``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import record_function

P = ParamSpec("P")
T = TypeVar("T")


def profiled(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make every call a range ``ds_muon::<name>`` while the profiler runs.

    While it does not, a call costs nothing more; ``record_function`` would take time of the host in every call.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                return function(*args, **kwargs)
            with record_function(f"ds_muon::{name}"):
                return function(*args, **kwargs)

        return run

    return decorate
