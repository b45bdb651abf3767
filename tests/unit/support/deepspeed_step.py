"""All that ``step`` and ``load_state_dict`` of DeepSpeed's ZeRO optimizer do, and where ds_muon does it.

This is data for whoever moves to another DeepSpeed. A test compares the keys with the source of the installed release,
and fails if that does more. A key is a method of the optimizer that is called, an attribute that is set, or a function
of its module. A value is the place in ds_muon ("" for none) and a remark, such as why nothing is done.
"""

from __future__ import annotations

_DOWN = "the gradients of a run with CPU offload"
_THEIR_MUON = "of DeepSpeed's own Muon, which never runs here"
_THEIRS = "DeepSpeed's own"
_ELASTIC = "of elastic checkpoints, which are refused"

STEP: dict[str, tuple[str, str]] = {
    # before the decision
    "micro_step_id": ("zero.MuonZeroOptimizer.take_gradients", "reset"),
    "_wait_for_offload_copies": ("zero.MuonZeroOptimizer.take_gradients", _DOWN),
    "_offload_accumulated_param_ids": ("zero_offload.OffloadZero.copy_grads_in_partition", "_arrived instead"),
    "see_memory_usage": ("", "logs nothing unless forced, and it is not forced here"),
    "check_overflow": ("guard.StepGuard.measure", "in every step, whatever check_grad_overflow says"),
    "_apply_muon_updates_cpu_offload": ("", _THEIR_MUON),
    "scaled_global_norm": ("guard.StepGuard.measure", "of unscaled gradients"),
    "is_invalid_grad_norm": ("guard.Findings.gradients_are_finite", ""),
    "_global_grad_norm": (
        "zero.MuonZeroOptimizer._step_all_groups",
        "a tensor always, infinite where theirs is a float",
    ),
    "overflow": ("zero.MuonZeroOptimizer._step_all_groups", ""),
    "_update_scale": ("zero.MuonZeroOptimizer._step_all_groups", ""),
    "_commit_muon_momentum": ("", _THEIR_MUON),
    # the gradients, used or not
    "zero_grad": ("zero.MuonZeroOptimizer.take_gradients", "in every step, through free_grad_in_param_list"),
    "free_grad_in_param_list": ("zero.MuonZeroOptimizer.take_gradients", "of all parameters of a group at once"),
    "_release_preflattened_grad_buffers": ("zero.MuonZeroOptimizer.take_gradients", ""),
    "_get_preflattened_grad_partition": ("zero.MuonZeroOptimizer.take_gradients", "reads flat_partition itself"),
    "averaged_gradients": ("zero.MuonZeroOptimizer.take_gradients", "released"),
    "all_grad_tensors": ("zero.MuonZeroOptimizer.take_gradients", "released"),
    "reset_cpu_buffers": ("zero.MuonZeroOptimizer.take_gradients", "norms and overflow are measured, not kept"),
    "flatten": ("zero.MuonZeroOptimizer.take_gradients", "straight into fp32"),
    "flatten_dense_tensors_aligned": ("zero.MuonZeroOptimizer.take_gradients", "get_flat_partition has padded"),
    "_muon_update_lacks_loss_scale": ("", _THEIR_MUON),
    "unscale_and_clip_grads": ("zero.MuonZeroOptimizer.commit", "take_gradients has unscaled"),
    # the update
    "single_partition_of_fp32_groups": ("zero.MuonZeroOptimizer.commit", "their .grad stays as it is"),
    "_optimizer_step": ("zero.MuonZeroOptimizer.commit", "of all groups at once"),
    "optimizer": ("", "no group needs to be hidden from the optimizer"),
    "zenflow_cpu_optimizer_step": ("", "ZenFlow is refused"),
    "_lazy_init_hp_params_optimizer_state": ("zero.MuonZeroOptimizer.__init__", "the state is there from the start"),
    # the model
    "all_gather_dp_groups": ("zero.MuonZeroOptimizer._step_all_groups", "through update_lp_params"),
    "_update_model_bit16_weights": ("zero.MuonZeroOptimizer._bind_model", "for parameters with other storage"),
    "timers": ("zero.MuonZeroOptimizer._timed", "a skipped step leaves the all-gather's at zero"),
}

LOAD: dict[str, tuple[str, str]] = {
    "_wait_for_offload_copies": ("zero.MuonZeroBase.load_found", _DOWN),
    "_load_universal_checkpoint": ("checkpoints.universal.check_universal_before_loading", "into the same Found"),
    "_load_legacy_checkpoint": ("zero.MuonZeroOptimizer.load_found", "of any number of ranks, by parameter"),
    "_load_global_state": ("zero.MuonZeroOptimizer.load_found", _THEIRS),
    "loss_scaler": ("zero.MuonZeroOptimizer.load_found", _THEIRS),
    "dynamic_loss_scale": ("zero.MuonZeroOptimizer.load_found", _THEIRS),
    "overflow": ("zero.MuonZeroOptimizer.load_found", _THEIRS),
    "clip_grad": ("zero.MuonZeroOptimizer.load_found", _THEIRS),
    "_convert_unpadded_rigid_optimizer_state": ("checkpoints.reshard.stretches", "of any layout"),
    "_restore_elastic_base_optimizer_state": ("", _ELASTIC),
    "_restore_base_optimizer_state": ("", _ELASTIC),
    "_restore_from_unpadded_local_fp32_weights": ("checkpoints.reshard.stretches", "of any layout"),
    "_restore_from_unpadded_fp32_weights": ("checkpoints.reshard.stretches", "of any layout"),
    "_restore_from_elastic_fp32_weights": ("", _ELASTIC),
    "_get_padded_tensor": ("checkpoints.reshard.stretches", "gaps are left as they are, zero"),
    "_restore_from_bit16_weights": ("zero.MuonZeroOptimizer._restore_from_bit16_weights", "of what the model holds"),
    "_link_all_hp_params": ("zero.MuonZeroOptimizer._link_optimizer_state", "and links the optimizer's state again"),
}
