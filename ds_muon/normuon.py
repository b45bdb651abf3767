"""NorMuon's second moments: one number per row of every matrix, the same on every rank.

Rows are outputs. A matrix that is stored as (in, out) has them as columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.layout import Layout
from ds_muon.plan.partition import GroupPlan
from ds_muon.update import advance_row_variance


class RowVariance:
    """Where the rows of one param group's matrices lie in its ``row_variance``.

    The rank that orthogonalizes a matrix advances the moments of its rows. Moments are few, so every rank keeps them
    all, and the partition does not matter.

    Args:
        plan: the group's plan.
        names: its tensors in the group's own order, which is that of their rows.
        beta2: weight of the past.
        process_group: the ranks that share the group.
    """

    def __init__(
        self, plan: GroupPlan, names: Sequence[str], beta2: float, process_group: dist.ProcessGroup | None
    ) -> None:
        self.beta2 = beta2
        self.process_group = process_group
        self._indices_of: dict[tuple[str, ...], Tensor] = {}
        order = {name: i for i, name in enumerate(names)}
        matrices = [(order[unit.tensor], matrix) for unit in plan.units for matrix in unit.matrices]
        places = sorted(range(len(matrices)), key=lambda place: matrices[place][0])
        ordered = [matrices[place][1] for place in places]
        rows = [matrix.sides[0] for matrix in ordered]
        first_rows = accumulate(rows, initial=0)
        self._rows = {matrix.name: of_matrix for matrix, *of_matrix in zip(ordered, first_rows, rows, strict=False)}
        # (2, matrices), in the order of their rows: place in the plan, and number of rows.
        self._matrices = torch.tensor([places, rows], dtype=torch.int64, device="cpu")

    def of(self, variance: Tensor, name: str) -> Tensor:
        """The (rows,) moments of a matrix: a view of the group's (rows, 1)."""
        return variance.view(-1).narrow(0, *self._rows[name])

    def begin(self, variance: Tensor, flags: Tensor) -> RowMoments:
        """Begin a step.

        Args:
            variance: (rows, 1) fp32, the current moments of the group; not modified.
            flags: (matrices,) bool, whether each of the plan's matrices moves. If not, its rows keep their moments.
        """
        self._matrices = self._matrices.to(variance.device)
        places, rows = self._matrices
        moves = torch.repeat_interleave(flags[places], rows, output_size=variance.numel())
        return RowMoments(self, variance, moves.view_as(variance), torch.zeros_like(variance))

    def indices(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """Where the rows of a batch lie: (len(names), rows) int64. Kept, because every step has the same batches."""
        if names not in self._indices_of:
            starts = torch.tensor([self._rows[name][0] for name in names], dtype=torch.int64, device="cpu")
            rows = torch.arange(self._rows[names[0]][1], dtype=torch.int64, device="cpu")
            self._indices_of[names] = (starts[:, None] + rows).to(device)
        return self._indices_of[names]


@dataclass(frozen=True, eq=False)
class RowMoments:
    """The moments of a group's rows in one step: ``factors`` of each batch, ``agree`` on all ranks, then ``commit``.

    Attributes:
        places: of the rows.
        current: (rows, 1) fp32, not modified before ``commit``.
        moves: (rows, 1) bool, which rows ``commit`` overwrites.
        staged: (rows, 1) fp32, the new moments of the rows that this rank advances; zeros, so that ranks can add up.
    """

    places: RowVariance
    current: Tensor
    moves: Tensor
    staged: Tensor

    def factors(self, names: Sequence[str], orthogonal: Tensor, layout: Layout) -> Tensor:
        """Stage the moments of a batch of O by the names of its matrices; returns the factors of their rows.

        Arguments and factors as for ``advance_row_variance``.
        """
        indices = self.places.indices(tuple(names), self.current.device)
        moments = self.current.view(-1)[indices]
        advanced, factors = advance_row_variance(orthogonal, moments, beta2=self.places.beta2, layout=layout)
        self.staged.view(-1)[indices] = advanced
        return factors

    def agree(self) -> None:
        """Add up the staged moments of all ranks. A collective; exact, because only one rank stages a row."""
        dist.all_reduce(self.staged, group=self.places.process_group)

    def commit(self) -> None:
        """Overwrite the current moments of all matrices that move with the staged ones."""
        torch.where(self.moves, self.staged, self.current, out=self.current)
