"""DeepSpeed's ZeRO-1/2 optimizer around DSMuon's step: gradients, weights and checkpoints, without its own Muon."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import LOSS_SCALER
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from torch import Tensor

from ds_muon.checkpoints.check import Found
from ds_muon.checkpoints.shards import CUT_STATE, LAYOUT, SHARD, Save, description, layout
from ds_muon.failure import Failure
from ds_muon.layout import outputs
from ds_muon.passes import LARGEST_IN_LIST
from ds_muon.progress import Progress
from ds_muon.refusals import NO_GRADIENTS, DSMuonRefusal
from ds_muon.zero_offload import OffloadZero


class MuonZeroBase(OffloadZero):
    """``DeepSpeedZeroOptimizer`` whose own Muon never runs, and whose state loads at any number of ranks.

    Attributes:
        failure: what has failed in this rank's part of a step.
        save: the ``save_checkpoint`` under way, which shards name. ``registration`` sets it; else None.
        interrupted: why no step is right any more, after a backward pass that has raised; else None.
    """

    save: Save | None = None
    interrupted: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failure = Failure(self.dp_process_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: see ``DSMuon.add_param_group``."""
        self.optimizer.add_param_group(param_group)

    def shapes(self, group_index: int) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each tensor of a Muon group, in the group's order."""
        return [(self.param_names[p], tuple(p.shape)) for p in self.bit16_groups[group_index]]

    def initialize_optimizer_states(self) -> None:
        """Allocate all state: see ``DSMuon.init_state``."""
        if self.cpu_offload:
            super().initialize_optimizer_states()  # makes the gradients' place on the host
        muon = [i for i, group in enumerate(self.optimizer.param_groups) if group["use_muon"]]
        self.optimizer.init_state([sum(self._rows(i)) for i in muon], self.accelerator)

    def _rows(self, group_index: int) -> list[int]:
        """Rows (outputs) of each tensor of a Muon group, in the group's order."""
        stored, pieces = self.optimizer.routing.layouts(), self.optimizer.routing.pieces()
        return [outputs(pieces[name], stored[name]) for name, _ in self.shapes(group_index)]

    # ---- gradients, as DeepSpeed's reduction leaves them --------------------------------------------------------

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """DeepSpeed's own, refused without gradients. At ZeRO-1 ``engine.step`` calls it if the script accumulates."""
        self._refuse_without_backward()
        super().reduce_gradients(pipeline_parallel=pipeline_parallel)

    def finalize_gradient_accumulation_boundary(self) -> None:
        """As ``reduce_gradients``, at ZeRO-2."""
        self._refuse_without_backward()
        super().finalize_gradient_accumulation_boundary()

    @property
    def has_no_gradients(self) -> bool:
        """Whether no backward pass has been since the last step. At ZeRO-1, also if it has only added to ``.grad``."""
        # Hooks of the parameters count it up; the step sets it back.
        return bool(self.micro_step_id == deepspeed_zero.INITIAL_MICRO_STEP_ID)

    def _refuse_without_backward(self) -> None:
        if self.has_no_gradients and all(
            self.get_gradient_for_reduction(p) is None for group in self.bit16_groups for p in group
        ):
            raise DSMuonRefusal(NO_GRADIENTS)

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
        """This rank's fragments of the averaged gradients, in flat order, with zeros in the gaps.

        DeepSpeed's method of this name also runs its own Muon on parameters tagged ``use_muon``. This one never does.
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
        """False: DeepSpeed's own Muon never runs, whatever tags the parameters carry."""
        return False

    def _take_gradient(self, group_index: int) -> Tensor:
        """A group's gradient, unscaled: (partition_size,) fp32. Releases DeepSpeed's own."""
        fragments = self.averaged_gradients[group_index]
        gradient = getattr(fragments, "flat_partition", None)
        if self.cpu_offload:
            gradient = self.gradient_on_host(group_index)
        elif gradient is None:
            gradient = torch.empty(self.partition_size[group_index], dtype=torch.float32, device=self.device)
            pieces = [fragment.reshape(-1) for fragment in fragments]
            if gradient.numel() > LARGEST_IN_LIST:
                pieces = [part for piece in pieces for part in torch.split(piece, LARGEST_IN_LIST)]
            # torch.cat takes twice as long where it converts: 1.16 ms, not 0.56, for 72 of 2048 x 2048 in bf16 on H200.
            torch._foreach_copy_(torch.split(gradient, [piece.numel() for piece in pieces]), pieces)
        self._release_gradient(group_index)
        return gradient if self.loss_scale == 1 else gradient.mul_(1 / self.loss_scale)

    def _release_gradients(self) -> None:
        """Forget DeepSpeed's own gradients, to which the next step would add."""
        self.micro_step_id = deepspeed_zero.INITIAL_MICRO_STEP_ID
        self._arrived.clear()
        for i in range(len(self.bit16_groups)):
            self._release_gradient(i)

    def _release_gradient(self, group_index: int) -> None:
        self._release_preflattened_grad_buffers(group_index)
        if self.cpu_offload and self._use_compact_grad_partition_buffer(group_index):
            self._show(group_index, None)
        self.averaged_gradients[group_index] = None
        self.all_grad_tensors[group_index] = None
        self.free_grad_in_param_list(self.bit16_groups[group_index])

    # ---- the model's weights --------------------------------------------------------------------------------------

    def update_lp_params(self, phase: str = "commit") -> None:
        """Round, gather and bind the model's weights. A collective: a rank that fails gathers, because the others wait.

        Args:
            phase: what it is part of.
        """
        with self.failure.holding(phase):
            self.round_weights()
        deepspeed_zero.all_gather_dp_groups(
            groups_flat=self.bit16_groups_flat,
            partitioned_param_groups=self.parallel_partitioned_bit16_groups,
            dp_process_group=self.real_dp_process_group,
            start_alignment_factor=self.nccl_start_alignment_factor,
            allgather_bucket_size=self.allgather_bucket_size,
        )
        with self.failure.holding(phase):
            self._bind_model()

    def _bind_model(self, *, keep: bool = False) -> None:
        """Make every parameter a view of the flat 16-bit weights again, if a script has given it other storage.

        ``p.data = ...``, ``module.float()``, ``module.cpu()`` and an RNN's ``flatten_parameters`` do that. Looking at
        a parameter costs the host two microseconds.

        Args:
            keep: whether such a parameter's values survive; else it gets those of the flat weights.
        """
        groups = (self.bit16_groups_flat, self.round_robin_bit16_groups, self.round_robin_bit16_offsets)
        for flat, params, offsets, metas in zip(*groups, self.round_robin_bit16_meta, strict=True):
            start, size = flat.data_ptr(), flat.element_size()
            for p, offset, meta in zip(params, offsets, metas, strict=True):
                if (
                    p.data_ptr() != start + size * offset
                    or p.dtype != flat.dtype
                    or p.shape != meta.shape
                    or not p.is_contiguous()
                ):
                    weight = flat.narrow(0, offset, meta.numel()).view(meta.shape)
                    if keep:
                        weight.copy_(p.data)
                    p.data = weight

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's own, with the ``layout`` and a ``description`` of what lies in it.

        Raises:
            RuntimeError: a rank has failed while it committed a step, or loaded, and has not loaded since.
        """
        self.failure.refuse_to_save()
        state: dict[str, Any] = super().state_dict()
        return {**state, LAYOUT: layout(self), SHARD: description(self, self.save)}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Refused: ``engine.load_checkpoint`` loads through ``load_found``."""
        raise NotImplementedError(
            "DSMuon's ZeRO optimizer loads no state dict; use engine.load_checkpoint, which reads from all shards what "
            "this rank will hold"
        )

    @torch.no_grad()
    def load_found(self, found: Found, *, from_fp32_weights: bool) -> None:
        """Load this rank's partitions, and what is the same on every rank, from the shards of any number of ranks.

        Modifies fp32 weights, state, rates, settings and the loss scaler, in place. The engine has loaded the model's
        weights before; they stay, unless they were saved in another dtype: then they are the fp32 ones rounded, and the
        loss scaler stays. A collective.

        Args:
            found: from ``check_before_loading``.
            from_fp32_weights: whether to load the fp32 weights; else they are made from the weights that the model has.

        Raises:
            Exception: a rank could not read what it will hold. The others raise a ``RuntimeError`` that quotes it.
        """
        self.failure.clear()
        self._sent.clear()  # in a commit that has failed
        self._wait_for_offload_copies()
        with self.failure.holding("load_checkpoint"):
            self._read(found, from_fp32_weights)
        if from_fp32_weights and not found.is_of_dtype(self.bit16_groups_flat[0].dtype):
            # The engine has loaded weights that were rounded to another dtype.
            self.update_lp_params("load_checkpoint")
        with self.failure.holding("load_checkpoint"):
            if from_fp32_weights:
                self._bind_model(keep=True)
            else:
                self._restore_from_bit16_weights()
            self._link_all_hp_params()
            self._link_optimizer_state()
        self.failure.raise_on_all()
        self.failure.settle()

    def _read(self, found: Found, from_fp32_weights: bool) -> None:
        same_dtype = found.is_of_dtype(self.bit16_groups_flat[0].dtype)
        scaler = (LOSS_SCALER, "dynamic_loss_scale")
        self._load_global_state({k: v for k, v in found.whole.items() if same_dtype or k not in scaler})
        self.optimizer.load_groups(found.groups)
        states = [self.optimizer.state[p] for group in self.optimizer.param_groups for p in group["params"]]
        weights = self.single_partition_of_fp32_groups
        targets = [{key: tensor for key, tensor in state.items() if key in CUT_STATE} for state in states]
        size = [sum(t.element_size() for t in of.values()) + 4 * from_fp32_weights for of in targets]
        progress = Progress("load_checkpoint: rank 0 has read", sum(size[s.group] * s.numel for s in found.stretches))
        for stretch in found.stretches:
            here = slice(stretch.offset, stretch.offset + stretch.numel)
            if from_fp32_weights:
                weights[stretch.group][here].copy_(found.weights(stretch))
            for key, target in targets[stretch.group].items():
                target[here].copy_(found.state(stretch, key))
            progress.add(size[stretch.group] * stretch.numel)
        for state, source in zip(states, found.sources, strict=True):
            if "step" in state:
                state["step"].copy_(found.whole_state(source, "step"))
        for i in range(len(states)):
            if (variance := self.optimizer.row_variance(i)) is not None:
                of_tensors = torch.split(variance.view(-1), self._rows(i))
                for (name, _), of_tensor in zip(self.shapes(i), of_tensors, strict=True):
                    of_tensor.copy_(found.row_variance(name))

    def _restore_from_bit16_weights(self) -> None:
        """DeepSpeed's own, from the weights that the model holds, wherever a script has put them."""
        self._bind_model(keep=True)
        super()._restore_from_bit16_weights()

    def reload_states(self, non_blocking: bool = False) -> None:
        """DeepSpeed's own, then new links, so that ``safe_get_full_optimizer_state`` reads the state in use."""
        super().reload_states(non_blocking)
        self._link_optimizer_state()

    def _link_optimizer_state(self) -> None:
        # DeepSpeed has linked the parameters anew, without the optimizer's state, or has put that state elsewhere.
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()
