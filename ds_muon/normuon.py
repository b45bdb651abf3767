"""NorMuon's second moments: one number per row of every matrix, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.update import advance_row_variance


class RowVariance:
    """The second moments of one param group's rows, and those that a step would make of them.

    A row's moment is advanced by the rank that orthogonalizes its matrix. So few numbers are worth keeping whole on
    every rank: they outlast any partition. Each step calls ``factors`` for the matrices of a rank, then ``agree`` on
    every rank, then ``commit``, unless the step is skipped.

    Args:
        current: (rows, 1) fp32, the optimizer's state. Overwritten by ``commit`` and nothing else.
        shapes: name and shape of every matrix of the group, in the group's order, in which their rows follow.
        beta2: weight of the past.
        process_group: the ranks that share the group.
    """

    def __init__(
        self,
        current: Tensor,
        shapes: Sequence[tuple[str, tuple[int, int]]],
        beta2: float,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._current = current
        self._beta2 = beta2
        self._process_group = process_group
        self._advanced = torch.zeros_like(current)
        self._rows: dict[str, tuple[int, int]] = {}
        self._where: dict[tuple[str, ...], Tensor] = {}
        start = 0
        for name, (rows, _) in shapes:
            self._rows[name] = (start, rows)
            start += rows

    def of(self, name: str) -> Tensor:
        """The current moments of a matrix: a (rows,) view."""
        return self._current.view(-1).narrow(0, *self._rows[name])

    def factors(self, names: Sequence[str], orthogonal: Tensor) -> Tensor:
        """Stage the moments of some matrices and return the factor of each row.

        Args:
            names: the matrices, all of one shape.
            orthogonal: (len(names), rows, cols), any float dtype; not modified.

        Returns:
            (len(names), rows, 1) fp32.
        """
        where = self._indices(tuple(names))
        before = self._current.view(-1)[where]
        advanced, factors = advance_row_variance(orthogonal, before, beta2=self._beta2)
        self._advanced.view(-1)[where] = advanced
        return factors

    def _indices(self, names: tuple[str, ...]) -> Tensor:
        """Where the rows of some matrices lie: (len(names), rows) int64. Kept, for the same batches come every step."""
        if names not in self._where:
            starts = torch.tensor([self._rows[name][0] for name in names])
            rows = torch.arange(self._rows[names[0]][1])
            self._where[names] = (starts[:, None] + rows).to(self._current.device)
        return self._where[names]

    def agree(self) -> None:
        """Bring the staged moments of all ranks together. A collective, and exact: one rank stages a row."""
        dist.all_reduce(self._advanced, group=self._process_group)

    def commit(self) -> None:
        """Make the staged moments current."""
        self._current.copy_(self._advanced)

    def clear(self) -> None:
        """Begin a step: forget what was staged."""
        self._advanced.zero_()
