"""Engines that a script does things around."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from ds_muon.optimizer import DSMuon
from tests.unit.support.models import PrescribedGradients, ds_config, full_weights, start, train_step
from tests.unit.support.steps import exact_gradients

SHAPES = [(16, 16), (24, 7), (5,), (7, 24)]


def config_of(optimizer: str, **settings: Any) -> dict[str, Any]:
    config = ds_config(**settings)
    if optimizer == "AdamW":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    return config


def gradients_of(engine: Any, step: int) -> list[Tensor]:
    return exact_gradients(SHAPES, step, engine.device)


def is_bound(engine: Any) -> bool:
    """Whether every parameter lies in the flat weights, and holds what the fp32 weights round to."""
    zero, weights = engine.optimizer, full_weights(engine)
    flat = {f.untyped_storage().data_ptr() for f in zero.bit16_groups_flat}
    return all(
        p.untyped_storage().data_ptr() in flat and torch.equal(p.detach().cpu(), weights[name].to(p.dtype))
        for name, p in engine.module.named_parameters()
    )


def away(engine: Any, *, pin_memory: bool = False, **which: Any) -> None:
    # DeepSpeed looks for garbage three times, which takes seconds beside all that the tests have imported.
    with mock.patch("gc.collect"):
        engine.offload_states(pin_memory=pin_memory, **which)


def evaluate(engine: Any) -> None:
    engine.eval()
    with torch.no_grad():  # also where the weights are away from the accelerator
        engine([g.to(p.device) for g, p in zip(gradients_of(engine, 9), engine.module.parameters(), strict=True)])
    engine.train()


STATES = OffloadStateTypeEnum


BUT_THE_MODEL = [STATES.hp_params, STATES.lp_grads, STATES.optim_states]


def read(engine: Any, key: str) -> dict[str, Tensor]:
    """What DeepSpeed's links read of a state, by parameter. Ranks without links raise, which the caller gathers."""
    muon = [engine.optimizer.param_names[p] for p in engine.optimizer.bit16_groups[0]]
    named = dict(engine.module.named_parameters())
    if key == "weight":
        return {name: safe_get_full_fp32_param(p).cpu() for name, p in named.items()}
    names = muon if key == "momentum_buffer" else [name for name in named if name not in muon]
    return {name: safe_get_full_optimizer_state(named[name], key).cpu() for name in names}


def offload_and_reload(config: dict[str, Any], how: dict[str, Any] | None) -> dict[str, Any]:
    """Three steps; states are away, while the model generates, after the first one and within the second one."""
    engine = start(PrescribedGradients(SHAPES), config)

    def away_and_back() -> None:
        if how is not None:
            away(engine, **how)
            evaluate(engine)
            engine.reload_states()

    train_step(engine, gradients_of(engine, 0))
    away_and_back()
    away_and_back()
    links = [p._hp_mapping for p in engine.module.parameters() if p._hp_mapping is not None]
    found: dict[str, Any] = {"linked": all(link.optim_fragment is not None for link in links)}
    engine.backward(engine(gradients_of(engine, 1)))
    away_and_back()
    engine.step()
    if isinstance(engine.optimizer.optimizer, DSMuon):
        found["states"] = {key: read(engine, key) for key in ("weight", "momentum_buffer", "exp_avg", "exp_avg_sq")}
    train_step(engine, gradients_of(engine, 2))
    found |= {"weights": full_weights(engine), "bound": is_bound(engine)}
    engine.destroy()
    return found
