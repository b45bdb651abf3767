"""``verify_bits``: another rank makes one matrix's update again, from the same U, and must get the same bits.

A result does not depend on its batch, so the other rank needs that matrix alone. Bits that differ come from a device,
or its memory, that computes wrongly without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.agree import gather
from ds_muon.orthogonalize import orthogonalize_batch
from ds_muon.plan.partition import Matrix
from ds_muon.refusals import DSMuonRefusal
from ds_muon.say import log, printable


class SilentCorruption(RuntimeError):
    """Two ranks make different bits of the same U."""


class Canary:
    """Compares what the owner of a matrix has made of it with what another rank makes.

    Args:
        zero: a ``MuonZeroOptimizer``.

    Raises:
        DSMuonRefusal: the results of its backend depend on the batch.
    """

    def __init__(self, zero: Any) -> None:
        if zero.newton_schulz.backend == "torch" and zero.accelerator.type != "cpu":
            raise DSMuonRefusal(
                'verify_bits = true with ns_backend "torch" on an accelerator, where products round by their batch; '
                'set "ns_backend": "triton", or verify_bits to false'
            )
        self._zero = zero
        self._kept: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def listening(self, name: str) -> Iterator[None]:
        """Within this context the owner of the matrix keeps U and O of the next step."""
        index, _, _ = self._find(name)
        group = self._zero.muon_groups[index]
        original = group.orthogonalize

        def keeping(batch: Sequence[tuple[Matrix, Tensor]]) -> Tensor:
            before = [u.clone() for matrix, u in batch if matrix.name == name]
            outputs: Tensor = original(batch)
            for (matrix, _), output in zip(batch, outputs, strict=True):
                if matrix.name == name:
                    self._kept = before[0], output.clone(memory_format=torch.contiguous_format)
            return outputs

        with mock.patch.object(group, "orthogonalize", keeping):
            yield

    def compare(self, name: str, turn: int) -> None:
        """Let another rank repeat it, in turn. A collective; the host waits.

        Raises:
            SilentCorruption: on every rank, if the bits differ. The step has been applied.
        """
        zero, (_, unit, matrix) = self._zero, self._find(name)
        group, world_size = zero.dp_process_group, dist.get_world_size(zero.dp_process_group)
        rank, other = dist.get_rank(group), (unit.owner + 1 + turn % max(1, world_size - 1)) % world_size
        u, o = self._kept or (
            torch.empty(matrix.rows, matrix.cols, dtype=dtype, device=zero.accelerator)
            for dtype in (torch.float32, zero.newton_schulz.dtype)
        )
        self._kept = None
        for tensor in (u, o):
            dist.broadcast(tensor, dist.get_global_rank(group, unit.owner), group=group)
        differ = 0
        if rank == other:
            try:
                again = orthogonalize_batch([u], zero.newton_schulz)[0].contiguous()
                differ = int((again.view(torch.uint8) != o.view(torch.uint8)).sum())
            except Exception as error:  # for want of memory, say; the others are in the next collective
                log(f"verify_bits: {printable(name)} could not be compared: {error!r}")
        if differ := gather(differ, group)[other]:
            raise SilentCorruption(
                f"verify_bits: of the same U of {printable(name)} ({matrix.rows} x {matrix.cols}), rank {other} makes "
                f"another result than its owner, rank {unit.owner}: {differ} of {o.nbytes} bytes differ. One of them "
                "computes wrongly: test both devices. The step has been applied: load a checkpoint from before it"
            )

    def _find(self, name: str) -> tuple[int, Any, Matrix]:
        """The group, the unit and the matrix of this name."""
        return next(
            (index, unit, matrix)
            for index, group in enumerate(self._zero.plan.groups)
            for unit in group.units
            for matrix in unit.matrices
            if matrix.name == name
        )
