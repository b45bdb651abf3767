"""CUDA graphs of the iteration: to launch a batch kernel by kernel takes the host milliseconds, to replay it a tenth.

A graph works in memory that is allocated for each batch and given back after it: between steps, nothing is kept for it.
In a training run of fixed shapes torch's allocator hands out the same addresses in every step. A graph is captured the
second time that a kind of batch comes by at an address, and replayed there from then on. It is the same kernels on the
same numbers: the results are the same, bit for bit. Parts of a batch run on streams of their own.

A cache is used by one thread. Others may talk to the device during a capture, but not through the streams of torch's
pool, which everybody shares: what is launched there meanwhile can end up in the graph.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from ds_muon.say import log

# Kinds of batches and addresses that get a graph; and that are remembered.
_MOST_GRAPHS = 64
_MOST_SEEN = 1024
# Batches after which a graph that was not used by any of them may make room for another. Where more of them come in
# turns than get a graph, the others are launched: to capture costs more than that.
_FORGOTTEN = 1024

Work = Callable[[Tensor, Tensor], object]


class GraphCache:
    """Graphs by kind of batch and the address at which it is worked on."""

    def __init__(self) -> None:
        self._begin()

    def clear(self) -> None:
        """Begin anew. Waits for the devices."""
        for device in {graph.device for graph in self._graphs.values()}:
            torch.cuda.synchronize(device)
        self._begin()

    def _begin(self) -> None:
        # Those used last come last.
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._captures = True
        self._runs = 0

    def run(self, key: Hashable, source: Tensor, memory: Tensor, work: Work) -> None:
        """``work(source, memory)``, through a graph from the second time on.

        Args:
            key: all that ``work`` depends on but the values of ``source`` and the address of ``memory``.
            source: small; not modified, and the same numbers for as long as it is the same tensor.
            memory: to work in and for the result.
            work: allocates next to nothing.
        """
        if not source.is_cuda:
            work(source, memory)
            return
        self._runs += 1
        place = key, memory.data_ptr()
        graph = self._graphs.get(place)
        if graph is not None:
            graph.replay(source)
        # What comes once, as in a test, is worth no graph; and the first launch compiles the kernels.
        elif place in self._seen and self._captures and self._has_room():
            graph = self._capture_and_replay(source, memory, work)
        if graph is None:
            work(source, memory)
            self._remember(place)
        else:
            graph.last_run = self._runs
            self._graphs[place] = graph
            self._graphs.move_to_end(place)

    def _remember(self, place: Hashable) -> None:
        self._seen[place] = None
        self._seen.move_to_end(place)
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)

    def _has_room(self) -> bool:
        """Whether there may be one more graph, now that one that was forgotten has been dropped."""
        if len(self._graphs) < _MOST_GRAPHS:
            return True
        place, oldest = next(iter(self._graphs.items()))
        if self._runs - oldest.last_run <= _FORGOTTEN:
            return False
        del self._graphs[place]  # CUDA lets one that is running end
        return True

    def _capture_and_replay(self, source: Tensor, memory: Tensor, work: Work) -> _Graph | None:
        try:
            graph = _Graph(source, memory, work)
            # The first time, too, it may want memory of the device.
            graph.replay(source)
        except RuntimeError as error:  # a fault of the work shows without a graph, too
            log(f"from now on Newton-Schulz captures no CUDA graphs: {error}", logger=__name__)
            self._captures = False  # the next one would most likely fail as well, and costs time
            _capture_something(source, memory)
            return None
        return graph


def _capture_something(source: Tensor, memory: Tensor) -> None:
    """After a capture that CUDA broke off: torch's generators believe in it, and raise, until another one has ended."""
    with suppress(RuntimeError):
        _Graph(source, memory, lambda source, memory: source.zero_())


class _Graph:
    """``work`` as captured.

    Attributes:
        device: on which it runs.
        last_run: when it was used last, by the count of the cache.
    """

    def __init__(self, source: Tensor, memory: Tensor, work: Work) -> None:
        self.device, self.last_run = source.device, 0
        self._source, self._held = source.clone(), source
        self._used_on = torch.cuda.current_stream(source.device)
        self._graph = torch.cuda.CUDAGraph()
        # Always the same: memory is used again by the stream that it was allocated for.
        (stream,) = _streams(source.device, 1)
        stream.wait_stream(self._used_on)
        with torch.cuda.stream(stream), _nothing_is_collected(), _capturing(self._graph):
            work(self._source, memory)
        self._used_on.wait_stream(stream)

    def replay(self, source: Tensor) -> None:
        stream = torch.cuda.current_stream(self.device)
        if stream != self._used_on:
            # It has one source, which the last replay may still be reading.
            stream.wait_stream(self._used_on)
            self._source.record_stream(stream)
            self._used_on = stream
        if self._held is not source:
            self._source.copy_(source)
            self._held = source
        self._graph.replay()


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """The work inside is captured; where that fails, it ends for torch's allocator, too."""
    pool = torch.cuda.graph_pool_handle()  # of its own
    try:
        # Other threads, such as NCCL's watchdog, may go on talking to the device.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
    except RuntimeError:
        _end_allocating_to(pool)
        raise


def _end_allocating_to(pool: tuple[int, int]) -> None:
    """After a capture that CUDA broke off, the allocator would use no memory again that a second stream has used."""
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):  # the second before torch 2.8
        if (end := getattr(torch._C, name, None)) is not None:
            with suppress(RuntimeError):  # it has ended: something else failed
                end(torch.cuda.current_device(), pool)
            return


@contextmanager
def _nothing_is_collected() -> Iterator[None]:
    """What Python's garbage collector ends meanwhile, such as an older graph, may call what a capture forbids."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


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
