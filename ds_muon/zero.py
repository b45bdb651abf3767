"""The ZeRO-1/2 wrapper: DeepSpeed's own partitioning and reduction, with a step that is all or nothing.

DeepSpeed steps one param group after another. Here a step has four phases, each over all groups: take the averaged
gradients, measure them, stage every update, commit. Until the last, no weight and no AdamW state has moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from torch import Tensor

from ds_muon.exchange import StraddlerExchange
from ds_muon.guard import SkippedSteps, raise_together
from ds_muon.optimizer import DSMuon
from ds_muon.orthogonalize import NewtonSchulz, orthogonalize
from ds_muon.partition import Plan, flat_layout, make_plan
from ds_muon.refusals import SUPPORTED_DEEPSPEED
from ds_muon.update import update_scale
from ds_muon.verify.in_training import TrainingCheck


class MuonZeroOptimizer(deepspeed_zero.DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer`` with DSMuon's step. Built by the engine, with the arguments of its base class.

    Attributes:
        plan: who holds, who owns and what moves, for the Muon groups (which are the first ones).
        training_check: of ``verify_every``.
        spikes: steps skipped by ``grad_norm_skip_threshold``.
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
        )
        self.spikes = SkippedSteps()
        self._rank = dist.get_rank(self.dp_process_group)
        self.plan = self._make_plan()
        self._exchanges = [StraddlerExchange(group, self._rank, self.dp_process_group) for group in self.plan.groups]
        self._held = [group.held(self._rank) for group in self.plan.groups]
        self._lazy_init_hp_params_optimizer_state()
        self.training_check = TrainingCheck(self, config.verify_every)

    # ---- construction -------------------------------------------------------------------------------------------

    def initialize_optimizer_states(self) -> None:
        self.optimizer.init_state()

    def _make_plan(self) -> Plan:
        muon_groups = [i for i, group in enumerate(self.optimizer.param_groups) if group["use_muon"]]
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
        shapes = [[(self.param_names[p], tuple(p.shape)) for p in self.bit16_groups[i]] for i in muon_groups]
        return make_plan(shapes, layouts, world_size, self.newton_schulz.cost)

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

        ``self.overflow`` says afterwards that nothing moved; the engine then counts a skipped step and holds the
        learning rate schedule. The host waits for the device once, for the norms.
        """
        with self.training_check.around_step():
            self._step_all_groups()
        self.timers.log(deepspeed_zero.OPTIMIZER_TIMERS)

    def _step_all_groups(self) -> None:
        self.micro_step_id = deepspeed_zero.INITIAL_MICRO_STEP_ID
        with self._timed(deepspeed_zero.OPTIMIZER_GRADIENTS_TIMER):
            gradients = [self._take_gradient(i) for i in range(len(self.bit16_groups))]
            squares = self._squared_norms(gradients)
        # A sum of squares in fp64 is finite exactly when every gradient of every rank is.
        is_finite = math.isfinite(sum(squares))
        # A spike says nothing of the loss scale.
        self._update_scale(not is_finite)
        self.overflow = not is_finite or self._is_spike(squares)
        norm = math.sqrt(sum(squares)) if is_finite else math.inf
        self._global_grad_norm: float | None = norm if self.compute_grad_norm else None
        if not self.overflow:
            with self._timed(deepspeed_zero.OPTIMIZER_STEP_TIMER):
                self._stage(gradients, squares)
                self._commit(gradients)
            with self._timed(deepspeed_zero.OPTIMIZER_ALLGATHER_TIMER):
                self.update_lp_params()

    def _squared_norms(self, gradients: Sequence[Tensor]) -> list[float]:
        """Sum of squares of each group's gradient over all ranks, in fp64."""
        squares = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in gradients])
        dist.all_reduce(squares, group=self.dp_process_group)
        return [float(square) for square in squares.tolist()]

    def _is_spike(self, squares: Sequence[float]) -> bool:
        """Whether AdamW's gradients exceed ``grad_norm_skip_threshold``. Muon's do no harm, however large they are."""
        threshold = self.optimizer.config.grad_norm_skip_threshold
        groups = zip(self.optimizer.param_groups, squares, strict=True)
        norm = math.sqrt(sum(square for group, square in groups if not group["use_muon"]))
        if threshold is None or norm <= threshold:
            return False
        self.spikes.warn(f"the norm of AdamW's gradients is {norm:.4g}, grad_norm_skip_threshold {threshold:g}")
        return True

    def _stage(self, gradients: Sequence[Tensor], squares: Sequence[float]) -> None:
        """Turn every gradient, in place, into what ``DSMuon.step`` applies."""
        clip = self._adamw_clip(squares)
        for i, (group, gradient) in enumerate(zip(self.optimizer.param_groups, gradients, strict=True)):
            if group["use_muon"]:
                self.optimizer.advance_momentum_(i, gradient)
                self._orthogonalize_partition_(i, gradient)
            elif clip < 1:
                gradient.mul_(clip)

    def _adamw_clip(self, squares: Sequence[float]) -> float:
        """The factor of ``gradient_clipping`` for AdamW gradients. Muon's are never clipped: see the README."""
        if self.clip_grad <= 0:
            return 1.0
        everything = self.optimizer.config.clip_norm_scope == "all"
        groups = zip(self.optimizer.param_groups, squares, strict=True)
        norm = math.sqrt(sum(square for group, square in groups if everything or not group["use_muon"]))
        return min(1.0, float(self.clip_grad) / (norm + 1e-6))

    def _orthogonalize_partition_(self, group_index: int, partition: Tensor) -> None:
        """Overwrite U with ``s O`` on this rank's partition of a Muon group; padding stays zero. A collective."""
        exchange = self._exchanges[group_index]
        held = [(matrix, partition.narrow(0, s.offset, s.numel)) for matrix, s in self._held[group_index]]
        whole = [piece.view(matrix.rows, matrix.cols) for matrix, piece in held if not matrix.straddles]
        outputs = orthogonalize([*whole, *exchange.gather(partition)], self.newton_schulz)
        for piece, output in zip(whole, outputs[: len(whole)], strict=True):
            piece.copy_(output)
        exchange.scatter(outputs[len(whole) :], partition, self.newton_schulz.dtype)
        for matrix, piece in held:
            scale = update_scale(self.optimizer.config.adjust_lr_fn, matrix.rows, matrix.cols)
            if scale != 1:
                piece.mul_(scale)

    def _commit(self, gradients: Sequence[Tensor]) -> None:
        """Apply all staged updates to the fp32 weights and AdamW's state."""
        for flat, gradient in zip(self.single_partition_of_fp32_groups, gradients, strict=True):
            flat.grad = gradient
        self.optimizer.step()
        for flat in self.single_partition_of_fp32_groups:
            flat.grad = None

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
