"""DeepSpeed's ZeRO-1/2 optimizer with CPU offload: gradients on their way to the host, and what else is at home there.

Without offload everything here is DeepSpeed's own.
"""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor

from ds_muon.passes import compile_for_host
from ds_muon.say import log

# Elements of the weights that the host rounds at a time, so that they stay in its caches, and sends on their way.
_AT_A_TIME = 1 << 22


class OffloadZero(deepspeed_zero.DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer`` whose offloaded gradients are those of a run without offload, bit for bit.

    The averaged gradients come down while the backward pass runs, each into its slice of ``.grad`` of the group's fp32
    weights, which exists all the time. Over several micro-batches that slice holds their sum, and goes up to be added
    to. DeepSpeed's own way keeps whole parameters on every rank for that, adds what a parameter had in the step before
    if it takes no part in the first micro-batch, leaves the gradient of the step before where there is none, and asks
    the accelerator about every parameter whether it overflows, which ``measure`` finds for all at once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._arrived: set[int] = set()
        """Parameters with a gradient in this step, in what this rank holds."""
        self._sent: dict[int, int] = {}
        """How many of a group's weights are on their way up in this step."""
        super().__init__(*args, **kwargs)
        if self.cpu_offload:
            self.optimizer.on_host = compile_for_host()
            if torch.get_num_threads() == 1 < len(os.sched_getaffinity(0)):
                log("CPU offload has one thread of the host; set OMP_NUM_THREADS to the cores that a rank has")
            # As large as the largest parameter, and of no use here.
            self.temp_grad_buffer_for_gpu_offload = self.temp_grad_buffer_for_cpu_offload = None

    def gradient_on_host(self, group_index: int) -> Tensor:
        """The place of a group's gradients with CPU offload: (partition_size,) fp32."""
        gradient: Tensor = self.single_partition_of_fp32_groups[group_index].grad
        return gradient

    def get_grad_position(
        self, group_id: int, tensor_list: list[Tensor], first_offset: int, partition_size: int
    ) -> None:
        """DeepSpeed's own, also for parameters without elements."""
        super().get_grad_position(group_id, [p for p in tensor_list if p.numel()], first_offset, partition_size)
        self.grad_position.update({self.get_param_id(p): [group_id, 0, 0, 0] for p in tensor_list if not p.numel()})

    def copy_grads_in_partition(self, param: Tensor, group_idx: int | None = None) -> None:
        """With offload, start to bring down what this rank holds of an averaged gradient, and release the gradient."""
        if not self.cpu_offload:
            super().copy_grads_in_partition(param, group_idx)
            return
        group_index = self._get_param_group_idx(param) if group_idx is None else group_idx
        # Sums in fp32 of a model in half precision stay in a buffer of DeepSpeed's until all have come.
        if not self._use_compact_grad_partition_buffer(group_index):
            self._bring_down(param, group_index)
        self.clear_grad_attribute(param)

    def _bring_down(self, param: Tensor, group_index: int) -> None:
        number = self.get_param_id(param)
        _, start, offset, numel = self.grad_position[number]
        gradient = self.get_gradient_for_reduction(param).detach().reshape(-1).narrow(0, start, numel)
        place = self.gradient_on_host(group_index).narrow(0, offset, numel)
        stream = get_accelerator().current_stream()
        # Backward passes may run on several streams.
        for producer, event in self._pending_offload_events.items():
            if producer != stream:
                stream.wait_event(event)
        total = gradient
        if number in self._arrived:
            if not self.cpu_offload_pin_memory:
                self._wait_for_offload_copies()  # the host reads memory that is not pinned at once
            # Moved, then converted: a conversion would be made by the host, before the copy above has ended.
            before = place.to(gradient.device, non_blocking=True).to(self.gradient_accumulation_dtype, copy=True)
            total = before.add_(gradient)
        self._arrived.add(number)
        place.copy_(total.to(torch.float32), non_blocking=True)
        self._record_gradient_stream(gradient, stream)
        self._record_offload_copy()

    def independent_gradient_partition_epilogue(self) -> None:
        """DeepSpeed's own, after which the gradients of a step have come down, or are on their way."""
        super().independent_gradient_partition_epilogue()
        if self.cpu_offload and self.is_gradient_accumulation_boundary():
            self._complete_gradients()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """The same where the script says when a step ends."""
        if not self.cpu_offload:
            super().finalize_gradient_accumulation_boundary()
            return
        self.set_gradient_accumulation_boundary(True)
        self._complete_gradients()

    def _complete_gradients(self) -> None:
        """Bring down the sums in fp32, and zero what has no gradient in this step."""
        for i, params in enumerate(self.params_in_partition):
            gradient = self.gradient_on_host(i)
            if self._use_compact_grad_partition_buffer(i):
                gradient.copy_(self._get_compact_grad_partition_buffer(i).flat_partition, non_blocking=True)
                self._record_offload_copy()
                continue
            for number in map(self.get_param_id, params):
                if number not in self._arrived:
                    _, _, offset, numel = self.grad_position[number]
                    gradient.narrow(0, offset, numel).zero_()
            self.averaged_gradients[i] = [gradient]

    @torch.no_grad()
    def round_weights(self) -> None:
        """Write this rank's fp32 weights to the model's; with offload, the host goes on rounding while they go up."""
        if not self.cpu_offload:
            for i, weights in enumerate(self.single_partition_of_fp32_groups):
                self._own_model_weights(i).copy_(weights)
            return
        self._wait_for_offload_copies()
        for i, weights in enumerate(self.single_partition_of_fp32_groups):
            self.send_up(i, weights.numel())
        self._sent.clear()
        self._record_offload_copy()

    def _own_model_weights(self, group_index: int) -> Tensor:
        """This rank's part of a group's weights, as the model holds them: (partition_size,)."""
        rank = dist.get_rank(group=self.real_dp_process_group[group_index])
        own: Tensor = self.parallel_partitioned_bit16_groups[group_index][rank].detach()
        return own

    @torch.no_grad()
    def send_up(self, group_index: int, end: int, *, rounded: bool = False) -> None:
        """Send the weights of a group up to ``end``, as the model holds them, but for those that have been sent.

        Few at a time wait for more, but for the last.

        Args:
            rounded: whether they have been written to ``rounded_on_host``.
        """
        start = self._sent.get(group_index, 0)
        weights = self.single_partition_of_fp32_groups[group_index]
        if end - start < min(_AT_A_TIME, weights.numel() - start):
            return
        self._sent[group_index] = end
        flats = (self._own_model_weights(group_index), weights, self.rounded_on_host(group_index))
        for goal, part, buffer in zip(*(flat.detach()[start:end].split(_AT_A_TIME) for flat in flats), strict=True):
            goal.copy_(buffer if rounded else buffer.copy_(part), non_blocking=True)

    def rounded_on_host(self, group_index: int) -> Tensor:
        """Where a group's weights are rounded, as the model holds them, before they go up: (partition_size,)."""
        buffer: Tensor = self.param_buffer_of_bit16_for_cpu_offload_groups[group_index]
        return buffer

    def offload_states(self, include: Container[OffloadStateTypeEnum] | None = None, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's own; with CPU offload, of the model's weights alone, because the rest is on the host anyway."""
        lp_params = OffloadStateTypeEnum.lp_params
        if self.cpu_offload:
            include = [lp_params] if include is None or lp_params in include else []
        super().offload_states(include, *args, **kwargs)
