"""From U to the updates of a Muon param group: exchange, orthogonalization, NorMuon's rows. Knows no DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.capture import NanCapture
from ds_muon.exchange import Exchange, Transfer, result_dtype
from ds_muon.failure import Failure
from ds_muon.normuon import RowVariance
from ds_muon.offload import STAGING_BYTES, Ferry, HostPart
from ds_muon.orthogonalize import NewtonSchulz, batches, orthogonalize_batch
from ds_muon.passes import Held, Segments, Where, store_updates, sum_of_squares
from ds_muon.plan.partition import GroupPlan, Matrix, Unit
from ds_muon.plan.zero_layout import Slice
from ds_muon.ranges import profiled
from ds_muon.strips import Copies, assembled, scale_strips_
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
        self.row_variance: RowVariance | None = None
        """Where the rows of NorMuon's state lie; None for plain Muon."""
        if beta2 is not None:
            self.row_variance = RowVariance(plan, names, beta2, process_group)
        self._matrices = len(plan.matrices)
        self.held = plan.held(rank)
        """Each unit that this rank holds a slice of, with that slice."""
        # The units in a partition are neighbours in the flat buffer, and so are their matrices in the plan.
        index = plan.units.index(self.held[0][0]) if self.held else 0
        first = sum(len(unit.matrices) for unit in plan.units[:index])
        self._here = slice(first, first + sum(len(unit.matrices) for unit, _ in self.held))
        self._segments: Segments | None = None
        self._settings = settings
        self._adjust_lr_fn = adjust_lr_fn
        self._capture = capture
        self._ferry = ferry
        self.on_host: HostPart | None = None
        """What this step's updates have left in a partition on the host."""
        # Once, because a model may have thousands of experts.
        self._whole = [(unit, held) for unit, held in self.held if not unit.travels]
        self._runs = _runs(self._whole)
        self._travelling = [(unit, held) for unit, held in self.held if unit.travels]
        self._order: tuple[_Indices, _Indices, _Indices] | None = None
        self._met = 0  # collectives of this step that have begun
        self._scales: dict[str, Tensor] = {}

    def squares(self, partition: Tensor) -> Tensor:
        """For each of the plan's matrices, the sum of squares of this rank's part: (matrices,) fp64 on the device.

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
            parts = [Held(unit.piece, held.start, held.offset, held.numel) for unit, held in self.held]
            self._segments = Segments.of(parts, partition.numel(), partition.device)
        return self._segments

    def in_any_case(
        self, updates: Iterator[None], variance: Tensor | None, moves: Tensor, failure: Failure
    ) -> Iterator[None]:
        """``updates``, but all of its collectives take place, even if something raises, which ``failure`` then holds.

        Args:
            updates: of this group, perhaps with something before.
            variance, moves: as ``updates`` takes them.
            failure: of this rank.
        """
        self._met = 0
        for turn in (1, 2, 3):
            with failure.held("stage"):
                next(updates, None)
            while self._met < turn:
                self._meet(variance, moves)
            yield

    def _meet(self, variance: Tensor | None, moves: Tensor) -> None:
        """Begin the next collective of ``updates`` with nothing to give."""
        self._met += 1
        if self._met < 3:
            dtype = torch.float32 if self._met == 1 else result_dtype(self._settings, normuon=variance is not None)
            self.exchange.take_part(back=self._met == 2, dtype=dtype, device=moves.device)
        elif self.row_variance is not None and variance is not None:
            self.row_variance.begin(variance.to(moves.device), moves)  # it may be offloaded
            self.row_variance.agree()

    def updates(
        self,
        partition: Tensor,
        variance: Tensor | None,
        moves: Tensor,
        advance: Callable[..., None] | None = None,
    ) -> Iterator[None]:
        """Overwrite U with the update ``s O`` in this rank's partition; padding stays zero. A collective.

        Yields twice, while slices travel: the work of another group can hide that, see ``in_turns``. With NorMuon,
        normalizes the rows of O and stages their new variances for ``commit``.

        Args:
            partition: (partition_size,) fp32; not to be touched until this has ended.
            variance: (rows, 1) fp32, NorMuon's current state; not modified. None for plain Muon.
            moves: (matrices,) bool, whether each of the plan's matrices moves. If not, its U is zero.
            advance: as ``HostPart`` takes it; needed on the host, where ``on_host`` then has the updates.
        """
        if advance is not None and self._ferry is not None:
            self.on_host = HostPart(partition, advance, self._ferry.device)
            self.on_host.advance([partition.narrow(0, held.offset, held.numel) for _, held in self._travelling])
        gathering = self.exchange.gather(partition)
        self._met = 1
        if self.row_variance is not None and variance is not None:
            self.row_variance.begin(variance, moves)
        yield  # slices of U are on their way to the ranks that own their matrices

        whole = self._inputs(partition)
        gathered = zip(self.exchange.owned, gathering.tensors, strict=True)
        inputs = [*whole, *((m, u) for unit, u in gathered for m in unit.matrices)]
        before, together, after = self._batches(inputs, len(whole))
        self._update([([inputs[i] for i in indices], len(indices)) for indices in before], variance)
        gathering.wait()
        batches = [([inputs[i] for i in indices], sum(i < len(whole) for i in indices)) for indices in together]
        returning = self._update_and_return(batches, partition, variance)
        self._met = 2
        del gathering, gathered, inputs, batches  # frees the gathered matrices
        self._update([([whole[i] for i in indices], len(indices)) for indices in after], variance)
        yield  # slices of O are on their way to the ranks that hold them

        returning.wait()
        if self.row_variance is not None:
            self.row_variance.agree()
        self._met = 3
        self._scale_travellers(partition)

    def _inputs(self, partition: Tensor) -> list[tuple[Matrix, Tensor]]:
        """The matrices that this rank holds and owns, each with U of its unit, (rows, cols), a view."""
        units = [
            u
            for offset, count, rows, cols in self._runs
            for u in partition.narrow(0, offset, count * rows * cols).view(count, rows, cols).unbind()
        ]
        return [(m, u) for (unit, _), u in zip(self._whole, units, strict=True) for m in unit.matrices]

    def _scale_travellers(self, partition: Tensor) -> None:
        """Multiply what has travelled by ``s``: in Newton-Schulz's dtype O is exact without it."""
        scaled: list[tuple[Tensor, float]] = []
        for unit, held in self._travelling:
            elements = partition.narrow(0, held.offset, held.numel)
            scales = [self._scale(matrix) for matrix in unit.matrices]
            if len(set(scales)) == 1:
                scaled.append((elements, scales[0]))
            else:  # strips of unequal sides
                if unit.name not in self._scales:  # kept, because the host would wait for a copy
                    self._scales[unit.name] = elements.new_tensor([scales[label] for label in unit.piece.labels()])
                scale_strips_(elements, unit.piece, held.start, self._scales[unit.name])
        if scaled := [(elements, scale) for elements, scale in scaled if scale != 1.0]:
            torch._foreach_mul_([elements for elements, _ in scaled], [scale for _, scale in scaled])

    def _batches(self, inputs: _Batch, whole: int) -> tuple[_Indices, _Indices, _Indices]:
        """See ``order_batches``. Kept, because it is the same in every step and takes time on the host."""
        if self._order is None:
            matrices = [matrix for matrix, _ in inputs]
            if self._ferry is not None:
                # While one batch is orthogonalized, the next goes up.
                device, most = self._ferry.device, STAGING_BYTES // 2
            else:
                device, most = inputs[0][1].device if inputs else torch.device("cpu"), None
            self._order = order_batches(matrices, whole, self._settings, device, most)
        return self._order

    def _update_and_return(
        self, together: Sequence[tuple[_Batch, int]], partition: Tensor, variance: Tensor | None
    ) -> Transfer:
        """Orthogonalize the gathered matrices, with those that share their batches, and start to return the results.

        Args:
            together: as ``_update`` takes them.
        """
        results = self._update(together, variance)
        dtype = result_dtype(self._settings, normuon=variance is not None)
        outputs = [assembled(unit, results, dtype) for unit in self.exchange.owned]
        return self.exchange.scatter(outputs, partition, dtype)

    def _update(self, batches: Sequence[tuple[_Batch, int]], variance: Tensor | None) -> dict[str, Tensor]:
        """Overwrite U with ``s O``, but for matrices that have travelled: of these, return O by name, without ``s``.

        Args:
            batches: matrices, each with the U of its unit, and how many of a batch have not travelled. They come first.
        """
        results: dict[str, Tensor] = {}
        if self._ferry is None:
            for batch, count in batches:
                self._update_batch(batch, count, variance, results)
        else:
            # While one batch is orthogonalized, the next goes up, and the one before is stored.
            in_turns([self._update_on_host(self._ferry, *batch, variance, results) for batch in batches])
        return results

    def _update_batch(self, batch: _Batch, count: int, variance: Tensor | None, results: dict[str, Tensor]) -> None:
        """``_update`` of a batch. Adds to ``results``."""
        copies = Copies()
        inputs = [(m, copies.of(m, unit)) for m, unit in batch]
        outputs = self.orthogonalize(inputs)
        factors = self._factors(inputs, outputs, variance)
        targets = [u for _, u in inputs[:count]]
        here = None if factors is None else factors[:count]
        store_updates(outputs[:count], targets, scale=self._scale(batch[0][0]), factors=here)
        copies.put_back(batch[:count])
        results.update(_results(inputs[count:], outputs[count:], None if factors is None else factors[count:]))

    def _update_on_host(
        self, ferry: Ferry, batch: _Batch, count: int, variance: Tensor | None, results: dict[str, Tensor]
    ) -> Iterator[None]:
        """The same where U lies on the host, but for matrices that have travelled. In three turns."""
        assert self.on_host is not None, "updates were given no way to advance the momentum"
        copies = Copies()
        # A matrix whose rows or columns lie apart goes up as a copy, and comes back to it.
        in_place = not any(matrix.piece.scattered for matrix, _ in batch[:count])
        if not in_place:
            self.on_host.advance([unit for _, unit in batch[:count]])
        units = [copies.of(m, unit) for m, unit in batch]
        rising = ferry.up_from(self.on_host.write, units[:count]) if in_place else ferry.up(units[:count])
        yield  # U is on its way up

        lifted = [*rising.on_accelerator(), *units[count:]]
        inputs = [(matrix, u) for (matrix, _), u in zip(batch, lifted, strict=True)]
        outputs = self.orthogonalize(inputs)
        factors = self._factors(inputs, outputs, variance)
        scale = self._scale(batch[0][0])
        here = outputs[:count] if factors is None else outputs[:count] * factors[:count]
        falling = ferry.down([here], self.on_host.land(here, units[:count], scale) if in_place else None)
        results.update(_results(inputs[count:], outputs[count:], None if factors is None else factors[count:]))
        del rising, lifted, inputs, outputs, here  # memory of the accelerator
        yield  # the results are on their way down

        arrived = falling.on_host()
        if not in_place:
            store_updates(arrived[0], units[:count], scale=scale)
            copies.put_back(batch[:count])

    def commit(self, variance: Tensor | None) -> None:
        """Overwrite NorMuon's state with the staged variances."""
        if self.row_variance is not None and variance is not None:
            self.row_variance.commit(variance)

    def sizes(self, partition: Tensor) -> Tensor:
        """What is finite exactly if all updates in this rank's partition are. On the host, a number of each batch."""
        return partition if self.on_host is None else self.on_host.sizes()

    def _scale(self, matrix: Matrix) -> float:
        return update_scale(self._adjust_lr_fn, *matrix.sides)

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


def _results(inputs: _Batch, outputs: Tensor, factors: Tensor | None) -> dict[str, Tensor]:
    """O of matrices by name, times the factors of their rows, in memory of their own. Overwrites U if there are any."""
    if not inputs:
        return {}
    if factors is None:
        # Copies, because views would keep the whole batch alive.
        made: Sequence[Tensor] = outputs.clone(memory_format=torch.contiguous_format).unbind()
    else:
        made = [u for _, u in inputs]
        store_updates(outputs, made, factors=factors)
    return {matrix.name: result for (matrix, _), result in zip(inputs, made, strict=True)}


def _runs(whole: Sequence[tuple[Unit, Slice]]) -> list[tuple[int, int, int, int]]:
    """Units of one shape that lie side by side: first element, number, rows and columns. Torch cuts a run at once."""
    runs: list[tuple[int, int, int, int]] = []
    for unit, held in whole:
        if runs:
            offset, count, rows, cols = runs[-1]
            if (rows, cols) == (unit.rows, unit.cols) and offset + count * rows * cols == held.offset:
                runs[-1] = (offset, count + 1, rows, cols)
                continue
        runs.append((held.offset, 1, unit.rows, unit.cols))
    return runs


def order_batches(
    matrices: Sequence[Matrix], whole: int, settings: NewtonSchulz, device: torch.device, most: int | None = None
) -> tuple[_Indices, _Indices, _Indices]:
    """The batches that a rank runs, as indices: before the gathered matrices arrive, with them, and after.

    A matrix that does not travel shares a batch with gathered ones of its shape, because larger batches are faster. But
    none does if most of the work would then have to wait. Of the batches that need not wait, the first half runs while
    matrices are gathered, the rest while results travel back.

    Args:
        matrices: the gathered ones come last. A batch has one layout: scale and NorMuon's rows depend on it.
        whole: how many do not travel.
        settings: of the iteration.
        device: of the matrices, when they are orthogonalized.
        most: bytes of U in a batch; a larger matrix is alone. None for no such bound.
    """
    in_out = {i for i, matrix in enumerate(matrices) if matrix.layout == "in_out"}
    shapes = [(matrix.rows, matrix.cols) for matrix in matrices]
    cost_of = {shape: settings.cost(*shape) for shape in set(shapes)}

    def cost(indices: Iterable[int]) -> int:
        return sum(cost_of[shapes[i]] for i in indices)

    travelling = set(shapes[whole:])
    apart = 2 * cost(i for i in range(whole) if shapes[i] in travelling) > cost(range(whole))
    ready: _Indices = []
    waiting: _Indices = []
    for first, end in [(0, whole), (whole, len(matrices))] if apart else [(0, len(matrices))]:
        for alike in ([i for i in range(first, end) if (i in in_out) is turned] for turned in (False, True)):
            for indices in batches([shapes[i] for i in alike], device, settings):
                for chosen in _cut([alike[i] for i in indices], shapes, most):
                    (ready if chosen[-1] < whole else waiting).append(chosen)
    costs = [cost(indices) for indices in ready]
    before = sum(2 * done < sum(costs) for done in accumulate(costs, initial=0))
    return ready[:before], waiting, ready[before:]


def _cut(indices: Sequence[int], shapes: Sequence[tuple[int, int]], most: int | None) -> list[Sequence[int]]:
    """A batch in parts of about equal size, each with at most ``most`` bytes of U, or one matrix."""
    if most is None:
        return [indices]
    rows, cols = shapes[indices[0]]
    parts = -(-len(indices) // max(1, most // max(1, rows * cols * torch.float32.itemsize)))
    return [indices[len(indices) * part // parts : len(indices) * (part + 1) // parts] for part in range(parts)]
