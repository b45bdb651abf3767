"""Binds DSMuon to DeepSpeed's engine: the only module that changes anything of DeepSpeed's or torch's.

Methods of ``DeepSpeedEngine`` are wrapped, its constructor among them, and the constructors of the schedulers that take
one number for all param groups. Each wrapper does its part for an engine whose optimizer type is DSMuon, or for a
scheduler of DSMuon, and for any other does what DeepSpeed or torch does. The modules of the model get a hook for their
``state_dict``. After ``torch.distributed.init_process_group`` a rank leaves word in the group's store that it has
imported this package.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from ds_muon import passes
from ds_muon.agree import RollCall, agree, gather, leave_word
from ds_muon.checkpoints import engine_methods
from ds_muon.checkpoints.saving import refuse_torn_weights
from ds_muon.config import OPTIMIZER_TYPE
from ds_muon.deepspeed_parts import SCHEDULES, check_parts
from ds_muon.dtypes import DTYPES
from ds_muon.learning_rates import far_off
from ds_muon.making import making
from ds_muon.optimizer import DSMuon
from ds_muon.orthogonalize import backends
from ds_muon.param_groups import split_param_groups
from ds_muon.preparation import prepare
from ds_muon.refusals import DSMuonRefusal
from ds_muon.routing import Routing
from ds_muon.say import log, say
from ds_muon.schedulers import build, cycle_momentum, dsmuon_in, highest_rates
from ds_muon.zero import MuonZeroOptimizer

_roll_call = RollCall()


def register() -> None:
    """Make ``"type": "DSMuon"`` known to DeepSpeed. Does nothing the second time.

    Raises:
        ImportError: this DeepSpeed lacks a part that DSMuon binds to.
    """
    engine = deepspeed_engine.DeepSpeedEngine
    if getattr(engine._is_supported_optimizer, "_ds_muon", False):
        return
    check_parts()
    for wrapper in (
        _is_supported_optimizer,
        _configure_distributed_model,
        _broadcast_model,
        _configure_basic_optimizer,
        _do_optimizer_sanity_check,
        _configure_zero_optimizer,
        _scheduler_from_config,
        _configure_lr_scheduler,
        backward,
        step,
        *engine_methods.WRAPPERS,
    ):
        _wrap(engine, wrapper.__name__, wrapper)
    _wrap(engine, "__init__", _make)
    for module, schedules in SCHEDULES:
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


def _uses_dsmuon(engine: Any) -> bool:
    name = engine.optimizer_name()
    return isinstance(name, str) and name.lower() == OPTIMIZER_TYPE.lower()


def _optimizer_of(engine: Any) -> str:
    if engine.client_optimizer is not None:
        return f"the optimizer that was passed to deepspeed.initialize ({type(engine.client_optimizer).__name__})"
    return f"the optimizer {engine.optimizer_name()}" if engine.optimizer_name() else "no optimizer"


# ---- the wrappers: `original` is DeepSpeed's method, bound to the engine; those of checkpoints: checkpoints ---


def _make(original: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """Let every rank stop where one fails while the engine is made."""
    try:
        with making.of_engine(lambda: _advice(engine)):
            original(*args, **kwargs)
    except BaseException:
        made = vars(engine)
        if "_ds_muon" in made:  # a script may make another engine of the model, which would call this one's hooks
            hooks = [made.get("module_forward_pre_hook"), made.get("module_forward_post_hook")]
            for hook in [*filter(None, hooks), *getattr(made.get("optimizer"), "_grad_acc_hooks", ())]:
                hook.remove()
        raise


def _advice(engine: Any) -> str:
    offload = engine._config.zero_config.offload_optimizer
    if offload is None or not offload.pin_memory:
        return ""
    return ". If memory cannot be locked, set offload_optimizer.pin_memory to false"


def _is_supported_optimizer(original: Callable[..., bool], engine: Any, optimizer_name: str) -> bool:
    return optimizer_name.lower() == OPTIMIZER_TYPE.lower() or original(optimizer_name)


def _configure_distributed_model(original: Callable[..., None], engine: Any, model: nn.Module) -> None:
    """Refuse and route before the model is broadcast: the first point at which collectives are safe."""
    if _uses_dsmuon(engine):
        _roll_call.wait_for_all()
        with making.together():
            deepspeed_groups._get_data_parallel_group()  # a collective, before which DeepSpeed would move the model
        engine._ds_muon = prepare(engine, model)
    else:
        _roll_call.pass_by(_optimizer_of(engine))
    original(model)


def _broadcast_model(original: Callable[..., None], engine: Any) -> None:
    with making.together() if _uses_dsmuon(engine) else nullcontext():
        original()


def _configure_basic_optimizer(original: Callable[..., Any], engine: Any, model_parameters: Iterable[Any]) -> Any:
    if not _uses_dsmuon(engine):
        return original(model_parameters)
    config, routing = engine._ds_muon.config, engine._ds_muon.routing
    groups = split_param_groups(engine.module, model_parameters, routing, config)
    facts = _as_facts(engine, groups)
    with making.together():
        agree("param groups", facts, "pass the same model_parameters, in the same order and with the same settings")
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
        engine.optimizer = zero_optimizer = original(optimizer)
    finally:
        deepspeed_engine.DeepSpeedZeroOptimizer = usual
    zero_optimizer.failure.notice = notice = _roll_call.notice("torn")
    refuse_torn_weights(engine, notice)
    settings, device = zero_optimizer.newton_schulz, zero_optimizer.accelerator
    shapes = {(matrix.rows, matrix.cols) for matrix in zero_optimizer.plan.matrices}
    backends.compile_ahead(settings.backend, shapes, device, settings.dtype)
    if zero_optimizer.cpu_offload:
        pinned = ", pinned" * zero_optimizer.cpu_offload_pin_memory
        say(f"CPU offload: the optimizer's state is in the host's memory{pinned}")
    else:
        passes.compile_ahead(
            device,
            momentum=optimizer.config.momentum,
            nesterov=optimizer.config.nesterov,
            momentum_dtype=DTYPES[optimizer.config.momentum_dtype],
            result_dtype=settings.dtype,
            weight_decay=optimizer.param_groups[0]["weight_decay"],
        )
    if every := optimizer.config.verify_every:
        from ds_muon.verify.in_training import TrainingCheck

        zero_optimizer.training_check = TrainingCheck(
            zero_optimizer, engine.module, every, bits=optimizer.config.verify_bits
        )
    if every := _telemetry_every(engine, optimizer.config.telemetry_every):
        from ds_muon.telemetry import Telemetry

        zero_optimizer.telemetry = Telemetry(zero_optimizer, engine, every)
    if dist.get_rank() == 0:
        log(zero_optimizer.plan.summary(), logging.INFO)
    return zero_optimizer


def backward(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Refused after a backward pass that has raised: what it had reduced by then is among the gradients."""
    zero = engine.optimizer
    if not isinstance(zero, MuonZeroOptimizer):
        return original(*args, **kwargs)
    if zero.interrupted is not None:
        raise DSMuonRefusal(zero.interrupted)
    depth = zero._backward_active_depth
    try:
        return original(*args, **kwargs)
    except BaseException as error:
        if zero._backward_active_depth > depth:
            zero.interrupted = (
                f"a backward pass has ended in an error ({type(error).__name__}: {error}), and some of its gradients "
                "are among those of the next steps: end the run, and go on from a checkpoint in a new engine"
            )
        raise


def step(original: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """Of a step that has raised, DeepSpeed's engine thinks that it goes on, and that its last micro-batch is to come:
    every backward pass would end a step.
    """
    try:
        original(*args, **kwargs)
    except BaseException:
        if isinstance(engine.optimizer, MuonZeroOptimizer):
            if engine.is_gradient_accumulation_boundary() and engine.optimizer.has_no_gradients:
                engine.micro_steps += 1
                engine._unmanaged_backward_count = 0
            engine._running_engine_step = False
            for name in engine.engine_timers.step_timers:
                engine.timers(name).reset()
        raise


def _telemetry_every(engine: Any, every: int | None) -> int:
    """How many steps lie between two that are observed; 0 for none. Rank 0's, which alone may have a monitor."""
    if every is None and engine.monitor.enabled:
        of_engine = engine.steps_per_print()
        every = int(of_engine) if of_engine and math.isfinite(of_engine) else 100  # Accelerate sets infinity
    with making.together():
        return gather(every or 0, None)[0]


def _scheduler_from_config(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Build on DSMuon itself: torch's schedulers, and DeepSpeed's ``OneCycle``, do not take a ZeRO optimizer."""
    return original(dsmuon_in(optimizer) or optimizer)


def _configure_lr_scheduler(original: Callable[..., None], engine: Any) -> None:
    """Refuse a scheduler of another optimizer, or of other rates on a rank, and warn of rates that are far off."""
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, DSMuon):
        return original()
    original()
    driven = getattr(engine.lr_scheduler, "optimizer", optimizer)
    if getattr(driven, "param_groups", optimizer.param_groups) is not optimizer.param_groups:
        raise DSMuonRefusal(
            f"lr_scheduler = a {type(engine.lr_scheduler).__name__} of another optimizer, a "
            f"{type(driven).__name__}, would change no rate of DSMuon's; pass a function that builds one, such as "
            "lr_scheduler=lambda optimizer: LambdaLR(optimizer, ...)"
        )
    lines = far_off(highest_rates(engine.lr_scheduler, optimizer), optimizer.configured_rates, optimizer.config)
    # Of a function that builds a scheduler, or of one that is passed, ranks can only compare what it does.
    rates = {group["name"]: {"lr": group["lr"]} for group in optimizer.param_groups}
    with making.together():
        agree("learning rates at the start", rates, "pass the same lr_scheduler")
    if dist.get_rank() == 0:
        for line in [*lines, *_of_one_rank()]:
            log(line)


def _of_one_rank() -> list[str]:
    """What to say where Accelerate takes this rank for the only one, as it does on a CPU unless told."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    world_size = dist.get_world_size()
    if getattr(state, "_shared_state", {}).get("num_processes", world_size) == world_size:
        return []
    return [
        f"Accelerate does not know of all {world_size} ranks: Trainer, and what it prepares, gives each of them "
        "the same data. On a CPU set use_cpu=True in TrainingArguments, or call accelerate.PartialState(cpu=True) first"
    ]


def _as_facts(engine: Any, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The param groups, with names in place of parameters."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    return {"param_groups": [{**group, "params": [names[id(p)] for p in group["params"]]} for group in groups]}
