"""All that DSMuon would refuse or warn about in a DeepSpeed config, at once and without an engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any, Literal

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.monitor import utils as monitors
from deepspeed.monitor.config import get_monitor_config
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_muon import ds_config
from ds_muon.config import AUTO_IS_A_CHOICE, DSMuonConfig, show
from ds_muon.doctor.switch import switch
from ds_muon.doctor.trainer import FILLED_IN, Filled, fill
from ds_muon.learning_rates import GroupRate, far_off
from ds_muon.optimizer import DSMuon
from ds_muon.param_groups import split_param_groups
from ds_muon.routing import route
from ds_muon.schedulers import highest_rates

Kind = Literal["refused", "warning", "note"]

# Of each monitor that takes a package: DeepSpeed's look at it, which raises, and what to install.
_MONITORS = {
    "tensorboard": (monitors.check_tb_availability, "tensorboard"),
    "wandb": (monitors.check_wandb_availability, "wandb"),
    "comet": (monitors.check_comet_availability, "'comet_ml>=3.41.0'"),
}


@dataclass(frozen=True)
class Finding:
    """What is refused, warned about, or worth knowing."""

    kind: Kind
    text: str

    @property
    def key(self) -> str:
        """What the text begins with, where it is of one key."""
        return self.text.partition(" = ")[0]


def examine(config: dict[str, Any]) -> list[Finding]:
    """Refusals first, then warnings, then notes. Of another optimizer's config, as if its type were changed.

    What depends on the model or on the number of ranks is not seen: patterns that match nothing, batch sizes.

    Args:
        config: as it stands in the file; not modified.
    """
    found = [Finding("refused", text) for text in [*_optimizer(config), *_blanks(config)]]
    changes = {change.place: change.value for change in switch(config)}
    filled = fill(ds_config.changed(config, changes), AUTO_IS_A_CHOICE)
    found += [Finding("refused", text) for text in [*_settings(filled.config), *_monitors(filled.config)]]
    params = ds_config.value_at(filled.config, ("optimizer", "params"))
    read, lines = DSMuonConfig.read({} if params is ds_config.ABSENT or params is None else params)
    found += [Finding("refused", text) for text in [*lines, *_backend(read)]]
    found += _rates(filled, read)
    found += [Finding("note", text) for text in _of_trainer(fill(config, AUTO_IS_A_CHOICE), read)]
    return sorted(found, key=lambda finding: ("refused", "warning", "note").index(finding.kind))


def refused_keys(config: dict[str, Any]) -> list[str]:
    """The keys of the settings that are refused, but for those of ``optimizer.params``."""
    return [Finding("refused", text).key for text in _settings(fill(config, AUTO_IS_A_CHOICE).config)]


def _optimizer(config: dict[str, Any]) -> list[str]:
    section, kind = config.get("optimizer"), ds_config.optimizer_name(config)
    if ds_config.is_ours(kind):
        return []
    if section is None:
        return [
            "optimizer is absent: the optimizer is then the script's own, or AdamW by Trainer; set "
            '{"type": "DSMuon", "params": {...}}, and pass none in the script'
        ]
    if kind is None:
        return [f'optimizer = {show(section)}: has no type; set "type": "DSMuon"']
    return [f'optimizer.type = {show(kind)}: is not DSMuon; set "DSMuon", and look at the rates']


def _blanks(config: dict[str, Any]) -> list[str]:
    filled = fill(config, AUTO_IS_A_CHOICE)
    lines = []
    for place in filled.blanks:
        why = "is a blank that no trainer fills in; set a value, or leave the key out"
        if place[:-1] == ("optimizer", "params") and place[-1] in AUTO_IS_A_CHOICE:
            why = "ends Trainer, because Accelerate wants a value to fill in; leave the key out, which means the same"
        lines.append(f'{".".join(place)} = "auto": {why}')
    return lines


def _settings(filled: dict[str, Any]) -> list[str]:
    try:
        return ds_config.refusals(filled)
    except Exception as error:  # pydantic's, an assertion, or whatever a value of another type leads to
        return [f"DeepSpeed cannot read this config: {_in_a_line(error)}"]


def _in_a_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines()) or type(error).__name__


def _monitors(filled: dict[str, Any]) -> list[str]:
    """Of the monitors that are on, those whose package DeepSpeed cannot import here."""
    try:
        configured = get_monitor_config(filled)
    except Exception:  # DeepSpeed cannot read the config, and that is said
        return []
    lines = []
    for section, (look, package) in _MONITORS.items():
        try:
            if getattr(configured, section).enabled:
                with redirect_stdout(StringIO()):
                    look()
        except Exception as error:  # a package that is there may fail in any way
            stops = f'training stops at its start, on this machine, with "{_in_a_line(error)}"'
            lines.append(f"{section}.enabled = true: {stops}; pip install {package}")
    return lines


def _backend(read: DSMuonConfig) -> list[str]:
    try:
        read.newton_schulz(torch.device(get_accelerator().current_device_name()))
    except ValueError as error:
        return [f"{error} (on this machine)"]
    return []


def _rates(filled: Filled, read: DSMuonConfig) -> list[Finding]:
    """What the scheduler refuses, and rates that are far off, for a param group in each half."""
    read = read.model_copy(update={"no_decay_params": (), "muon_blocks": (), "muon_params": (), "adamw_params": ()})
    model = nn.Sequential(OrderedDict(layer=nn.Linear(4, 8, device="cpu")))
    routing = route(model)
    try:
        groups = split_param_groups(model, list(model.parameters()), routing, read)
    except ValueError as error:  # a rate times a decay that is no factor
        return [Finding("refused", str(error))]
    configured = [GroupRate(group["lr"], group["use_muon"], group["user_group"]) for group in groups]
    highest, found = [rate.lr for rate in configured], []
    section = filled.config.get("scheduler")
    if isinstance(section, Mapping) and section.get("type") is not None:
        kind, params = section["type"], section.get("params")
        stands_in = SimpleNamespace(scheduler_name=lambda: kind, scheduler_params=lambda: params)
        optimizer = DSMuon(groups, read, routing)
        try:
            with ds_config.quiet():
                highest = highest_rates(DeepSpeedEngine._scheduler_from_config(stands_in, optimizer), optimizer)
        except Exception as error:  # DeepSpeed's, torch's or ours, whatever the arguments lead to
            said = str(error) or type(error).__name__
            said = said if said.startswith("scheduler ") else f"scheduler {show(kind)}: {said}"
            found.append(Finding("refused", said))
    by_trainer = ' (with Trainer\'s own learning_rate; "auto" takes yours)' if filled.rate_is_given_elsewhere else ""
    return found + [Finding("warning", line + by_trainer) for line in far_off(highest, configured, read)]


def _of_trainer(filled: Filled, read: DSMuonConfig) -> list[str]:
    if not filled.places:
        return []
    keys = {".".join(place): FILLED_IN[place][0] for place in filled.places}
    taken = (key if argument in ("", key) else f"{key} from {argument}" for key, argument in keys.items())
    lines = [f'"auto" is for Trainer to fill in: {", ".join(taken)}']
    if not read.no_decay_params:
        lines.append(
            "weight_decay acts on norms and biases, too: Trainer leaves them out of an optimizer of its own only; name "
            'them in optimizer.params, such as "no_decay_params": ["*norm*"]'
        )
    return lines
