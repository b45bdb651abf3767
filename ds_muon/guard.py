"""The decision of all ranks on a step: it is applied, skipped with a warning, or stopped with an error."""

from __future__ import annotations

import math
import os
import shlex
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.agree import gather
from ds_muon.capture import NanCapture
from ds_muon.say import log, printable


class NonFiniteUpdate(RuntimeError):
    """Newton-Schulz returned a NaN or an infinity, and ``nan_guard`` or the capture is set to stop then."""


class SkippedSteps:
    """Counts the steps skipped for one cause.

    Rank 0 warns of the first, second, fourth, eighth, ... only, to keep a log readable. It logs the total when the
    optimizer is destroyed or the interpreter exits.
    """

    def __init__(self, cause: str) -> None:
        self.why = ""
        """The reason for the last one."""
        self._tally = {cause: 0}
        self._cause = cause
        self._end = weakref.finalize(self, _say_how_many, self._tally)

    @property
    def count(self) -> int:
        return self._tally[self._cause]

    def add(self, why: str, *, quiet: bool = False) -> None:
        """Count one more, skipped for this reason. ``quiet``: do not warn."""
        self._tally[self._cause] += 1
        self.why = why
        if not quiet and dist.get_rank() == 0 and self.count & (self.count - 1) == 0:
            log(f"step skipped, no weight moved on any rank: {why} (skipped so far for {self._cause}: {self.count})")

    def close(self) -> None:
        """Log the total, if there were any. Once."""
        self._end()


def _say_how_many(tally: dict[str, int]) -> None:
    for cause, count in tally.items():
        # The process group may be gone by now.
        if count and os.environ.get("RANK", "0") == "0":
            log(f"steps skipped in all for {cause}: {count}")


# What a rank finds of a step's updates. The largest of all ranks counts.
FINITE, NOT_FINITE, CAPTURED = 0, 1, 2


@dataclass(frozen=True)
class Verdict:
    """Whether the gradients allow a step, on the device; the same on every rank.

    Attributes:
        squares: (groups,) fp64, sum of squares of each param group's gradient over all ranks.
        may_move: bool scalar: all gradients are finite, the norm of AdamW's is within the threshold, and no rank
            refuses the step. The size of Muon's does not matter.
        moves: (matrices,) bool for each Muon group: ``may_move``, and the matrix's gradient is not zero everywhere.
        for_host: the numbers that the host needs to know.
    """

    squares: Tensor
    may_move: Tensor
    moves: tuple[Tensor, ...]
    for_host: HostCopy


@dataclass(frozen=True)
class Findings:
    """What the host knows of a step once everything is staged; the same on every rank.

    Attributes:
        muon, adamw: sum of squares of each param group's gradient over all ranks.
        may_move: whether the gradients allow the step. If so, the momentum has moved.
        updates: ``FINITE``, ``NOT_FINITE`` or ``CAPTURED``; ``FINITE`` with ``nan_guard`` "off".
        stop: whether a rank asks to stop because of a capture in the step before, which has been applied.
        refused: whether a rank refuses the step. If so, nothing has moved.
    """

    muon: Sequence[float]
    adamw: Sequence[float]
    may_move: bool
    updates: int
    stop: bool
    refused: bool

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
        return self.may_move and self.updates == FINITE and not self.stop


class HostCopy:
    """Numbers on their way from the device to the host.

    Args:
        numbers: on the device.
        early: whether the copy is queued now, so that it waits for no later work; else ``wait`` queues it.
    """

    def __init__(self, numbers: Tensor, *, early: bool) -> None:
        self.numbers = self._copy = numbers
        self._event: torch.cuda.Event | None = None
        if early and numbers.is_cuda:
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


class StepGuard:
    """Decides with all ranks whether a step is applied. Warns or raises if not.

    Args:
        nan_guard: ``"off"``, ``"skip"`` or ``"raise"``.
        threshold: ``grad_norm_skip_threshold``.
        groups: names of the param groups, Muon's first.
        capture: saves the inputs of updates that are not finite, and may ask to stop then.
        process_group: the ranks that share the weights; all must make the same calls.

    Attributes:
        spikes, bad_gradients, bad_updates: skipped steps, by cause.
        last: the one that counted the last skipped step; None before the first.
    """

    def __init__(
        self,
        nan_guard: str,
        threshold: float | None,
        groups: Sequence[str],
        capture: NanCapture,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.spikes = SkippedSteps("spikes")
        self.bad_gradients = SkippedSteps("non-finite gradients")
        self.bad_updates = SkippedSteps("non-finite updates")
        self.last: SkippedSteps | None = None
        self._nan_guard = nan_guard
        self._threshold = threshold
        self._groups = groups
        self._capture = capture
        self._process_group = process_group

    def measure(self, muon: Sequence[Tensor], adamw: Sequence[Tensor], refuse: bool) -> Verdict:
        """Add up the sums of squares of all ranks. A collective; the host does not wait.

        Args:
            muon: (matrices,) fp64 for each Muon group: sum of squares over this rank's slice of each gradient.
            adamw: fp64 scalar for each AdamW group: the same over this rank's partition.
            refuse: whether this rank refuses the step.
        """
        # About the step before, which the capture still remembers. With the guard on, all ranks have stopped in it.
        asks = self._capture.stops_training and self._nan_guard == "off"
        counts = [*(len(sums) for sums in muon), *(1 for _ in adamw), 1, 1]
        everything = [*muon, *(total.view(1) for total in adamw)]
        sums = torch.cat([*everything, *(everything[0].new_full((1,), float(one)) for one in (asks, refuse))])
        dist.all_reduce(sums, group=self._process_group)
        by_group = torch.split(sums, counts)
        # One for each group, then the number of ranks that ask to stop, then the number of ranks that refuse.
        totals = torch.stack([of_group.sum() for of_group in by_group])
        squares = totals[:-2]
        may_move = squares.sum().isfinite() & (totals[-1] == 0)
        if self._threshold is not None:
            may_move &= squares[len(muon) :].sum().sqrt() <= self._threshold
        # With the guard on, these numbers reach the host together with its byte.
        for_host = HostCopy(torch.cat([totals, may_move.double().view(1)]), early=self._nan_guard == "off")
        moves = tuple(of_group.ne(0) & may_move for of_group in by_group[: len(muon)])
        return Verdict(squares, may_move, moves, for_host)

    def decide(self, verdict: Verdict, updates: Sequence[Tensor]) -> Findings:
        """Whether to apply what is staged, the same on every rank. The only time in a step that the host waits.

        With ``nan_guard`` "off" it waits for the gradients' norms only, while the updates may still be computed. With
        the guard on, this is a collective.

        Args:
            verdict: on the gradients.
            updates: this rank's flat partition of each Muon group's update; not modified.
        """
        found = float(FINITE)
        if self._nan_guard == "off":
            *squares, stop, refused, may = verdict.for_host.wait()
        else:
            byte = agree_on_updates(updates, self._capture.stops_training, self._process_group)
            *squares, stop, refused, may, found = torch.cat([verdict.for_host.numbers, byte.double()]).tolist()
        of_muon = len(verdict.moves)
        return Findings(squares[:of_muon], squares[of_muon:], bool(may), int(found), bool(stop), bool(refused))

    def explain(self, findings: Findings, bad_updates: str, *, scaler_is_watching: bool) -> None:
        """Warn that a step is skipped, or raise. A collective where an update is not finite.

        Args:
            findings: of a step that is not applied.
            bad_updates: describes the updates that are not finite, in the same words on every rank; "" without any.
            scaler_is_watching: whether a dynamic loss scaler reports non-finite gradients itself.

        Raises:
            NonFiniteUpdate: the same on every rank.
        """
        if findings.stop:
            seen = gather(self._capture.seen_before, self._process_group)
            raise NonFiniteUpdate(
                f"in the step before, the update of {', '.join(printable(name) for names in seen for name in names)} "
                "was not finite and, with nan_guard off, has been applied: load a checkpoint. "
                f"{self._evidence()[0]}"
            )
        if bad_updates:
            if findings.updates == CAPTURED or self._nan_guard == "raise":
                evidence, captures = self._evidence()
                go_on = 'nan_guard "skip" goes on without such steps'
                if captures:
                    go_on = f"With DS_MUON_NAN_CAPTURE_RAISE=0, {go_on}"
                raise NonFiniteUpdate(f"{bad_updates}. Nothing was applied. {evidence}. {go_on}")
            self._skip(self.bad_updates, bad_updates)
        elif not findings.gradients_are_finite:
            squares = zip(self._groups, [*findings.muon, *findings.adamw], strict=True)
            bad = [name for name, square in squares if not math.isfinite(square)]
            where = f"param group{'s' if len(bad) > 1 else ''} {', '.join(bad)}"
            self._skip(self.bad_gradients, f"a gradient is not finite, in {where}", quiet=scaler_is_watching)
        else:
            norm, threshold = findings.norm_of_adamw, self._threshold
            self._skip(
                self.spikes, f"the norm of AdamW's gradients is {norm:.4g}, grad_norm_skip_threshold {threshold:g}"
            )

    def _skip(self, skipped: SkippedSteps, why: str, *, quiet: bool = False) -> None:
        self.last = skipped
        skipped.add(why, quiet=quiet)

    def close(self) -> None:
        """Log how many steps were skipped."""
        for skipped in (self.spikes, self.bad_gradients, self.bad_updates):
            skipped.close()

    def _evidence(self) -> tuple[str, bool]:
        """Where the inputs are saved, and whether any rank captures: the same on every rank. A collective."""
        ranks = gather((self._capture.saved, self._capture.is_on), self._process_group)
        saved = [str(path) for of_rank, _ in ranks for path in of_rank]
        captures = any(is_on for _, is_on in ranks)
        if saved:
            return f"Saved for inspection: ds-muon replay {shlex.join(saved)}", captures
        if captures:
            return "The input could not be saved: see the warnings", captures
        return "DS_MUON_NAN_CAPTURE=1 saves such inputs for ds-muon replay", captures


def agree_on_updates(partitions: Sequence[Tensor], captured: bool, process_group: dist.ProcessGroup | None) -> Tensor:
    """One byte, the same on every rank: whether all updates are finite. A collective; the host does not wait.

    Args:
        partitions: this rank's staged updates, one flat tensor per Muon group; not modified.
        captured: whether this rank asks to stop because of a capture.
        process_group: the ranks that share the weights.

    Returns:
        (1,) uint8 on the device: ``FINITE``, ``NOT_FINITE`` or ``CAPTURED``.
    """
    # A NaN survives in the largest magnitude.
    largest = torch.stack([torch.linalg.vector_norm(partition, ord=float("inf")) for partition in partitions])
    byte = largest.isfinite().all().logical_not().to(torch.uint8).view(1)
    if captured:
        byte.fill_(CAPTURED)
    dist.all_reduce(byte, op=dist.ReduceOp.MAX, group=process_group)
    return byte
