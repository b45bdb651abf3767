"""The decision of all ranks on a step: whether it is applied. ``skipped`` has the words for one that is not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.capture import NanCapture
from ds_muon.failure import Failure

# What a rank finds of a step's updates. The largest of all ranks counts.
FINITE, NOT_FINITE, CAPTURED, FAILED = 0, 1, 2, 3


@dataclass(frozen=True)
class Verdict:
    """Whether the gradients allow a step, on the device; the same on every rank.

    Attributes:
        squares: (groups,) fp64, sum of squares of each param group's gradient over all ranks.
        may_move: bool scalar: all gradients are finite, the norm of AdamW's is within the threshold, and no rank
            has failed. The size of Muon's does not matter.
        moves: (matrices,) bool for each Muon group: ``may_move``, and the matrix's gradient is not zero everywhere.
        numbers: what the host needs to know: ``squares``, the ranks that ask to stop, ``may_move``.
        on_its_way: the same, if nothing else decides on the step.
    """

    squares: Tensor
    may_move: Tensor
    moves: tuple[Tensor, ...]
    numbers: Tensor
    on_its_way: HostCopy | None


@dataclass(frozen=True)
class Findings:
    """What the host knows of a step once everything is staged; the same on every rank.

    Attributes:
        muon, adamw: sum of squares of each param group's gradient over all ranks.
        may_move: whether the gradients allow the step. If so, the momentum has moved.
        worst: what any rank has found: ``FINITE``, ``NOT_FINITE``, ``CAPTURED`` or ``FAILED``, the last of these that
            occurs; with ``nan_guard`` "off" the first or the last.
        stop: whether a rank asks to stop because of a capture in the step before, which has been applied.
    """

    muon: Sequence[float]
    adamw: Sequence[float]
    may_move: bool
    worst: int
    stop: bool

    @property
    def gradients_are_finite(self) -> bool:
        # A sum of squares in fp64 is finite exactly when every gradient of every rank is.
        return math.isfinite(sum([*self.muon, *self.adamw]))

    @property
    def norm(self) -> float:
        return math.sqrt(sum([*self.muon, *self.adamw])) if self.gradients_are_finite else math.inf

    @property
    def norm_of_adamw(self) -> float:
        return math.sqrt(sum(self.adamw))

    @property
    def allow_the_step(self) -> bool:
        return self.may_move and self.worst == FINITE and not self.stop


class HostCopy:
    """Numbers on their way from the device to the host. The copy is queued here, so that it waits for no later work."""

    def __init__(self, numbers: Tensor) -> None:
        self._copy = numbers
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            # A copy to memory that is not pinned would stop the host.
            self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()

    def wait(self) -> list[float]:
        """The numbers. Blocks the host until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._copy.tolist()
        return found


@dataclass(frozen=True)
class StepGuard:
    """Decides with all ranks whether a step is applied.

    Attributes:
        nan_guard: ``"off"``, ``"skip"`` or ``"raise"``.
        threshold: ``grad_norm_skip_threshold``.
        capture: saves the inputs of updates that are not finite, and may ask to stop then.
        failure: of this rank.
        process_group: the ranks that share the weights; all must make the same calls.
    """

    nan_guard: str
    threshold: float | None
    capture: NanCapture
    failure: Failure
    process_group: dist.ProcessGroup | None

    def measure(self, muon: Sequence[Tensor], adamw: Sequence[Tensor]) -> Verdict:
        """Add up the sums of squares of all ranks. A collective; the host does not wait.

        Args:
            muon: (matrices,) fp64 for each Muon group: sum of squares over this rank's slice of each gradient.
            adamw: fp64 scalar for each AdamW group: the same over this rank's partition.
        """
        # About the step before, which the capture still remembers. With the guard on, all ranks have stopped in it.
        asks = self.capture.stops_training and self.nan_guard == "off"
        failed = self.failure.error is not None
        counts = [*(len(sums) for sums in muon), *(1 for _ in adamw), 1, 1]
        everything = [*muon, *(total.view(1) for total in adamw)]
        sums = torch.cat([*everything, *(everything[0].new_full((1,), float(one)) for one in (asks, failed))])
        dist.all_reduce(sums, group=self.process_group)
        by_group = torch.split(sums, counts)
        # One for each group, then the number of ranks that ask to stop, then the number of ranks that have failed.
        totals = torch.stack([of_group.sum() for of_group in by_group])
        squares = totals[:-2]
        may_move = squares.sum().isfinite() & (totals[-1] == 0)
        if self.threshold is not None:
            may_move &= squares[len(muon) :].sum().sqrt() <= self.threshold
        numbers = torch.cat([totals[:-1], may_move.double().view(1)])
        # Where ranks agree on a byte later, these numbers reach the host together with it.
        on_its_way = HostCopy(numbers) if self.nan_guard == "off" and self.failure.alone else None
        moves = tuple(of_group.ne(0) & may_move for of_group in by_group[: len(muon)])
        return Verdict(squares, may_move, moves, numbers, on_its_way)

    def decide(self, verdict: Verdict, flats: Iterable[Tensor]) -> Findings:
        """Whether to apply what is staged, the same on every rank. A collective.

        The host waits here and, without offload or a capture, nowhere else in a step that is applied. A rank alone
        with ``nan_guard`` "off" waits for the gradients' norms only, while the updates may still be computed.

        Args:
            verdict: on the gradients.
            flats: of each Muon group, this rank's partition, or what is finite if it is; not modified. Looked at with
                the guard on only.
        """
        found = float(FINITE)
        if verdict.on_its_way is not None:
            *squares, stop, may = verdict.on_its_way.wait()
        else:
            byte = torch.full((1,), FINITE, dtype=torch.uint8, device=verdict.numbers.device)
            if self.nan_guard != "off" and self.failure.error is None:
                with self.failure.holding("decide"):
                    # A NaN survives in the largest magnitude.
                    largest = [torch.linalg.vector_norm(u, ord=float("inf")) for u in flats]
                    byte.copy_(torch.stack(largest).isfinite().all().logical_not())
                if self.capture.stops_training:
                    byte.fill_(CAPTURED)
            if self.failure.error is not None:
                byte.fill_(FAILED)
            dist.all_reduce(byte, op=dist.ReduceOp.MAX, group=self.process_group)
            *squares, stop, may, found = torch.cat([verdict.numbers, byte.double()]).tolist()
        of_muon = len(verdict.moves)
        return Findings(squares[:of_muon], squares[of_muon:], bool(may), int(found), bool(stop))
