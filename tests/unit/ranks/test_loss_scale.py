"""fp16: static and dynamic loss scales leave the momentum in unscaled units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.support.models import Block, PrescribedGradients, ds_config, full_weights, start, train_step
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import exact_gradients, state_of

pytestmark = pytest.mark.ranks


def changes(config: dict[str, Any], steps: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = start(Block(), config)
    before = full_weights(engine)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        tokens, targets = torch.randint(0, 40, (2, 8, 32), generator=generator).to(engine.device)
        train_step(engine, tokens, targets)
    after = full_weights(engine)
    return {name: after[name] - before[name] for name in before}


@pytest.mark.parametrize("stage", [1, 2])
def test_static_loss_scales_give_the_same_updates_within_2_percent(stage: int) -> None:
    one, large = (
        run_ranks(2, changes, ds_config(stage=stage, fp16={"enabled": True, "loss_scale": scale}), 3)[0]
        for scale in (1.0, 1024.0)
    )
    for name in ("square.weight", "tall.weight", "wide.weight"):
        assert (one[name] - large[name]).norm() <= 0.02 * one[name].norm(), name


def under_scales(config: dict[str, Any], scales: list[float]) -> tuple[list[Tensor], dict[str, Tensor]]:
    shapes = [(48, 48), (9,)]
    engine = start(PrescribedGradients(shapes), config)
    for step, scale in enumerate(scales):
        engine.optimizer.loss_scale = scale
        train_step(engine, exact_gradients(shapes, step, engine.device))
    return state_of(engine), full_weights(engine)


def test_a_scale_that_changes_between_steps_leaves_state_and_weights_right() -> None:
    """Powers of two scale fp16 gradients exactly, so any course of the scale must give the same bits."""
    config = ds_config(dtype="float16")
    steady = run_ranks(2, under_scales, config, [1.0] * 4)
    changing = run_ranks(2, under_scales, config, [8.0, 256.0, 2.0, 64.0])
    for (state, weights), (state_changing, weights_changing) in zip(steady, changing, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(state, state_changing, strict=True))
        assert all(torch.equal(weights[name], weights_changing[name]) for name in weights)


def overflow_once(config: dict[str, Any]) -> dict[str, Any]:
    shapes = [(16, 16), (5,)]
    engine = start(PrescribedGradients(shapes), config)
    first = engine.optimizer.loss_scale
    gradients = exact_gradients(shapes, 0, engine.device)
    if torch.distributed.get_rank() == 0:
        gradients[0][0, 0] = 60000.0
    before = full_weights(engine)
    train_step(engine, gradients)
    skipped, norm = engine.skipped_steps, engine.get_global_grad_norm()
    untouched = all(torch.equal(before[n], w) for n, w in full_weights(engine).items())
    second = engine.optimizer.loss_scale
    train_step(engine, exact_gradients(shapes, 1, engine.device))
    moved = any(not torch.equal(before[n], w) for n, w in full_weights(engine).items())
    return {
        "scales": (first, second),
        "skipped": (skipped, engine.skipped_steps),
        "untouched": untouched,
        "moved": moved,
        "norm": norm,
    }


def test_the_dynamic_scaler_sees_an_overflow_and_backs_off() -> None:
    config = ds_config(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    for found in run_ranks(2, overflow_once, config):
        assert found["scales"] == (16.0, 8.0)
        assert found["skipped"] == (1, 1)
        assert found["untouched"] and found["moved"]
        assert found["norm"] == float("inf")
