"""What is said of a step that is not applied, a warning and a count or an error, and how ranks come to say the same."""

from __future__ import annotations

import math
import os
import shlex
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.agree import gather
from ds_muon.capture import NanCapture
from ds_muon.dtypes import name_of
from ds_muon.guard import CAPTURED, FINITE, Findings
from ds_muon.say import log, printable

if TYPE_CHECKING:
    from ds_muon.muon_group import MuonGroup, Staged
    from ds_muon.zero import MuonZeroOptimizer


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


class Skips:
    """Counts the steps that are not applied, and says why. All ranks must make the same calls.

    Args:
        nan_guard: ``"off"``, ``"skip"`` or ``"raise"``.
        threshold: ``grad_norm_skip_threshold``.
        groups: names of the param groups, Muon's first.
        capture: saves the inputs of updates that are not finite, and may ask to stop then.
        process_group: the ranks that share the weights.

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

    def explain(self, findings: Findings, bad_updates: str, scaler_is_watching: bool) -> None:
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
            if findings.worst == CAPTURED or self._nan_guard == "raise":
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


def bad_updates(zero: MuonZeroOptimizer, staged: Sequence[Staged], findings: Findings) -> str:
    """The matrices whose updates are not finite on any rank, and the cause, for ``Skips.explain``; "" without any.

    A collective that blocks the host, where there are any.

    Raises:
        Exception: a rank could not look at them. The others raise a ``RuntimeError`` that quotes it.
    """
    if findings.worst == FINITE:
        return ""
    found: list[tuple[list[str], list[str]]] = []
    with zero.failure.holding("decide"):
        found = [
            (
                _nonfinite(group, partial(_values, of_group)),
                _nonfinite(group, partial(zero.optimizer.momentum_buffer(i).narrow, 0)),
            )
            for i, (group, of_group) in enumerate(zip(zero.muon_groups, staged, strict=True))
        ]
    zero.failure.raise_on_all()
    everywhere = [of_group for of_rank in gather(found, zero.dp_process_group) for of_group in of_rank]
    bad = {name for of_updates, _ in everywhere for name in of_updates}
    bad_momentum = {name for _, of_momentum in everywhere for name in of_momentum}
    (unit, first), *others = [(unit, each) for unit in zero.plan.units for each in unit.matrices if each.name in bad]
    settings = zero.newton_schulz
    what = (
        f"the update of {printable(first.name)} ({first.rows} x {first.cols}) is not finite in step {zero.steps} "
        "since start"
    )
    what += f", nor those of {len(others)} more matri{'x' if len(others) == 1 else 'ces'}" if others else ""
    if first.name in bad_momentum:
        return f"{what}: its momentum is not finite"
    return (
        f"{what}: Newton-Schulz on rank {unit.owner}, {settings.backend} backend, "
        f"{name_of(settings.dtype)}, {settings.form(first.rows, first.cols)} form"
    )


def _values(staged: Staged, offset: int, numel: int) -> Tensor:
    """The updates of so many elements, but for finite factors: (numel,) fp32, a copy."""
    end = offset + numel
    found = [
        update[max(offset - start, 0) : end - start].float()
        for start, update, *_ in staged.updates()
        if start < end and offset < start + update.numel()
    ]
    return torch.cat(found)


def _nonfinite(group: MuonGroup, values: Callable[[int, int], Tensor]) -> list[str]:
    """The matrices with a value in this rank's partition that is not finite. Blocks the host.

    Args:
        group: of the matrices.
        values: of so many elements of the partition, from an offset on.
    """
    names: list[str] = []
    for unit, part in group.held:
        bad = values(part.offset, part.numel).isfinite().logical_not_()
        if bad.any():
            elements = bad.nonzero().view(-1) + part.start
            names += [unit.matrices[number].name for number in unit.piece.holding(elements)]
    return names
