"""What a rank allocates inside the step of a Muon group, beside its gradients. Pure functions of the plan; no ranks.

``stage`` and ``exchange`` allocate, in this order:

    U           every travelling matrix that the rank owns, whole, in fp32: until O is on its way
    transit     the slices of U that it sends, packed, and those that it receives: until they have arrived
    batches     what Newton-Schulz works in: one batch at a time, half of those that need not wait during this transit
    O           a copy of the results that travel: until they are packed. With NorMuon they overwrite U
    transit     the slices of O that it sends, packed, and those that it receives: while the other batches run

Where there are several groups, U and transit of the next one are there as well. That is what tensors take; torch's
allocator may round it up. The elementwise passes are left out: as kernels they allocate nothing, in torch at most
128 MiB, and not while slices travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.exchange import result_dtype
from ds_muon.orthogonalize import BACKENDS, NewtonSchulz, newton_schulz
from ds_muon.partition import GroupPlan
from ds_muon.stage import in_order

Shape = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """One rank's part in the step of a param group.

    Attributes:
        whole: (rows, cols) of the matrices that it orthogonalizes and that do not travel, in flat order.
        owned: of those that it orthogonalizes and that travel, in flat order.
        sent: elements of U that it sends to owners; as many of O come back.
        received: elements of U that it receives as an owner; as many of O it sends back.
    """

    whole: tuple[Shape, ...] = ()
    owned: tuple[Shape, ...] = ()
    sent: int = 0
    received: int = 0

    @property
    def runs(self) -> int:
        """Matrices that it orthogonalizes."""
        return len(self.whole) + len(self.owned)


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a rank has allocated at the same time inside a step.

    Attributes:
        exchange: at most, of U, O and what is in transit.
        peak: at most, of all that and the batch that is worked on.
    """

    exchange: int
    peak: int


def parts(plan: GroupPlan) -> list[Part]:
    """The part of every rank, in one pass over the plan."""
    whole: list[list[Shape]] = [[] for _ in range(plan.world_size)]
    owned: list[list[Shape]] = [[] for _ in range(plan.world_size)]
    sent, received = [0] * plan.world_size, [0] * plan.world_size
    for matrix in plan.matrices:
        (owned if matrix.travels else whole)[matrix.owner].append((matrix.rows, matrix.cols))
        for piece in matrix.slices:
            if piece.rank != matrix.owner:
                sent[piece.rank] += piece.numel
                received[matrix.owner] += piece.numel
    by_rank = zip(whole, owned, sent, received, strict=True)
    return [Part(tuple(w), tuple(o), out, back) for w, o, out, back in by_rank]


def step_memory(
    part: Part, settings: NewtonSchulz, *, normuon: bool = False, device: torch.device | None = None
) -> StepMemory:
    """The most that ``MuonGroup`` allocates on one rank from ``begin`` to ``finish``.

    Args:
        part: of the rank.
        settings: of the iteration; its backend says what a batch works in.
        normuon: whether results are NorMuon's.
        device: of the matrices, for what batches depend on; any GPU by default.
    """
    backend, itemsize = BACKENDS[settings.backend](), torch.float32.itemsize
    matrices = [_of_shape(shape, device) for shape in (*part.whole, *part.owned)]

    def workspace(indices: Sequence[int]) -> int:
        rows, cols = matrices[indices[0]].shape
        squares = newton_schulz.squares(settings.form(rows, cols))
        return len(indices) * backend.workspace(rows, cols, settings.dtype, squares)

    before, waiting, after = in_order(matrices, len(part.whole), settings)
    moved = part.sent + part.received
    u = itemsize * sum(rows * cols for rows, cols in part.owned)
    exchange = u + itemsize * moved
    peak = exchange + max(map(workspace, before), default=0)
    results = 0
    for indices in waiting:
        travelling = sum(matrices[i].numel() for i in indices if i >= len(part.whole))
        copied = 0 if normuon else settings.dtype.itemsize * travelling
        # A result that is a piece of what its batch worked in keeps all of that alive while it is copied.
        peak = max(peak, u + results + workspace(indices) + (0 if backend.compact else copied))
        results += copied
    transit = result_dtype(settings, normuon=normuon).itemsize * moved
    back = u + results + transit
    peak = max(peak, back, transit + max(map(workspace, after), default=0))
    return StepMemory(max(exchange, back), peak)


def _of_shape(shape: Shape, device: torch.device | None) -> Tensor:
    """Takes no memory."""
    return torch.empty((), device=device or "meta").expand(shape)
