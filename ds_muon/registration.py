"""Binds DSMuon to DeepSpeed's engine: the only module that changes anything of DeepSpeed's or torch's.

Seven methods of ``DeepSpeedEngine`` are wrapped, and the constructors of the schedulers that take one number for all
param groups. Each wrapper does its part for an engine whose optimizer type is DSMuon, or for a scheduler of DSMuon, and
for any other does what DeepSpeed or torch does.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

from ds_muon.config import DSMuonConfig
from ds_muon.guard import gather, raise_together
from ds_muon.learning_rates import DEEPSPEED_SCHEDULES, TORCH_SCHEDULES, far_off
from ds_muon.optimizer import DSMuon
from ds_muon.param_groups import GROUP_KEYS, split_param_groups
from ds_muon.refusals import SUPPORTED_DEEPSPEED, DSMuonRefusal, config_refusals, model_refusals
from ds_muon.routing import Routing, route
from ds_muon.say import log, say
from ds_muon.schedulers import build, cycle_momentum, dsmuon_in, highest_rates
from ds_muon.zero import MuonZeroOptimizer

OPTIMIZER_TYPE = "DSMuon"

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
)
_ZERO_METHODS = (
    "initialize_optimizer_states",
    "get_flat_partition",
    "_is_muon_group",
    "_release_preflattened_grad_buffers",
    "free_grad_in_param_list",
    "get_param_id",
    "_update_scale",
    "update_lp_params",
    "state_dict",
    "load_state_dict",
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
    "round_robin_bit16_groups",
    "round_robin_bit16_offsets",
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
    "_param_slice_mappings",
    "_hp_optimizer_states_linked",
)
_MODULE_NAMES = (
    (deepspeed_engine, ("DeepSpeedZeroOptimizer", "ZERO_OPTIMIZATION")),
    (
        deepspeed_zero,
        (
            "DeepSpeedZeroOptimizer",
            "version",
            "INITIAL_MICRO_STEP_ID",
            "OPTIMIZER_TIMERS",
            "OPTIMIZER_GRADIENTS_TIMER",
            "OPTIMIZER_STEP_TIMER",
            "OPTIMIZER_ALLGATHER_TIMER",
            "PARAM_SLICE_MAPPINGS",
            "BASE_OPTIMIZER_STATE",
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
    ):
        _wrap(engine, wrapper.__name__, wrapper)
    for module, schedules in _SCHEDULES:
        for name, schedule in schedules.items():
            _wrap(getattr(module, name), "__init__", functools.partial(build, schedule))
            if schedule.momentum_method:
                _wrap(getattr(module, name), schedule.momentum_method, cycle_momentum)


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


# ---- the wrappers: `original` is DeepSpeed's method, bound to the engine --------------------------------------------


def _is_supported_optimizer(original: Callable[..., bool], engine: Any, optimizer_name: str) -> bool:
    return optimizer_name.lower() == OPTIMIZER_TYPE.lower() or original(optimizer_name)


def _configure_distributed_model(original: Callable[..., None], engine: Any, model: nn.Module) -> None:
    """Refuse and route before the model is broadcast: the first point at which collectives are safe."""
    if _uses_dsmuon(engine):
        engine._ds_muon = _prepare(engine, model)
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
    _agree(
        _facts(engine, groups),
        "pass the same model_parameters, in the same order and with the same settings, and the same DeepSpeed config",
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
    if dist.get_rank() == 0:
        log(zero_optimizer.plan.summary(), logging.INFO)
    return zero_optimizer


def _scheduler_from_config(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Build on DSMuon itself: torch's schedulers, and DeepSpeed's ``OneCycle``, do not take a ZeRO optimizer."""
    return original(dsmuon_in(optimizer) or optimizer)


def _configure_lr_scheduler(original: Callable[..., None], engine: Any) -> None:
    """Let every rank stop where a scheduler is refused on one, and warn of rates that are far off."""
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, DSMuon):
        return original()
    error: Exception | None = None
    try:
        original()
        driven = getattr(engine.lr_scheduler, "optimizer", optimizer)
        if getattr(driven, "param_groups", optimizer.param_groups) is not optimizer.param_groups:
            raise DSMuonRefusal(
                f"lr_scheduler = a {type(engine.lr_scheduler).__name__} of another optimizer, a "
                f"{type(driven).__name__}, would change no rate of DSMuon's; pass a function that builds one, such as "
                "lr_scheduler=lambda optimizer: LambdaLR(optimizer, ...)"
            )
    except Exception as caught:  # whatever it is, no rank may be left waiting
        error = caught
    raise_together(error)
    if dist.get_rank() == 0:
        reached = highest_rates(engine.lr_scheduler, optimizer)
        for line in far_off(reached, optimizer.configured_rates, optimizer.config):
            log(line)


# ---- preparation ----------------------------------------------------------------------------------------------------


def _prepare(engine: Any, model: nn.Module) -> _Prepared:
    """Validate the config, refuse what cannot be trained correctly, route the parameters; agree with all ranks."""
    prepared: _Prepared | None = None
    error: Exception | None = None
    try:
        if engine.client_optimizer is not None:
            raise DSMuonRefusal(
                'DSMuon was passed to deepspeed.initialize(optimizer=...); set "optimizer": {"type": "DSMuon"} in the '
                "DeepSpeed config instead, so that it can see the model and the ZeRO settings"
            )
        refusals = config_refusals(engine._config, engine.mesh_device) + model_refusals(model, engine.mpu)
        if refusals:
            raise DSMuonRefusal("\n".join(["DSMuon refuses this setup:", *refusals]))
        config = DSMuonConfig.parse(engine.optimizer_params() or {})
        # Refuses a backend that cannot run.
        newton_schulz = config.newton_schulz(torch.device(get_accelerator().current_device_name()))
        routing = route(model, muon_params=config.muon_params, adamw_params=config.adamw_params)
        prepared = _Prepared(config, routing, f"{newton_schulz.backend} in {newton_schulz.dtype}")
    except Exception as caught:  # whatever it is, no rank may be left waiting
        error = caught
    raise_together(error)
    assert prepared is not None
    _agree(
        prepared.routing.digest(prepared.config.model_dump_json()),
        "build the same model and read the same DeepSpeed config",
    )
    iterations = gather(prepared.iteration, None)
    for rank, iteration in enumerate(iterations):
        if iteration != iterations[0]:
            raise DSMuonRefusal(
                f"rank {rank} would run Newton-Schulz by {iteration}, rank 0 by {iterations[0]}: "
                'set "ns_backend" and "ns_dtype" to what every rank can run'
            )
    return prepared


def _facts(engine: Any, groups: list[dict[str, Any]]) -> bytes:
    """SHA-256 of all that decides the layout and the step beside the routing: the groups and the ZeRO settings."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    keys = (*GROUP_KEYS, "use_muon", "name", "user_group")
    facts = [([names[id(p)] for p in g["params"]], [repr((key, g.get(key))) for key in keys]) for g in groups]
    settings = [engine.gradient_clipping(), engine._config.zero_config.model_dump_json(), repr(engine.get_data_types())]
    return hashlib.sha256(json.dumps([facts, settings]).encode()).digest()


def _agree(digest: bytes, remedy: str) -> None:
    """Raise on every rank if ranks bring different digests."""
    digests = gather(digest, None)
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise DSMuonRefusal(
            f"ranks {others} have other parameters, routes, param groups or settings than rank 0; "
            f"{remedy} on every rank"
        )
