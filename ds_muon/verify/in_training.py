"""``verify_every``: while a model trains, one Muon matrix each k steps is checked against the reference, in turn.

The check is that of ``ds-muon verify``, from the raw gradients of all ranks to the changed weights, for one matrix and
one step. It starts from the engine's own momentum, since it has not followed the matrix from its first step. References
are computed on the owner of the matrix only.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from ds_muon.agree import gather
from ds_muon.refusals import nothing_to_step_on
from ds_muon.say import log, say
from ds_muon.verify.canary import Canary
from ds_muon.verify.check import StepComparison
from ds_muon.verify.engine_view import Look
from ds_muon.verify.record import UpdateRecord


class TrainingCheck:
    """Checks a ``MuonZeroOptimizer`` while it trains. A wrong update raises nothing: the owner of the matrix logs it.
    Where a check fails by itself on a rank, as for want of memory, that rank logs it and no rank makes it. Bits that
    another rank cannot repeat stop the run.

    Args:
        zero: the optimizer, whose plan names the matrices; the same on every rank.
        module: the model that it trains.
        every: check each so many steps; 0 for never.
        bits: whether another rank also makes the update again.

    Attributes:
        last: the latest record of a matrix that this rank owns; None before the first.
    """

    def __init__(self, zero: Any, module: nn.Module, every: int, *, bits: bool = False) -> None:
        self.last: UpdateRecord | None = None
        self._zero = zero
        self._module = module
        self._every = every if zero.plan.matrices else 0
        self._steps = 0
        self._checks = 0
        self._comparison: StepComparison | None = None
        self._is_ready = False
        """Whether this rank has all that it needs from before the step that is checked."""
        self._canary = Canary(zero) if bits else None
        self._arm()

    @property
    def _due(self) -> bool:
        """Whether the next step is checked: the same on every rank, whatever has failed on one."""
        return bool(self._every) and (self._steps + 1) % self._every == 0

    @property
    def _name(self) -> str:
        """The matrix whose turn it is."""
        matrices = self._zero.plan.matrices
        return str(matrices[self._checks % len(matrices)].name) if matrices else ""

    def _arm(self) -> None:
        """Listen to a matrix's gradients from the first micro-batch of the step that is to be checked."""
        if self._comparison is None and self._due:
            with self._trying():
                self._comparison = StepComparison(self._zero, self._module, only=self._name)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Around the optimizer's step, on every rank; collective in the steps that are checked."""
        is_due, name = self._due, self._name
        canary = self._canary if is_due else None
        is_checked = is_due and self._before()
        with nullcontext() if canary is None else canary.listening(name):
            yield  # what is refused is raised here
        if self._zero.overflow:
            return  # the same matrix again in the next step
        self._steps += 1
        if is_checked:
            self._after()
        if is_due:
            self._checks += 1
            if self._comparison is not None:
                self._comparison.close()
                self._comparison = None
        self._arm()
        if canary is not None:
            canary.compare(name, self._checks)

    def _before(self) -> bool:
        """Whether the step that begins is checked, the same on every rank. A collective."""
        self._is_ready = False
        seen = None if nothing_to_step_on(self._zero) else self._look(before=True)
        with_all = self._on_all(seen is not None)
        if self._comparison is not None:
            with self._trying():
                if with_all:
                    self._comparison.before_step(seen)
                    self._is_ready = True
            if not self._is_ready:
                self._comparison.forget()  # of a step that will not be, or is not checked
        return with_all

    def _after(self) -> None:
        """Compare what the step has done. A collective."""
        seen = self._look(before=False) if self._is_ready else None
        if self._on_all(seen is not None) and self._comparison is not None:
            with self._trying():
                for record in self._comparison.after_step(seen):
                    self.last = record
                    self._log(record)

    def _look(self, *, before: bool) -> Look | None:
        """What this rank has of the step; None if that has failed."""
        with self._trying():
            if self._comparison is not None:
                return self._comparison.look(before=before)
        return None

    def _on_all(self, here: bool) -> bool:
        """Whether it is so on all ranks. A collective."""
        return all(gather(here, self._zero.dp_process_group))

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """What fails inside is logged: a check must not stop a run, nor leave other ranks waiting."""
        try:
            yield
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # it may have been for want of memory
            log(f"after {self._steps} steps, an update of {self._name} could not be checked: {error!r}")

    def _log(self, record: UpdateRecord) -> None:
        update, same = record.against_fp64, record.against_same_dtype
        text = (
            f"step {self._steps}: update of {record.name} on rank {record.owner}: relative error "
            f"{update.error:.1e} against fp64 (tolerance {update.tolerance:.1e}), {same.error:.1e} against the same "
            f"dtype ({same.tolerance:.1e})"
        )
        if record.ok:
            say(text, every_rank=True)  # DeepSpeed's logger shows nothing below a warning unless it is told to
        else:
            log(f"{text}. WRONG: {record.diagnosis}. Run ds-muon verify with this config")
