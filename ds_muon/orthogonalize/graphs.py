"""CUDA graphs of the iteration for small batches, whose launches take the host longer than the GPU needs for the work.

A graph is captured the second time that a kind of batch comes by, and replayed from then on. It is the same kernels on
the same numbers: the results are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

# Floating-point operations of a batch up to which the GPU is done before the host has launched it: about 2 ms.
_FEW = 1_500_000_000_000
# What all graphs may keep of inputs and outputs, in bytes. Their temporaries share one pool.
_KEPT_BYTES = 256 << 20

Iterate = Callable[[Tensor], Tensor]


class GraphCache:
    """Graphs by kind of batch; memory for inputs and outputs stays allocated, up to 256 MiB in all."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Graph | None] = {}
        self._kept = 0
        self._pool: Any = None

    def run(self, key: Hashable, x: Tensor, flops: int, iterate: Iterate) -> Tensor:
        """``iterate(x)``, through a graph if that pays.

        Args:
            key: all that ``iterate`` depends on but ``x``.
            x: not modified.
            flops: of the batch.

        Returns:
            A tensor of its own.
        """
        if not x.is_cuda or flops > _FEW or torch.cuda.is_current_stream_capturing():
            return iterate(x)
        key = (key, x.device, x.shape, x.stride(), x.dtype)
        if key not in self._graphs:
            self._graphs[key] = None  # what comes once, as in a test, is not worth a graph; and this compiles kernels
            return iterate(x)
        graph = self._graphs[key]
        if graph is None:
            size = 2 * x.numel() * x.element_size()
            if self._kept + size > _KEPT_BYTES:
                return iterate(x)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = self._graphs[key] = _Graph(x, iterate, self._pool)
            self._kept += size
        return graph.replay(x)


class _Graph:
    def __init__(self, x: Tensor, iterate: Iterate, pool: Any) -> None:
        self._x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            # Other threads, such as NCCL's watchdog, may go on talking to the device.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self._out = iterate(self._x)
            self._graph.capture_end()
        torch.cuda.current_stream(x.device).wait_stream(stream)

    def replay(self, x: Tensor) -> Tensor:
        self._x.copy_(x)
        self._graph.replay()
        return self._out.clone()
