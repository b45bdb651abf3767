"""Agreement between ranks: what one rank finds, all ranks act on. And what is said of steps that are skipped."""

from __future__ import annotations

import torch.distributed as dist
from deepspeed.utils import logger


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


class SkippedSteps:
    """Counts skipped steps and warns on rank 0: of the first, second, fourth, eighth, ... to keep a log readable."""

    def __init__(self) -> None:
        self.count = 0

    def warn(self, why: str) -> None:
        """One more step was skipped, for this reason."""
        self.count += 1
        if dist.get_rank() == 0 and self.count & (self.count - 1) == 0:
            logger.warning(f"[ds_muon] step skipped, nothing moved on any rank: {why} (skipped so far: {self.count})")
