"""NorMuon's second moments: one number per row of every matrix, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.update import advance_row_variance


class RowVariance:
    """Where the rows of one param group's matrices lie in its ``row_variance``, and the moments that a step stages.

    A row's moment is advanced by the rank that orthogonalizes its matrix. So few numbers are worth keeping whole on
    every rank: they outlast any partition. A step calls ``begin``, ``factors`` for each batch of a rank's matrices,
    ``agree`` on every rank, and ``commit``, unless it is skipped.

    Args:
        rows: name and number of rows of every matrix of the group, in the group's order.
        beta2: weight of the past.
        process_group: the ranks that share the group.
    """

    def __init__(self, rows: Sequence[tuple[str, int]], beta2: float, process_group: dist.ProcessGroup | None) -> None:
        self._beta2 = beta2
        self._process_group = process_group
        self._staged = torch.empty(0, dtype=torch.float32, device="cpu")
        self._where: dict[tuple[str, ...], Tensor] = {}
        self._rows: dict[str, tuple[int, int]] = {}
        start = 0
        for name, count in rows:
            self._rows[name] = (start, count)
            start += count

    def begin(self, variance: Tensor) -> None:
        """Stage zeros, so that a sum over ranks brings together what each one stages.

        Args:
            variance: (rows, 1) fp32, the current moments of the group; not modified.
        """
        if self._staged.shape != variance.shape or self._staged.device != variance.device:
            self._staged = torch.empty_like(variance)
        self._staged.zero_()

    def of(self, variance: Tensor, name: str) -> Tensor:
        """The (rows,) moments of one matrix, a view of the group's (rows, 1)."""
        return variance.view(-1).narrow(0, *self._rows[name])

    def factors(self, variance: Tensor, names: Sequence[str], orthogonal: Tensor) -> Tensor:
        """Stage the moments of some matrices and return the factor of each row.

        Args:
            variance: (rows, 1) fp32, the current moments of the group; not modified.
            names: the matrices, all of one shape.
            orthogonal: (len(names), rows, cols), any float dtype; not modified.

        Returns:
            (len(names), rows, 1) fp32.
        """
        where = self._indices(tuple(names), variance.device)
        advanced, factors = advance_row_variance(orthogonal, variance.view(-1)[where], beta2=self._beta2)
        self._staged.view(-1)[where] = advanced
        return factors

    def agree(self) -> None:
        """Bring the staged moments of all ranks together. A collective, and exact: one rank stages a row."""
        dist.all_reduce(self._staged, group=self._process_group)

    def commit(self, variance: Tensor) -> None:
        """Overwrite the current moments with the staged ones."""
        variance.copy_(self._staged)

    def _indices(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """Where the rows of some matrices lie: (len(names), rows) int64. Kept, for the same batches come every step."""
        if names not in self._where:
            starts = torch.tensor([self._rows[name][0] for name in names], dtype=torch.int64, device="cpu")
            rows = torch.arange(self._rows[names[0]][1], dtype=torch.int64, device="cpu")
            self._where[names] = (starts[:, None] + rows).to(device)
        return self._where[names]
