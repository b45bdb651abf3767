"""Engines that a script does things around."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.unit.support.models import ds_config, full_weights
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
