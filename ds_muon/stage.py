"""From U to the update, for one Muon param group: exchange, orthogonalization, NorMuon's rows. Knows no DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.capture import NanCapture
from ds_muon.exchange import Exchange, result_dtype
from ds_muon.normuon import RowVariance
from ds_muon.orthogonalize import NewtonSchulz, batches, orthogonalize_batch
from ds_muon.partition import GroupPlan, Matrix
from ds_muon.passes import store_updates
from ds_muon.update import update_scale


class MuonGroup:
    """One rank's part in the updates of a Muon param group.

    Args:
        plan: the group's plan, the same on every rank.
        names: its matrices in the group's own order, in which rows of ``row_variance`` follow.
        rank: this rank within ``process_group``.
        process_group: the ranks that share the group; None for the default group.
        adjust_lr_fn: see ``update_scale``.
        beta2: NorMuon's; None for plain Muon.
        capture: saves inputs of what is not finite.
    """

    def __init__(
        self,
        plan: GroupPlan,
        names: Sequence[str],
        rank: int,
        process_group: dist.ProcessGroup | None,
        *,
        adjust_lr_fn: str,
        beta2: float | None,
        capture: NanCapture,
    ) -> None:
        self.exchange = Exchange(plan, rank, process_group)
        self.row_variance: RowVariance | None = None
        """Where the rows of NorMuon's state lie; None for plain Muon."""
        if beta2 is not None:
            rows = {matrix.name: matrix.rows for matrix in plan.matrices}
            self.row_variance = RowVariance([(name, rows[name]) for name in names], beta2, process_group)
        self._held = plan.held(rank)
        self._adjust_lr_fn = adjust_lr_fn
        self._capture = capture

    def orthogonalize_(self, partition: Tensor, variance: Tensor | None, settings: NewtonSchulz) -> None:
        """Overwrite U with the update ``s O`` on this rank's partition; padding stays zero. A collective.

        Args:
            partition: (partition_size,) fp32.
            variance: (rows, 1) fp32, NorMuon's current state; not modified. None for plain Muon.
            settings: of the iteration.

        With NorMuon the rows of O are normalized, and their new variances staged, for ``commit``.

        What travels does so while batches of what does not run, and comes back while others do.
        """
        pieces = self._pieces(partition)
        whole = [(matrix, piece.view(matrix.rows, matrix.cols)) for matrix, piece in pieces if not matrix.travels]
        gathering = self.exchange.gather(partition)
        inputs = whole + list(zip(self.exchange.owned, gathering.tensors, strict=True))
        travelling: dict[int, Tensor] = {}
        if self.row_variance is not None and variance is not None:
            self.row_variance.begin(variance)
        waiting: list[Sequence[int]] = []
        ready: list[Sequence[int]] = []
        for indices in batches([u for _, u in inputs], settings):
            (waiting if indices[-1] >= len(whole) else ready).append(indices)
        before = ready[: (len(ready) + 1) // 2]
        for indices in before:
            self._update([inputs[i] for i in indices], len(indices), variance, settings)
        gathering.wait()
        for indices in waiting:
            # Indices ascend: those that do not travel come first.
            count = sum(index < len(whole) for index in indices)
            outputs = self._update([inputs[i] for i in indices], count, variance, settings)
            travelling.update(zip(indices[count:], outputs, strict=True))
        dtype = result_dtype(settings, normuon=variance is not None)
        returning = self.exchange.scatter([output for _, output in sorted(travelling.items())], partition, dtype)
        for indices in ready[len(before) :]:
            self._update([inputs[i] for i in indices], len(indices), variance, settings)
        returning.wait()
        if self.row_variance is not None:
            self.row_variance.agree()
        # Scaled by their holders: what travels is what Newton-Schulz returned, in its own dtype.
        to_scale = [(piece, self._scale(matrix)) for matrix, piece in pieces if matrix.travels]
        if to_scale:
            torch._foreach_mul_([piece for piece, _ in to_scale], [scale for _, scale in to_scale])

    def _update(
        self, batch: Sequence[tuple[Matrix, Tensor]], count: int, variance: Tensor | None, settings: NewtonSchulz
    ) -> Sequence[Tensor]:
        """Overwrite the first ``count`` U of a batch with ``s O``; returns the O of the others, not scaled."""
        outputs = self._orthogonalize(batch, settings)
        factors = self._factors(batch, outputs, variance)
        targets = [u for _, u in batch]
        here, away = (None, None) if factors is None else (factors[:count], factors[count:])
        store_updates(outputs[:count], targets[:count], scale=self._scale(batch[0][0]), factors=here)
        if away is not None:
            store_updates(outputs[count:], targets[count:], factors=away)
            return targets[count:]
        # Not views of the outputs, which would keep the whole batch alive.
        return outputs[count:].clone(memory_format=torch.contiguous_format).unbind()

    def commit(self, variance: Tensor | None) -> None:
        """Overwrite NorMuon's state with the variances staged last."""
        if self.row_variance is not None and variance is not None:
            self.row_variance.commit(variance)

    def nonfinite(self, partition: Tensor) -> list[str]:
        """The matrices whose update is not finite on this rank's partition. Blocks the host."""
        return [matrix.name for matrix, piece in self._pieces(partition) if not piece.isfinite().all()]

    def _scale(self, matrix: Matrix) -> float:
        return update_scale(self._adjust_lr_fn, matrix.rows, matrix.cols)

    def _pieces(self, partition: Tensor) -> list[tuple[Matrix, Tensor]]:
        return [(matrix, partition.narrow(0, piece.offset, piece.numel)) for matrix, piece in self._held]

    def _orthogonalize(self, batch: Sequence[tuple[Matrix, Tensor]], settings: NewtonSchulz) -> Tensor:
        """(batch, rows, cols); saves the inputs of what is not finite, if the capture is on."""
        inputs = [u for _, u in batch]
        kept = self._capture.keep(inputs)
        outputs = orthogonalize_batch(inputs, settings)
        self._capture.save_nonfinite([matrix.name for matrix, _ in batch], kept, outputs, settings)
        return outputs

    def _factors(
        self, batch: Sequence[tuple[Matrix, Tensor]], outputs: Tensor, variance: Tensor | None
    ) -> Tensor | None:
        """What the rows of the outputs are multiplied with, (batch, rows, 1) fp32; None for plain Muon."""
        if self.row_variance is None or variance is None:
            return None
        return self.row_variance.factors(variance, [matrix.name for matrix, _ in batch], outputs)
