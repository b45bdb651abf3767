"""CPU offload of the optimizer: what lies on the host, and how it reaches the accelerator and comes back.

With ``offload_optimizer.device`` "cpu" the flat partitions of weights, gradients and state lie on the host. A step is
the same as without; only Newton-Schulz and what ranks exchange need the accelerator. So U goes up, and O comes down, a
batch of matrices at a time: ``STAGING_BYTES`` bounds them, whatever the size of the partition. On CPU ranks "host" and
"accelerator" are both the CPU, and the copies are made all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STAGING_BYTES = 256 << 20
"""Most bytes of U on the accelerator at a time, of matrices that this rank holds and owns; a larger one is alone. The
matrices that are cut between ranks come on top: at most two a rank, for each param group."""


class Ferry:
    """Carries matrices from the host to the accelerator, and results back.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def up(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the accelerator."""
        return [matrix.to(self.device, copy=True) for matrix in matrices]

    def down(self, results: Tensor) -> Tensor:
        """A contiguous copy on the host, in the dtype of ``results``."""
        return results.to("cpu", copy=True, memory_format=torch.contiguous_format)
