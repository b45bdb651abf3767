"""CUDA graphs of the iteration, for batches whose launches take the host longer than the GPU needs for the work.

A graph works in memory that is allocated for each batch and given back after it: between steps, nothing is kept for it.
Torch's allocator hands out the same addresses in every step of a training run. A graph is captured the second time that
a kind of batch comes by at an address, and replayed there from then on. It is the same kernels on the same numbers: the
results are the same, bit for bit. Parts of a batch run on streams of their own.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

_LOGGER = logging.getLogger(__name__)

# Floating-point operations of a batch up to which a graph pays: about 4 ms of an H100.
_FEW = 3_000_000_000_000
# Kinds of batches and addresses that get a graph, those used last; and that are remembered.
_MOST_GRAPHS = 64
_MOST_SEEN = 1024

Work = Callable[[Tensor, Tensor], object]


class GraphCache:
    """Graphs by kind of batch and the address at which it is worked on."""

    def __init__(self) -> None:
        self._begin()

    def clear(self) -> None:
        """Begin anew. Waits for the device."""
        if self._graphs:
            torch.cuda.synchronize()
        self._begin()

    def _begin(self) -> None:
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._uncapturable: set[Hashable] = set()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def run(self, key: Hashable, source: Tensor, memory: Tensor, work: Work, flops: int) -> None:
        """``work(source, memory)``, through a graph if that pays.

        Args:
            key: all that ``work`` depends on but the values of ``source`` and the address of ``memory``.
            source: small; not modified, and the same numbers for as long as it is the same tensor.
            memory: to work in and for the result.
            work: allocates next to nothing.
            flops: of the batch.
        """
        if not source.is_cuda or flops > _FEW or key in self._uncapturable:
            work(source, memory)
            return
        place = key, memory.data_ptr()
        graph = self._graphs.get(place)
        if graph is None and not _remember(self._seen, place, None, _MOST_SEEN):
            # What comes once, as in a test, is worth no graph; and this compiles the kernels.
            work(source, memory)
            return
        if graph is None:
            try:
                graph = _Graph(source, memory, work, self._shared_pool())
            except RuntimeError as error:  # such as no memory for it: a fault of the work shows without a graph, too
                _LOGGER.warning("a Newton-Schulz batch goes without a CUDA graph: %s", error)
                self._uncapturable.add(key)
                work(source, memory)
                return
        _remember(self._graphs, place, graph, _MOST_GRAPHS)
        stream = torch.cuda.current_stream(source.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)  # a graph has one source, and all of them share what they allocate
        self._stream = stream
        graph.replay(source)

    def _shared_pool(self) -> Any:
        """For what little ``work`` allocates. Torch takes no capture into a pool that has lost its only graph."""
        if self._pool is None or not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool


_V = TypeVar("_V")


def _remember(cache: OrderedDict[Hashable, _V], key: Hashable, value: _V, most: int) -> bool:
    """Make ``key`` the last of the ``most`` that are kept. Returns whether it was there."""
    known = key in cache
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > most:
        cache.popitem(last=False)
    return known


class _Graph:
    def __init__(self, source: Tensor, memory: Tensor, work: Work, pool: Any) -> None:
        self._source, self._held = source.clone(), source
        self._graph = torch.cuda.CUDAGraph()
        # Always the same: memory is used again by the stream that it was allocated for.
        (stream,) = _streams(source.device, 1)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            # Other threads, such as NCCL's watchdog, may go on talking to the device.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work(self._source, memory)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream(source.device).wait_stream(stream)

    def replay(self, source: Tensor) -> None:
        if self._held is not source:
            self._source.copy_(source)
            self._held = source
        self._graph.replay()


_T = TypeVar("_T")


def overlapped(parts: Sequence[tuple[Callable[[], _T], Callable[[_T], object]]], device: torch.device) -> None:
    """Run ``second(first())`` of all parts, on a GPU each on a stream of its own.

    The first halves, which load, do not run beside each other, but beside the second half of the part before.
    """
    if len(parts) == 1 or device.type != "cuda":
        for first, second in parts:
            second(first())
        return
    origin = torch.cuda.current_stream(device)
    loaded = origin.record_event()
    begun = []
    try:
        for stream, (first, second) in zip(_streams(device, len(parts)), parts, strict=True):
            stream.wait_event(loaded)
            begun.append(stream)
            # What is allocated inside belongs to the stream, and is used again only behind what runs on it.
            with torch.cuda.stream(stream):
                half = first()
                loaded = stream.record_event()
                second(half)
    finally:
        # Also after an error: a capture cannot end with a stream that has not come back.
        for stream in begun:
            origin.wait_stream(stream)


@lru_cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """The same ones for the same count."""
    return [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]
