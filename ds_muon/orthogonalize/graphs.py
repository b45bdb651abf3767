"""CUDA graphs of the iteration, for batches whose launches take the host longer than the GPU needs for the work.

A graph is captured the second time that a kind of batch comes by, and replayed from then on. It is the same kernels on
the same numbers: the results are the same, bit for bit. Parts of a batch run on streams of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

_LOGGER = logging.getLogger(__name__)

# Floating-point operations of a batch up to which a graph pays: about 4 ms of an H100.
_FEW = 3_000_000_000_000
# Kinds of batches that get one.
_MOST_GRAPHS = 64

Work = Callable[[Tensor, Tensor], object]


class GraphCache:
    """Graphs by kind of batch.

    All of them share the memory of their temporaries, which stays allocated for the largest batch, and that of their
    results, at most four times the largest one: powers of two, of which each is kept for the graphs that began with it.
    """

    def __init__(self) -> None:
        self._begin()

    def clear(self) -> None:
        """Begin anew, and give all memory back. Results that were lent are lost. Waits for the device."""
        if self._graphs:
            torch.cuda.synchronize()
        self._begin()

    def _begin(self) -> None:
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: set[Hashable] = set()
        self._uncapturable: set[Hashable] = set()
        self._results: dict[torch.device, Tensor] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def run(self, key: Hashable, source: Tensor, nbytes: int, work: Work, flops: int) -> Tensor:
        """``work(source, result)``, through a graph if that pays; returns ``result``.

        Args:
            key: all that ``work`` depends on but the values of ``source``.
            source: small; not modified.
            nbytes: of the result.
            work: writes to ``result``, (nbytes,) uint8.
            flops: of the batch.

        Returns:
            What may be overwritten in the next call.
        """
        few = source.is_cuda and flops <= _FEW and key not in self._uncapturable
        graph = self._graphs.get(key) if few else None
        if graph is None and not (few and key in self._seen and len(self._graphs) < _MOST_GRAPHS):
            # What comes once, as in a test, is worth no graph; and this compiles the kernels.
            self._seen.add(key)
            result = torch.empty(nbytes, dtype=torch.uint8, device=source.device)
            work(source, result)
            return result
        stream = torch.cuda.current_stream(source.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)  # graphs share their memory
        self._stream = stream
        if graph is None:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                graph = _Graph(source, self._memory(source.device, nbytes), work, self._pool)
            except RuntimeError as error:  # such as no memory for it: a fault of the work shows without a graph, too
                _LOGGER.warning("a Newton-Schulz batch goes without a CUDA graph: %s", error)
                self._uncapturable.add(key)
                if not self._graphs:
                    self._pool = None  # torch takes no capture into a pool that has lost its only graph
                return self.run(key, source, nbytes, work, flops)
            self._graphs[key] = graph
        return graph.replay(source)

    def _memory(self, device: torch.device, nbytes: int) -> Tensor:
        kept = self._results.get(device)
        if kept is None or kept.numel() < nbytes:
            # Graphs that were captured before go on using theirs.
            size = 1 << max(nbytes - 1, 1).bit_length()
            kept = self._results[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return kept[:nbytes]


class _Graph:
    def __init__(self, source: Tensor, result: Tensor, work: Work, pool: Any) -> None:
        self._source, self._result = source.clone(), result
        self._graph = torch.cuda.CUDAGraph()
        # Always the same: memory is used again by the stream that it was allocated for.
        (stream,) = _streams(source.device, 1)
        torch.cuda.empty_cache()  # nothing can be given back during a capture
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            # Other threads, such as NCCL's watchdog, may go on talking to the device.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work(self._source, self._result)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream(source.device).wait_stream(stream)

    def replay(self, source: Tensor) -> Tensor:
        self._source.copy_(source)
        self._graph.replay()
        return self._result


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
