"""One rank that fails, or is killed, at a chosen place of a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.normuon import RowMoments
from tests.unit.support.models import full_momentum, full_weights, start_groups, train_step
from tests.unit.support.steps import SHAPES, exact_gradients

# Where a rank fails: the phase, the call of it, and of what. The model has two param groups of Muon, two of AdamW.
Where = Callable[[Any], tuple[Any, str]]
PLACES: dict[str, tuple[str, int, Where]] = {
    "the first flatten": ("take_gradients", 1, lambda zero: (zero, "_take_gradient")),
    "the last flatten": ("take_gradients", 4, lambda zero: (zero, "_take_gradient")),
    "the squares": ("measure", 1, lambda zero: (zero.muon_groups[1], "squares")),
    "the momentum": ("stage", 1, lambda zero: (zero.optimizer, "advance_momentum_")),
    "the momentum of the last group": ("stage", 2, lambda zero: (zero.optimizer, "advance_momentum_")),
    "U of the first group": ("stage", 1, lambda zero: (zero.muon_groups[0].exchange, "gather")),
    "U of the last group": ("stage", 1, lambda zero: (zero.muon_groups[1].exchange, "gather")),
    "a batch": ("stage", 1, lambda zero: (zero.muon_groups[0], "orthogonalize")),
    "O of the first group": ("stage", 1, lambda zero: (zero.muon_groups[0].exchange, "scatter")),
    "O of the last group": ("stage", 1, lambda zero: (zero.muon_groups[1].exchange, "scatter")),
    "what comes back": ("stage", 1, lambda zero: (zero.muon_groups[0], "_scale_travellers")),
}
COMMIT: dict[str, tuple[str, int, Where]] = {
    "the clip": ("commit", 1, lambda zero: (zero, "_adamw_clip")),
    "AdamW": ("commit", 1, lambda zero: (zero.optimizer._adamw, "step")),
    "the variances": ("commit", 2, lambda zero: (RowMoments, "commit")),
    "the model's weights": ("commit", 1, lambda zero: (zero, "round_weights")),
    "the model's views": ("commit", 1, lambda zero: (zero, "_bind_model")),
}
LOAD: dict[str, tuple[str, int, Where]] = {
    "what a load has read": ("load_checkpoint", 1, lambda zero: (zero.optimizer, "load_groups")),
}
MOMENTUM = {place for place in PLACES if "momentum" in place}


class NoMemory(RuntimeError):
    """Stands for torch's own, which a CPU does not raise."""


def fail_at(place: str, engine: Any, bad_rank: int, do: Callable[[], object]) -> str:
    """What ``do`` raises here if ``bad_rank`` fails at a place, and no other rank fails. "nowhere": if none does."""
    if place == "nowhere":
        bad_rank = -1
    _, number, where = {**PLACES, **COMMIT, **LOAD}.get(place, ("", 0, lambda zero: (zero, "step")))
    target, method = where(engine.optimizer)
    original, calls = getattr(target, method), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        if len(calls) == number:
            raise NoMemory(f"none for {place}")
        return original(*args, **kwargs)

    raised = "nothing"
    with ExitStack() as stack:
        if dist.get_rank() == bad_rank:
            stack.enter_context(mock.patch.object(target, method, fails))
        try:
            do()
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    assert dist.get_rank() != bad_rank or len(calls) >= number, f"{place} was not reached"
    return raised


def gradients_of(engine: Any, step: int) -> list[Tensor]:
    return exact_gradients(SHAPES, step, engine.device)


def killed(config: dict[str, Any], phase: str, folder: str) -> None:
    """Save a checkpoint, and a step later end the last rank by SIGKILL at a phase; in "stage", while U travels.

    The files ``killed`` and ``ended`` in the folder say when that was, and when another rank had an error.
    """

    def kill(*_: Any, **__: Any) -> NoReturn:
        Path(folder, "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    engine = start_groups(SHAPES, config, groups=2)
    train_step(engine, gradients_of(engine, 0))
    engine.save_checkpoint(folder, tag="last")
    train_step(engine, gradients_of(engine, 1))
    if dist.get_rank() == dist.get_world_size() - 1:
        zero = engine.optimizer
        target, method = (zero.muon_groups[0], "orthogonalize") if phase == "stage" else (zero, phase)
        setattr(target, method, kill)
    try:
        train_step(engine, gradients_of(engine, 2))
    except Exception:
        Path(folder, "ended").touch()
        raise


def load_after(config: dict[str, Any], *folders: str) -> bool:
    """Whether the checkpoints that ``killed`` has saved are those of its first step."""
    engine = start_groups(SHAPES, config, groups=2)
    train_step(engine, gradients_of(engine, 0))
    weights, momentum = full_weights(engine), full_momentum(engine)
    same: list[bool] = []
    for folder in folders:
        train_step(engine, gradients_of(engine, 5))
        engine.load_checkpoint(folder)
        pairs = [(full_weights(engine), weights), (full_momentum(engine), momentum)]
        same += [torch.equal(one[name], other[name]) for one, other in pairs for name in other]
    return all(same)
