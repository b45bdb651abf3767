"""Agreement between ranks: what one rank finds, all ranks act on. And what is said of steps that are skipped."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import Tensor


def raise_together(error: Exception | None, process_group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank of the group if any rank brings an error, so that none is left waiting in a collective.

    A rank raises its own error where it has one, otherwise a ``RuntimeError`` that quotes the first rank that does.
    A collective: every rank of the group must call it. Blocks the host.
    """
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        if error is not None:
            raise error
        return
    messages: list[str | None] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}", group=process_group)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"rank {rank} stopped, and this rank with it. {message}")


class NonFiniteUpdate(RuntimeError):
    """Newton-Schulz returned a NaN or an infinity, and ``nan_guard`` or the capture was set to stop for it."""


class SkippedSteps:
    """Counts the steps skipped for one cause, and warns on rank 0.

    Of the first, second, fourth, eighth, ... only, to keep a log readable, and of how many there were in all at the
    end: when the optimizer is destroyed, or at the interpreter's exit.
    """

    def __init__(self, cause: str) -> None:
        self._tally = {cause: 0}
        self._cause = cause
        self._end = weakref.finalize(self, _say_how_many, self._tally)

    @property
    def count(self) -> int:
        return self._tally[self._cause]

    def warn(self, why: str) -> None:
        """One more step was skipped, for this reason."""
        self._tally[self._cause] += 1
        if dist.get_rank() == 0 and self.count & (self.count - 1) == 0:
            logger.warning(
                f"[ds_muon] step skipped, no weight moved on any rank: {why} (skipped so far for {self._cause}: "
                f"{self.count})"
            )

    def close(self) -> None:
        """Say how many there were, if any. Once."""
        self._end()


def _say_how_many(tally: dict[str, int]) -> None:
    for cause, count in tally.items():
        # The process group may be gone by now.
        if count and os.environ.get("RANK", "0") == "0":
            logger.warning(f"[ds_muon] steps skipped in all for {cause}: {count}")


# What a rank has to say of a step's updates; of all ranks, the largest holds.
FINITE, NOT_FINITE, CAPTURED = 0, 1, 2


def agree_on_updates(partitions: Sequence[Tensor], captured: bool, process_group: dist.ProcessGroup | None) -> Tensor:
    """One byte, the same on every rank: whether anything that would be applied is not finite.

    Args:
        partitions: this rank's staged updates, one flat tensor per Muon group; not modified.
        captured: whether this rank has saved an input and wants all ranks to stop.

    Returns:
        (1,) uint8 on the device: ``FINITE``, ``NOT_FINITE`` or ``CAPTURED``. A collective over the whole group in which
        the weights are replicated; the host does not wait.
    """
    # The largest magnitude keeps a NaN.
    largest = torch.stack([torch.linalg.vector_norm(partition, ord=float("inf")) for partition in partitions])
    byte = largest.isfinite().all().logical_not().to(torch.uint8).view(1)
    if captured:
        byte.fill_(CAPTURED)
    dist.all_reduce(byte, op=dist.ReduceOp.MAX, group=process_group)
    return byte
