"""From U to the updates of a Muon param group: exchange, orthogonalization, NorMuon's rows. Knows no DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.capture import NanCapture
from ds_muon.exchange import Exchange, Transfer, result_dtype
from ds_muon.layout import Layout
from ds_muon.normuon import RowVariance
from ds_muon.orthogonalize import NewtonSchulz, batches, orthogonalize_batch
from ds_muon.passes import Segments, Where, store_updates, sum_of_squares
from ds_muon.plan.partition import GroupPlan, Matrix
from ds_muon.ranges import profiled
from ds_muon.update import update_scale

_Batch = Sequence[tuple[Matrix, Tensor]]
_Indices = list[Sequence[int]]


def in_turns(updates: Sequence[Iterator[None]]) -> None:
    """Run the updates of several groups, so that slices of one travel while another computes. A collective.

    At most two groups hold gathered matrices at a time, because these take memory.

    Args:
        updates: ``MuonGroup.updates`` of each group, in the same order on every rank.
    """
    for turn in range(len(updates) + 2):
        for i in (turn, turn - 1, turn - 2):
            if 0 <= i < len(updates):
                next(updates[i], None)


class MuonGroup:
    """The updates of a Muon param group, as one rank computes them.

    Args:
        plan: the group's plan, the same on every rank.
        names: its matrices in the group's own order, which is that of the rows of ``row_variance``.
        rank: this rank within ``process_group``.
        process_group: the ranks that share the group; None for the default group.
        settings: of the iteration.
        adjust_lr_fn: see ``update_scale``.
        beta2: NorMuon's; None for plain Muon.
        capture: saves the inputs of results that are not finite.
    """

    def __init__(
        self,
        plan: GroupPlan,
        names: Sequence[str],
        rank: int,
        process_group: dist.ProcessGroup | None,
        settings: NewtonSchulz,
        *,
        adjust_lr_fn: str,
        beta2: float | None,
        capture: NanCapture,
    ) -> None:
        self.exchange = Exchange(plan, rank, process_group)
        self.row_variance: RowVariance | None = None
        """Where the rows of NorMuon's state lie; None for plain Muon."""
        if beta2 is not None:
            rows = {matrix.name: matrix.sides[0] for matrix in plan.matrices}
            self.row_variance = RowVariance([(name, rows[name]) for name in names], list(rows), beta2, process_group)
        self._matrices = len(plan.matrices)
        self._held = plan.held(rank)
        # The matrices in a partition are neighbours in the flat buffer, and so in the plan.
        first = plan.matrices.index(self._held[0][0]) if self._held else 0
        self._here = slice(first, first + len(self._held))
        self._segments: Segments | None = None
        self._settings = settings
        self._adjust_lr_fn = adjust_lr_fn
        self._capture = capture
        self._order: tuple[_Indices, _Indices, _Indices] | None = None

    def squares(self, partition: Tensor) -> Tensor:
        """For each of the plan's matrices, the sum of squares of this rank's slice: (matrices,) fp64 on the device.

        Args:
            partition: (partition_size,) fp32; not modified.
        """
        squares = torch.zeros(self._matrices, dtype=torch.float64, device=partition.device)
        squares[self._here] = sum_of_squares(partition, self._segments_of(partition))
        return squares

    def where(self, partition: Tensor, moves: Tensor) -> Where:
        """``moves``, a flag for each of the plan's matrices, cut to those in this rank's partition."""
        return Where(self._segments_of(partition), moves[self._here])

    def _segments_of(self, partition: Tensor) -> Segments:
        if self._segments is None or self._segments.bounds.device != partition.device:
            offsets = [piece.offset for _, piece in self._held]
            self._segments = Segments.of(offsets, partition.numel(), partition.device)
        return self._segments

    def updates(self, partition: Tensor, variance: Tensor | None, moves: Tensor) -> Iterator[None]:
        """Overwrite U with the update ``s O`` in this rank's partition; padding stays zero. A collective.

        Yields twice, while slices travel: the work of another group can hide that, see ``in_turns``. With NorMuon,
        normalizes the rows of O and stages their new variances for ``commit``.

        Args:
            partition: (partition_size,) fp32; not to be touched until this has ended.
            variance: (rows, 1) fp32, NorMuon's current state; not modified. None for plain Muon.
            moves: (matrices,) bool, whether each of the plan's matrices moves. If not, its U is zero.
        """
        held = self._pieces(partition)
        gathering = self.exchange.gather(partition)
        if self.row_variance is not None and variance is not None:
            self.row_variance.begin(variance, moves)
        yield  # slices of U are on their way to the ranks that own their matrices

        whole = [(m, piece.view(m.rows, m.cols)) for m, piece in held if not m.travels]
        inputs = [*whole, *zip(self.exchange.owned, gathering.tensors, strict=True)]
        before, together, after = self._batches(inputs, len(whole))
        for indices in before:
            self._update([inputs[i] for i in indices], len(indices), variance)
        gathering.wait()
        returning = self._update_and_return([[inputs[i] for i in indices] for indices in together], partition, variance)
        del gathering, inputs  # frees the gathered matrices
        for indices in after:
            self._update([whole[i] for i in indices], len(indices), variance)
        yield  # slices of O are on their way to the ranks that hold them

        returning.wait()
        if self.row_variance is not None:
            self.row_variance.agree()
        # O travels without its scale: in Newton-Schulz's dtype it is exact. The holders scale it.
        scaled = [(piece, self._scale(matrix)) for matrix, piece in held if matrix.travels]
        if scaled := [(piece, scale) for piece, scale in scaled if scale != 1.0]:
            torch._foreach_mul_([piece for piece, _ in scaled], [scale for _, scale in scaled])

    def _batches(self, inputs: _Batch, whole: int) -> tuple[_Indices, _Indices, _Indices]:
        """See ``order_batches``. Kept, because it is the same in every step and takes time on the host."""
        if self._order is None:
            layouts = [matrix.layout for matrix, _ in inputs]
            self._order = order_batches([u for _, u in inputs], whole, self._settings, layouts)
        return self._order

    def _update_and_return(self, together: Sequence[_Batch], partition: Tensor, variance: Tensor | None) -> Transfer:
        """Orthogonalize the gathered matrices, with those that share their batches, and start to return the results."""
        results: dict[str, Tensor] = {}
        for batch in together:
            # Matrices that do not travel come first.
            count = sum(not matrix.travels for matrix, _ in batch)
            outputs = self._update(batch, count, variance)
            results.update(zip((matrix.name for matrix, _ in batch[count:]), outputs, strict=True))
        dtype = result_dtype(self._settings, normuon=variance is not None)
        return self.exchange.scatter([results[m.name] for m in self.exchange.owned], partition, dtype)

    def _update(self, batch: _Batch, count: int, variance: Tensor | None) -> Sequence[Tensor]:
        """Overwrite the first ``count`` U of a batch with ``s O``. Return the O of the others, without ``s``."""
        outputs = self.orthogonalize(batch)
        factors = self._factors(batch, outputs, variance)
        targets = [u for _, u in batch]
        here, away = (None, None) if factors is None else (factors[:count], factors[count:])
        store_updates(outputs[:count], targets[:count], scale=self._scale(batch[0][0]), factors=here)
        if count == len(batch):
            return ()
        if away is not None:
            store_updates(outputs[count:], targets[count:], factors=away)
            return targets[count:]
        # Copies, because views would keep the whole batch alive.
        return outputs[count:].clone(memory_format=torch.contiguous_format).unbind()

    def commit(self, variance: Tensor | None) -> None:
        """Overwrite NorMuon's state with the staged variances."""
        if self.row_variance is not None and variance is not None:
            self.row_variance.commit(variance)

    def nonfinite(self, partition: Tensor) -> list[str]:
        """The matrices with a value in this rank's partition that is not finite. Blocks the host."""
        return [matrix.name for matrix, piece in self._pieces(partition) if not piece.isfinite().all()]

    def _scale(self, matrix: Matrix) -> float:
        return update_scale(self._adjust_lr_fn, *matrix.sides)

    def _pieces(self, partition: Tensor) -> list[tuple[Matrix, Tensor]]:
        return [(matrix, partition.narrow(0, piece.offset, piece.numel)) for matrix, piece in self._held]

    @profiled("newton_schulz")
    def orthogonalize(self, batch: _Batch) -> Tensor:
        """O of a batch: (batch, rows, cols). With the capture on, saves the inputs of results that are not finite."""
        inputs = [u for _, u in batch]
        kept = self._capture.keep(inputs)
        outputs = orthogonalize_batch(inputs, self._settings)
        self._capture.save_nonfinite([matrix.name for matrix, _ in batch], kept, outputs, self._settings)
        return outputs

    def _factors(self, batch: _Batch, outputs: Tensor, variance: Tensor | None) -> Tensor | None:
        """NorMuon's factors for the rows of the outputs, see ``advance_row_variance``; None for plain Muon."""
        if self.row_variance is None or variance is None:
            return None
        return self.row_variance.factors(variance, [matrix.name for matrix, _ in batch], outputs, batch[0][0].layout)


def order_batches(
    matrices: Sequence[Tensor], whole: int, settings: NewtonSchulz, layouts: Sequence[Layout] = ()
) -> tuple[_Indices, _Indices, _Indices]:
    """The batches that a rank runs, as indices: before the gathered matrices arrive, with them, and after.

    A matrix that does not travel shares a batch with gathered ones of its shape, because larger batches are faster. But
    none does if most of the work would then have to wait. Of the batches that need not wait, the first half runs while
    matrices are gathered, the rest while results travel back.

    Args:
        matrices: (rows, cols) each; the gathered ones come last.
        whole: how many do not travel.
        settings: of the iteration.
        layouts: of each matrix; all "out_in" by default. A batch has one layout: scale and NorMuon's rows depend on it.
    """
    in_out = {i for i, layout in enumerate(layouts) if layout == "in_out"}
    shapes = [matrix.shape for matrix in matrices]
    cost_of = {shape: settings.cost(*shape) for shape in set(shapes)}

    def cost(indices: Iterable[int]) -> int:
        return sum(cost_of[shapes[i]] for i in indices)

    travelling = set(shapes[whole:])
    apart = 2 * cost(i for i in range(whole) if shapes[i] in travelling) > cost(range(whole))
    ready: _Indices = []
    waiting: _Indices = []
    for first, end in [(0, whole), (whole, len(matrices))] if apart else [(0, len(matrices))]:
        for alike in ([i for i in range(first, end) if (i in in_out) is turned] for turned in (False, True)):
            for indices in batches([matrices[i] for i in alike], settings):
                chosen = [alike[i] for i in indices]
                (ready if chosen[-1] < whole else waiting).append(chosen)
    costs = [cost(indices) for indices in ready]
    before = sum(2 * done < sum(costs) for done in accumulate(costs, initial=0))
    return ready[:before], waiting, ready[before:]
