"""From U to the updates of a Muon param group: exchange, orthogonalization, NorMuon's rows. Knows no DeepSpeed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.capture import NanCapture
from ds_muon.exchange import Exchange, result_dtype
from ds_muon.failure import Failure
from ds_muon.normuon import RowMoments, RowVariance
from ds_muon.offload import STAGING_BYTES, Ferry, HostPart, Stretch
from ds_muon.orthogonalize import NewtonSchulz, batches, orthogonalize_batch
from ds_muon.passes import Held, Moves, Segments, store_updates, sum_of_squares
from ds_muon.plan.partition import GroupPlan, Matrix, Unit
from ds_muon.plan.zero_layout import Slice
from ds_muon.ranges import profiled
from ds_muon.strips import Copies, assembled, scale_strips_
from ds_muon.update import update_scale

_Batch: TypeAlias = Sequence[tuple[Matrix, Tensor]]
_Batches: TypeAlias = list[Sequence[int]]
_Results: TypeAlias = dict[str, Tensor]


def in_turns(turns: Sequence[Iterator[None]]) -> None:
    """Run the stages of several groups, so that slices of one travel while another computes. A collective.

    At most two groups hold gathered matrices at a time, because these take memory. Batches of a group go up from the
    host, and come down, in the same way.

    Args:
        turns: ``MuonGroup.run_stage`` of each group, in the same order on every rank.
    """
    for newest in range(len(turns) + 2):
        for i in (newest, newest - 1, newest - 2):
            if 0 <= i < len(turns):
                next(turns[i], None)


@dataclass(eq=False)
class Staged:
    """A Muon group's partition on one rank in the course of one step: its gradient, then U, then its updates.

    Attributes:
        flat: (partition_size,) fp32, overwritten as the step goes on: in the end with ``s O``, on the host with what
            ``HostPart`` says. Empty on a rank that has failed to take its gradient.
        flags: (matrices,) bool, whether each of the plan's matrices moves. If not, its U is zero.
        variance: (rows, 1) fp32, NorMuon's state; None for plain Muon.
        moves: ``flags`` of the matrices in this partition; None for all.
        rows: NorMuon's, from the beginning of the stage.
        host: what becomes of a partition on the host.
        met: collectives that have begun.
    """

    flat: Tensor
    flags: Tensor
    variance: Tensor | None = None
    moves: Moves | None = None
    rows: RowMoments | None = None
    host: HostPart | None = None
    met: int = 0

    def updates(self) -> Sequence[Stretch]:
        """The updates of the whole partition, in order."""
        return [Stretch(0, self.flat)] if self.host is None else self.host.stretches()

    def sizes(self) -> Tensor:
        """What is finite exactly if all updates are. On the host, a number of each batch."""
        return self.flat if self.host is None else self.host.sizes()


class MuonGroup:
    """The updates of a Muon param group, as one rank computes them.

    Args:
        plan: the group's plan, the same on every rank.
        names: its tensors in the group's own order, which is that of the rows of ``row_variance``.
        rank: this rank within ``process_group``.
        process_group: the ranks that share the group; None for the default group.
        settings: of the iteration.
        adjust_lr_fn: see ``update_scale``.
        beta2: NorMuon's; None for plain Muon.
        capture: saves the inputs of results that are not finite.
        ferry: to the accelerator, if partitions are on the host; None if they are where Newton-Schulz runs.
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
        ferry: Ferry | None = None,
    ) -> None:
        self.exchange = Exchange(plan, rank, process_group, None if ferry is None else ferry.device)
        self.row_variance = None if beta2 is None else RowVariance(plan, names, beta2, process_group)
        """Where the rows of NorMuon's state lie; None for plain Muon."""
        self.held = plan.held(rank)
        """Each unit that this rank holds a slice of, with that slice."""
        self._settings = settings
        self._adjust_lr_fn = adjust_lr_fn
        self._capture = capture
        self._ferry = ferry
        # What follows is the same in every step, and a model may have thousands of experts.
        self._matrices = len(plan.matrices)
        # The units in a partition are neighbours in the flat buffer, and so are their matrices in the plan.
        index = plan.units.index(self.held[0][0]) if self.held else 0
        first = sum(len(unit.matrices) for unit in plan.units[:index])
        self._here = slice(first, first + sum(len(unit.matrices) for unit, _ in self.held))
        self._segments: Segments | None = None
        self._staying = [(unit, part) for unit, part in self.held if not unit.travels]
        self._travelling = [(unit, part) for unit, part in self.held if unit.travels]
        self._runs = _runs(self._staying)
        self._order: tuple[_Batches, _Batches, _Batches] | None = None
        self._scales: dict[str, Tensor] = {}

    def squares(self, partition: Tensor, known: Tensor | None = None) -> Tensor:
        """For each of the plan's matrices, the sum of squares of this rank's part: (matrices,) fp64 on the device.

        Args:
            partition: (partition_size,) fp32; not modified.
            known: those of the matrices in the partition; by default they are taken.
        """
        here = sum_of_squares(partition, self._segments_of(partition)) if known is None else known
        squares = torch.zeros(self._matrices, dtype=torch.float64, device=here.device)
        squares[self._here] = here
        return squares

    def moves_here(self, partition: Tensor, flags: Tensor) -> Moves:
        """``flags``, one for each of the plan's matrices, cut to those in this rank's partition."""
        return Moves(self._segments_of(partition), flags[self._here])

    def _segments_of(self, partition: Tensor) -> Segments:
        if self._segments is None or self._segments.bounds.device != partition.device:
            self._segments = Segments.of(self.parts(0, partition.numel()), partition.numel(), partition.device)
        return self._segments

    def parts(self, start: int, end: int) -> list[Held]:
        """What lies between two unit boundaries, elements of this rank's partition; offsets from the first."""
        first, last = (bisect_left(self.held, element, key=lambda of: of[1].offset) for element in (start, end))
        return [Held(unit.piece, part.start, part.offset - start, part.numel) for unit, part in self.held[first:last]]

    def run_stage(self, staged: Staged) -> Iterator[None]:
        """Overwrite U with the update ``s O`` (on the host: see ``HostPart``); padding stays zero. A collective.

        Yields twice, while slices travel: the work of another group can hide that, see ``in_turns``. With NorMuon,
        normalizes the rows of O and stages their new variances for ``commit``.

        Args:
            staged: with U, or on the host what makes it; not to be touched until this has ended.
        """
        partition = staged.flat
        if staged.host is not None:
            staged.host.advance([partition.narrow(0, part.offset, part.numel) for _, part in self._travelling])
        gathering = self.exchange.gather(partition)
        staged.met = 1
        if self.row_variance is not None and staged.variance is not None:
            staged.rows = self.row_variance.begin(staged.variance, staged.flags)
        yield  # slices of U are on their way to the ranks that own their matrices

        staying = self._inputs(partition)
        gathered = zip(self.exchange.owned, gathering.tensors, strict=True)
        inputs = [*staying, *((m, u) for unit, u in gathered for m in unit.matrices)]
        if self._order is None:
            # While one batch is orthogonalized, the next goes up from the host.
            most = None if self._ferry is None else STAGING_BYTES // 2
            self._order = order_batches([m for m, _ in inputs], len(staying), self._settings, staged.flags.device, most)
        before, together, after = self._order
        self._update(staged, before, inputs, len(staying))
        gathering.wait()
        results = self._update(staged, together, inputs, len(staying))
        outputs = [assembled(unit, results, self._result_dtype) for unit in self.exchange.owned]
        returning = self.exchange.scatter(outputs, partition, self._result_dtype)
        staged.met = 2
        del gathering, gathered, inputs, results, outputs  # frees the gathered matrices
        self._update(staged, after, staying, len(staying))
        yield  # slices of O are on their way to the ranks that hold them

        returning.wait()
        if staged.rows is not None:
            staged.rows.agree()
        staged.met = 3
        self._scale_travellers(partition)

    def in_any_case(self, turns: Iterator[None], staged: Staged, failure: Failure) -> Iterator[None]:
        """``run_stage``, but all of its collectives take place, even if something raises, which ``failure`` then holds.

        Args:
            turns: ``run_stage`` of this group, perhaps with something before.
            staged: what ``turns`` works on.
            failure: of this rank.
        """
        for turn in (1, 2, 3):
            with failure.holding("stage"):
                next(turns, None)
            while staged.met < turn:
                self._meet(staged)
            yield

    def _meet(self, staged: Staged) -> None:
        """Begin the next collective of ``run_stage`` with nothing to give."""
        staged.met += 1
        if staged.met < 3:
            dtype = torch.float32 if staged.met == 1 else self._result_dtype
            self.exchange.take_part(back=staged.met == 2, dtype=dtype, device=staged.flags.device)
        elif self.row_variance is not None and staged.variance is not None:
            here = staged.variance.to(staged.flags.device)  # it may be offloaded
            self.row_variance.begin(here, staged.flags).agree()

    @property
    def _result_dtype(self) -> torch.dtype:
        return result_dtype(self._settings, normuon=self.row_variance is not None)

    def _inputs(self, partition: Tensor) -> _Batch:
        """The matrices that stay, each with U of its unit, (rows, cols), a view."""
        units = [
            u
            for offset, count, rows, cols in self._runs
            for u in partition.narrow(0, offset, count * rows * cols).view(count, rows, cols).unbind()
        ]
        return [(m, u) for (unit, _), u in zip(self._staying, units, strict=True) for m in unit.matrices]

    def _scale_travellers(self, partition: Tensor) -> None:
        """Multiply what has travelled by ``s``: in Newton-Schulz's dtype O is exact without it."""
        alike: list[tuple[Tensor, float]] = []
        for unit, part in self._travelling:
            elements = partition.narrow(0, part.offset, part.numel)
            scales = [self._scale(matrix) for matrix in unit.matrices]
            if len(set(scales)) == 1:
                alike.append((elements, scales[0]))
            else:  # strips of unequal sides
                if unit.name not in self._scales:  # kept, because the host would wait for a copy
                    self._scales[unit.name] = elements.new_tensor([scales[label] for label in unit.piece.labels()])
                scale_strips_(elements, unit.piece, part.start, self._scales[unit.name])
        if alike := [(elements, scale) for elements, scale in alike if scale != 1.0]:
            torch._foreach_mul_([elements for elements, _ in alike], [scale for _, scale in alike])

    def _update(self, staged: Staged, chosen: _Batches, inputs: _Batch, n_staying: int) -> _Results:
        """Overwrite U with ``s O``, but for matrices that have travelled: of these, return O by name, without ``s``.

        Args:
            chosen: batches, as indices of ``inputs``.
            inputs: matrices, each with the U of its unit.
            n_staying: how many of ``inputs`` have not travelled. They come first.
        """
        results: _Results = {}
        counted = [([inputs[i] for i in indices], bisect_left(indices, n_staying)) for indices in chosen]
        in_turns([self._update_batch(staged, batch, count, results) for batch, count in counted])
        return results

    def _update_batch(self, staged: Staged, batch: _Batch, count: int, results: _Results) -> Iterator[None]:
        """``_update`` of a batch, of which the first ``count`` have not travelled. Adds to ``results``.

        On the host it yields while the batch goes up, and while it comes down.
        """
        copies, scale = Copies(), self._scale(batch[0][0])
        if staged.host is not None:
            travelled = [(m, copies.of(m, unit)) for m, unit in batch[count:]]
            yield from staged.host.update(
                batch[:count], scale, lambda lifted: self._compute(staged, [*lifted, *travelled], count, results)
            )
            return
        inputs = [(m, copies.of(m, unit)) for m, unit in batch]
        outputs, factors = self._compute(staged, inputs, count, results)
        store_updates(outputs, [u for _, u in inputs[:count]], scale=scale, factors=factors)
        copies.put_back(batch[:count])

    def _compute(self, staged: Staged, inputs: _Batch, count: int, results: _Results) -> tuple[Tensor, Tensor | None]:
        """O of the first ``count`` matrices, and NorMuon's factors of their rows; None for plain Muon.

        Of the others, O times the factors goes to ``results``.
        """
        outputs = self.orthogonalize(inputs)
        factors = None
        if staged.rows is not None:
            factors = staged.rows.factors([m.name for m, _ in inputs], outputs, inputs[0][0].layout)
        if travelled := inputs[count:]:
            made: Sequence[Tensor] = [u for _, u in travelled]
            if factors is not None:
                store_updates(outputs[count:], made, factors=factors[count:])
            else:  # copies, because views would keep the whole batch alive
                made = outputs[count:].clone(memory_format=torch.contiguous_format).unbind()
            results.update((m.name, o) for (m, _), o in zip(travelled, made, strict=True))
        return outputs[:count], None if factors is None else factors[:count]

    @profiled("newton_schulz")
    def orthogonalize(self, batch: _Batch) -> Tensor:
        """O of a batch: (batch, rows, cols). With the capture on, saves the inputs of results that are not finite."""
        inputs = [u for _, u in batch]
        kept = self._capture.keep(inputs)
        outputs = orthogonalize_batch(inputs, self._settings)
        self._capture.save_nonfinite([matrix.name for matrix, _ in batch], kept, outputs, self._settings)
        return outputs

    def _scale(self, matrix: Matrix) -> float:
        return update_scale(self._adjust_lr_fn, *matrix.sides)


def _runs(staying: Sequence[tuple[Unit, Slice]]) -> list[tuple[int, int, int, int]]:
    """Units of one shape that lie side by side: first element, number, rows and columns. Torch cuts a run at once."""
    runs: list[tuple[int, int, int, int]] = []
    for unit, part in staying:
        if runs:
            offset, count, rows, cols = runs[-1]
            if (rows, cols) == (unit.rows, unit.cols) and offset + count * rows * cols == part.offset:
                runs[-1] = (offset, count + 1, rows, cols)
                continue
        runs.append((part.offset, 1, unit.rows, unit.cols))
    return runs


def order_batches(
    matrices: Sequence[Matrix], n_staying: int, settings: NewtonSchulz, device: torch.device, most: int | None = None
) -> tuple[_Batches, _Batches, _Batches]:
    """The batches that a rank runs, as indices: before the gathered matrices arrive, with them, and after.

    A matrix that does not travel shares a batch with gathered ones of its shape, because larger batches are faster. But
    none does if most of the work would then have to wait. Of the batches that need not wait, the first half runs while
    matrices are gathered, the rest while results travel back.

    Args:
        matrices: the gathered ones come last. A batch has one layout: scale and NorMuon's rows depend on it.
        n_staying: how many do not travel.
        settings: of the iteration.
        device: of the matrices, when they are orthogonalized.
        most: bytes of U in a batch, as ``batches`` takes it.
    """
    in_out = {i for i, matrix in enumerate(matrices) if matrix.layout == "in_out"}
    shapes = [(matrix.rows, matrix.cols) for matrix in matrices]
    cost_of = {shape: settings.cost(*shape) for shape in set(shapes)}

    def cost(indices: Iterable[int]) -> int:
        return sum(cost_of[shapes[i]] for i in indices)

    travelling = set(shapes[n_staying:])
    apart = 2 * cost(i for i in range(n_staying) if shapes[i] in travelling) > cost(range(n_staying))
    ready: _Batches = []
    waiting: _Batches = []
    for first, end in [(0, n_staying), (n_staying, len(matrices))] if apart else [(0, len(matrices))]:
        for alike in ([i for i in range(first, end) if (i in in_out) is turned] for turned in (False, True)):
            for indices in batches([shapes[i] for i in alike], device, settings, most):
                chosen = [alike[i] for i in indices]
                (ready if chosen[-1] < n_staying else waiting).append(chosen)
    costs = [cost(indices) for indices in ready]
    before = sum(2 * done < sum(costs) for done in accumulate(costs, initial=0))
    return ready[:before], waiting, ready[before:]
