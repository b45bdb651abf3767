"""The ZeRO-1/2 wrapper: DeepSpeed's own partitioning and reduction, with a step that is all or nothing.

DeepSpeed steps one param group after another. Here a step has five phases, each over all groups: take the averaged
gradients, measure them, stage every update, decide, commit. Until the last, no weight, no AdamW state and no variance
has moved; the momentum has, unless the gradients forbid it.

The host waits for the device once, to decide: for the norms of the gradients and, with ``nan_guard``, for the byte that
says whether the updates are finite. Everything before it is queued without knowing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from torch import Tensor

from ds_muon.capture import NanCapture
from ds_muon.exchange import StraddlerExchange
from ds_muon.guard import CAPTURED, FINITE, NonFiniteUpdate, SkippedSteps, agree_on_updates, raise_together
from ds_muon.normuon import RowVariance
from ds_muon.optimizer import DSMuon
from ds_muon.orthogonalize import NewtonSchulz, batches, orthogonalize_batch
from ds_muon.partition import Matrix, Plan, flat_layout, make_plan
from ds_muon.refusals import SUPPORTED_DEEPSPEED
from ds_muon.update import update_scale
from ds_muon.verify.in_training import TrainingCheck


@dataclass(frozen=True)
class _Findings:
    """What the host learns of a step once everything is staged; the same on every rank.

    Attributes:
        squares: sum of squares of each group's gradient over all ranks.
        may_move: whether the gradients allow the step; the momentum has moved if so.
        updates: ``guard.FINITE``, ``NOT_FINITE`` or ``CAPTURED``; always the first without ``nan_guard``.
    """

    squares: list[float]
    may_move: bool
    updates: int

    @property
    def gradients_are_finite(self) -> bool:
        # A sum of squares in fp64 is finite exactly when every gradient of every rank is.
        return math.isfinite(sum(self.squares))

    @property
    def norm(self) -> float:
        return math.sqrt(sum(self.squares)) if self.gradients_are_finite else math.inf


class MuonZeroOptimizer(deepspeed_zero.DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer`` with DSMuon's step. Built by the engine, with the arguments of its base class.

    Attributes:
        plan: who holds, who owns and what moves, for the Muon groups (which are the first ones).
        training_check: of ``verify_every``.
        row_variances: of NorMuon, one per Muon group; None for plain Muon.
        spikes: steps skipped by ``grad_norm_skip_threshold``.
        bad_gradients: steps skipped for a gradient that is not finite, where no loss scaler is looking for one.
        bad_updates: steps skipped by ``nan_guard``.
    """

    def __init__(self, init_optimizer: DSMuon, param_names: dict[Tensor, str], *args: Any, **kwargs: Any) -> None:
        super().__init__(init_optimizer, param_names, *args, **kwargs)
        config = init_optimizer.config
        self.newton_schulz = NewtonSchulz.resolve(
            torch.device(self.device),
            ns_steps=config.ns_steps,
            ns_method=config.ns_method,
            ns_coefficients=config.ns_coefficients,
            ns_dtype=config.ns_dtype,
            ns_eps=config.ns_eps,
            ns_backend=config.ns_backend,
        )
        self.spikes = SkippedSteps("spikes")
        self.bad_gradients = SkippedSteps("non-finite gradients")
        self.bad_updates = SkippedSteps("non-finite updates")
        self._steps = 0
        self._rank = dist.get_rank(self.dp_process_group)
        self._capture = NanCapture(self._rank)
        self.plan = self._make_plan()
        self._exchanges = [StraddlerExchange(group, self._rank, self.dp_process_group) for group in self.plan.groups]
        self._held = [group.held(self._rank) for group in self.plan.groups]
        self.row_variances = self._make_row_variances()
        self._lazy_init_hp_params_optimizer_state()
        self.training_check = TrainingCheck(self, config.verify_every)

    # ---- construction -------------------------------------------------------------------------------------------

    def initialize_optimizer_states(self) -> None:
        self.optimizer.init_state([sum(p.shape[0] for p in self.bit16_groups[i]) for i in self._muon_groups()])

    def destroy(self) -> None:
        for skipped in (self.spikes, self.bad_gradients, self.bad_updates):
            skipped.close()
        super().destroy()

    def _muon_groups(self) -> list[int]:
        """The first ones."""
        return [i for i, group in enumerate(self.optimizer.param_groups) if group["use_muon"]]

    def _shapes(self, group_index: int) -> list[tuple[str, tuple[int, int]]]:
        """Name and shape of a Muon group's matrices, in the group's order."""
        return [(self.param_names[p], tuple(p.shape)) for p in self.bit16_groups[group_index]]

    def _make_row_variances(self) -> list[RowVariance | None]:
        variances = [self.optimizer.row_variance(i) for i in self._muon_groups()]
        return [
            None if v is None else RowVariance(v, self._shapes(i), self.optimizer.config.beta2, self.dp_process_group)
            for i, v in enumerate(variances)
        ]

    def _make_plan(self) -> Plan:
        muon_groups = self._muon_groups()
        world_size = dist.get_world_size(self.dp_process_group)
        layouts = []
        for i in muon_groups:
            params = self.bit16_groups[i]
            layout = flat_layout(
                [p.numel() for p in params],
                world_size,
                element_size=params[0].element_size(),
                parameter_alignment=self.parameter_alignment,
                round_robin=self.round_robin_gradients,
            )
            flat_order = zip(self.round_robin_bit16_groups[i], layout.order, strict=True)
            if (
                any(p is not params[k] for p, k in flat_order)
                or tuple(self.round_robin_bit16_offsets[i]) != layout.offsets
                or self.partition_size[i] != layout.partition_size
            ):
                raise RuntimeError(
                    f"this DeepSpeed ({deepspeed_zero.version}) lays out param group {i} otherwise than ds_muon "
                    f"expects; install deepspeed {SUPPORTED_DEEPSPEED}"
                )
            layouts.append(layout)
        return make_plan([self._shapes(i) for i in muon_groups], layouts, world_size, self.newton_schulz.cost)

    # ---- gradients, as DeepSpeed's reduction leaves them --------------------------------------------------------

    def get_flat_partition(
        self,
        tensor_list: list[Tensor],
        first_offset: int,
        partition_size: int,
        dtype: torch.dtype,
        device: torch.device,
        param_group_idx: int,
        return_tensor_list: bool = False,
    ) -> Any:
        """This rank's fragments of the averaged gradients, in flat order, gaps filled with zeros.

        DeepSpeed's method of this name also runs its own Muon on parameters tagged ``use_muon``; this one never does.
        """
        starts = self.grad_start_offset[param_group_idx][self._partition_id(param_group_idx)]
        targets = self.grad_partition_insertion_offset[param_group_idx][self._partition_id(param_group_idx)]
        fragments: list[Tensor] = []
        filled = 0

        def pad(until: int) -> None:
            if until > filled:
                padding = torch.zeros(until - filled, dtype=dtype, device=device)
                padding._zero_padding = True  # type: ignore[attr-defined]  # DeepSpeed's mark: no parameter's gradient
                fragments.append(padding)

        for param, gradient in zip(tensor_list, self.all_grad_tensors[param_group_idx], strict=True):
            start, target = starts[self.get_param_id(param)], targets[self.get_param_id(param)]
            numel = min(param.numel() - start, partition_size - target)
            pad(target)
            whole = numel == param.numel()
            fragments.append(gradient if whole else gradient.reshape(-1).narrow(0, start, numel))
            filled = target + numel
        pad(partition_size)
        return fragments if return_tensor_list else self.flatten(fragments)

    def _partition_id(self, group_index: int) -> int:
        return dist.get_rank(self.real_dp_process_group[group_index])

    def _is_muon_group(self, tensor_list: list[Tensor]) -> bool:
        """Never DeepSpeed's own Muon, whatever tags the parameters carry."""
        return False

    def _take_gradient(self, group_index: int) -> Tensor:
        """The averaged, unscaled gradient of this rank's partition: (partition_size,) fp32, free to be overwritten.

        Frees what DeepSpeed kept of it.
        """
        fragments = self.averaged_gradients[group_index]
        gradient = getattr(fragments, "flat_partition", None)
        if gradient is None:
            gradient = torch.empty(self.partition_size[group_index], dtype=torch.float32, device=self.device)
            torch.cat([fragment.reshape(-1) for fragment in fragments], out=gradient)
        self._release_preflattened_grad_buffers(group_index)
        self.averaged_gradients[group_index] = None
        self.all_grad_tensors[group_index] = None
        self.free_grad_in_param_list(self.bit16_groups[group_index])
        return gradient if self.loss_scale == 1 else gradient.mul_(1 / self.loss_scale)

    # ---- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One optimizer step over all groups, or none: see the module's docstring.

        ``self.overflow`` says afterwards that no weight moved; the engine then counts a skipped step and holds the
        learning rate schedule.

        Raises:
            NonFiniteUpdate: on every rank, where ``nan_guard`` is "raise" and an update is not finite, or where it is
                not "off" and the capture has saved an input. On the rank that saved it alone where it is "off".
        """
        with self.training_check.around_step():
            self._step_all_groups()
        self.timers.log(deepspeed_zero.OPTIMIZER_TIMERS)

    def _step_all_groups(self) -> None:
        self.micro_step_id = deepspeed_zero.INITIAL_MICRO_STEP_ID
        self._steps += 1
        with self._timed(deepspeed_zero.OPTIMIZER_GRADIENTS_TIMER):
            gradients = [self._take_gradient(i) for i in range(len(self.bit16_groups))]
            squares = self._squared_norms(gradients)
            may_move = self._may_move(squares)
        with self._timed(deepspeed_zero.OPTIMIZER_STEP_TIMER):
            self._stage(gradients, may_move)
            findings = self._wait_for_findings(gradients, squares, may_move)
            # Neither a spike nor a bad kernel says anything of the loss scale.
            self._update_scale(not findings.gradients_are_finite)
            self._global_grad_norm: float | None = findings.norm if self.compute_grad_norm else None
            self.overflow = not findings.may_move or findings.updates != FINITE
            if self.overflow:
                self._say_why(findings, gradients)
                return
            self._clip_adamw_(gradients, findings.squares)
            self._commit(gradients)
        with self._timed(deepspeed_zero.OPTIMIZER_ALLGATHER_TIMER):
            self.update_lp_params()

    def _squared_norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Sum of squares of each group's gradient over all ranks: (groups,) fp64 on the device."""
        squares = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in gradients])
        dist.all_reduce(squares, group=self.dp_process_group)
        return squares

    def _may_move(self, squares: Tensor) -> Tensor:
        """Whether the gradients are finite and AdamW's no spike: a bool scalar on the device, the same on every rank.

        Muon's gradients do no harm, however large they are.
        """
        may_move = squares.sum().isfinite()
        threshold, first_of_adamw = self.optimizer.config.grad_norm_skip_threshold, len(self._muon_groups())
        if threshold is not None:
            may_move &= squares[first_of_adamw:].sum().sqrt() <= threshold
        return may_move

    def _stage(self, gradients: Sequence[Tensor], may_move: Tensor) -> None:
        """Turn every Muon gradient, in place, into what ``DSMuon.step`` applies; AdamW's is that already."""
        self._capture.start_step(self._steps)
        for i in self._muon_groups():
            self.optimizer.advance_momentum_(i, gradients[i], may_move)
            self._orthogonalize_partition_(i, gradients[i])

    def _wait_for_findings(self, gradients: Sequence[Tensor], squares: Tensor, may_move: Tensor) -> _Findings:
        """Agree with all ranks on what was staged, and wait for the device."""
        known = [squares, may_move.double().view(1)]
        if self.optimizer.config.nan_guard != "off":
            updates = [gradients[i] for i in self._muon_groups()]
            known.append(agree_on_updates(updates, self._capture.stops_training, self.dp_process_group).double())
        elif self._capture.stops_training:
            why = f"an update is not finite in step {self._steps}, and nan_guard is off: rank {self._rank} stops alone"
            raise NonFiniteUpdate(_why_stopped(why, self._capture.saved))
        groups = len(gradients)
        values = torch.cat(known).tolist()
        return _Findings(values[:groups], bool(values[groups]), int(sum(values[groups + 1 :], FINITE)))

    def _say_why(self, findings: _Findings, gradients: Sequence[Tensor]) -> None:
        """Warn that the step is skipped, or raise. The same on every rank."""
        config, groups = self.optimizer.config, self.optimizer.param_groups
        if not findings.gradients_are_finite:
            bad = [g["name"] for g, square in zip(groups, findings.squares, strict=True) if not math.isfinite(square)]
            if not self.dynamic_loss_scale:  # the scaler looks for these, and reports them itself
                self.bad_gradients.warn(f"a gradient is not finite, in param group {', '.join(bad)}")
        elif not findings.may_move:
            norm, threshold = self._norm(findings.squares, of_muon=False), config.grad_norm_skip_threshold
            self.spikes.warn(f"the norm of AdamW's gradients is {norm:.4g}, grad_norm_skip_threshold {threshold:g}")
        else:
            why, files = self._describe_bad_updates(gradients)
            if findings.updates == CAPTURED or config.nan_guard == "raise":
                raise NonFiniteUpdate(_why_stopped(why, files))
            self.bad_updates.warn(why)

    def _describe_bad_updates(self, gradients: Sequence[Tensor]) -> tuple[str, list[Path]]:
        """What all ranks found not to be finite, and the files they saved. A collective; blocks the host."""
        found = [
            matrix.name
            for i in self._muon_groups()
            for matrix, piece in self._held[i]
            if not gradients[i].narrow(0, piece.offset, piece.numel).isfinite().all()
        ]
        everywhere: list[tuple[list[str], list[Path]]] = [([], []) for _ in self.plan.loads]
        dist.all_gather_object(everywhere, (found, self._capture.saved), group=self.dp_process_group)
        files = [path for _, saved in everywhere for path in saved]
        names = {name for found, _ in everywhere for name in found}
        bad = [matrix for matrix in self.plan.matrices if matrix.name in names]
        first, settings = bad[0], self.newton_schulz
        others = f", nor are those of {len(bad) - 1} more" if len(bad) > 1 else ""
        why = (
            f"the update of {first.name} ({first.rows} x {first.cols}) is not finite in step {self._steps}{others}: "
            f"Newton-Schulz on rank {first.owner}, {settings.backend} backend, "
            f"{str(settings.dtype).removeprefix('torch.')}, {settings.form(first.rows, first.cols)} form"
        )
        return why, files

    def _clip_adamw_(self, gradients: Sequence[Tensor], squares: Sequence[float]) -> None:
        """``gradient_clipping`` for AdamW gradients, in place. Muon's are never clipped: see the README."""
        clip = self._adamw_clip(squares)
        if clip < 1:
            for gradient in gradients[len(self._muon_groups()) :]:
                gradient.mul_(clip)

    def _adamw_clip(self, squares: Sequence[float]) -> float:
        if self.clip_grad <= 0:
            return 1.0
        everything = self.optimizer.config.clip_norm_scope == "all"
        return min(1.0, float(self.clip_grad) / (self._norm(squares, of_muon=everything) + 1e-6))

    def _norm(self, squares: Sequence[float], *, of_muon: bool) -> float:
        """Of AdamW's gradients, or of all."""
        return math.sqrt(sum(squares if of_muon else squares[len(self._muon_groups()) :]))

    def _orthogonalize_partition_(self, group_index: int, partition: Tensor) -> None:
        """Overwrite U with ``s O`` on this rank's partition of a Muon group; padding stays zero. A collective.

        With NorMuon, O's rows are normalized, and their new variances staged.
        """
        exchange, variance = self._exchanges[group_index], self.row_variances[group_index]
        pieces = [(matrix, partition.narrow(0, piece.offset, piece.numel)) for matrix, piece in self._held[group_index]]
        whole = [(matrix, piece.view(matrix.rows, matrix.cols)) for matrix, piece in pieces if not matrix.straddles]
        inputs = whole + list(zip(exchange.owned, exchange.gather(partition), strict=True))
        straddling: dict[int, Tensor] = {}
        if variance is not None:
            variance.clear()
        for indices in batches([u for _, u in inputs], self.newton_schulz):
            orthogonal = self._orthogonalize([inputs[i] for i in indices])
            names = [inputs[i][0].name for i in indices]
            factors: Iterable[Tensor | None] = repeat(None) if variance is None else variance.factors(names, orthogonal)
            for index, output, factor in zip(indices, orthogonal, factors, strict=False):
                u = inputs[index][1]
                if factor is not None:
                    output = torch.mul(output, factor, out=u)
                elif index < len(whole):
                    u.copy_(output)
                if index >= len(whole):
                    straddling[index] = output
        dtype = self.newton_schulz.dtype if variance is None else torch.float32
        exchange.scatter([output for _, output in sorted(straddling.items())], partition, dtype)
        if variance is not None:
            variance.agree()
        for matrix, piece in pieces:
            scale = update_scale(self.optimizer.config.adjust_lr_fn, matrix.rows, matrix.cols)
            if scale != 1:
                piece.mul_(scale)

    def _orthogonalize(self, batch: Sequence[tuple[Matrix, Tensor]]) -> Tensor:
        """(batch, rows, cols); saves the inputs of what is not finite, if the capture is on."""
        inputs = [matrix for _, matrix in batch]
        kept = self._capture.keep(inputs)
        outputs = orthogonalize_batch(inputs, self.newton_schulz)
        self._capture.save_nonfinite([matrix.name for matrix, _ in batch], kept, outputs, self.newton_schulz)
        return outputs

    def _commit(self, gradients: Sequence[Tensor]) -> None:
        """Apply all staged updates to the fp32 weights, AdamW's state and NorMuon's variances."""
        for flat, gradient in zip(self.single_partition_of_fp32_groups, gradients, strict=True):
            flat.grad = gradient
        self.optimizer.step()
        for flat in self.single_partition_of_fp32_groups:
            flat.grad = None
        for variance in self.row_variances:
            if variance is not None:
                variance.commit()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        timer = self.timers(name)
        timer.start()
        yield
        timer.stop()

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def load_state_dict(
        self,
        state_dict_list: list[dict[str, Any]],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: str | None = None,
        load_serial: Any = None,
        param_shapes: Any = None,
    ) -> None:
        """Load this rank's shard of a checkpoint saved at the same world size.

        Raises:
            NotImplementedError: a universal checkpoint.
            ValueError: the checkpoint was cut otherwise: other routing, grouping or order of parameters. Ranks that
                do not see it themselves raise a RuntimeError that quotes one that does.
        """
        if checkpoint_folder is not None:
            raise NotImplementedError(
                "checkpoint.load_universal = true: DSMuon cannot load universal checkpoints in this version; "
                "load a regular checkpoint at the world size that saved it"
            )
        if load_optimizer_states or load_from_fp32_weights:
            raise_together(self._layout_error(state_dict_list[self._rank]), self.dp_process_group)
        super().load_state_dict(
            state_dict_list, load_optimizer_states, load_from_fp32_weights, None, load_serial, param_shapes
        )
        # DeepSpeed has made new links from parameters to fp32 weights, without the optimizer's state.
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()

    def _layout_error(self, shard: dict[str, Any]) -> ValueError | None:
        saved, ours = shard[deepspeed_zero.PARAM_SLICE_MAPPINGS], self._param_slice_mappings
        if saved == ours:
            return None
        names_saved = {name: i for i, group in enumerate(saved) for name in group}
        names_ours = {name: i for i, group in enumerate(ours) for name in group}
        moved = [n for n in {**names_saved, **names_ours} if names_saved.get(n) != names_ours.get(n)]
        example = f"{moved[0]!r} is in another param group" if moved else "the same parameters lie in another order"
        return ValueError(
            f"this checkpoint does not fit the optimizer: {example}. Use the model, param groups, muon_params and "
            "adamw_params it was saved with, or load_checkpoint(load_module_only=True)"
        )


def _why_stopped(why: str, files: Sequence[Path]) -> str:
    if files:
        evidence = f"the input is saved: ds-muon replay {' '.join(map(str, files))}"
        remedy = 'DS_MUON_NAN_CAPTURE_RAISE=0 and nan_guard "skip" go on without such steps'
    else:
        evidence = "DS_MUON_NAN_CAPTURE=1 saves such inputs for ds-muon replay"
        remedy = 'nan_guard "skip" goes on without such steps'
    return f"{why}. Nothing was applied; {evidence}. {remedy}"
