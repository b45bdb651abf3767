"""``verify_every``: while a model trains, one Muon matrix each k steps is checked against the reference, in turn.

The check is that of ``ds-muon verify``, from the raw gradients of all ranks to the changed weights, for one matrix and
one step. It starts from the engine's own momentum, since it has not followed the matrix from its first step. References
are computed on the owner of the matrix only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from ds_muon.agree import gather
from ds_muon.refusals import nothing_to_step_on
from ds_muon.say import log, say
from ds_muon.verify.canary import Canary
from ds_muon.verify.check import StepComparison
from ds_muon.verify.record import UpdateRecord


class TrainingCheck:
    """Checks a ``MuonZeroOptimizer`` while it trains. A wrong update raises nothing: the owner of the matrix logs it.
    Bits that another rank cannot repeat stop the run.

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
        self._canary = Canary(zero) if bits else None
        self._name = ""
        self._arm()

    def _arm(self) -> None:
        """Listen to a matrix's gradients from the first micro-batch of the step that is to be checked."""
        if self._comparison is None and self._every and (self._steps + 1) % self._every == 0:
            matrices = self._zero.plan.matrices
            self._name = matrices[self._checks % len(matrices)].name
            self._comparison = StepComparison(self._zero, self._module, only=self._name)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Around the optimizer's step, on every rank; collective in the steps that are checked."""
        name, canary = self._name, self._canary if self._comparison is not None else None
        if self._comparison is not None:
            refused = gather(nothing_to_step_on(self._zero) is not None, self._zero.dp_process_group)
            if any(refused):
                if not all(refused):
                    self._comparison.forget()  # the others' gradients go with the step
                yield  # what is refused is raised here
                return
            self._comparison.before_step()
        with nullcontext() if canary is None else canary.listening(name):
            yield
        if self._zero.overflow:
            return  # the same matrix again in the next step
        self._steps += 1
        if self._comparison is not None:
            self._finish(self._comparison)
        self._arm()
        if canary is not None:
            canary.compare(name, self._checks)

    def _finish(self, comparison: StepComparison) -> None:
        self._comparison = None
        self._checks += 1
        comparison.close()
        records: list[UpdateRecord] = []
        # After its collectives, after_step computes on the owner alone: an error there must not stop the others.
        try:
            records = comparison.after_step()
        except Exception as error:
            log(f"step {self._steps}: the check of an update failed: {error!r}")
        for record in records:
            self.last = record
            self._log(record)

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
