"""Exact gradients, training on them, and what two runs are compared by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.unit.support.models import full_weights, start_groups, train_step

SHAPES = [(48, 48), (63, 63), (32, 96), (96, 32), (7, 13), (2, 3), (3, 50), (11,), (40, 1)]


def exact_gradients(shapes: list[tuple[int, ...]], step: int, device: torch.device) -> list[Tensor]:
    """Gradients with few mantissa bits on rank 0, zeros elsewhere, scaled so that the average is the same and exact
    for any world size: multiplying by the world size and dividing by it again rounds nothing."""
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(step)
    gradients = [torch.randint(-64, 65, shape, generator=generator) / 1024.0 for shape in shapes]
    return [(g * world_size if rank == 0 else torch.zeros_like(g)).to(device) for g in gradients]


def train(
    shapes: list[tuple[int, ...]], config: dict[str, Any], steps: int, scale: float = 1.0, groups: int = 1
) -> dict[str, Tensor]:
    """Train on exact gradients (times ``scale``) and return all weights; the same on every rank."""
    engine = start_groups(shapes, config, groups)
    for step in range(steps):
        train_step(engine, [g * scale for g in exact_gradients(shapes, step, engine.device)])
    weights = full_weights(engine)
    engine.destroy()
    return weights


def muon_names(shapes: list[tuple[int, ...]]) -> list[str]:
    return [f"p{i}" for i, shape in enumerate(shapes) if len(shape) == 2 and min(shape) > 1]


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor], names: list[str] | None = None) -> None:
    for name in left if names is None else names:
        assert torch.equal(left[name], right[name]), name


def state_by_key(engine: Any) -> dict[tuple[int, str], Tensor]:
    """The optimizer's state on this rank, by param group and key."""
    states = engine.optimizer.optimizer.state.values()
    return {(i, key): tensor.clone() for i, state in enumerate(states) for key, tensor in state.items()}


def state_of(engine: Any) -> list[Tensor]:
    return [*state_by_key(engine).values()]
