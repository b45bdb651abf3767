"""DeepSpeed's ZeRO-1/2 optimizer, with a step that is all or nothing. Partitioning and reduction stay DeepSpeed's own.

A step has five phases: ``take_gradients``, ``measure``, ``stage``, ``decide``, ``commit``. Each runs over all param
groups and is a range in torch's profiler. ``stage`` moves the momentum, unless the gradients forbid the step. Only
``commit`` moves weights, AdamW's state and NorMuon's variances.

The host waits for the device once, in ``decide``: for the norms of the gradients, and for the byte that says whether a
rank has failed (see ``failure``) and, with ``nan_guard`` on, whether all updates are finite. If one is not, the host
waits again, to name it. The phases before are queued without knowing the outcome. On a single rank with ``nan_guard``
"off" there is nothing to agree on, and ``commit`` is queued while Newton-Schulz still runs.

With CPU offload the partitions are on the host, which then waits more often: for the gradients to come down, for the
measures of all ranks before the momentum moves, and for every batch of O. A batch's momentum advances just before its U
goes up, and ``commit`` sends weights to the model while it computes others.

What surrounds a step is in ``zero_base``: gradients as the reduction leaves them, the model's weights, checkpoints.
docs/how-it-works.md has the files of a step in reading order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from torch import Tensor

from ds_muon.agree import gather
from ds_muon.capture import NanCapture
from ds_muon.guard import FAILED, Findings, StepGuard, Verdict
from ds_muon.muon_group import MuonGroup, Staged, in_turns
from ds_muon.offload import HostPart
from ds_muon.optimizer import DSMuon
from ds_muon.orthogonalize import release
from ds_muon.passes import sum_of_squares
from ds_muon.ranges import profiled
from ds_muon.refusals import DSMuonRefusal, nothing_to_step_on, step_refusal
from ds_muon.skipped import Skips, bad_updates
from ds_muon.zero_base import MuonZeroBase
from ds_muon.zero_plan import plan_of

if TYPE_CHECKING:
    from ds_muon.telemetry import Telemetry
    from ds_muon.verify.in_training import TrainingCheck


class MuonZeroOptimizer(MuonZeroBase):
    """``DeepSpeedZeroOptimizer`` with DSMuon's step. The engine builds it with the arguments of that class.

    Attributes:
        plan: who holds and who owns each Muon matrix. Muon's param groups are the first ones.
        training_check: checks every ``verify_every``-th step from around it. ``registration`` sets it; else None.
        telemetry: observes every ``telemetry_every``-th step in the same way.
        muon_groups: one per Muon param group.
        skips: counts the skipped steps.
        steps: calls of ``step`` in this process, skipped steps included.
    """

    def __init__(self, init_optimizer: DSMuon, param_names: dict[Tensor, str], *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(init_optimizer, param_names, *args, **kwargs)
            self._make_groups(init_optimizer)
        except BaseException:
            for hook in vars(self).get("_grad_acc_hooks", ()):  # which would reduce gradients for nobody
                hook.remove()
            raise
        self._frozen = [(name, p) for p, name in param_names.items() if not p.requires_grad]
        self.training_check: TrainingCheck | None = None
        self.telemetry: Telemetry | None = None

    def _make_groups(self, init_optimizer: DSMuon) -> None:
        """The plan, and what a step needs of each Muon group. A collective."""
        config = init_optimizer.config
        self.newton_schulz = config.newton_schulz(self.accelerator)
        self.steps = 0
        rank = dist.get_rank(self.dp_process_group)
        self._capture = NanCapture(rank)
        groups = [group["name"] for group in init_optimizer.param_groups]
        rules = (config.nan_guard, config.grad_norm_skip_threshold)
        self.guard = StepGuard(*rules, self._capture, self.failure, self.dp_process_group)
        self.skips = Skips(*rules, groups, self._capture, self.dp_process_group)
        self.plan = plan_of(self, self.newton_schulz)
        self.muon_groups = [
            MuonGroup(
                group,
                [name for name, _ in self.shapes(i)],
                rank,
                self.dp_process_group,
                self.newton_schulz,
                adjust_lr_fn=config.adjust_lr_fn,
                beta2=config.beta2 if config.variant == "normuon" else None,
                capture=self._capture,
                ferry=self.ferry,
            )
            for i, group in enumerate(self.plan.groups)
        ]
        self.know_matrices([group.parts for group in self.muon_groups])
        self._lazy_init_hp_params_optimizer_state()

    def destroy(self) -> None:
        self.skips.close()
        release()
        super().destroy()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One optimizer step over all groups, or none: see the module's docstring.

        Afterwards ``self.overflow`` says whether the step was skipped. If so, the engine counts a skipped step and
        holds the learning rate schedule.

        Raises:
            DSMuonRefusal: there are no gradients, or the script has done what forbids a step. Nothing has moved.
            Exception: whatever has failed on a rank, before anything is committed. The others raise a ``RuntimeError``
                that quotes it. If ``commit`` has failed, all raise in every step until a load.
            NonFiniteUpdate: on every rank. An update is not finite, and ``nan_guard`` is "raise" or a rank has captured
                the input. With ``nan_guard`` "off", a capture raises in the next step.
        """
        with ExitStack() as instruments:
            for instrument in (self.telemetry, self.training_check):
                if instrument is not None:
                    instruments.enter_context(instrument.around_step())
            self._step_all_groups()
        self.timers.log(deepspeed_zero.OPTIMIZER_TIMERS)

    def _step_all_groups(self) -> None:
        self.steps += 1
        self.failure.step = self.steps
        gradients: list[Tensor] = []
        with self._timed(deepspeed_zero.OPTIMIZER_GRADIENTS_TIMER):
            with self.failure.holding("take_gradients"):
                if refusal := nothing_to_step_on(self):
                    raise DSMuonRefusal(refusal)
                gradients = self.take_gradients()
                self.failure.refuse_if_torn("no step is made")
                if refusal := step_refusal(self, self._frozen):
                    raise DSMuonRefusal(refusal)
            verdict = self.measure(gradients)
        with self._timed(deepspeed_zero.OPTIMIZER_STEP_TIMER):
            staged = self.stage(gradients, verdict)
            findings = self.decide(staged, verdict)
            if findings.worst == FAILED:
                # If no rank has taken its gradients, all can still use them; if one has, all drop theirs.
                if any(gather(bool(gradients), self.dp_process_group)):
                    with self.failure.holding("take_gradients"):
                        self._release_gradients()
                self.failure.raise_on_all()
            # A spike or a bad kernel says nothing about the loss scale.
            self._update_scale(not findings.gradients_are_finite)
            self.overflow = not findings.allow_the_step
            # By now the others commit as well. An error from here on reaches them in their next step, or save.
            with self.failure.holding("commit"):
                # torch.tensor would wait for the device.
                norm = torch.full((), findings.norm, dtype=torch.float64, device=self.device).float()
                self._global_grad_norm = norm if self.compute_grad_norm else None
                if not self.overflow:
                    self.commit(staged, gradients[len(staged) :], findings)
            if self.overflow:
                self.skips.explain(findings, bad_updates(self, staged, findings), self.dynamic_loss_scale)
                return
        with self._timed(deepspeed_zero.OPTIMIZER_ALLGATHER_TIMER):
            self.update_lp_params()

    @profiled("take_gradients")
    def take_gradients(self) -> list[Tensor]:
        """The averaged, unscaled gradients: (partition_size,) fp32 for each param group, free to be overwritten.

        Releases DeepSpeed's own gradient buffers. With CPU offload the gradients are on the host, and the host waits
        until the last have come.
        """
        self.micro_step_id = deepspeed_zero.INITIAL_MICRO_STEP_ID
        self._wait_for_offload_copies()
        self._begin_step()
        try:
            return [self._take_gradient(i) for i in range(len(self.bit16_groups))]
        except Exception:
            self._release_gradients()
            raise

    @profiled("measure")
    def measure(self, gradients: Sequence[Tensor]) -> Verdict:
        """Whether the gradients of all ranks allow the step, and which matrices move. A collective.

        Args:
            gradients: as ``take_gradients`` returns them; not modified. Empty where that has failed.
        """
        muon, there = len(self.muon_groups), self.accelerator  # where ranks communicate
        squares: list[Tensor] = []
        if gradients:
            with self.failure.holding("measure"):
                squares = [self._squares_here(i, gradient).to(there) for i, gradient in enumerate(gradients)]
        if self.failure.error is not None:
            sizes = [len(group.matrices) for group in self.plan.groups] + [1] * (len(self.bit16_groups) - muon)
            squares = [torch.zeros(size, dtype=torch.float64, device=there) for size in sizes]
        return self.guard.measure(squares[:muon], squares[muon:])

    def _squares_here(self, i: int, gradient: Tensor) -> Tensor:
        """The sums of squares of a group's gradient on this rank: (matrices,) of Muon's, or a scalar; fp64."""
        known = self.squares_on_the_way(i)
        if i < len(self.muon_groups):
            return self.muon_groups[i].squares(gradient, known)
        return sum_of_squares(gradient) if known is None else known

    @profiled("stage")
    def stage(self, gradients: Sequence[Tensor], verdict: Verdict) -> list[Staged]:
        """Move the momentum and turn Muon's gradients, in place, into updates, which are returned. A collective."""
        with self.failure.holding("stage"):
            # Nothing is captured in a step that the gradients forbid.
            self._capture.start_step(self.steps, verdict.may_move)
        staged, turns = [], []
        for i, (group, flags) in enumerate(zip(self.muon_groups, verdict.moves, strict=True)):
            flat = gradients[i] if gradients else torch.empty(0, dtype=torch.float32, device=self.device)
            staged.append(Staged(flat, flags, self.optimizer.row_variance(i)))
            of_group = self._stage_group(i, staged[i]) if gradients else iter(())
            turns.append(group.in_any_case(of_group, staged[i], self.failure))
        in_turns(turns)
        if self.ferry is not None:
            self.ferry.settle()
        return staged

    def _stage_group(self, i: int, staged: Staged) -> Iterator[None]:
        """Advance a group's momentum, turn its gradient into U, and U into updates; on the host batch by batch."""
        group, flat = self.muon_groups[i], staged.flat
        staged.moves = group.moves_here(flat, staged.flags.to(flat.device))
        if self.ferry is None:
            self.optimizer.advance_momentum_(i, flat, staged.moves)
        else:
            if staged.moves.flags.all():  # looked at here, so that the host need not at each element
                staged.moves = None
            advance = partial(self.optimizer.advance_momentum_, i, flat, staged.moves)
            staged.host = HostPart(flat, advance, self.ferry)
        yield from group.run_stage(staged)

    @profiled("decide")
    def decide(self, staged: Sequence[Staged], verdict: Verdict) -> Findings:
        """Decide with all ranks whether to commit; the host waits. A collective."""
        return self.guard.decide(verdict, (of_group.sizes() for of_group in staged))  # if they are asked for

    @profiled("commit")
    def commit(self, staged: Sequence[Staged], gradients: Sequence[Tensor], findings: Findings) -> None:
        """Apply what is staged to the fp32 weights, AdamW's state and NorMuon's variances.

        Args:
            staged: of each Muon group; overwritten.
            gradients: of each AdamW group. ``gradient_clipping`` scales them, in place, and never Muon's: see
                docs/how-it-works.md.
        """
        if (clip := self._adamw_clip(findings)) < 1:
            for gradient in gradients:
                gradient.mul_(clip)
        updates = [(of_group.moves, self.sent_up(i, of_group.updates())) for i, of_group in enumerate(staged)]
        with nullcontext() if self.ferry is None else self.ferry.together():
            self.optimizer.step(updates=updates, gradients=gradients)
        for of_group in staged:
            if of_group.rows is not None:
                of_group.rows.commit()

    def _adamw_clip(self, findings: Findings) -> float:
        if self.clip_grad <= 0:
            return 1.0
        everything = self.optimizer.config.clip_norm_scope == "all"
        norm = findings.norm if everything else findings.norm_of_adamw
        return min(1.0, float(self.clip_grad) / (norm + 1e-6))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        timer = self.timers(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()
