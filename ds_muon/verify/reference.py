"""What the rules call for, one parameter at a time, on whole tensors, each keeping its own state.

Two kinds. The fp64 references start from the raw gradients and share nothing with the optimizer but the coefficients
and NorMuon's ``ROW_EPS``. The same-dtype references start from the averaged gradient that the engine has, and are the
public single-process functions: ``ds_muon.muon_update`` and ``torch.optim.AdamW``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ds_muon.dtypes import name_of
from ds_muon.layout import Layout
from ds_muon.one_matrix import muon_update
from ds_muon.orthogonalize import NewtonSchulz, orthogonalize, reference_newton_schulz, schedule
from ds_muon.orthogonalize.newton_schulz import blocks
from ds_muon.passes import advance_momentum_
from ds_muon.update import ROW_EPS, advance_row_variance
from ds_muon.verify import tolerances
from ds_muon.verify.engine_view import ROW_VARIANCE, MuonRule, Placed

Group = dict[str, Any]

# Elements of the disturbed matrices that are worked on at a time: bounds each temporary to 128 MiB, or to one matrix.
_BATCH_ELEMENTS = 1 << 24
# Of AdamW's disturbed moments: for tensors of few elements, among which no average is taken.
_RANDOM_PAIRS = 16
_SMALL = 4096


def muon_scale(adjust_lr_fn: str, rows: int, cols: int) -> float:
    """The factor s on the orthogonalized matrix, whose rows are outputs."""
    return {
        "original": math.sqrt(max(1.0, rows / cols)),
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
        "none": 1.0,
    }[adjust_lr_fn]


def muon_change(weight: Tensor, orthogonal: Tensor, group: Group, rule: MuonRule) -> Tensor:
    """``-lr (weight_decay W + s O)``, all (rows, cols) fp64."""
    update = muon_scale(rule.adjust_lr_fn, *orthogonal.shape) * orthogonal
    return torch.mul(group["weight_decay"] * weight + update, -group["lr"])


class RowNormalization:
    """NorMuon's normalization of rows in fp64, with a variance of its own: arXiv:2510.05491, Algorithm 1.

    Args:
        variance: (rows,) fp64, to start from; replaced at each step.
    """

    def __init__(self, variance: Tensor, beta2: float) -> None:
        self._variance = variance
        self._beta2 = beta2

    def __call__(self, orthogonal: Tensor) -> Tensor:
        """Advance the variance by one (rows, cols) fp64 matrix and return it normalized."""
        rows, cols = orthogonal.shape
        self._variance = self._beta2 * self._variance + (1 - self._beta2) * orthogonal.square().mean(dim=1)
        normalized = orthogonal / (self._variance.sqrt() + ROW_EPS).unsqueeze(1)
        norm = torch.linalg.vector_norm(normalized).clamp_min(torch.finfo(torch.float64).tiny)
        # In this order: a zero matrix has no finite factor.
        return normalized.div_(norm).mul_(math.sqrt(min(rows, cols)))


class MuonReference:
    """Momentum of one matrix in fp64, the change it calls for, and what roundings may add to that.

    Rows are outputs in here: what is stored otherwise is turned on its way in and out.

    Args:
        momentum_buffer: (rows, cols) fp64, the momentum to start from, as it is stored; advanced in place.
        rule: settings, and the dtypes whose roundings are to be explained.
        row_variance: one fp64 number for each output, NorMuon's to start from; None for plain Muon.
        layout: of the matrix.
    """

    def __init__(
        self,
        momentum_buffer: Tensor,
        rule: MuonRule,
        row_variance: Tensor | None = None,
        layout: Layout = "out_in",
    ) -> None:
        # One for the reference, and one for each of the disturbed ones: their variances part from the first step on.
        counts = 0 if row_variance is None else 1 + tolerances.draws(tuple(momentum_buffer.shape))
        self._normalize = [RowNormalization(row_variance, rule.beta2) for _ in range(counts)]  # type: ignore[arg-type]
        self.momentum_buffer = momentum_buffer if layout == "out_in" else momentum_buffer.mT
        self.variance = torch.zeros_like(self.momentum_buffer)
        self._layout = layout
        self._rule = rule
        self._steps = 0

    def change(self, weight: Tensor, gradient: Tensor, variance: Tensor, group: Group) -> tuple[Tensor, float]:
        """Advance the momentum by one gradient.

        Args:
            weight: (rows, cols) fp64, before the step.
            gradient: (rows, cols) fp64, averaged and unscaled.
            variance: of the error that the engine's sums put into each element of the gradient.
            group: the param group's settings.

        Returns:
            The change of the weight, and what roundings explain of an error in it, in Frobenius norm.
        """
        if self._layout == "in_out":
            weight, gradient, variance = weight.mT, gradient.mT, variance.mT
        mu, m, rule = group["momentum"], self.momentum_buffer, self._rule
        m += (1 - mu) * (gradient - m)
        direction = gradient + mu * (m - gradient) if group["nesterov"] else m
        of_direction = self._advance_variance(variance, mu, group["nesterov"])
        of_direction += tolerances.stored_variance(direction, torch.float32)
        orthogonal = reference_newton_schulz(direction, ns_steps=rule.ns_steps, ns_coefficients=rule.ns_coefficients)
        if self._normalize:
            orthogonal = self._normalize[0](orthogonal)
        change = muon_change(weight, orthogonal, group, rule)
        self._steps += 1
        rounding = self._rounding(change, weight, direction, of_direction, group)
        return change if self._layout == "out_in" else change.mT, rounding

    def _advance_variance(self, variance: Tensor, mu: float, nesterov: bool) -> Tensor:
        """Carry the variance of the gradient through M, and return that of U, in which the gradient stands twice."""
        before = self.variance.clone()
        self.variance.mul_(mu**2).add_(variance, alpha=(1 - mu) ** 2)
        self.variance += tolerances.stored_variance(self.momentum_buffer, self._rule.momentum_dtype)
        if not nesterov:
            return self.variance.clone()
        return before.mul_(mu**4).add_(variance, alpha=(1 - mu**2) ** 2)

    def _rounding(self, change: Tensor, weight: Tensor, direction: Tensor, variance: Tensor, group: Group) -> float:
        generator = torch.Generator(device=direction.device).manual_seed(self._steps)
        draws = tolerances.draws(tuple(direction.shape))
        differences: list[float] = []
        at_once = max(1, _BATCH_ELEMENTS // direction.numel())
        for count in (min(at_once, draws - start) for start in range(0, draws, at_once)):
            noise = torch.empty((count, *direction.shape), dtype=direction.dtype, device=direction.device)
            disturbed = noise.normal_(generator=generator).mul_(variance.sqrt()).add_(direction)
            for orthogonal in self._rounded_orthogonal(disturbed, generator):
                if self._normalize:
                    orthogonal = self._normalize[1 + len(differences)](orthogonal)
                differences.append(float((muon_change(weight, orthogonal, group, self._rule) - change).norm()))
        return tolerances.explained(differences)

    def _rounded_orthogonal(self, directions: Tensor, generator: torch.Generator) -> Tensor:
        """The iteration in the form of ``ns_method``, rounded at random after each product; (draws, rows, cols)."""
        rule = self._rule

        def rounded(value: Tensor) -> Tensor:
            return value.add_(tolerances.rounding(value, rule.ns_dtype, generator))

        rows, cols = directions.shape[-2:]
        triples = schedule(rule.ns_coefficients, rule.ns_steps)
        norm = torch.linalg.vector_norm(directions, dim=(-2, -1), keepdim=True)
        x = directions / norm.clamp_min(torch.finfo(torch.float64).tiny)
        x = rounded(x.mT.contiguous() if rows > cols else x)
        identity = torch.eye(min(rows, cols), dtype=x.dtype, device=x.device)
        for block in blocks(rows, cols, triples, rule.ns_dtype, rule.ns_method):
            r, q = rounded(x @ x.mT), identity
            for a, b, c in block:
                p = rounded(b * r + c * rounded(r @ r)) + a * identity
                q = p if q is identity else rounded(p @ q)
                r = rounded(p @ rounded(p @ r))
            x = rounded(q @ x)
        return x.mT if rows > cols else x


class AdamWReference:
    """Moments of one tensor in fp64 and the change they call for: Loshchilov and Hutter, arXiv:1711.05101."""

    def __init__(self, exp_avg: Tensor, exp_avg_sq: Tensor, step: float) -> None:
        self._moments = (exp_avg, exp_avg_sq)
        # Other pairs are fed with gradients that roundings have moved: the first nearer to zero each time, where the
        # update is steepest; the rest either way at random, since moves of one sign cancel between the moments.
        pairs = 1 + (_RANDOM_PAIRS if exp_avg.numel() <= _SMALL else 2)
        self._disturbed = [(exp_avg.clone(), exp_avg_sq.clone()) for _ in range(pairs)]
        self._step = step

    def change(self, weight: Tensor, gradient: Tensor, variance: Tensor, group: Group) -> tuple[Tensor, float]:
        """As ``MuonReference.change``; any shape."""
        self._step += 1
        change = self._change(self._moments, weight, gradient, group)
        generator = torch.Generator(device=gradient.device).manual_seed(int(self._step))
        bound = variance.sqrt()
        rounding = torch.zeros_like(change)
        for i, moments in enumerate(self._disturbed):
            noise = torch.empty_like(gradient).normal_(generator=generator) if i else -torch.sign(gradient)
            moved = self._change(moments, weight, gradient + noise * bound, group)
            rounding = torch.maximum(rounding, (moved - change).abs())
        return change, tolerances.SAFETY * float(rounding.norm())

    def _change(self, moments: tuple[Tensor, Tensor], weight: Tensor, gradient: Tensor, group: Group) -> Tensor:
        (beta1, beta2), (exp_avg, exp_avg_sq) = group["betas"], moments
        exp_avg += (1 - beta1) * (gradient - exp_avg)
        exp_avg_sq += (1 - beta2) * (gradient * gradient - exp_avg_sq)
        mean = exp_avg / (1 - beta1**self._step)
        root = torch.sqrt(exp_avg_sq / (1 - beta2**self._step))
        return torch.mul(group["weight_decay"] * weight + mean / (root + group["eps"]), -group["lr"])


class SameDtypeMuon:
    """``ds_muon.muon_update`` on the whole matrix, in the dtypes of the engine, applied to the fp32 weight."""

    def __init__(self, state: dict[str, Tensor], rule: MuonRule, layout: Layout = "out_in") -> None:
        self.state = {"momentum_buffer": state["momentum_buffer"].to(rule.momentum_dtype)}
        if ROW_VARIANCE in state:
            self.state[ROW_VARIANCE] = state[ROW_VARIANCE].clone()
        self._rule = rule
        self._layout = layout
        self._newton_schulz: dict[str, Any] = {
            "ns_steps": rule.ns_steps,
            "ns_method": rule.ns_method,
            "ns_coefficients": rule.ns_coefficients,
            "ns_dtype": name_of(rule.ns_dtype),
            "ns_eps": rule.ns_eps,
            "ns_backend": rule.ns_backend,
        }

    def new_weight(self, weight: Tensor, gradient: Tensor, group: Group) -> Tensor:
        """The (rows, cols) fp32 weight after one step with the averaged, unscaled fp32 gradient."""
        # DeepSpeed's Muon may keep it in fp16, which muon_update refuses. All arithmetic is in fp32 anyway.
        momentum_buffer = self.state["momentum_buffer"].float()
        update = muon_update(
            gradient,
            momentum_buffer,
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            adjust_lr_fn=self._rule.adjust_lr_fn,
            row_variance=self.state.get(ROW_VARIANCE),
            beta2=self._rule.beta2,
            layout=self._layout,
            **self._newton_schulz,
        )
        self.state["momentum_buffer"].copy_(momentum_buffer)
        return _apply(weight, update, group) if gradient.any() else weight

    def new_weights_in_batches(
        self, weight: Tensor, gradient: Tensor, before: dict[str, Tensor | None], group: Group, most: int
    ) -> Iterator[Tensor]:
        """The same, had the matrix been orthogonalized in a batch of 2, 3, ... ``most`` of its shape.

        A vendor's batched product may sum in another order for another number of matrices. ``before`` is the state
        before the step; it and the reference's own stay as they are. Nothing if there is no gradient.
        """
        if not gradient.any():
            return
        direction = gradient.clone()
        momentum, variance = before["momentum_buffer"], before.get(ROW_VARIANCE)
        assert momentum is not None
        momentum_buffer = momentum.to(self._rule.momentum_dtype, copy=True)
        advance_momentum_(direction, momentum_buffer, momentum=group["momentum"], nesterov=group["nesterov"])
        settings = NewtonSchulz.resolve(weight.device, **self._newton_schulz)
        scale = muon_scale(self._rule.adjust_lr_fn, *(weight if self._layout == "out_in" else weight.mT).shape)
        for count in range(2, most + 1):
            update = orthogonalize([direction] * count, settings)[0].to(torch.float32)
            if variance is not None:
                _, factors = advance_row_variance(
                    update[None], variance[None], beta2=self._rule.beta2 or 0.0, layout=self._layout
                )
                update.mul_(factors[0])
            yield _apply(weight, update.mul_(scale), group)


def _apply(weight: Tensor, update: Tensor, group: Group) -> Tensor:
    decay = group["lr"] * group["weight_decay"]
    decayed = weight * (1 - decay) if decay else weight
    return decayed.sub(update.mul_(group["lr"]))


class SameDtypeAdamW:
    """``torch.optim.AdamW`` on the whole tensor."""

    def __init__(self, placed: Placed, state: dict[str, Tensor], step: float) -> None:
        self._param = torch.nn.Parameter(torch.zeros_like(placed.param, dtype=torch.float32).detach())
        self._adamw = _adamw(self._param)
        self._adamw.state[self._param] = {
            "step": torch.tensor(step, dtype=torch.float32, device=placed.param.device),
            **{key: tensor.clone() for key, tensor in state.items()},
        }

    @property
    def state(self) -> dict[str, Tensor]:
        return {key: self._adamw.state[self._param][key] for key in ("exp_avg", "exp_avg_sq")}

    def new_weight(self, weight: Tensor, gradient: Tensor, group: Group) -> Tensor:
        """The fp32 weight after one step with the averaged, unscaled, clipped fp32 gradient."""
        self._adamw.param_groups[0].update({key: group[key] for key in ("lr", "betas", "eps", "weight_decay")})
        self._param.data.copy_(weight)
        self._param.grad = gradient.clone()
        self._adamw.step()
        return self._param.detach().clone()


def _adamw(param: torch.nn.Parameter) -> torch.optim.AdamW:
    try:
        return torch.optim.AdamW([param], fused=True)
    except RuntimeError:  # torch has no fused AdamW for this device
        return torch.optim.AdamW([param])
