"""Learning rates of two halves: what a scheduler's one number means to each param group, and which rates are far off.

Schedulers of DeepSpeed and torch write one number into every group, which would end the ratio of Muon's rate to
AdamW's. All of them take lists as well, with one entry per group: ``spread`` makes those lists. So ``group["lr"]`` is
the rate that is applied, and the scheduler's own account of it is true.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ds_muon.config import DSMuonConfig
from ds_muon.dtypes import LARGEST
from ds_muon.refusals import DSMuonRefusal

# A rate above the first is meant for orthogonalized updates, and one below the second for AdamW.
HIGHEST_FOR_ADAMW = 5e-3
LOWEST_FOR_ORIGINAL = 1e-3


@dataclass(frozen=True)
class GroupRate:
    """What a scheduler has to know of a param group of the optimizer."""

    lr: float
    """As configured, whatever schedulers have written since."""
    use_muon: bool
    user_group: int
    """Index of the user's param group that this one is a part of."""


@dataclass(frozen=True)
class Schedule:
    """The arguments of a scheduler's constructor that are one value for all groups, or a list with one per group."""

    rates: tuple[str, ...] = ()
    """Learning rates; the last one is the highest that the schedule reaches."""
    others: tuple[str, ...] = ()
    momentum_key: str = ""
    """If it cycles momentum: what it looks for in ``optimizer.defaults`` and then writes into every group."""
    momentum_method: str = ""
    """The method that writes it."""


DEEPSPEED_SCHEDULES = {
    "LRRangeTest": Schedule(("lr_range_test_min_lr",)),
    "OneCycle": Schedule(
        ("cycle_min_lr", "cycle_max_lr"),
        ("cycle_min_mom", "cycle_max_mom"),
        momentum_key="betas",
        momentum_method="step",
    ),
    # Also WarmupDecayLR, whose constructor calls this one. WarmupCosineLR takes fractions of the groups' own rates.
    "WarmupLR": Schedule(("warmup_min_lr", "warmup_max_lr")),
}
# The others of torch multiply each group's own rate.
TORCH_SCHEDULES = {
    "CyclicLR": Schedule(
        ("base_lr", "max_lr"), ("base_momentum", "max_momentum"), momentum_key="momentum", momentum_method="get_lr"
    ),
    "LambdaLR": Schedule(others=("lr_lambda",)),
    "MultiplicativeLR": Schedule(others=("lr_lambda",)),
    "OneCycleLR": Schedule(
        ("max_lr",), ("base_momentum", "max_momentum"), momentum_key="momentum", momentum_method="get_lr"
    ),
    "ReduceLROnPlateau": Schedule(others=("min_lr",)),
}


def spread(
    name: str, schedule: Schedule, arguments: Mapping[str, Any], groups: Sequence[GroupRate], config: DSMuonConfig
) -> dict[str, Any]:
    """The arguments of a scheduler's constructor, with a list that has one entry per group in place of each rate.

    A number stands for ``lr``: a group gets number * (its configured rate / ``lr``). Where the config has no ``lr``,
    the number stands for the rate of the half that equals the highest rate of the schedule. Of a list with one entry
    per param group of the user's, an entry is the rate of that group; if its parts differ in their configured rates,
    the entry stands for ``lr`` likewise. Lists with one entry per group of the optimizer, and None, stay as they are.

    Args:
        name: of the scheduler, for messages.
        schedule: which arguments are rates or lists.
        arguments: by name, defaults included; not modified.
        groups: of the optimizer, in order.
        config: has an ``lr`` or not.

    Raises:
        DSMuonRefusal: an argument is "auto", a rate is no number, a list has another length, or it cannot be told which
            rate a number stands for.
    """
    for key, value in arguments.items():
        if isinstance(value, str) and value == "auto":
            raise DSMuonRefusal(f'scheduler {name}: {key} = "auto" is a blank that no trainer filled in; set a value')
    result = dict(arguments)
    for key in schedule.others:
        if isinstance(arguments[key], list | tuple):
            result[key] = [entry for entry, _ in _dealt(name, key, arguments[key], groups)]
    given = [key for key in schedule.rates if arguments[key] is not None]
    for key, entries in {key: _dealt_rates(name, key, arguments[key], groups) for key in given}.items():
        result[key] = [number for number, _ in entries]
        # Zero is zero, whatever it stands for.
        if any(stands_for_lr and number for number, stands_for_lr in entries):
            meant = _rate_meant(name, key, arguments, schedule, groups, config)
            result[key] = [
                _in_proportion(number, meant, group.lr) if stands_for_lr else number
                for (number, stands_for_lr), group in zip(entries, groups, strict=True)
            ]
    return result


def _dealt_rates(name: str, key: str, value: Any, groups: Sequence[GroupRate]) -> list[tuple[Any, bool]]:
    """For each group of the optimizer its number, and whether that stands for ``lr`` rather than for itself."""
    entries = _dealt(name, key, value, groups) if isinstance(value, list | tuple) else [(value, True)] * len(groups)
    if not all(_is_rate(number) for number, _ in entries):
        raise DSMuonRefusal(
            f"scheduler {name}: {key} = {value!r}: a rate is a number, at least 0 and finite in fp32, such as 0.02"
        )
    return entries


def _is_rate(value: Any) -> bool:
    # NaN compares false.
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= LARGEST


def _dealt(name: str, key: str, values: Sequence[Any], groups: Sequence[GroupRate]) -> list[tuple[Any, bool]]:
    """For each group of the optimizer its entry, and whether that serves groups of different configured rates."""
    users = max(group.user_group for group in groups) + 1
    if len(values) == users:
        configured = [{group.lr for group in groups if group.user_group == user} for user in range(users)]
        return [(values[group.user_group], len(configured[group.user_group]) > 1) for group in groups]
    if len(values) == len(groups):
        return [(value, False) for value in values]
    raise DSMuonRefusal(
        f"scheduler {name}: {key} has {len(values)} entries; give one for all, or a list of {users} (one per param "
        f"group passed to deepspeed.initialize) or of {len(groups)} (one per group of optimizer.param_groups)"
    )


def _rate_meant(
    name: str,
    key: str,
    arguments: Mapping[str, Any],
    schedule: Schedule,
    groups: Sequence[GroupRate],
    config: DSMuonConfig,
) -> float:
    """The configured rate that the numbers of a schedule stand for."""
    where = f"scheduler {name}: {key} = {arguments[key]!r}"
    top_key = schedule.rates[-1]
    top = arguments[top_key]
    highest = max(top) if isinstance(top, list | tuple) else top
    halves = {"muon_lr": config.resolved_muon_lr}
    if not all(group.use_muon for group in groups):
        halves["adam_lr"] = config.resolved_adam_lr
    if "lr" in config.model_fields_set:
        meant = [config.lr]
    elif len(set(halves.values())) == 1:
        meant = [config.resolved_muon_lr]
    else:
        meant = [rate for rate in halves.values() if highest is not None and math.isclose(rate, highest)]
    if not meant:
        rates = " nor ".join(f"{half} ({rate:g})" for half, rate in halves.items())
        raise DSMuonRefusal(
            f"{where} is one number for two rates: optimizer.params has no lr that it could stand for, and {top_key} "
            f"equals neither {rates}; set optimizer.params.lr to the rate that it stands for, or {top_key} to one of "
            "the two, and the other half keeps its ratio"
        )
    if meant[0] == 0:
        raise DSMuonRefusal(
            f"{where} stands for a configured rate of 0, of which no other rate is a multiple; set optimizer.params.lr "
            "to the rate that it stands for"
        )
    return meant[0]


def _in_proportion(number: float, meant: float, configured: float) -> float:
    # Two special cases of number / meant * configured, without its rounding.
    if configured == meant:
        return number
    return configured if number == meant else number / meant * configured


def own_momentum(groups: Iterable[dict[str, Any]]) -> None:
    """Hand a momentum that a scheduler wrote, as it does for all groups alike, to the key that each half reads.

    Modifies the groups: in Muon's, the first of ``betas`` becomes ``momentum``; in AdamW's, the other way round.
    """
    for group in groups:
        if group["use_muon"]:
            if "betas" in group:
                group["momentum"] = group.pop("betas")[0]
        elif "momentum" in group:
            group["betas"] = (group.pop("momentum"), *group["betas"][1:])


def far_off(rates: Sequence[float], groups: Sequence[GroupRate], config: DSMuonConfig) -> list[str]:
    """A warning for each half with a rate that is valid but likely not meant. A rate of 0 is meant.

    Args:
        rates: the highest that each group reaches.
        groups: the same groups.
        config: names the scale of Muon's updates.
    """
    muon = [rate for rate, group in zip(rates, groups, strict=True) if group.use_muon and rate > 0]
    adamw = [rate for rate, group in zip(rates, groups, strict=True) if not group.use_muon]
    lines = []
    if config.adjust_lr_fn == "original" and min(muon, default=LOWEST_FOR_ORIGINAL) < LOWEST_FOR_ORIGINAL:
        lines.append(
            f'Muon\'s learning rate is {min(muon):g}, but about 0.02 is usual with "adjust_lr_fn": "original": it will '
            'hardly learn; in optimizer.params set "adjust_lr_fn": "match_rms_adamw", which takes rates of AdamW, or '
            '"muon_lr", such as 0.02'
        )
    if max(adamw, default=0.0) > HIGHEST_FOR_ADAMW:
        lines.append(
            f"AdamW's learning rate is {max(adamw):g}, which is high for AdamW; in optimizer.params set "
            '"adam_lr", such as 3e-4, without which AdamW takes "lr"'
        )
    return lines
