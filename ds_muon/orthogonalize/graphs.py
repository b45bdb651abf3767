"""CUDA graphs of the iteration, for batches whose launches take the host longer than the GPU needs for the work.

A graph is captured the second time that a kind of batch comes by, and replayed from then on. It is the same kernels on
the same numbers: the results are the same, bit for bit. Inside a graph, parts of a batch run on streams of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

# Floating-point operations of a batch up to which a graph pays: about 4 ms of an H100.
_FEW = 3_000_000_000_000
# What all graphs may keep of results, in bytes. Their temporaries share one pool.
_KEPT_BYTES = 512 << 20

Work = Callable[[Tensor], Tensor]


class GraphCache:
    """Graphs by kind of batch. Memory for results stays allocated, and for the temporaries of the largest batch."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Graph | None] = {}
        self._kept = 0
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def run(self, key: Hashable, source: Tensor, work: Work, *, flops: int, nbytes: int) -> Tensor:
        """``work(source)``, through a graph if that pays.

        Args:
            key: all that ``work`` depends on but the values of ``source``.
            source: small; not modified.
            flops: of the batch.
            nbytes: of the result.

        Returns:
            What may be overwritten in the next call.
        """
        if not source.is_cuda or flops > _FEW or torch.cuda.is_current_stream_capturing():
            return work(source)
        if key not in self._graphs:
            self._graphs[key] = None  # what comes once, as in a test, is not worth a graph; and this compiles kernels
            return work(source)
        stream = torch.cuda.current_stream(source.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)  # graphs share their temporaries
        self._stream = stream
        graph = self._graphs[key]
        if graph is None:
            if self._kept + nbytes > _KEPT_BYTES:
                return work(source)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = self._graphs[key] = _Graph(source, work, self._pool)
            self._kept += nbytes
        return graph.replay(source)


class _Graph:
    def __init__(self, source: Tensor, work: Work, pool: Any) -> None:
        self._source = source.clone()
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            # Other threads, such as NCCL's watchdog, may go on talking to the device.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self._out = work(self._source)
            self._graph.capture_end()
        torch.cuda.current_stream(source.device).wait_stream(stream)

    def replay(self, source: Tensor) -> Tensor:
        self._source.copy_(source)
        self._graph.replay()
        return self._out


_T = TypeVar("_T")


def overlapped(parts: Sequence[tuple[Callable[[], _T], Callable[[_T], object]]]) -> None:
    """Run ``second(first())`` of all parts: in a graph each on a stream of its own, else one after another.

    The first halves, which load, do not run beside each other, but beside the second half of the part before.
    """
    if len(parts) == 1 or not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        for first, second in parts:
            second(first())
        return
    origin = torch.cuda.current_stream()
    branches = [torch.cuda.Stream() for _ in parts]  # type: ignore[no-untyped-call]
    loaded = origin.record_event()
    for branch, (first, second) in zip(branches, parts, strict=True):
        branch.wait_event(loaded)
        with torch.cuda.stream(branch):
            begun = first()
            loaded = branch.record_event()
            second(begun)
    for branch in branches:
        origin.wait_stream(branch)
