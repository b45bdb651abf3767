"""Captures of one matrix, and the environment that asks for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_muon.capture import NanCapture
from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.skipped import NonFiniteUpdate
from tests.unit.support.faulty import faulty_backend, sick
from tests.unit.support.models import PrescribedGradients, start, train_step
from tests.unit.support.steps import exact_gradients

SHAPES = [(30, 20), (8, 8), (5,)]

SETTINGS = NewtonSchulz.resolve(torch.device("cpu"))

MAY_MOVE = torch.tensor(True)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"DS_MUON_NAN_CAPTURE": "1", "DS_MUON_NAN_CAPTURE_DIR": str(folder), **more}


def matrices(count: int = 1) -> Tensor:
    return torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(0))


def with_nan(batch: Tensor) -> Tensor:
    batch = batch.clone()
    batch[:, 1, 2] = torch.nan
    return batch


def capture_one(monkeypatch: pytest.MonkeyPatch, folder: Path, **more: str) -> NanCapture:
    for key, value in environment(folder, **more).items():
        monkeypatch.setenv(key, value)
    capture = NanCapture(rank=3)
    capture.start_step(7, MAY_MOVE)
    kept = capture.keep(list(matrices()))
    capture.save_nonfinite(["layer.weight"], kept, with_nan(matrices()), SETTINGS)
    return capture


def captured_step(config: dict[str, Any], env: dict[str, str], overwrite: bool = False) -> dict[str, Any]:
    """One step in which the (30, 20) matrix comes out with a NaN."""
    from ds_muon import muon_group

    engine = start(PrescribedGradients(SHAPES), config)
    gradients = exact_gradients(SHAPES, 0, engine.device)
    original = muon_group.orthogonalize_batch

    def overwriting(inputs: list[Tensor], settings: NewtonSchulz) -> Tensor:
        outputs = original(inputs, settings)
        for matrix in inputs:
            matrix.fill_(torch.nan)
        return outputs

    batch = overwriting if overwrite else original
    raised = None
    with (
        faulty_backend(engine),
        sick((30, 20)),
        mock.patch.dict(os.environ, env),
        mock.patch.object(muon_group, "orthogonalize_batch", batch),
    ):
        try:
            train_step(engine, gradients)
        except NonFiniteUpdate as error:
            raised = str(error)
    # Nesterov's blend, from zero momentum: (1 - m) G + m (1 - m) G.
    torch.distributed.all_reduce(gradients[0])
    blend = gradients[0] / torch.distributed.get_world_size() * (0.05 + 0.95 * 0.05)
    owner = next(m.owner for m in engine.optimizer.plan.units if m.name == "p0")
    torch.distributed.barrier()
    return {"raised": raised, "skipped": engine.skipped_steps, "blend": blend.cpu(), "owner": owner}
