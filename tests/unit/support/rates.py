"""Rates of the two halves, and a scheduler that is none of DeepSpeed's."""

from __future__ import annotations

from typing import Any

import torch

LR, MUON, ADAM = 0.01, 0.02, 3e-4


class Other(torch.optim.Optimizer):
    """An optimizer with momentum that is not DSMuon."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    def step(self, closure: Any = None) -> None:
        pass
