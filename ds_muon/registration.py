"""Binds DSMuon to DeepSpeed's engine: the only module that changes anything of DeepSpeed's or torch's.

Fifteen methods of ``DeepSpeedEngine`` are wrapped, and the constructors of the schedulers that take one number for all
param groups. Each wrapper does its part for an engine whose optimizer type is DSMuon, or for a scheduler of DSMuon, and
for any other does what DeepSpeed or torch does. After ``torch.distributed.init_process_group`` a rank leaves word in
the group's store that it has imported this package.
"""

from __future__ import annotations

import functools
import glob
import inspect
import logging
import math
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

from ds_muon.agree import RollCall, agree, gather, leave_word, raise_together
from ds_muon.blocks import described
from ds_muon.checkpoint import check_before_loading
from ds_muon.config import OPTIMIZER_TYPE, DSMuonConfig, DSMuonConfigError
from ds_muon.learning_rates import DEEPSPEED_SCHEDULES, TORCH_SCHEDULES, far_off
from ds_muon.optimizer import DSMuon
from ds_muon.param_groups import split_param_groups
from ds_muon.refusals import SUPPORTED_DEEPSPEED, DSMuonRefusal, config_refusals, may_differ, model_refusals
from ds_muon.routing import Routing, RoutingError, check_matches, route
from ds_muon.same_weights import check_same_weights
from ds_muon.saving import WholeCheckpoints
from ds_muon.say import log, say
from ds_muon.schedulers import build, cycle_momentum, dsmuon_in, highest_rates, set_scheduled_rates
from ds_muon.shards import SAVE, Save
from ds_muon.universal import LATEST, FoundUniversal, check_universal_before_loading, is_universal, loading_by_name
from ds_muon.zero import MuonZeroOptimizer

_REFUSED = "DSMuon refuses this setup (ds-muon doctor --config FILE --fix OUT mends configs):"
_roll_call = RollCall()

# What this package binds to: methods of the engine and of the ZeRO optimizer, attributes that the latter's constructor
# names, and names in DeepSpeed's modules.
_ENGINE_METHODS = (
    "_is_supported_optimizer",
    "_configure_distributed_model",
    "_configure_basic_optimizer",
    "_do_optimizer_sanity_check",
    "_configure_zero_optimizer",
    "_scheduler_from_config",
    "_configure_lr_scheduler",
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
_ZERO_METHODS = (
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
    "_lazy_init_hp_params_optimizer_state",
    "loss_scale",
    "destroy",
)
_ZERO_ATTRIBUTES = (
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
_MODULE_NAMES = (
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
_SCHEDULES = ((lr_schedules, DEEPSPEED_SCHEDULES), (torch_schedulers, TORCH_SCHEDULES))


@dataclass(frozen=True)
class _Prepared:
    config: DSMuonConfig
    routing: Routing
    iteration: str
    """Backend and dtype of Newton-Schulz on this rank, where the config leaves them open."""


def register() -> None:
    """Make ``"type": "DSMuon"`` known to DeepSpeed. Does nothing the second time.

    Raises:
        ImportError: this DeepSpeed lacks a part that DSMuon binds to.
    """
    engine = deepspeed_engine.DeepSpeedEngine
    if getattr(engine._is_supported_optimizer, "_ds_muon", False):
        return
    _check_parts()
    for wrapper in (
        _is_supported_optimizer,
        _configure_distributed_model,
        _configure_basic_optimizer,
        _do_optimizer_sanity_check,
        _configure_zero_optimizer,
        _scheduler_from_config,
        _configure_lr_scheduler,
        load_checkpoint,
        _get_all_ckpt_names,
        _load_checkpoint,
        _load_zero_checkpoint,
        load_module_state_dict,
        _configure_checkpointing,
        save_checkpoint,
        _common_checkpoint_state,
    ):
        _wrap(engine, wrapper.__name__, wrapper)
    for module, schedules in _SCHEDULES:
        for name, schedule in schedules.items():
            _wrap(getattr(module, name), "__init__", functools.partial(build, schedule))
            if schedule.momentum_method:
                _wrap(getattr(module, name), schedule.momentum_method, cycle_momentum)
    _leave_word_in_every_process_group()


def _leave_word_in_every_process_group() -> None:
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        leave_word()

    dist.init_process_group = init_process_group
    leave_word()


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, self), self, *args, **kwargs)

    method._ds_muon = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _check_parts() -> None:
    engine, zero = deepspeed_engine.DeepSpeedEngine, deepspeed_zero.DeepSpeedZeroOptimizer
    set_in_init = set(zero.__init__.__code__.co_names)
    missing = [f"DeepSpeedEngine.{name}" for name in _ENGINE_METHODS if not hasattr(engine, name)]
    missing += [f"DeepSpeedZeroOptimizer.{name}" for name in _ZERO_METHODS if not hasattr(zero, name)]
    missing += [f"DeepSpeedZeroOptimizer.{name}" for name in _ZERO_ATTRIBUTES if name not in set_in_init]
    missing += [
        f"{module.__name__}.{name}" for module, names in _MODULE_NAMES for name in names if not hasattr(module, name)
    ]
    for module, schedules in _SCHEDULES:
        for name, schedule in schedules.items():
            known = inspect.signature(getattr(module, name)).parameters if hasattr(module, name) else {}
            keys = ("optimizer", *schedule.rates, *schedule.others)
            missing += [f"{module.__name__}.{name}({key})" for key in keys if key not in known]
    if missing:
        raise ImportError(
            f"ds_muon binds to parts of DeepSpeed that version {deepspeed.__version__} does not have: "
            f"{', '.join(missing)}. Install deepspeed {SUPPORTED_DEEPSPEED}"
        )


def _uses_dsmuon(engine: Any) -> bool:
    name = engine.optimizer_name()
    return isinstance(name, str) and name.lower() == OPTIMIZER_TYPE.lower()


def _optimizer_of(engine: Any) -> str:
    if engine.client_optimizer is not None:
        return f"the optimizer that was passed to deepspeed.initialize ({type(engine.client_optimizer).__name__})"
    return f"the optimizer {engine.optimizer_name()}" if engine.optimizer_name() else "no optimizer"


# ---- the wrappers: `original` is DeepSpeed's method, bound to the engine --------------------------------------------


def _is_supported_optimizer(original: Callable[..., bool], engine: Any, optimizer_name: str) -> bool:
    return optimizer_name.lower() == OPTIMIZER_TYPE.lower() or original(optimizer_name)


def _configure_distributed_model(original: Callable[..., None], engine: Any, model: nn.Module) -> None:
    """Refuse and route before the model is broadcast: the first point at which collectives are safe."""
    if _uses_dsmuon(engine):
        _roll_call.wait_for_all()
        engine._ds_muon = _prepare(engine, model)
    else:
        _roll_call.pass_by(_optimizer_of(engine))
    original(model)


def _configure_basic_optimizer(original: Callable[..., Any], engine: Any, model_parameters: Iterable[Any]) -> Any:
    if not _uses_dsmuon(engine):
        return original(model_parameters)
    config, routing = engine._ds_muon.config, engine._ds_muon.routing
    groups: list[dict[str, Any]] = []
    error: Exception | None = None
    try:
        groups = split_param_groups(engine.module, model_parameters, routing, config)
    except Exception as caught:  # whatever it is, no rank may be left waiting
        error = caught
    raise_together(error)
    agree(
        "param groups",
        _as_facts(engine, groups),
        "pass the same model_parameters, in the same order and with the same settings",
    )
    names = {id(p): name for name, p in engine.module.named_parameters()}
    routing = routing.given({names[id(p)] for group in groups for p in group["params"]})
    _show(routing)
    return DSMuon(groups, config, routing)


def _show(routing: Routing) -> None:
    """A line for each half, whatever the log level, and what is likely not meant. On rank 0."""
    muon, adamw, *others = routing.summary()
    say(muon)
    say(adamw)
    if dist.get_rank() == 0:
        for line in others:
            log(line, logging.INFO)
        for line in routing.warnings():
            log(line)


def _do_optimizer_sanity_check(original: Callable[..., Any], engine: Any, basic_optimizer: Any) -> Any:
    """DSMuon is always wrapped by the ZeRO optimizer, also where DeepSpeed would choose ``BF16_Optimizer``."""
    if isinstance(basic_optimizer, DSMuon):
        return deepspeed_engine.ZERO_OPTIMIZATION
    return original(basic_optimizer)


def _configure_zero_optimizer(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    if not isinstance(optimizer, DSMuon):
        return original(optimizer)
    # The engine builds the ZeRO optimizer by this name, with some thirty arguments that are its business.
    usual = deepspeed_engine.DeepSpeedZeroOptimizer
    deepspeed_engine.DeepSpeedZeroOptimizer = MuonZeroOptimizer
    try:
        zero_optimizer = original(optimizer)
    finally:
        deepspeed_engine.DeepSpeedZeroOptimizer = usual
    if every := optimizer.config.verify_every:
        from ds_muon.verify.in_training import TrainingCheck

        zero_optimizer.training_check = TrainingCheck(zero_optimizer, engine.module, every)
    if every := _telemetry_every(engine, optimizer.config):
        from ds_muon.telemetry import Telemetry

        zero_optimizer.telemetry = Telemetry(zero_optimizer, engine, every)
    if dist.get_rank() == 0:
        log(zero_optimizer.plan.summary(), logging.INFO)
    return zero_optimizer


def _telemetry_every(engine: Any, config: DSMuonConfig) -> int:
    """How many steps lie between two that are observed; 0 for none. Rank 0's, which alone may have a monitor."""
    every = config.telemetry_every
    if every is None and engine.monitor.enabled:
        of_engine = engine.steps_per_print()
        every = int(of_engine) if of_engine and math.isfinite(of_engine) else 100  # Accelerate sets infinity
    return gather(every or 0, None)[0]


def _scheduler_from_config(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Build on DSMuon itself: torch's schedulers, and DeepSpeed's ``OneCycle``, do not take a ZeRO optimizer."""
    return original(dsmuon_in(optimizer) or optimizer)


def _configure_lr_scheduler(original: Callable[..., None], engine: Any) -> None:
    """Let every rank stop where a scheduler is refused on one, and warn of rates that are far off."""
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, DSMuon):
        return original()
    error: Exception | None = None
    lines: list[str] = []
    try:
        original()
        driven = getattr(engine.lr_scheduler, "optimizer", optimizer)
        if getattr(driven, "param_groups", optimizer.param_groups) is not optimizer.param_groups:
            raise DSMuonRefusal(
                f"lr_scheduler = a {type(engine.lr_scheduler).__name__} of another optimizer, a "
                f"{type(driven).__name__}, would change no rate of DSMuon's; pass a function that builds one, such as "
                "lr_scheduler=lambda optimizer: LambdaLR(optimizer, ...)"
            )
        lines = far_off(highest_rates(engine.lr_scheduler, optimizer), optimizer.configured_rates, optimizer.config)
    except Exception as caught:  # whatever it is, no rank may be left waiting
        error = caught
    raise_together(error)
    # Of a function that builds a scheduler, or of one that is passed, ranks can only compare what it does.
    rates = {group["name"]: {"lr": group["lr"]} for group in optimizer.param_groups}
    agree("learning rates at the start", rates, "pass the same lr_scheduler")
    if dist.get_rank() == 0:
        for line in lines:
            log(line)


def load_checkpoint(
    original: Callable[..., Any], engine: Any, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Refuse a folder whose file ``latest`` names no tag, or lacks on some ranks; compare the weights afterwards."""
    if not isinstance(engine.optimizer, MuonZeroOptimizer):
        return original(load_dir, tag, *args, **kwargs)
    if tag is None:
        universal = engine.load_universal_checkpoint()
        named = _check_latest(Path(load_dir, LATEST if universal else "latest"), engine.optimizer.dp_process_group)
        if universal and named is None:
            raise FileNotFoundError(
                f"checkpoint.load_universal = true, and there is no {Path(load_dir, LATEST)}; write it by ds-muon "
                "to-universal, or set false: an ordinary checkpoint loads at any world size"
            )
        if universal and named:
            _say_what_is_newer(Path(load_dir, "latest"), named)
        tag = named if universal else None
    try:
        with loading_by_name(engine):
            path, client_state = original(load_dir, tag, *args, **kwargs)
    finally:
        # Files that are mapped into memory must not be held.
        engine._ds_muon_found = None
    if path is not None:
        check_same_weights(engine.optimizer, engine.module)
    return path, client_state


def _check_latest(path: Path, group: dist.ProcessGroup) -> str | None:
    """The tag that the file names; None if it is on no rank. A collective.

    Raises:
        ValueError, FileNotFoundError: on every rank, if it names no tag, or is there on some ranks only.
    """
    error, named = None, None
    try:
        if path.is_file() and not (named := path.read_text().strip()):
            error = ValueError(f"{path} is empty: what wrote it was stopped; pass the tag of a checkpoint")
    except Exception as caught:  # whatever it is, no rank may be left waiting
        error = ValueError(f"{path} cannot be read: {type(caught).__name__}: {caught}; pass the tag of a checkpoint")
    raise_together(error, group)
    there = [tag is not None for tag in gather(named, group)]
    if any(there) and not all(there):
        raise FileNotFoundError(
            f"{path} is there on rank {there.index(True)}, and not on rank {there.index(False)}; give every rank the "
            "same folder, or pass the tag"
        )
    return named


def _say_what_is_newer(latest: Path, named: str) -> None:
    """One line, where a run has saved on beside the checkpoint in the universal layout that it loads again."""
    with suppress(OSError, ValueError):  # another rank may read what this one cannot, and neither needs it
        if (newest := latest.read_text().strip()) not in ("", named):
            say(
                f"checkpoint.load_universal = true takes {named!r}, which {LATEST} names, and not {newest!r}, which "
                "latest names; set false to go on from what was saved last"
            )


def _get_all_ckpt_names(original: Callable[..., Any], engine: Any, checkpoints_path: str, tag: str) -> Any:
    """Take folder and tag as they are: DeepSpeed looks for the files by a pattern, in which ``[`` and ``*`` count."""
    if isinstance(engine.optimizer, MuonZeroOptimizer):
        checkpoints_path, tag = glob.escape(str(checkpoints_path)), glob.escape(str(tag))
    return original(checkpoints_path, tag)


def _load_checkpoint(original: Callable[..., Any], engine: Any, load_dir: str, tag: str, **options: Any) -> Any:
    """Refuse a checkpoint that does not fit while the engine is as it was."""
    with_optimizer = options.get("load_optimizer_states", True) and not options.get("load_module_only", False)
    if with_optimizer and isinstance(engine.optimizer, MuonZeroOptimizer):
        with_scheduler = options.get("load_lr_scheduler_states", True)
        is_there = gather(is_universal(Path(load_dir, str(tag))), engine.optimizer.dp_process_group)
        check = check_universal_before_loading if any(is_there) else check_before_loading
        engine._ds_muon_found = check(engine, load_dir, tag, with_scheduler=with_scheduler)
    elif isinstance(engine.optimizer, MuonZeroOptimizer):
        say("momentum, moments, variances and fp32 weights are not loaded: state stays as it is, zero in a new engine")
    return original(load_dir, tag, **options)


def _load_zero_checkpoint(original: Callable[..., bool], engine: Any, *args: Any, **kwargs: Any) -> bool:
    """Load what ``_load_checkpoint`` has found: DeepSpeed's reads this rank's shard alone, and refuses other sizes."""
    if not isinstance(engine.optimizer, MuonZeroOptimizer):
        return original(*args, **kwargs)
    found = engine._ds_muon_found
    engine.optimizer.load_found(found, from_fp32_weights=engine.zero_load_from_fp32_weights())
    if isinstance(found, FoundUniversal) and not found.content.of_dsmuon:
        # Its rates are of another optimizer: those of this run are set, for the place that its schedule has reached.
        set_scheduled_rates(engine.lr_scheduler)
    return True


def load_module_state_dict(
    original: Callable[..., None], engine: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Let weights be loaded that were trained when they were saved, and are frozen now.

    From stage 2 on, DeepSpeed looks for every frozen parameter among those that were frozen then.
    """
    frozen = checkpoint.get(FROZEN_PARAM_FRAGMENTS)
    if frozen is not None and isinstance(engine.optimizer, MuonZeroOptimizer):
        checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: {**checkpoint["module"], **frozen}}
    original(checkpoint, *args, **kwargs)


def _configure_checkpointing(original: Callable[..., None], engine: Any) -> None:
    """Save whole checkpoints, if DeepSpeed would save them by torch."""
    original()
    if isinstance(engine.optimizer, MuonZeroOptimizer) and type(engine.checkpoint_engine) is TorchCheckpointEngine:
        engine.checkpoint_engine = WholeCheckpoints(engine.checkpoint_engine, engine.optimizer.dp_process_group)


def save_checkpoint(
    original: Callable[..., bool],
    engine: Any,
    save_dir: str,
    tag: str | None = None,
    client_state: Mapping[str, Any] = MappingProxyType({}),
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Let every file say which save it is of, and move ``latest`` when all ranks have written theirs."""
    zero = engine.optimizer
    if not isinstance(zero, MuonZeroOptimizer):
        return original(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    save = Save(_of_one_tag(tag, save_latest, zero.dp_process_group), tag, engine.global_steps)
    files, whole = engine.checkpoint_engine, isinstance(engine.checkpoint_engine, WholeCheckpoints)
    # What a load has returned says of which save that was.
    client_state = {key: value for key, value in client_state.items() if key != SAVE}
    zero.save = save
    try:
        with files.together() if whole else nullcontext():
            done = original(save_dir, tag, client_state, save_latest and not whole, exclude_frozen_parameters)
        if save_latest and whole:
            files.set_latest(save_dir, tag)
    finally:
        zero.save = None
    return done


def _of_one_tag(tag: str, save_latest: bool, group: dist.ProcessGroup) -> str:
    """A number for the save, if all ranks save the same tag, and one that can be loaded. A collective."""
    tags = gather((tag, uuid.uuid4().hex), group)
    for rank, (other, _) in enumerate(tags):
        if other != tags[0][0]:
            raise ValueError(f"rank 0 saves the tag {tags[0][0]!r}, and rank {rank} {other!r}; pass the same tag")
    if (save_latest and tag != tag.strip()) or not tag:
        raise ValueError(
            f"tag = {tag!r} would not be found again: DeepSpeed drops blanks at its ends, and takes an empty one for "
            "none; pass another tag"
        )
    return tags[0][1]


def _common_checkpoint_state(
    original: Callable[..., dict[str, Any]], engine: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """What the file of the weights says beside them."""
    state, zero = original(*args, **kwargs), engine.optimizer
    if isinstance(zero, MuonZeroOptimizer) and zero.save is not None:
        state[SAVE] = zero.save.as_saved()
    return state


# ---- preparation ----------------------------------------------------------------------------------------------------


def _prepare(engine: Any, model: nn.Module) -> _Prepared:
    """Validate the config, refuse what cannot be trained correctly, route the parameters; agree with all ranks."""
    prepared: _Prepared | None = None
    error: Exception | None = None
    try:
        prepared = _read(engine, model)
    except Exception as caught:  # whatever it is, no rank may be left waiting
        error = caught
    raise_together(error)
    assert prepared is not None
    scheduler = type(engine.client_lr_scheduler).__name__
    agree(
        "settings",
        {**engine._config._param_dict, "deepspeed.initialize(lr_scheduler=...)": scheduler},
        "read the same DeepSpeed config",
        may_differ,
    )
    agree("parameters", _routes(prepared.routing), "build the same model")
    iterations = gather(prepared.iteration, None)
    for rank, iteration in enumerate(iterations):
        if iteration != iterations[0]:
            raise DSMuonRefusal(
                f"rank {rank} would run Newton-Schulz by {iteration}, rank 0 by {iterations[0]}: "
                'set "ns_backend" and "ns_dtype" to what every rank can run'
            )
    return prepared


def _read(engine: Any, model: nn.Module) -> _Prepared:
    """What the config and the model come to on this rank.

    Raises:
        DSMuonRefusal, DSMuonConfigError, RoutingError or ValueError: everything that is wrong, at once.
    """
    problems: list[Exception] = []
    if engine.client_optimizer is not None:
        problems.append(
            DSMuonRefusal(
                'DSMuon was passed to deepspeed.initialize(optimizer=...); set "optimizer": {"type": "DSMuon"} in the '
                "DeepSpeed config instead, so that it can see the model and the ZeRO settings"
            )
        )
    of_model = model_refusals(model, engine.mpu)
    mesh = engine.mesh_device
    sequence_parallel = 1 if mesh is None else mesh.get_group(mesh_dim="sequence_parallel").size()
    if refusals := config_refusals(engine._config, sequence_parallel) + of_model:
        problems.append(DSMuonRefusal("\n".join([_REFUSED, *refusals])))
    params = {} if engine.optimizer_params() is None else engine.optimizer_params()
    config, lines = DSMuonConfig.read(params)
    if lines:
        problems.append(DSMuonConfigError("\n".join(lines)))
    routing = iteration = None
    try:
        # Refuses a backend that cannot run.
        newton_schulz = config.newton_schulz(torch.device(get_accelerator().current_device_name()))
        iteration = f"{newton_schulz.backend} in {newton_schulz.dtype}"
    except ValueError as error:
        problems.append(error)
    # Pieces of weights have no shapes to go by, and a pattern that cannot be read may be the one that matters.
    in_pieces = of_model or engine._config.zero_optimization_stage == 3
    patterns = {"muon_params", "adamw_params", "muon_blocks"}
    unread = isinstance(params, Mapping) and patterns & params.keys() - config.model_fields_set
    if not in_pieces and not unread:
        unmatched = _unmatched_patterns(config, model)
        problems += unmatched
        if not unmatched:
            try:
                routing = route(
                    model,
                    muon_params=config.muon_params,
                    adamw_params=config.adamw_params,
                    muon_blocks=config.muon_blocks,
                    per_head_muon=config.per_head_muon,
                )
            except RoutingError as error:
                problems.append(error)
    if not problems:
        assert routing is not None and iteration is not None
        return _Prepared(config, routing, iteration)
    if len(problems) == 1:
        raise problems[0]
    texts = [str(problem).removeprefix(f"{_REFUSED}\n") for problem in problems]
    raise DSMuonRefusal("\n".join([_REFUSED, *texts]))


def _unmatched_patterns(config: DSMuonConfig, model: nn.Module) -> list[RoutingError]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    errors = []
    rules = [pattern for pattern, _ in config.muon_blocks]
    for key, patterns in {
        "muon_params": config.muon_params,
        "adamw_params": config.adamw_params,
        "no_decay_params": config.no_decay_params,
        "muon_blocks": rules,
    }.items():
        for pattern in patterns:
            try:
                check_matches(key, [pattern], names)
            except RoutingError as error:
                errors.append(error)
    return errors


def _routes(routing: Routing) -> dict[str, str]:
    """Where every parameter goes, under all its names."""
    return {
        " = ".join(r.names): f"{r.shown_shape}, to {r.half}, stored {r.layout}, {described(r.pieces)}"
        for r in routing.routes
    }


def _as_facts(engine: Any, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The param groups, with names in place of parameters."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    return {"param_groups": [{**group, "params": [names[id(p)] for p in group["params"]]} for group in groups]}
