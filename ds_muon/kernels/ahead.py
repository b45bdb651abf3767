"""Kernels compiled ahead of their first launch, side by side: one by one they take ten seconds on a new machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any

import triton

_MOST_THREADS = 16


def compile_ahead(kernels: ModuleType, launch: Callable[[], object]) -> None:
    """Compile in threads what ``launch`` would launch of a module's kernels, and launch nothing.

    Nothing is done where Triton cannot do that, before 3.6 and in its interpreter, or where there is one core for a
    rank: a kernel is then compiled when it is first launched. What the compiler raises is raised by that launch, too.

    Args:
        kernels: those with a public name. No other thread may launch any of them meanwhile.
    """
    beside: Callable[..., Any] = getattr(triton, "AsyncCompileMode", object)
    found = {name: of for name, of in vars(kernels).items() if isinstance(of, triton.JITFunction) and name[0] != "_"}
    threads = _threads()
    if "ignore_errors" not in signature(beside).parameters or not found or threads == 1:
        return
    with ExitStack() as stack:
        for name, kernel in found.items():
            stack.callback(setattr, kernels, name, kernel)
            setattr(kernels, name, _Ahead(kernel))
        with ThreadPoolExecutor(threads) as pool, beside(pool, ignore_errors=True):
            launch()


class _Ahead:
    """In place of a kernel: what would launch it has it compiled."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self._kernel.warmup, grid=grid)


def _threads() -> int:
    """Of this rank: its share of the cores."""
    said = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
    ranks = next((int(number) for number in said if number), 1)
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))
