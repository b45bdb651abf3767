"""What turns the config of another optimizer into one of DSMuon that keeps its meaning, as far as there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_muon import ds_config
from ds_muon.config import AUTO_IS_A_CHOICE, OPTIMIZER_TYPE, DSMuonConfig, show
from ds_muon.doctor.trainer import fill
from ds_muon.ds_config import ABSENT, Place
from ds_muon.learning_rates import HIGHEST_FOR_ADAMW

# Of AdamW, in torch and in DeepSpeed's own.
_ADAMW_LR = 1e-3
USUAL_MUON_LR, USUAL_ADAM_LR = 0.02, 3e-4

_PARAMS: Place = ("optimizer", "params")


@dataclass(frozen=True)
class Change:
    """A value that is set, or ``ABSENT``, and why."""

    place: Place
    value: Any
    why: str


def switch(config: dict[str, Any]) -> list[Change]:
    """The changes of the section ``optimizer``; none if it is DSMuon's.

    Args:
        config: as it stands in the file; not modified.
    """
    kind = ds_config.optimizer_name(config)
    if ds_config.is_ours(kind):
        return []
    by_trainer = bool(fill(config, AUTO_IS_A_CHOICE).places)
    if kind is None:
        params: dict[str, Any]
        if by_trainer:
            params = {"lr": "auto", "weight_decay": "auto", "adjust_lr_fn": "match_rms_adamw"}
            why = "learning_rate, AdamW's, serves both halves with match_rms_adamw"
        else:
            params = {"lr": USUAL_MUON_LR, "adam_lr": USUAL_ADAM_LR, "weight_decay": 0.1}
            why = "rates to start with; pass no optimizer to deepspeed.initialize"
        return [Change(("optimizer",), {"type": OPTIMIZER_TYPE, "params": params}, why)]
    given = ds_config.value_at(config, _PARAMS)
    given = given if isinstance(given, dict) else {}
    if kind.lower() == "muon":
        why = "DeepSpeed's Muon clips its updates unless gradient_clipping is 0: a rate tuned so is for smaller steps"
        changes = _from_muon(given)
    else:
        why = "Muon for the matrices, AdamW for the rest"
        changes = _from_adamw(kind, given)
    changes.insert(0, Change(("optimizer", "type"), OPTIMIZER_TYPE, why))
    foreign = [key for key in given if key not in DSMuonConfig.model_fields]
    return changes + [Change((*_PARAMS, key), ABSENT, f"a key of {show(kind)} that DSMuon has not") for key in foreign]


def one_rate_for_both(why: str) -> Change:
    return Change((*_PARAMS, "adjust_lr_fn"), "match_rms_adamw", why)


def adamws_own_rate(why: str) -> Change:
    return Change((*_PARAMS, "adam_lr"), USUAL_ADAM_LR, why)


def _from_adamw(kind: str, given: dict[str, Any]) -> list[Change]:
    lr: Place = (*_PARAMS, "lr")
    if "adam" not in kind.lower():
        changes = [one_rate_for_both("one rate, AdamW's, serves both halves")]
        if given.get("lr") != "auto":
            changes.append(Change(lr, USUAL_ADAM_LR, f"a rate of {show(kind)} means nothing here: take AdamW's"))
        return changes
    changes = [one_rate_for_both("AdamW's rate stays, and serves both halves")]
    if "lr" not in given:
        changes.append(Change(lr, _ADAMW_LR, "AdamW's default; that of DSMuon, 0.02, is for other steps"))
    return changes


def _from_muon(given: dict[str, Any]) -> list[Change]:
    changes = []
    lr = given.get("lr")
    if "adam_lr" not in given:
        if lr == "auto":
            changes.append(one_rate_for_both("learning_rate serves both halves with it: give AdamW's"))
        elif not isinstance(lr, int | float) or lr > HIGHEST_FOR_ADAMW:
            changes.append(adamws_own_rate("AdamW's rate: it would be lr, which is Muon's"))
    return changes
