"""Captures of one matrix, and the environment that asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ds_muon.capture import NanCapture
from ds_muon.orthogonalize import NewtonSchulz

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
