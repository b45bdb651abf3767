"""The parts of DeepSpeed and of torch's schedulers that this package binds to: whether they are all there."""

from __future__ import annotations

import inspect
from typing import Final

import deepspeed
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from torch.optim import lr_scheduler as torch_schedulers

from ds_muon.learning_rates import DEEPSPEED_SCHEDULES, TORCH_SCHEDULES
from ds_muon.refusals import SUPPORTED_DEEPSPEED

# What this package binds to: methods of the engine and of the ZeRO optimizer, attributes that the latter's constructor
# names, and names in DeepSpeed's modules.
ENGINE_METHODS = (
    "_is_supported_optimizer",
    "_configure_distributed_model",
    "_broadcast_model",
    "_configure_basic_optimizer",
    "_do_optimizer_sanity_check",
    "_configure_zero_optimizer",
    "steps_per_print",
    "train_batch_size",
    "managed_gradient_accumulation",
    "_scheduler_from_config",
    "_configure_lr_scheduler",
    "backward",
    "step",
    "is_gradient_accumulation_boundary",
    "load_checkpoint",
    "_get_all_ckpt_names",
    "_load_checkpoint",
    "_load_zero_checkpoint",
    "load_module_state_dict",
    "load_universal_checkpoint",
    "_configure_checkpointing",
    "save_checkpoint",
    "_common_checkpoint_state",
    "zero_load_from_fp32_weights",
    "_get_ckpt_name",
    "_get_rank_zero_ckpt_name",
)
ZERO_METHODS = (
    "initialize_optimizer_states",
    "get_flat_partition",
    "_is_muon_group",
    "_release_preflattened_grad_buffers",
    "free_grad_in_param_list",
    "reduce_gradients",
    "finalize_gradient_accumulation_boundary",
    "get_param_id",
    "get_gradient_for_reduction",
    "get_grad_position",
    "copy_grads_in_partition",
    "clear_grad_attribute",
    "independent_gradient_partition_epilogue",
    "is_gradient_accumulation_boundary",
    "set_gradient_accumulation_boundary",
    "_get_param_group_idx",
    "_use_compact_grad_partition_buffer",
    "_get_compact_grad_partition_buffer",
    "_build_compact_grad_partition_buffer",
    "_get_offload_gradient_dict",
    "_record_gradient_stream",
    "_record_offload_copy",
    "_wait_for_offload_copies",
    "_update_scale",
    "update_lp_params",
    "state_dict",
    "load_state_dict",
    "_load_global_state",
    "_link_all_hp_params",
    "_restore_from_bit16_weights",
    "offload_states",
    "reload_states",
    "_backward_active_depth",
    "_lazy_init_hp_params_optimizer_state",
    "loss_scale",
    "destroy",
)
ZERO_ATTRIBUTES = (
    "optimizer",
    "device",
    "overflow",
    "dynamic_loss_scale",
    "_global_grad_norm",
    "round_robin_gradients",
    "bit16_groups",
    "bit16_groups_flat",
    "round_robin_bit16_groups",
    "round_robin_bit16_meta",
    "round_robin_bit16_offsets",
    "cpu_offload",
    "cpu_offload_pin_memory",
    "params_in_partition",
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "parallel_partitioned_bit16_groups",
    "nccl_start_alignment_factor",
    "allgather_bucket_size",
    "grad_position",
    "gradient_accumulation_dtype",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
    "_pending_offload_events",
    "offload_gradient_dict",
    "offloaded_states",
    "partition_size",
    "real_dp_process_group",
    "single_partition_of_fp32_groups",
    "averaged_gradients",
    "all_grad_tensors",
    "grad_start_offset",
    "grad_partition_insertion_offset",
    "parameter_alignment",
    "compute_grad_norm",
    "clip_grad",
    "dp_process_group",
    "flatten",
    "micro_step_id",
    "param_names",
    "timers",
    "_hp_optimizer_states_linked",
)
MODULE_NAMES = (
    (deepspeed_engine, ("DeepSpeedZeroOptimizer", "ZERO_OPTIMIZATION")),
    (
        deepspeed_zero,
        (
            "DeepSpeedZeroOptimizer",
            "version",
            "all_gather_dp_groups",
            "INITIAL_MICRO_STEP_ID",
            "OPTIMIZER_TIMERS",
            "OPTIMIZER_GRADIENTS_TIMER",
            "OPTIMIZER_STEP_TIMER",
            "OPTIMIZER_ALLGATHER_TIMER",
            "BASE_OPTIMIZER_STATE",
            "PARTITION_COUNT",
            "SINGLE_PARTITION_OF_FP32_GROUPS",
            "CLIP_GRAD",
        ),
    ),
)
SCHEDULES: Final = ((lr_schedules, DEEPSPEED_SCHEDULES), (torch_schedulers, TORCH_SCHEDULES))


def check_parts() -> None:
    """Raises:
    ImportError: naming every part that this DeepSpeed lacks, and the versions that have them all.
    """
    engine, zero = deepspeed_engine.DeepSpeedEngine, deepspeed_zero.DeepSpeedZeroOptimizer
    set_in_init = set(zero.__init__.__code__.co_names)
    missing = [f"DeepSpeedEngine.{name}" for name in ENGINE_METHODS if not hasattr(engine, name)]
    missing += [f"DeepSpeedZeroOptimizer.{name}" for name in ZERO_METHODS if not hasattr(zero, name)]
    missing += [f"DeepSpeedZeroOptimizer.{name}" for name in ZERO_ATTRIBUTES if name not in set_in_init]
    missing += [
        f"{module.__name__}.{name}" for module, names in MODULE_NAMES for name in names if not hasattr(module, name)
    ]
    for module, schedules in SCHEDULES:
        for name, schedule in schedules.items():
            known = inspect.signature(getattr(module, name)).parameters if hasattr(module, name) else {}
            keys = ("optimizer", *schedule.rates, *schedule.others)
            missing += [f"{module.__name__}.{name}({key})" for key in keys if key not in known]
    if missing:
        raise ImportError(
            f"ds_muon binds to parts of DeepSpeed that version {deepspeed.__version__} does not have: "
            f"{', '.join(missing)}. Install deepspeed {SUPPORTED_DEEPSPEED}"
        )
