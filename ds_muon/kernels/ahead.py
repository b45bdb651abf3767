"""Kernels compiled ahead of their first launch, side by side: one by one they take ten seconds on a new machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
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
        with _Compilers(threads) as pool, beside(pool, ignore_errors=True):
            launch()


class _Compilers(ThreadPoolExecutor):
    """Threads that compile, and make what Triton launches a kernel by.

    Up to Triton 3.6 that is C of every signature's own, which a C compiler takes a quarter of a second for, and by
    default at the first launch. It lands in the same cache; that launch says what is wrong with it.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._begun = set[tuple[str, ...]]()  # one that two threads make is made twice

    def submit(self, compile_one: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return super().submit(self._run, compile_one)

    def _run(self, compile_one: Callable[[], Any]) -> Any:
        kernel = compile_one()
        # The shape of a descriptor's block makes no difference.
        signature = kernel.src.name, *(str(of).partition("[")[0] for of in kernel.src.signature.values())
        if signature not in self._begun:
            self._begun.add(signature)
            with suppress(Exception):
                triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel


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
