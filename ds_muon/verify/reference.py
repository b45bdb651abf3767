"""Both halves' update rules in fp64, one parameter at a time, on whole tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_muon.orthogonalize import reference_newton_schulz


@dataclass
class MuonReference:
    """Momentum of one matrix and the change it calls for.

    Attributes:
        momentum_buffer: (rows, cols) fp64.
        settings: the optimizer's ``adjust_lr_fn``, ``ns_steps`` and ``ns_coefficients``.
        rounded_to: dtype to which the direction is rounded before it is orthogonalized; None to leave it.
    """

    momentum_buffer: Tensor
    settings: dict[str, Any]
    rounded_to: torch.dtype | None = None

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Advance the momentum by ``gradient`` and return the change of ``weight``, all (rows, cols) fp64."""
        mu, m = group["momentum"], self.momentum_buffer
        m += (1 - mu) * (gradient - m)
        direction = gradient + mu * (m - gradient) if group["nesterov"] else m
        if self.rounded_to is not None:
            # Scaled to 1 first: rounding is relative, but fp16 has little range.
            direction = (direction / direction.abs().max().clamp_min(1e-300)).to(self.rounded_to)
        rows, cols = gradient.shape
        scale = {
            "original": math.sqrt(max(1.0, rows / cols)),
            "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
            "none": 1.0,
        }[self.settings["adjust_lr_fn"]]
        orthogonal = reference_newton_schulz(
            direction, ns_steps=self.settings["ns_steps"], ns_coefficients=self.settings["ns_coefficients"]
        )
        return torch.mul(group["weight_decay"] * weight + scale * orthogonal, -group["lr"])


@dataclass
class AdamWReference:
    """Moments of one tensor and the change they call for: Loshchilov and Hutter, arXiv:1711.05101."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: float

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Advance the moments by ``gradient`` and return the change of ``weight``, all of one shape in fp64."""
        beta1, beta2 = group["betas"]
        self.step += 1
        self.exp_avg += (1 - beta1) * (gradient - self.exp_avg)
        self.exp_avg_sq += (1 - beta2) * (gradient * gradient - self.exp_avg_sq)
        mean = self.exp_avg / (1 - beta1**self.step)
        root = torch.sqrt(self.exp_avg_sq / (1 - beta2**self.step))
        return torch.mul(group["weight_decay"] * weight + mean / (root + group["eps"]), -group["lr"])
