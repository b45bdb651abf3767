"""What DSMuon refuses in a config, a model and a step, and what to do instead; and what may differ between ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_muon.text import json_text

# The DeepSpeed whose inside this package was written and tested against.
SUPPORTED_DEEPSPEED = "0.19.8"


# Sections and keys at the top of a config that change nothing of the training, so that each rank may have its own.
MAY_DIFFER = frozenset(
    (
        *("tensorboard", "wandb", "comet", "csv_monitor"),  # only rank 0 writes
        # What a rank measures of itself, and prints.
        *("comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown"),
        *("steps_per_print", "dump_state", "log_level"),
        *("aio", "local_rank"),  # of the machine
    )
)
# At any depth: where a machine keeps a file, and how it is reached.
_OF_THE_MACHINE = re.compile(r"(.*_)?(paths?|dirs?|folders?|files?|ports?|hosts?|hostname|hostfile|addr|address|url)")

NO_GRADIENTS = (
    "there are no gradients to step on: call engine.backward(loss) before every engine.step(), which steps at the last "
    "of gradient_accumulation_steps micro-batches; leave optimizer.step() to it"
)


class DSMuonRefusal(ValueError):
    """A DeepSpeed config, a model or a step that DSMuon cannot make right. Lists every reason."""


def may_differ(place: Sequence[str]) -> bool:
    """Whether ranks may read a DeepSpeed config with other values in this place, given by the keys that lead to it."""
    return place[0] in MAY_DIFFER or any(map(_OF_THE_MACHINE.fullmatch, place))


def config_refusals(config: Any, sequence_parallel: int) -> list[str]:
    """One line per setting that DSMuon cannot work with: the key, its value, and what to set instead.

    Args:
        config: the engine's parsed ``DeepSpeedConfig``.
        sequence_parallel: ranks that share a sequence on the engine's device mesh; 1 without one.
    """
    zero = config.zero_config
    stage, clip = int(zero.stage), config.gradient_clipping
    section = zero.offload_optimizer
    offload = "none" if section is None else getattr(section.device, "value", section.device)
    lines = []
    if stage not in (1, 2):
        lines.append(f"zero_optimization.stage = {stage}: DSMuon works with ZeRO stages 1 and 2; set 1 or 2")
    elif zero.reduce_scatter:
        absent = "" if "reduce_scatter" in zero.model_fields_set else " (DeepSpeed's default when the key is absent)"
        lines.append(
            f"zero_optimization.reduce_scatter = true{absent}: it has computed Muon updates from pieces of a gradient; "
            "set it to false (with use_multi_rank_bucket_allreduce, the default, that moves no more bytes)"
        )
    lines += [
        f"{key} = {value}: {instead}"
        for key, value, refused, instead in (
            (
                "gradient_clipping",
                json_text(clip),
                not isinstance(clip, int | float) or math.isnan(clip),
                "it is not a number, and DeepSpeed asks for one at the first step; set one, such as 1.0, or 0 for none",
            ),
            (
                "torch_autocast.dtype",
                "float16",
                config.torch_autocast_enabled and config.torch_autocast_dtype == torch.float16,
                "its gradient scaler steps one param group after another; use bfloat16, or fp16.enabled",
            ),
            (
                "zero_optimization.offload_optimizer.device",
                offload,
                offload not in ("none", "cpu"),
                'its state may be on the accelerator or on the host; set "cpu", or remove offload_optimizer',
            ),
            (
                "zero_optimization.offload_optimizer.super_offload",
                "true",
                offload == "cpu" and section.super_offload,
                "it replaces the optimizer of ZeRO-3; remove super_offload",
            ),
            (
                "zero_optimization.compute_grad_norm",
                "false",
                offload == "cpu" and not zero.compute_grad_norm,
                "DeepSpeed does not take it with offload_optimizer; remove one of the two",
            ),
            (
                "zero_optimization.zenflow",
                "set",
                zero.zenflow is not None,
                "ZenFlow replaces the ZeRO optimizer that DSMuon extends; remove the section",
            ),
            (
                "zero_optimization.elastic_checkpoint",
                "true",
                zero.elastic_checkpoint,
                "elastic checkpoints hold Adam's state only; set it to false",
            ),
            (
                "sequence_parallel_size",
                sequence_parallel,
                sequence_parallel > 1,
                "on a device mesh DeepSpeed averages no gradients over sequence-parallel ranks; instead pass "
                "mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp to deepspeed.initialize",
            ),
            (
                "tensor_parallel.autotp_size",
                config.tensor_parallel_config.autotp_size,
                config.tensor_parallel_config.autotp_size > 1,
                "a tensor-parallel rank holds a piece of each matrix; set it to 1",
            ),
            (
                "compile.deepcompile",
                "true",
                config.compile_config.deepcompile,
                "DeepCompile replaces ZeRO's gradient reduction; set it to false (torch.compile is fine)",
            ),
            (
                "fp16.fp16_master_weights_and_grads",
                "true",
                config.float16_config.fp16_master_weights_and_grads,
                "DSMuon keeps fp32 master weights; set it to false",
            ),
            (
                "bf16.bf16_master_weights_and_grads",
                "true",
                config.bfloat16_config.bf16_master_weights_and_grads,
                "DSMuon keeps fp32 master weights; set it to false",
            ),
        )
        if refused
    ]
    return lines


def model_refusals(model: nn.Module, mpu: Any) -> list[str]:
    """One line per property of the model that DSMuon cannot work with.

    Args:
        model: the model, before or after DeepSpeed has wrapped it.
        mpu: the model-parallel unit passed to ``deepspeed.initialize``, or None.
    """
    kinds = {ancestor.__module__ + "." + ancestor.__name__ for m in model.modules() for ancestor in type(m).__mro__}
    lines = []
    if "deepspeed.runtime.pipe.module.PipelineModule" in kinds:
        lines.append(
            "model = PipelineModule: pipeline parallelism is not available in this version; pass a plain module"
        )
    if {"deepspeed.moe.layer.MoE", "deepspeed.module_inject.auto_ep_layer.AutoEPMoELayer"} & kinds:
        lines.append(
            "model with DeepSpeed MoE layers: they need reduce_scatter: true, which DSMuon refuses; use AdamW for such "
            "a model, or dense layers"
        )
    if mpu is not None and _model_parallel_size(mpu) > 1:
        lines.append(
            f"model-parallel world size = {_model_parallel_size(mpu)}: a rank holds a piece of each matrix; use data "
            "or sequence parallelism"
        )
    sharded = list(_tensor_parallel(model.named_parameters()))
    if sharded:
        lines.append(
            f"tensor-parallel weights ({', '.join(sharded[:3])}): a rank holds a piece of each; use whole weights"
        )
    return lines


def nothing_to_step_on(zero: Any) -> str | None:
    """Why this rank has no gradients that could be taken, and what to do; None if it has.

    It may be so on one rank alone, as where only that one has offloaded its states.

    Args:
        zero: the ZeRO optimizer, not modified.
    """
    if zero.offloaded_states:
        states = ", ".join(sorted(state.value for state in zero.offloaded_states))
        return f"engine.step() while {states} are offloaded: call engine.reload_states() first"
    if zero.interrupted is not None:
        return str(zero.interrupted)
    if any(zero.averaged_gradients.get(i) is None for i in range(len(zero.bit16_groups))):
        return NO_GRADIENTS
    return None


def step_refusal(zero: Any, frozen: Sequence[tuple[str, Tensor]]) -> str | None:
    """Why a step would go wrong for what the script has done since the last one, and what to do; None if it would not.

    It may be so on one rank alone: all are told before anything moves.

    Args:
        zero: the ZeRO optimizer, not modified.
        frozen: names and parameters that had ``requires_grad = False`` when it was made.
    """
    if thawed := [name for name, p in frozen if p.requires_grad]:
        return (
            f"{thawed[0]} {f'and {len(thawed) - 1} more were' if thawed[1:] else 'was'} frozen at deepspeed.initialize "
            "and now has requires_grad = True, but ZeRO knows nothing of it, and no step would move it: set "
            "requires_grad before initialize, or to False again"
        )
    for group in zero.optimizer.param_groups:  # a scheduler may have changed its momentum
        if problem := zero.optimizer.config.momentum_problem(group.get("momentum", 0.0)):
            return f"param group {group['name']!r} has momentum = {group['momentum']:g}: {problem}"
    return None


def _model_parallel_size(mpu: Any) -> int:
    if hasattr(mpu, "initialize_sequence_parallel"):
        # DeepSpeed's own unit for sequence parallelism: what it calls model parallel splits samples, not weights.
        return 1
    for name in ("tensor_model", "slice", "model"):
        getter = f"get_{name}_parallel_world_size"
        if hasattr(mpu, getter):
            return int(getattr(mpu, getter)())
    return 1


def _tensor_parallel(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterable[str]:
    for name, p in named_parameters:
        # The marks that Megatron and DeepSpeed put on such weights, and torch's own.
        if (
            getattr(p, "model_parallel", False)
            or getattr(p, "tensor_model_parallel", False)
            or hasattr(p, "placements")
        ):
            yield name
