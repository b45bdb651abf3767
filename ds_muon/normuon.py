"""NorMuon's second moments: one number per row of every matrix, the same on every rank.

Rows are outputs. A matrix that is stored in x out has them as columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.layout import Layout
from ds_muon.plan.partition import GroupPlan, Matrix
from ds_muon.update import advance_row_variance


class RowVariance:
    """Where the rows of one param group's matrices lie in its ``row_variance``, and the moments that a step stages.

    The rank that orthogonalizes a matrix advances the moments of its rows. Moments are few, so every rank keeps them
    all, and the partition does not matter. A step calls ``begin``, ``factors`` for each batch of a rank's matrices,
    ``agree`` on every rank, and ``commit`` unless it is skipped.

    Args:
        plan: the group's plan.
        names: its tensors in the group's own order, which is that of their rows.
        beta2: weight of the past.
        process_group: the ranks that share the group.
    """

    def __init__(
        self,
        plan: GroupPlan,
        names: Sequence[str],
        beta2: float,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._beta2 = beta2
        self._process_group = process_group
        self._current = self._staged = torch.empty(0, dtype=torch.float32, device="cpu")
        self._moves = torch.empty(0, dtype=torch.bool, device="cpu")
        self._indices_of: dict[tuple[str, ...], Tensor] = {}
        self._rows: dict[str, tuple[int, int]] = {}
        of_tensor: dict[str, list[tuple[int, Matrix]]] = {name: [] for name in names}
        matrices = [(unit.tensor, matrix) for unit in plan.units for matrix in unit.matrices]
        for place, (tensor, matrix) in enumerate(matrices):
            of_tensor[tensor].append((place, matrix))
        places: list[tuple[int, int]] = []
        rows = 0
        for name in names:
            first = rows
            for place, matrix in of_tensor[name]:
                self._rows[matrix.name] = (rows, matrix.sides[0])
                places.append((place, matrix.sides[0]))
                rows += matrix.sides[0]
            self._rows[name] = (first, rows - first)
        # (2, matrices), in the order of their rows: place in the plan, and number of rows.
        self._matrices = torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, 2).T.contiguous()

    def begin(self, variance: Tensor, moves: Tensor) -> None:
        """Stage zeros, so that ``agree`` can add up what each rank stages.

        Args:
            variance: (rows, 1) fp32, the current moments of the group; not modified.
            moves: (matrices,) bool, whether each of the plan's matrices moves. If not, its rows keep their moments.
        """
        self._current = variance
        if self._staged.shape != variance.shape or self._staged.device != variance.device:
            self._staged = torch.empty_like(variance)
            self._matrices = self._matrices.to(variance.device)
        self._staged.zero_()
        places, rows = self._matrices
        of_rows = torch.repeat_interleave(moves[places], rows, output_size=variance.numel())
        self._moves = of_rows.view_as(variance)

    def of(self, variance: Tensor, name: str) -> Tensor:
        """The (rows,) moments of a matrix, or of all of a tensor one after another: a view of the group's (rows, 1)."""
        return variance.view(-1).narrow(0, *self._rows[name])

    def factors(self, names: Sequence[str], orthogonal: Tensor, layout: Layout) -> Tensor:
        """Stage the moments of one batch of matrices and return the factor of each row.

        Args:
            names: the matrices, all of one shape and layout.
            orthogonal: (len(names), rows, cols) as stored, any float dtype; not modified.
            layout: of the matrices.

        Returns:
            See ``advance_row_variance``.
        """
        indices = self._indices(tuple(names), self._current.device)
        moments = self._current.view(-1)[indices]
        advanced, factors = advance_row_variance(orthogonal, moments, beta2=self._beta2, layout=layout)
        self._staged.view(-1)[indices] = advanced
        return factors

    def agree(self) -> None:
        """Add up the staged moments of all ranks. A collective; exact, because only one rank stages a row."""
        dist.all_reduce(self._staged, group=self._process_group)

    def commit(self, variance: Tensor) -> None:
        """Overwrite the current moments of all matrices that move with the staged ones."""
        torch.where(self._moves, self._staged, variance, out=variance)

    def _indices(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """Where the rows of a batch lie: (len(names), rows) int64. Kept, because every step has the same batches."""
        if names not in self._indices_of:
            starts = torch.tensor([self._rows[name][0] for name in names], dtype=torch.int64, device="cpu")
            rows = torch.arange(self._rows[names[0]][1], dtype=torch.int64, device="cpu")
            self._indices_of[names] = (starts[:, None] + rows).to(device)
        return self._indices_of[names]
