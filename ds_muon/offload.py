"""CPU offload of the optimizer: how matrices on the host reach the accelerator, and results come back.

With ``offload_optimizer.device`` "cpu" the flat partitions of weights, gradients and state lie on the host. A step is
the same as without; only Newton-Schulz and what ranks exchange need the accelerator. So U goes up, and O comes down, a
batch of matrices at a time: ``STAGING_BYTES`` bounds them, whatever the size of the partition. On CPU ranks "host" and
"accelerator" are both the CPU, and the copies are made all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

STAGING_BYTES = 256 << 20
"""Most bytes of U on the accelerator at a time, of matrices that this rank holds and owns; a larger one is alone. The
matrices that are cut between ranks come on top: at most two a rank, for each param group."""


class Journey:
    """Tensors on their way, each on a stream of its direction.

    Args:
        tensors: where they will be.
        done: recorded after the copies; None if they have been made.
    """

    def __init__(self, tensors: list[Tensor], done: torch.cuda.Event | None) -> None:
        self._tensors = tensors
        self._done = done

    def on_accelerator(self) -> list[Tensor]:
        """The tensors, for work that is queued from now on. The host does not wait."""
        if self._done is not None:
            stream = torch.cuda.current_stream(self._tensors[0].device)
            stream.wait_event(self._done)
            for tensor in self._tensors:
                tensor.record_stream(stream)
        return self._tensors

    def on_host(self) -> list[Tensor]:
        """The tensors, once they have come. Blocks the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors


class Ferry:
    """Carries matrices from the host to the accelerator, and results back, beside the work on either.

    Args:
        device: the accelerator.
        pinned: whether memory of the host is pinned; else the host waits for its copies.
    """

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.device = device
        self._pinned = pinned and device.type == "cuda"
        self._streams: dict[str, torch.cuda.Stream] = {}

    def up(self, matrices: Sequence[Tensor]) -> Journey:
        """Start to copy matrices to the accelerator.

        Args:
            matrices: on the host, not to be written until what is queued on ``on_accelerator`` has been done.
        """
        if self.device.type != "cuda" or not matrices:
            return Journey([matrix.to(self.device, copy=True) for matrix in matrices], None)
        with self._beside("up", after=None) as stream:
            copies = [matrix.to(self.device, non_blocking=True) for matrix in matrices]
            return Journey(copies, stream.record_event())

    def down(self, results: Sequence[Tensor]) -> Journey:
        """Start to copy results to the host, contiguous, as what is queued now will have left them."""
        # Copies first, because an iteration may use the memory of its result again.
        results = [result.clone(memory_format=torch.contiguous_format) for result in results]
        if self.device.type != "cuda" or not results:
            return Journey([result.to("cpu") for result in results], None)
        with self._beside("down", after=torch.cuda.current_stream(self.device)) as stream:
            copies = []
            for result in results:
                copy = torch.empty(result.shape, dtype=result.dtype, device="cpu", pin_memory=self._pinned)
                copies.append(copy.copy_(result, non_blocking=True))
                result.record_stream(stream)
            return Journey(copies, stream.record_event())

    @contextmanager
    def _beside(self, direction: str, *, after: torch.cuda.Stream | None) -> Iterator[torch.cuda.Stream]:
        """Queue on the stream of a direction, made when it is first needed."""
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream = self._streams[direction]
        if after is not None:
            stream.wait_stream(after)
        with torch.cuda.stream(stream):
            yield stream
