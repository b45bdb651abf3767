"""Both halves' update rules in fp64, one parameter at a time, on whole tensors.

``change`` returns the change that a gradient calls for, and how far that change moves (Frobenius norm) when the
gradient's part in it is rounded to ``summed_in``, the dtype in which the engine sums gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_muon.orthogonalize import reference_newton_schulz


@dataclass
class MuonReference:
    """Momentum of one matrix in fp64 and the change it calls for.

    Attributes:
        momentum_buffer: (rows, cols) fp64.
        settings: the optimizer's ``adjust_lr_fn``, ``ns_steps`` and ``ns_coefficients``.
    """

    momentum_buffer: Tensor
    settings: dict[str, Any]

    def change(
        self, weight: Tensor, gradient: Tensor, group: dict[str, Any], summed_in: torch.dtype
    ) -> tuple[Tensor, float]:
        """Advance the momentum by ``gradient``; all tensors (rows, cols) fp64. See the module's docstring."""
        mu, m = group["momentum"], self.momentum_buffer
        m += (1 - mu) * (gradient - m)
        direction = gradient + mu * (m - gradient) if group["nesterov"] else m
        rows, cols = gradient.shape
        scale = {
            "original": math.sqrt(max(1.0, rows / cols)),
            "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
            "none": 1.0,
        }[self.settings["adjust_lr_fn"]]
        update = scale * self._orthogonalize(direction)
        sensitivity = 0.0
        if summed_in != torch.float32:
            # Scaled to 1 first: rounding is relative, but fp16 has little range.
            rounded = (direction / direction.abs().max().clamp_min(1e-300)).to(summed_in)
            sensitivity = group["lr"] * float((scale * self._orthogonalize(rounded) - update).norm())
        return -group["lr"] * (group["weight_decay"] * weight + update), sensitivity

    def _orthogonalize(self, direction: Tensor) -> Tensor:
        return reference_newton_schulz(
            direction, ns_steps=self.settings["ns_steps"], ns_coefficients=self.settings["ns_coefficients"]
        )


@dataclass
class AdamWReference:
    """Moments of one tensor in fp64 and the change they call for: Loshchilov and Hutter, arXiv:1711.05101."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: float

    def change(
        self, weight: Tensor, gradient: Tensor, group: dict[str, Any], summed_in: torch.dtype
    ) -> tuple[Tensor, float]:
        """Advance the moments by ``gradient``; all tensors of one shape in fp64. See the module's docstring."""
        beta1, beta2 = group["betas"]
        self.step += 1
        self.exp_avg += (1 - beta1) * (gradient - self.exp_avg)
        self.exp_avg_sq += (1 - beta2) * (gradient * gradient - self.exp_avg_sq)
        mean = self.exp_avg / (1 - beta1**self.step)
        root = torch.sqrt(self.exp_avg_sq / (1 - beta2**self.step))
        update = mean / (root + group["eps"])
        sensitivity = 0.0
        if summed_in != torch.float32:
            # A relative error of the gradients reaches the mean and, with the other sign, the root.
            sensitivity = group["lr"] * torch.finfo(summed_in).eps * float(update.norm())
        return -group["lr"] * (group["weight_decay"] * weight + update), sensitivity
