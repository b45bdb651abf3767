"""``verify_bits``: another rank makes one matrix's update again, from the same U, and must get the same bits.

A result does not depend on its batch, so the other rank needs that matrix alone. Bits that differ come from a device,
or its memory, that computes wrongly without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.agree import gather
from ds_muon.orthogonalize import orthogonalize_batch
from ds_muon.plan.partition import Matrix
from ds_muon.refusals import DSMuonRefusal
from ds_muon.say import log, printable, say

T = TypeVar("T")
P = TypeVar("P")


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
            place = next((i for i, (matrix, _) in enumerate(batch) if matrix.name == name), None)
            before = None if place is None else _tried(name, _copy, batch[place][1])
            outputs: Tensor = original(batch)
            after = None if place is None else _tried(name, _copy, outputs[place])
            if before is not None and after is not None:
                self._kept = before, after
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
        kept, self._kept = self._kept, None
        if kept is None and rank != unit.owner:
            kept = _tried(name, self._room, matrix)
        if not all(gather(kept is not None, group)):
            return
        assert kept is not None
        for tensor in kept:
            dist.broadcast(tensor, dist.get_global_rank(group, unit.owner), group=group)
        differ = (_tried(name, self._differing_bytes, kept) or 0) if rank == other else 0
        if differ := gather(differ, group)[other]:
            raise SilentCorruption(
                f"verify_bits: of the same U of {printable(name)} ({matrix.rows} x {matrix.cols}), rank {other} makes "
                f"another result than its owner, rank {unit.owner}: {differ} of {kept[1].nbytes} bytes differ. One of "
                "them computes wrongly: test both devices. The step has been applied: load a checkpoint from before it"
            )
        if rank == other:
            say(
                f"verify_bits: rank {other} makes the same bits of {name}'s update as rank {unit.owner}",
                every_rank=True,
            )

    def _differing_bytes(self, kept: tuple[Tensor, Tensor]) -> int:
        u, o = kept
        again = orthogonalize_batch([u], self._zero.newton_schulz)[0].contiguous()
        return int((again.view(torch.uint8) != o.view(torch.uint8)).sum())

    def _room(self, matrix: Matrix) -> tuple[Tensor, Tensor]:
        """For U and O of a matrix."""
        u, o = (
            torch.empty(matrix.rows, matrix.cols, dtype=dtype, device=self._zero.accelerator)
            for dtype in (torch.float32, self._zero.newton_schulz.dtype)
        )
        return u, o

    def _find(self, name: str) -> tuple[int, Any, Matrix]:
        """The group, the unit and the matrix of this name."""
        return next(
            (index, unit, matrix)
            for index, group in enumerate(self._zero.plan.groups)
            for unit in group.units
            for matrix in unit.matrices
            if matrix.name == name
        )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _tried(name: str, make: Callable[[P], T], of: P) -> T | None:
    """What the comparison of a matrix needs; None, and a line that says so, where it cannot be had."""
    try:
        return make(of)
    except Exception as error:  # for want of memory, say: the step needs no such thing, and other ranks may wait
        log(f"verify_bits: {printable(name)} could not be compared: {error!r}")
        return None
