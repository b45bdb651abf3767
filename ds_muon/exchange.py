"""Slices of travelling matrices to their owners, and slices of the results back: one collective each way per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.plan.partition import GroupPlan, Matrix, Slice


@dataclass(frozen=True)
class _Routes:
    """What goes to every rank, or comes from it.

    Attributes:
        pieces: in packing order: by rank.
        counts: elements by rank.
    """

    pieces: tuple[tuple[Matrix, Slice], ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[tuple[Matrix, Slice]]]) -> _Routes:
        counts = (sum(piece.numel for _, piece in pieces) for pieces in by_rank)
        return cls(tuple(entry for pieces in by_rank for entry in pieces), tuple(counts))


@dataclass
class Transfer:
    """A collective under way. What it sends and receives stays alive until it has been waited for.

    Attributes:
        tensors: complete after ``wait``, which is what fills those of ``Exchange.gather``.
    """

    tensors: list[Tensor] = field(default_factory=list)
    _work: Any = None
    _sent: Tensor | None = None
    _received: Tensor | None = None
    _targets: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        """Let what is queued from now on see the data, on GPUs without stopping the host. Returns ``tensors``."""
        if self._received is not None:
            if self._work is not None:
                self._work.wait()
            _unpack(self._received, self._targets)
            self._work = self._sent = self._received = None
        return self.tensors


def result_dtype(settings: NewtonSchulz, *, normuon: bool) -> torch.dtype:
    """In which results travel: as Newton-Schulz returns them, or with NorMuon's factors on their rows."""
    return torch.float32 if normuon else settings.dtype


def element_bytes(settings: NewtonSchulz, *, normuon: bool) -> int:
    """Of an element that travels, both ways together: U in fp32, and the result."""
    return torch.float32.itemsize + result_dtype(settings, normuon=normuon).itemsize


class Exchange:
    """Moves the travelling matrices of one param group between the ranks that hold them and those that own them.

    Every rank of the process group must call ``gather`` and then ``scatter``, also one that holds nothing of the
    group: it sends and receives nothing, but takes part. Where no matrix travels, nobody communicates.

    Args:
        plan: the group's plan, the same on every rank.
        rank: this rank within ``process_group``.
        process_group: the ranks that share the group; None for the default group.
    """

    def __init__(self, plan: GroupPlan, rank: int, process_group: dist.ProcessGroup | None) -> None:
        self.owned = plan.owned_travellers(rank)
        """Travelling matrices that this rank orthogonalizes, in the order of ``gather``'s result."""
        self.sent_bytes = 0
        """In all, by this rank."""
        self._active = bool(plan.travellers)
        self._process_group = process_group
        # The same in every step, and work for the host where there are many ranks.
        self._outgoing = _Routes.of(plan.outgoing(rank))
        self._incoming = _Routes.of(plan.incoming(rank))
        self._kept = tuple((m, piece) for m in self.owned for piece in m.slices if piece.rank == rank)

    @record_function("ds_muon::exchange")
    def gather(self, partition: Tensor) -> Transfer:
        """Start to assemble the travelling matrices this rank owns, of which it may hold slices or nothing.

        Args:
            partition: (partition_size,) this rank's piece of the flat buffer; not modified, and free to be overwritten
                when this returns.

        Returns:
            A transfer of one (rows, cols) tensor of the partition's dtype per matrix of ``owned``.
        """
        if not self._active:
            return Transfer()
        full = {matrix.name: partition.new_empty(matrix.rows * matrix.cols) for matrix in self.owned}
        for matrix, piece in self._kept:
            _of_matrix(full[matrix.name], piece).copy_(_of_partition(partition, piece))
        packed = _pack([_of_partition(partition, piece) for _, piece in self._outgoing.pieces], like=partition)
        targets = [_of_matrix(full[matrix.name], piece) for matrix, piece in self._incoming.pieces]
        tensors = [full[matrix.name].view(matrix.rows, matrix.cols) for matrix in self.owned]
        return self._all_to_all(packed, self._outgoing, self._incoming, targets, tensors)

    @record_function("ds_muon::exchange")
    def scatter(self, outputs: Sequence[Tensor], partition: Tensor, dtype: torch.dtype) -> Transfer:
        """Start to give every holder its slice of each result.

        Args:
            outputs: one (rows, cols) tensor of ``dtype`` per matrix of ``owned``.
            partition: (partition_size,) overwritten where this rank holds slices of travelling matrices, in full only
                after the transfer has been waited for.
            dtype: of the outputs, and on the wire; the same on every rank.
        """
        if not self._active:
            return Transfer()
        full = {matrix.name: output.reshape(-1) for matrix, output in zip(self.owned, outputs, strict=True)}
        for matrix, piece in self._kept:
            _of_partition(partition, piece).copy_(_of_matrix(full[matrix.name], piece))
        leaving = [_of_matrix(full[matrix.name], piece) for matrix, piece in self._incoming.pieces]
        packed = _pack(leaving, like=partition.new_empty(0, dtype=dtype))
        targets = [_of_partition(partition, piece) for _, piece in self._outgoing.pieces]
        return self._all_to_all(packed, self._incoming, self._outgoing, targets, [])

    def _all_to_all(
        self, packed: Tensor, sent: _Routes, received: _Routes, targets: list[Tensor], tensors: list[Tensor]
    ) -> Transfer:
        self.sent_bytes += packed.nbytes
        # As bytes, so that every backend carries every dtype.
        item = packed.element_size()
        sizes_in = [item * count for count in sent.counts]
        sizes_out = [item * count for count in received.counts]
        output = torch.empty(sum(sizes_out), dtype=torch.uint8, device=packed.device)
        work = dist.all_to_all_single(
            output, packed.view(torch.uint8), sizes_out, sizes_in, group=self._process_group, async_op=True
        )
        return Transfer(tensors, work, packed, output.view(packed.dtype), targets)


def _of_matrix(flat_matrix: Tensor, piece: Slice) -> Tensor:
    return flat_matrix.narrow(0, piece.start, piece.numel)


def _of_partition(partition: Tensor, piece: Slice) -> Tensor:
    return partition.narrow(0, piece.offset, piece.numel)


def _pack(pieces: Sequence[Tensor], *, like: Tensor) -> Tensor:
    return torch.cat(list(pieces)) if pieces else like.new_empty(0)


def _unpack(packed: Tensor, targets: Sequence[Tensor]) -> None:
    for target, piece in zip(targets, torch.split(packed, [target.numel() for target in targets]), strict=True):
        target.copy_(piece)
