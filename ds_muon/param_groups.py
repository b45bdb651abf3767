"""The optimizer's param groups: the user's own, each split by half and by weight decay or none, Muon's first."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ds_muon.config import DSMuonConfig, DSMuonConfigError
from ds_muon.dtypes import LARGEST
from ds_muon.routing import Half, Routing, RoutingError, check_matches, first_match

# What a param group may set for itself; the other keys of the config hold for the whole optimizer.
GROUP_KEYS = ("lr", "weight_decay", "momentum", "nesterov", "betas", "eps")
# How the names end of the groups that no_decay_params makes.
NO_DECAY = "no_decay"
# What torch.optim.AdamW would read from a group, and Muon has no form of.
ADAMW_SWITCHES = ("amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused")


def split_param_groups(
    model: nn.Module, model_parameters: Iterable[Tensor | dict[str, Any]], routing: Routing, config: DSMuonConfig
) -> list[dict[str, Any]]:
    """The param groups of the optimizer: every Muon group first, then every AdamW group, each in the user's order.

    Args:
        model: the module that ``routing`` was made for.
        model_parameters: tensors, dict groups, or a mix, in which loose tensors form one group in the place of the
            first one. Not modified, but generators are used up. A group's own lr, weight_decay, momentum, nesterov,
            betas and eps win over the config; keys that DSMuon does not know are carried along.
        routing: from ``route``.
        config: the values of each half.

    Returns:
        New dicts with "params", "use_muon", "name", "user_group" (the index of the group that it is a part of), "lr",
        "weight_decay", and "momentum" and "nesterov" (Muon) or "betas" and "eps" (AdamW). None is empty; frozen and
        empty tensors are left out. What ``no_decay_params`` matches is in groups of its own, without weight decay.

    Raises:
        RoutingError: tensors given twice or not in the model, malformed or contradictory groups, no Muon matrix left,
            a pattern of ``no_decay_params`` without a match.
        DSMuonConfigError: a group's own value is out of range, or a group's lr times weight_decay is.
    """
    check_matches("no_decay_params", config.no_decay_params, [name for r in routing.routes for name in r.names])
    decided = {route.name: route.half for route in routing.routes}
    undecayed = {route.name for route in routing.routes if first_match(route.names, config.no_decay_params)}
    known = {id(param): name for name, param in model.named_parameters()}
    groups = _collect(model_parameters)
    defaults = _defaults(config)
    split: dict[Half, list[dict[str, Any]]] = {half: [] for half in defaults}
    seen: set[int] = set()
    for index, (group, group_name) in enumerate(zip(groups, _group_names(groups), strict=True)):
        pieces: dict[tuple[Half, bool], list[Tensor]] = {}
        for param in group["params"]:
            name = _known_name(param, index, known)
            if id(param) in seen:
                raise RoutingError(f"{name} is given twice, again in param group {index}; give every tensor once")
            seen.add(id(param))
            half = decided[name]
            if half != "none" and group.get("use_muon", half == "muon") is not (half == "muon"):
                raise RoutingError(
                    f"param group {index} has use_muon = {group['use_muon']!r}, but {name} goes to {half}; drop the "
                    f'key, or name the tensor in optimizer.params "muon_params" or "adamw_params"'
                )
            pieces.setdefault((half, name not in undecayed), []).append(param)
        own, carried = _own_settings(group, index)
        of_muon = any(half == "muon" for half, _ in pieces)
        if of_muon and (problem := config.momentum_problem(own.get("momentum", 0.0))):
            raise DSMuonConfigError(f"param_groups[{index}].momentum = {own['momentum']:g}: {problem}")
        for half, default in defaults.items():
            own_of_half = {key: own[key] for key in default if key in own}
            for decays in (True, False):
                if params := pieces.get((half, decays)):
                    name = "-".join(filter(None, (group_name, half, "" if decays else NO_DECAY)))
                    piece = {"params": params, "use_muon": half == "muon", "name": name, "user_group": index}
                    undecay = {} if decays else {"weight_decay": 0.0}
                    split[half].append({**piece, **default, **own_of_half, **undecay, **carried})
    if not split["muon"]:
        raise RoutingError(
            "the parameters given to deepspeed.initialize hold no trainable matrix for Muon; use AdamW, or pass some "
            f"of the model's, such as {', '.join(route.name for route in routing.of_half('muon')[:3])}"
        )
    _check_products(split["muon"] + split["adamw"])
    return split["muon"] + split["adamw"]


def _check_products(groups: Iterable[Mapping[str, Any]]) -> None:
    for group in groups:
        if group["lr"] * group["weight_decay"] > LARGEST:
            raise DSMuonConfigError(
                f"param group {group['name']!r} has lr = {group['lr']:g} and weight_decay = {group['weight_decay']:g}, "
                "whose product, the share of a weight that decays in a step, is infinite in fp32; set smaller ones"
            )


def _defaults(config: DSMuonConfig) -> dict[Half, dict[str, Any]]:
    return {
        "muon": {
            "lr": config.resolved_muon_lr,
            "weight_decay": config.resolved_muon_weight_decay,
            "momentum": config.momentum,
            "nesterov": config.nesterov,
        },
        "adamw": {
            "lr": config.resolved_adam_lr,
            "weight_decay": config.resolved_adam_weight_decay,
            "betas": config.betas,
            "eps": config.eps,
        },
    }


def _collect(model_parameters: Iterable[Tensor | dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(model_parameters, Tensor | Mapping):
        raise RoutingError(f"model_parameters is a {type(model_parameters).__name__}; pass a list of tensors or groups")
    groups: list[dict[str, Any]] = []
    loose: list[Tensor] | None = None
    for item in model_parameters:
        if isinstance(item, Mapping):
            if "params" not in item:
                raise RoutingError(
                    f'param group {len(groups)} has the keys {list(item)}; add "params", a list of tensors'
                )
            params = item["params"]
            if isinstance(params, set | frozenset):
                raise RoutingError(f"param group {len(groups)} has a set as params; pass a list, whose order is fixed")
            groups.append({**item, "params": [params] if isinstance(params, Tensor) else list(params)})
        elif loose is None:
            loose = [item]
            groups.append({"params": loose})
        else:
            loose.append(item)
    return groups


def _group_names(groups: Sequence[Mapping[str, Any]]) -> list[str | None]:
    names = [group.get("name", f"group{index}" if len(groups) > 1 else None) for index, group in enumerate(groups)]
    for index, name in enumerate(names):
        if names.index(name) != index or not (name is None or (isinstance(name, str) and name)):
            raise RoutingError(f'param group {index} has the name {name!r}; give it a string of its own, or no "name"')
    return names


def _known_name(param: Any, index: int, known: Mapping[int, str]) -> str:
    if not isinstance(param, Tensor):
        if isinstance(param, tuple):
            raise RoutingError(f"param group {index} holds tuples; pass parameters() instead of named_parameters()")
        raise RoutingError(f"param group {index} holds {param!r:.80}, a {type(param).__name__}; pass tensors")
    if id(param) not in known:
        raise RoutingError(
            f"param group {index} holds a tensor of shape {tuple(param.shape)} that is not a parameter of the model; "
            "leave it out, or register it in the module given to deepspeed.initialize"
        )
    return known[id(param)]


def _own_settings(group: Mapping[str, Any], index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a group sets for itself, checked like the config; and the keys that DSMuon does not know."""
    own = {key: value for key, value in group.items() if key in GROUP_KEYS}
    made_here = ("params", "name", "use_muon", "user_group")
    carried = {key: value for key, value in group.items() if key not in (*GROUP_KEYS, *made_here)}
    if fixed := [key for key in carried if key in DSMuonConfig.model_fields]:
        raise RoutingError(
            f"param group {index} has {fixed[0]} = {carried[fixed[0]]!r}, which holds for all groups; "
            "set it in optimizer.params"
        )
    if switches := [key for key in ADAMW_SWITCHES if carried.get(key)]:
        raise RoutingError(
            f"param group {index} has {switches[0]} = {carried[switches[0]]!r}, "
            "which would change its AdamW half only; remove the key"
        )
    if not carried.get("decoupled_weight_decay", True):
        raise RoutingError(
            f"param group {index} has decoupled_weight_decay = False, which makes its AdamW half Adam with an L2 "
            "penalty; remove the key"
        )
    for key in carried:
        if near := difflib.get_close_matches(key, GROUP_KEYS, n=1, cutoff=0.8):
            raise RoutingError(f"param group {index} has {key} = {carried[key]!r}; did you mean {near[0]!r}?")
    checked = DSMuonConfig.parse(own, where=f"param_groups[{index}]")
    return {key: getattr(checked, key) for key in own}, carried
