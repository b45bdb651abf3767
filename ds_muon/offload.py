"""CPU offload of the optimizer: how matrices on the host reach the accelerator, and results come back.

With ``offload_optimizer.device`` "cpu" the flat partitions of weights, gradients and state lie on the host. A step is
the same as without; only Newton-Schulz and what ranks exchange need the accelerator. So the momentum advances, U goes
up, and O comes down, a batch of matrices at a time: ``STAGING_BYTES`` bounds them, whatever the size of the partition.
On CPU ranks "host" and "accelerator" are both the CPU, and the copies are made all the same.

The host's memory is what a step waits for. So O comes down as it is, into the place of its U, and is scaled when the
weights move: see ``HostPart``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ds_muon.passes import compile_for_host, store_updates, sum_of_squares
from ds_muon.passes.lift import Goal, lift_to
from ds_muon.plan.partition import Matrix
from ds_muon.strips import Copies

STAGING_BYTES = 256 << 20
"""Most bytes of U on the accelerator at a time, of matrices that this rank holds and owns; a larger one is alone. The
matrices that are cut between ranks come on top: at most two a rank, for each param group."""


class Journey:
    """Tensors on their way, each on a stream of its direction.

    Args:
        tensors: where they will be.
        done: recorded after the copies; None if they have been made. Or what will be that, once all is written.
    """

    def __init__(self, tensors: list[Tensor], done: torch.cuda.Event | Future[torch.cuda.Event | None] | None) -> None:
        self._tensors = tensors
        self._done = done

    def on_accelerator(self) -> list[Tensor]:
        """The tensors, for work that is queued from now on. The host waits for what it writes, not for copies.

        Raises:
            Exception: what has been raised where it was written.
        """
        if (done := self._written()) is not None:
            stream = torch.cuda.current_stream(self._tensors[0].device)
            stream.wait_event(done)
            for tensor in self._tensors:
                tensor.record_stream(stream)
        return self._tensors

    def wait(self) -> list[Tensor]:
        """The tensors, once they have come. Blocks the host."""
        if (done := self._written()) is not None:
            done.synchronize()
        return self._tensors

    def _written(self) -> torch.cuda.Event | None:
        if isinstance(self._done, Future):
            self._done = self._done.result()
        return self._done


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
        self._loops = compile_for_host()
        """Compiled passes; None if these cannot be had."""
        self._lift = None if self._loops is None else lift_to(device, pinned=self._pinned)
        # Beside which Newton-Schulz of other matrices is launched: that takes as long as a third of the writing.
        prepared_for = (device, torch.get_num_threads(), self._loops)
        self._writer = ThreadPoolExecutor(1, "ds_muon", _as_here, prepared_for)

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

    def up_from(self, write: Callable[[Tensor, Tensor | Goal], None], matrices: Sequence[Tensor]) -> Journey:
        """Start to bring up what is written for matrices, while it is written.

        Args:
            write: writes what is to go up in place of a matrix, and of those behind it, to a flat tensor.
            matrices: of one shape, in fp32 on the host, parts of one tensor.
        """
        if not matrices:
            return Journey([], None)
        on_gpu = self.device.type == "cuda"
        with self._beside("up", after=None) if on_gpu else nullcontext():
            shape = (len(matrices), *matrices[0].shape)
            goals = torch.empty(shape, dtype=torch.float32, device=self.device)
        return Journey(list(goals.unbind()), self._writer.submit(self._write, write, matrices, goals))

    @torch.no_grad()
    def _write(
        self, write: Callable[[Tensor, Tensor | Goal], None], matrices: Sequence[Tensor], goals: Tensor
    ) -> torch.cuda.Event | None:
        """What ``up_from`` starts. Returns what is recorded after the copies."""
        on_gpu = self.device.type == "cuda"
        with self._beside("up", after=None) if on_gpu else nullcontext() as stream:
            with self.together():
                for first, end in _neighbours(matrices):
                    flat = goals[first:end].view(-1)
                    if (goal := self.goal(flat)) is not None:
                        write(matrices[first], goal)
                    else:
                        write(matrices[first], written := torch.empty(flat.shape, dtype=flat.dtype, device="cpu"))
                        flat.copy_(written)
            return None if stream is None else stream.record_event()

    def settle(self) -> None:
        """Wait until nothing is written any more: something may have failed elsewhere."""
        self._writer.submit(lambda: None).result()

    def up_rounded(self, weights: Tensor, goal: Tensor) -> None:
        """Bring up weights, on the current stream.

        Args:
            weights: flat, in fp32 on the host; may be overwritten afterwards.
            goal: on the accelerator, in any dtype.
        """
        if self._loops is not None and (to := self.goal(goal)) is not None:
            self._loops.round_to(weights, to)
        else:
            goal.copy_(weights.to(goal.dtype))

    def goal(self, tensor: Tensor) -> Goal | None:
        """A flat tensor of the accelerator, for the host's compiled passes to write to. None without these.

        What they write goes up on the stream that is now the current one.
        """
        if self._lift is None:
            return None
        if tensor.device.type == "cuda":
            self._lift.stream = torch.cuda.current_stream(tensor.device).cuda_stream
        return Goal(tensor, self._lift)

    def together(self) -> AbstractContextManager[None]:
        """Let what is written to goals of one stream wait for the end: see ``Lift.together``."""
        return nullcontext() if self._lift is None else self._lift.together()

    def down(self, results: Sequence[Tensor], places: Sequence[Tensor] | None = None) -> Journey:
        """Start to copy results to the host, contiguous, as what is queued now will have left them.

        Args:
            results: on the accelerator.
            places: on the host, for some matrices of the only result each; by default new memory for each result.
        """
        # Copies first, because an iteration may use the memory of its result again.
        results = [result.clone(memory_format=torch.contiguous_format) for result in results]
        if places is None:
            places = [
                torch.empty(result.shape, dtype=result.dtype, device="cpu", pin_memory=self._pinned)
                for result in results
            ]
        else:
            results = [part for result in results for part in torch.split(result, [len(place) for place in places])]
        if self.device.type != "cuda" or not results:
            return Journey([place.copy_(result) for place, result in zip(places, results, strict=True)], None)
        with self._beside("down", after=torch.cuda.current_stream(self.device)) as stream:
            for place, result in zip(places, results, strict=True):
                place.copy_(result, non_blocking=True)
                result.record_stream(stream)
            # Blocking, because a core that asks again and again is one that the loops lack.
            return Journey(list(places), stream.record_event(torch.cuda.Event(blocking=True)))  # type: ignore[no-untyped-call]

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


def _as_here(device: torch.device, threads: int, loops: ModuleType | None) -> None:
    """Prepare a thread that writes."""
    torch.set_num_threads(threads)
    if loops is not None and threads >= 8:
        # A loop whose threads lack one core takes longer by half than one with a thread less.
        loops.run_on(threads - 1)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _neighbours(matrices: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """The first and the end of each run of matrices that lie behind each other, so that one loop goes through them."""
    first = 0
    for i, matrix in enumerate(matrices, start=1):
        if i == len(matrices) or matrix.storage_offset() + matrix.numel() != matrices[i].storage_offset():
            yield first, i
            first = i


class Stretch(NamedTuple):
    """A part of a partition.

    Attributes:
        offset: its first element in the partition.
        update: flat: the update, or O in the dtype of the iteration.
        scale: what the update has to be multiplied by.
        rounded: where the new weights go, as the model holds them; None for nowhere.
    """

    offset: int
    update: Tensor
    scale: float = 1.0
    rounded: Tensor | Goal | None = None


class HostPart:
    """A Muon group's partition on the host in the course of a step: gradients, then U, then updates.

    Args:
        partition: (partition_size,) fp32.
        advance: advances the momentum of so many elements from an offset on, and turns their gradient into U, or writes
            U to a third argument.
        ferry: to the accelerator.
    """

    def __init__(self, partition: Tensor, advance: Callable[..., None], ferry: Ferry) -> None:
        self._partition = partition
        self._ferry = ferry
        self._advance = advance
        self._advanced: set[int] = set()
        self._landed: dict[int, Stretch] = {}
        self._largest: list[Tensor] = []

    def advance(self, parts: Sequence[Tensor]) -> None:
        """Turn gradients into U, once however often it is asked for.

        Args:
            parts: contiguous views of the partition.
        """
        for part in parts:
            if (offset := self._offset(part)) not in self._advanced:
                self._advanced.add(offset)
                self._advance(offset, part.numel())

    def update(
        self,
        batch: Sequence[tuple[Matrix, Tensor]],
        scale: float,
        compute: Callable[[list[tuple[Matrix, Tensor]]], tuple[Tensor, Tensor | None]],
    ) -> Iterator[None]:
        """Bring up U of a batch, and bring down O. Yields while it is on its way.

        A matrix whose rows or columns lie apart goes up as a copy, and comes back to it.

        Args:
            batch: matrices, each with its unit, a view of the partition.
            scale: of O.
            compute: O, (batch, rows, cols), and factors of its rows or None, of the matrices on the accelerator.
        """
        copies, ferry = Copies(), self._ferry
        in_place = not any(matrix.piece.scattered for matrix, _ in batch)
        if not in_place:
            self.advance([unit for _, unit in batch])
        units = [copies.of(matrix, unit) for matrix, unit in batch]
        rising = ferry.up_from(self.write, units) if in_place else ferry.up(units)
        yield  # U is on its way up

        outputs, factors = compute([(m, u) for (m, _), u in zip(batch, rising.on_accelerator(), strict=True)])
        if factors is not None:
            outputs = outputs * factors
        falling = ferry.down([outputs], self.land(outputs, units, scale) if in_place else None)
        del rising, outputs, factors  # memory of the accelerator
        yield  # O is on its way down

        arrived = falling.wait()
        if not in_place:
            store_updates(arrived[0], units, scale=scale)
            copies.put_back(batch)

    def write(self, matrix: Tensor, into: Tensor | Goal) -> None:
        """Write U of a matrix, contiguous in the partition, and of as many elements as are asked for."""
        self._advance(self._offset(matrix), into.numel(), into)

    def land(self, outputs: Tensor, units: Sequence[Tensor], scale: float) -> list[Tensor]:
        """Give out the places of U for O.

        Args:
            outputs: (batch, rows, cols), of at most four bytes an element; not modified.
            units: contiguous views of the partition, (rows, cols), that are not needed any more.
            scale: of O.

        Returns:
            (count, rows, cols) for the units that lie behind each other, of the dtype of O.
        """
        if units:  # the largest of nothing is undefined
            self._largest.append(torch.linalg.vector_norm(outputs, ord=float("inf")).float() * scale)
        places = []
        for first, end in _neighbours(units):
            offset, numel = self._offset(units[first]), outputs[first:end].numel()
            place = self._partition.narrow(0, offset, numel).view(outputs.dtype)[:numel]
            self._landed[offset] = Stretch(offset, place, scale)
            places.append(place.view(end - first, *outputs.shape[1:]))
        return places

    def stretches(self) -> list[Stretch]:
        """The whole partition, in order."""
        return sorted([*self._landed.values(), *self._between()], key=lambda part: part.offset)

    def _between(self) -> list[Stretch]:
        """What has not landed: updates in fp32, and padding."""
        found: list[Stretch] = []
        start = 0
        for offset in [*sorted(self._landed), self._partition.numel()]:
            if offset > start:
                found.append(Stretch(offset=start, update=self._partition[start:offset]))
            start = offset + (self._landed[offset].update.numel() if offset in self._landed else 0)
        return found

    def sizes(self) -> Tensor:
        """Some fp64 numbers on the accelerator that are finite exactly if all updates are."""
        host = [sum_of_squares(part.update) for part in self._between()]
        return torch.stack(
            [
                size.double().to(self._ferry.device)
                for size in (torch.zeros((), dtype=torch.float64, device="cpu"), *self._largest, *host)
            ]
        )

    def _offset(self, part: Tensor) -> int:
        return int(part.storage_offset() - self._partition.storage_offset())
