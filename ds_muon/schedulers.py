"""DeepSpeed's and torch's schedulers on DSMuon: one rate per param group, and momentum where each half reads it.

``registration`` puts these in place of the classes' own methods; ``original`` is that method, bound to the scheduler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any

from deepspeed.runtime.lr_schedules import OneCycle, WarmupLR
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from ds_muon.learning_rates import Schedule, own_momentum, spread
from ds_muon.optimizer import DSMuon


def build(schedule: Schedule, original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """``scheduler.__init__``, with the rates spread over the groups if it is a scheduler of DSMuon.

    Raises:
        DSMuonRefusal: see ``spread``.
    """
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
    except TypeError:  # arguments that do not fit: the class says so in its own words
        return original(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    optimizer = dsmuon_in(arguments.pop("optimizer"))
    if optimizer is None:
        return original(*args, **kwargs)
    arguments = spread(type(scheduler).__name__, schedule, arguments, optimizer.configured_rates, optimizer.config)
    defaults = optimizer.defaults
    if schedule.momentum_key:
        # For the time of the call only: one key is in no group of the other half.
        optimizer.defaults = {**defaults, schedule.momentum_key: None}
    try:
        original(optimizer, **arguments)
    finally:
        optimizer.defaults = defaults
    own_momentum(optimizer.param_groups)


def cycle_momentum(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """The method by which a scheduler writes momentum, and then each half's own key."""
    result = original(*args, **kwargs)
    if isinstance(scheduler.optimizer, DSMuon):
        own_momentum(scheduler.optimizer.param_groups)
    return result


def dsmuon_in(optimizer: Any) -> DSMuon | None:
    """The DSMuon in what ZeRO, Accelerate or both have wrapped around it; None if there is none."""
    for _ in range(4):
        if isinstance(optimizer, DSMuon):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


def highest_rates(scheduler: Any, optimizer: DSMuon) -> list[float]:
    """The rate that each group reaches, where the schedule says so; else the configured one."""
    if isinstance(scheduler, OneCycleLR):
        reached = [group.get("max_lr") for group in optimizer.param_groups]
    elif isinstance(scheduler, WarmupLR | OneCycle | CyclicLR):
        reached = list(getattr(scheduler, "max_lrs", ()))
    else:
        reached = []
    configured = [group.lr for group in optimizer.configured_rates]
    # A subclass of somebody's may keep them otherwise: what is warned about must not end a run.
    rates = [float(rate) for rate in reached if isinstance(rate, Real)]
    return rates if len(rates) == len(configured) else configured


def set_scheduled_rates(scheduler: Any) -> None:
    """Give every param group the rate of the step that the scheduler has come to, where it can say so.

    A scheduler that computes each rate from the one before cannot: its groups go on from the rates they have.
    """
    if (reached := getattr(scheduler, "last_batch_iteration", -1)) >= 0:  # DeepSpeed's
        scheduler.step(reached)
        return
    if isinstance(scheduler, LambdaLR):
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    elif hasattr(scheduler, "_get_closed_form_lr"):
        rates = scheduler._get_closed_form_lr()
    else:
        return
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)
