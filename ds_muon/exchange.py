"""Slices of travelling units to their owners, and slices of the results back: one all-to-all each way per group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.plan.partition import GroupPlan, Unit
from ds_muon.plan.zero_layout import Slice
from ds_muon.ranges import profiled

_Span: TypeAlias = tuple[int, int, int]
"""A stretch of one of several flat tensors: index of that tensor, first element, elements."""


@dataclass(frozen=True)
class _Route:
    """What goes to the other ranks, or comes from them.

    Attributes:
        spans: where it lies here, in packing order, which is by rank. What follows one another both here and in that
            order is one span: a unit with a hundred holders is two, before and after the owner's own slice.
        counts: elements for each rank.
        total: elements.
    """

    spans: tuple[_Span, ...]
    counts: list[int]
    total: int

    @classmethod
    def of(
        cls, by_rank: Sequence[Sequence[tuple[Unit, Slice]]], place: Callable[[Unit, Slice], tuple[int, int]]
    ) -> _Route:
        """Of the slices for each rank; ``place`` says in which tensor a slice begins, and where."""
        spans: list[_Span] = []
        for unit, part in (entry for of_rank in by_rank for entry in of_rank):
            index, start = place(unit, part)
            before, first, numel = spans[-1] if spans else (-1, 0, 0)
            if (before, first + numel) == (index, start):
                spans[-1] = (index, first, numel + part.numel)
            else:
                spans.append((index, start, part.numel))
        counts = [sum(part.numel for _, part in of_rank) for of_rank in by_rank]
        return cls(tuple(spans), counts, sum(counts))

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        return [flats[index].narrow(0, start, numel) for index, start, numel in self.spans]


@dataclass
class Transfer:
    """A collective under way. Its buffers stay alive until ``wait``.

    Attributes:
        tensors: the units that ``Exchange.gather`` assembles, complete after ``wait``; none of ``scatter``.
    """

    tensors: list[Tensor] = field(default_factory=list)
    _work: Any = None
    _sent: Tensor | None = None
    _received: Tensor | None = None
    _targets: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        """Make work that is queued from now on see the data; returns ``tensors``. On GPUs the host does not wait."""
        if self._received is not None:
            if self._work is not None:
                self._work.wait()
            if self._targets:
                received = self._received.to(self._targets[0].device)
                pieces = torch.split(received, [target.numel() for target in self._targets])
                for target, piece in zip(self._targets, pieces, strict=True):
                    target.copy_(piece)
            self._work = self._sent = self._received = None
        return self.tensors


def result_dtype(settings: NewtonSchulz, *, normuon: bool) -> torch.dtype:
    """The dtype in which results travel: Newton-Schulz's own, or fp32 once NorMuon has scaled their rows."""
    return torch.float32 if normuon else settings.dtype


def element_bytes(settings: NewtonSchulz, *, normuon: bool) -> int:
    """Bytes per element that travels, both ways together: U in fp32, and the result."""
    return torch.float32.itemsize + result_dtype(settings, normuon=normuon).itemsize


class Exchange:
    """Moves the travelling units of one param group, which are its matrices in most cases, to owners, and results back.

    Every rank of the process group must call ``gather`` and then ``scatter``, even if it holds and owns nothing of the
    group. Where nothing travels, nobody communicates.

    Args:
        plan: the group's plan, the same on every rank.
        rank: this rank within ``process_group``.
        process_group: the ranks that share the group; None for the default group.
        device: where units are assembled and what travels lies; by default where the partition is.
    """

    def __init__(
        self,
        plan: GroupPlan,
        rank: int,
        process_group: dist.ProcessGroup | None,
        device: torch.device | None = None,
    ) -> None:
        self.owned = plan.owned_travellers(rank)
        """Travelling units whose matrices this rank orthogonalizes, in the order of ``gather``'s result."""
        self.sent_bytes = 0
        """Bytes that this rank has sent so far."""
        self._active = bool(plan.travellers)
        self._process_group = process_group
        self._device = device
        # Kept, because they are the same in every step and with many ranks take time on the host.
        place = {unit.name: i for i, unit in enumerate(self.owned)}
        self._outgoing = _Route.of(plan.outgoing(rank), lambda _, part: (0, part.offset))
        self._incoming = _Route.of(plan.incoming(rank), lambda unit, part: (place[unit.name], part.start))
        self._kept = tuple((i, part) for i, unit in enumerate(self.owned) for part in unit.slices if part.rank == rank)

    @profiled("exchange")
    def gather(self, partition: Tensor) -> Transfer:
        """Start to assemble the travelling units that this rank owns, from its own slices and those of others.

        Args:
            partition: (partition_size,) of this rank; not modified, and free to be overwritten when this returns.

        Returns:
            A transfer of one (rows, cols) tensor of the partition's dtype for each of ``owned``.
        """
        if not self._active:
            return Transfer()
        device = self._device or partition.device
        full = [partition.new_empty(unit.piece.numel, device=device) for unit in self.owned]
        for i, part in self._kept:
            _of_unit(full[i], part).copy_(_of_partition(partition, part))
        packed = _pack(self._outgoing.views([partition]), like=partition).to(device)
        tensors = [flat.view(unit.rows, unit.cols) for unit, flat in zip(self.owned, full, strict=True)]
        return self._all_to_all(packed, self._outgoing, self._incoming, self._incoming.views(full), tensors)

    @profiled("exchange")
    def scatter(self, outputs: Sequence[Tensor], partition: Tensor, dtype: torch.dtype) -> Transfer:
        """Start to send every holder its slice of each result.

        Args:
            outputs: one (rows, cols) tensor of ``dtype`` for each of ``owned``.
            partition: (partition_size,) of this rank. Its slices of travelling units are overwritten, all of them
                only after ``wait``.
            dtype: of ``outputs``, and on the wire; the same on every rank.
        """
        if not self._active:
            return Transfer()
        full = [output.reshape(-1) for _, output in zip(self.owned, outputs, strict=True)]
        for i, part in self._kept:
            # Moved before it is converted: half the bytes, if that is to the host.
            _of_partition(partition, part).copy_(_of_unit(full[i], part).to(partition.device))
        empty = partition.new_empty(0, dtype=dtype, device=self._device or partition.device)
        packed = _pack(self._incoming.views(full), like=empty)
        return self._all_to_all(packed, self._incoming, self._outgoing, self._outgoing.views([partition]), [])

    def take_part(self, *, back: bool, dtype: torch.dtype, device: torch.device) -> None:
        """Do a failed rank's part in a ``gather``, or a ``scatter``: send zeros, keep nothing.

        Args:
            back: whether it is a ``scatter``.
            dtype: of what travels.
            device: on which ranks communicate.
        """
        if self._active:
            there, here = (self._incoming, self._outgoing) if back else (self._outgoing, self._incoming)
            self._all_to_all(torch.zeros(there.total, dtype=dtype, device=device), there, here, [], []).wait()

    def _all_to_all(
        self, packed: Tensor, sent: _Route, received: _Route, targets: list[Tensor], tensors: list[Tensor]
    ) -> Transfer:
        self.sent_bytes += packed.nbytes
        output = packed.new_empty(received.total)
        # Sent as rows of bytes, an element each, because not every backend carries every dtype.
        there, back = (tensor.unsqueeze(1).view(torch.uint8) for tensor in (packed, output))
        group = self._process_group
        work = dist.all_to_all_single(back, there, received.counts, sent.counts, group=group, async_op=True)
        return Transfer(tensors, work, packed, output, targets)


def _of_unit(flat: Tensor, part: Slice) -> Tensor:
    return flat.narrow(0, part.start, part.numel)


def _of_partition(partition: Tensor, part: Slice) -> Tensor:
    return partition.narrow(0, part.offset, part.numel)


def _pack(pieces: Sequence[Tensor], *, like: Tensor) -> Tensor:
    return torch.cat(list(pieces)) if pieces else like.new_empty(0)
