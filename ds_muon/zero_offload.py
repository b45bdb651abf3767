"""DeepSpeed's ZeRO-1/2 optimizer with CPU offload: gradients on their way to the host, and what else is at home there.

Without offload gradients go DeepSpeed's own way. Weights are rounded to the model's here in either case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor

from ds_muon.offload import Ferry, Stretch
from ds_muon.passes import Held, Segments, compile_for_host, sum_of_squares
from ds_muon.say import log


class _OnceDown(dict[int, list[Tensor] | None]):
    """Gradients on the host, by group. Whoever asks for them waits for the copies: they would overwrite what is set."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def __getitem__(self, group_index: int) -> list[Tensor] | None:
        self._wait()
        return super().__getitem__(group_index)


class OffloadZero(deepspeed_zero.DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer`` whose offloaded gradients are those of a run without offload, bit for bit.

    The averaged gradients come down while the backward pass runs, each into its slice of ``.grad`` of the group's fp32
    weights, which exists all the time. Over several micro-batches that slice holds their sum, and goes up to be added
    to. DeepSpeed's own way keeps whole parameters on every rank for that, adds what a parameter had in the step before
    if it takes no part in the first micro-batch, leaves the gradient of the step before where there is none, and asks
    the accelerator about every parameter whether it overflows, which ``measure`` finds for all at once.
    """

    def __init__(self, *args: Any, offload_optimizer_config: Any = None, **kwargs: Any) -> None:
        self._arrived: dict[int, Tensor | None] = {}
        """Parameters with a gradient in this step, in what this rank holds, and its sums of squares. None if a script
        has written to it since."""
        self._squares: list[Tensor] = []
        """Of each group, if the gradients are still those that came down."""
        self._versions: list[int] = []
        """Of each group's gradients, when this class last wrote to them."""
        self._parts: Sequence[Callable[[int, int], list[Held]]] = ()
        self._segments: dict[int, Segments] = {}
        self._sent: set[int] = set()
        """Groups whose weights are on their way up in this step."""
        self.ferry: Ferry | None = None
        """Between host and accelerator, with offload."""
        self._pins = offload_optimizer_config is not None and offload_optimizer_config.pin_memory
        if self._pins:  # DeepSpeed would also pin weights, which stay, and what ``initialize_optimizer_states`` drops
            offload_optimizer_config = offload_optimizer_config.model_copy(update={"pin_memory": False})
        super().__init__(*args, offload_optimizer_config=offload_optimizer_config, **kwargs)
        if self.cpu_offload:
            self.cpu_offload_pin_memory = self._pins
            self.optimizer.host_passes = compile_for_host()
            self.ferry = Ferry(self.accelerator, pinned=self._pins)
            if torch.get_num_threads() == 1 < len(os.sched_getaffinity(0)):
                log("CPU offload has one thread of the host; set OMP_NUM_THREADS to the cores that a rank has")

    def know_matrices(self, parts: Sequence[Callable[[int, int], list[Held]]]) -> None:
        """Learn, before the first backward pass, what lies where in Muon's partitions: ``MuonGroup.parts`` of each."""
        self._parts = parts

    def initialize_optimizer_states(self) -> None:
        """Make the gradients' place, pinned at once: DeepSpeed's own writes zeros elsewhere, and copies them."""
        # As large as the largest parameter, and as the partition: of no use here.
        self.temp_grad_buffer_for_gpu_offload = self.temp_grad_buffer_for_cpu_offload = None
        self.param_buffer_of_bit16_for_cpu_offload_groups.clear()
        for flat in self.single_partition_of_fp32_groups:
            place = get_accelerator().pin_empty_like(flat) if self._pins else torch.empty_like(flat)
            flat.grad = place.zero_()

    @property
    def accelerator(self) -> torch.device:
        """Where the model is and Newton-Schulz runs. With CPU offload, partitions are on ``device``, the host."""
        return torch.device(get_accelerator().current_device_name())

    def gradient_on_host(self, group_index: int) -> Tensor:
        """The place of a group's gradients with CPU offload: (partition_size,) fp32."""
        gradient: Tensor = self.single_partition_of_fp32_groups[group_index].grad
        return gradient

    def _get_offload_gradient_dict(self) -> None:
        """DeepSpeed's own, where ``safe_get_full_grad`` and ``safe_set_full_grad`` find gradients: see ``_show``."""
        self.offload_gradient_dict = _OnceDown(self._wait_for_offload_copies)
        super()._get_offload_gradient_dict()
        for i in range(len(self.bit16_groups)):
            if self._use_compact_grad_partition_buffer(i):
                self._show(i, None)

    def _build_compact_grad_partition_buffer(self, group_idx: int) -> Any:
        """DeepSpeed's own, where sums in fp32 are until all have come."""
        buffer = super()._build_compact_grad_partition_buffer(group_idx)
        if self.cpu_offload:
            self._show(group_idx, buffer.flat_partition)
        return buffer

    def _show(self, group_index: int, gradient: Tensor | None) -> None:
        """Let a script read and set a group's gradients where the next step takes them from: (partition_size,).

        None: nowhere yet, and DeepSpeed refuses it.
        """
        positions = (self.grad_position[self.get_param_id(p)][2:] for p in self.params_in_partition[group_index])
        self.offload_gradient_dict[group_index] = (
            None if gradient is None else [gradient.narrow(0, *position) for position in positions]
        )

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
        self._hear_of_writes()
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
        total = total.to(torch.float32)
        place.copy_(total, non_blocking=True)
        self._versions = self._versions_now()
        self._note(number, total)
        self._record_gradient_stream(gradient, stream)
        self._record_offload_copy()

    def _note(self, number: int, gradient: Tensor) -> None:
        """Take the sums of squares of what this rank holds of a gradient: (numel,) fp32 on the accelerator.

        Because the host, once the gradients are there, would have to read them all before anything moves.
        """
        self._arrived[number] = sum_of_squares(gradient, self._segments_of(number)).view(-1)

    def _segments_of(self, number: int) -> Segments | None:
        """The matrices in what this rank holds of a parameter; None for AdamW's."""
        group_index, _, offset, numel = self.grad_position[number]
        if group_index >= len(self._parts):
            return None
        if number not in self._segments:
            held = self._parts[group_index](offset, offset + numel)
            self._segments[number] = Segments.of(held, numel, self.accelerator)
        return self._segments[number]

    def _squares_of_group(self, group_index: int) -> Tensor:
        """What ``_note`` takes, of a group in this rank's partition: of each matrix, or one sum for AdamW's."""
        zeros = partial(torch.zeros, dtype=torch.float64, device=self.accelerator)
        sums = [zeros(0)]
        for number in map(self.get_param_id, self.params_in_partition[group_index]):
            if (squares := self._arrived.get(number)) is not None:
                sums.append(squares)
            elif (segments := self._segments_of(number)) is not None:
                sums.append(zeros(segments.matrices))
        return torch.cat(sums) if group_index < len(self._parts) else torch.cat(sums).sum()

    def update_offload_overflow_tracker(self, grad: Tensor | None) -> None:
        """Hears of a gradient that a script has set after a backward pass: all are measured where they are."""
        self._arrived = dict.fromkeys(self._arrived)
        self._squares.clear()

    def _hear_of_writes(self) -> None:
        """The same of what a script has written to in place."""
        if self._versions != self._versions_now():
            self.update_offload_overflow_tracker(None)

    def _versions_now(self) -> list[int]:
        groups = self.single_partition_of_fp32_groups if self.cpu_offload else ()
        return [flat.grad._version for flat in groups]

    def _begin_step(self) -> None:
        """Forget what is of the backward passes before this step, or of the step before."""
        self._hear_of_writes()
        self._arrived.clear()
        self._sent.clear()

    def squares_on_the_way(self, group_index: int) -> Tensor | None:
        """``_squares_of_group``, unscaled. None if a script has changed the gradients since, and without offload."""
        return self._squares[group_index] / self.loss_scale**2 if self._squares else None

    def independent_gradient_partition_epilogue(self) -> None:
        """DeepSpeed's own, after which the gradients of a step have come down, or are on their way."""
        super().independent_gradient_partition_epilogue()
        if self.cpu_offload and self.is_gradient_accumulation_boundary():
            self._complete_gradients()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """``independent_gradient_partition_epilogue``, where the script says when a step ends."""
        if not self.cpu_offload:
            super().finalize_gradient_accumulation_boundary()
            return
        self.set_gradient_accumulation_boundary(True)
        self._complete_gradients()

    def _complete_gradients(self) -> None:
        """Bring down the sums in fp32, and zero what has no gradient in this step."""
        self._hear_of_writes()
        for i, params in enumerate(self.params_in_partition):
            gradient = self.gradient_on_host(i)
            parts = [(number, *self.grad_position[number][2:]) for number in map(self.get_param_id, params)]
            if self._use_compact_grad_partition_buffer(i):
                sums = self._get_compact_grad_partition_buffer(i).flat_partition
                gradient.copy_(sums, non_blocking=True)
                self._show(i, gradient)
                for number, offset, numel in parts:
                    self._note(number, sums.narrow(0, offset, numel).float())
                self._record_offload_copy()
                continue
            for number, offset, numel in parts:
                if number not in self._arrived:
                    gradient.narrow(0, offset, numel).zero_()
            self.averaged_gradients[i] = [gradient]
        self._versions = self._versions_now()
        if all(squares is not None for squares in self._arrived.values()):
            self._squares = [self._squares_of_group(i) for i in range(len(self.params_in_partition))]

    @torch.no_grad()
    def round_weights(self) -> None:
        """Write this rank's fp32 weights to the model's; with offload, the host goes on rounding while they go up."""
        for i, weights in enumerate(self.single_partition_of_fp32_groups):
            if self.ferry is None:
                self._own_model_weights(i).copy_(weights)
            elif i not in self._sent:
                self.ferry.up_rounded(weights.detach(), self._own_model_weights(i))
        self._sent.clear()

    def _own_model_weights(self, group_index: int) -> Tensor:
        """This rank's part of a group's weights, as the model holds them: (partition_size,)."""
        rank = dist.get_rank(group=self.real_dp_process_group[group_index])
        own: Tensor = self.parallel_partitioned_bit16_groups[group_index][rank].detach()
        return own

    def sent_up(self, group_index: int, stretches: Iterable[Stretch]) -> Iterator[Stretch]:
        """The updates of a group. With offload, weights that have moved go up while the next are computed."""
        if self.ferry is None:
            yield from stretches
            return
        weights = self.single_partition_of_fp32_groups[group_index].detach()
        there = self._own_model_weights(group_index)
        for stretch in stretches:
            here = slice(stretch.offset, stretch.offset + stretch.update.numel())
            goal = self.ferry.goal(there[here])
            yield stretch._replace(rounded=goal)
            if goal is None:
                self.ferry.up_rounded(weights[here], there[here])
        self._sent.add(group_index)

    def offload_states(self, include: Container[OffloadStateTypeEnum] | None = None, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's own; with CPU offload, of the model's weights alone, because the rest is on the host anyway."""
        lp_params = OffloadStateTypeEnum.lp_params
        if self.cpu_offload:
            include = [lp_params] if include is None or lp_params in include else []
        super().offload_states(include, *args, **kwargs)
