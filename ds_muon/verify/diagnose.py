"""From the numbers of a wrong update to the fault that made them.

Each known fault predicts what it would have done to this very parameter in this step. The prediction that meets what
the engine did, within the tolerance of the iteration, is the diagnosis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_muon.orthogonalize import reference_newton_schulz
from ds_muon.verify.engine_view import ROW_VARIANCE, MuonRule, Placed, ratio
from ds_muon.verify.record import UpdateRecord
from ds_muon.verify.reference import RowNormalization, muon_scale

UNKNOWN = "no known fault explains it"
STALE = "stale rank"
OUTSIDE = "weights changed outside a step"
AVERAGING = "gradient not averaged over ranks"
OTHER_GRADIENT = "another gradient than the average"
IDLE = "rank did not move"
LOSS_SCALED = "gradient in loss-scaled units"
CLIPPED_GRADIENT = "clipped gradient"
MOMENTUM_TWICE = "momentum moved twice"
MOMENTUM_STILL = "gradient not taken in"
SLICE = "update from a partition's slice"
TWICE = "orthogonalized twice"
TRANSPOSE = "wrong transpose"
PADDING = "padding in the matrix"
CLIPPED_UPDATE = "clipped update"
SCALED_UPDATE = "wrong learning rate or scale"
TRANSPOSED_SCALE = "scale of the transpose"
UNSPLIT = "wrong split"
WITHOUT_GRADIENT = "moved without a gradient"
SIGN = "wrong sign"
NESTEROV = "wrong blend of momentum and gradient"
WEIGHT_DECAY = "weight decay of another rate"
ROW_VARIANCE_OFF = "wrong row variance"
NOT_FINITE = "not finite"
ELEMENTS = "single elements"
ROUNDING = "rounding beyond the tolerance"
RULE = "the single-process rule itself differs from the reference"

# What part of the elements are single ones, and how far off such a one is, in root mean squares of the update.
_FEW_ELEMENTS, _FAR_OFF = 0.01, 0.05

# Fit of a factor or a prediction: what is left over, relative to what was observed. A step moves a momentum by a few
# percent of itself, of which roundings to bf16 leave less.
_STATE_FIT = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_UPDATE_FIT = 0.3
# Of a factor that scales an update: roundings have the norm of one of the two, which hardly changes it.
_SCALE_FIT = 0.02
# How much of ZeRO's padding, in elements, a shifted matrix is looked for.
_SHIFTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Evidence:
    """What is known of a parameter whose record is not right. Tensors are of its shape, in fp64 but for the states.

    ``expected`` is the change by the same-dtype reference, which comes nearest to what the engine should have done.
    ``tensor`` is U of all of a tensor of several matrices, as (rows, cols); None if it is not known, or the parameter
    is one matrix. ``average`` is that of the raw gradients, ``averaged`` the engine's, ``gradient`` the latter, clipped
    for AdamW.
    """

    record: UpdateRecord
    placed: Placed
    rule: MuonRule
    group: dict[str, Any]
    loss_scale: float
    world_size: int
    weight: Tensor
    applied: Tensor
    expected: Tensor
    average: Tensor
    averaged: Tensor
    gradient: Tensor
    state_before: dict[str, Tensor | None]
    state_after: dict[str, Tensor | None]
    reference_state: dict[str, Tensor]
    tensor: Tensor | None = None


def diagnose(evidence: Evidence) -> str:
    """The fault in words, beginning with one of this module's names."""
    record = evidence.record
    if not evidence.applied.isfinite().all():
        reference = "nor is the reference: the coefficients diverge"
        if evidence.expected.isfinite().all():
            reference = "the single-process step is: set nan_guard, and see DS_MUON_NAN_CAPTURE"
        return f"{NOT_FINITE}: the applied change is not, {reference}"
    if record.moved_before:
        return f"{OUTSIDE}: they are others than after the step before; a skipped one in between may have moved them"
    if record.stale_ranks:
        ranks = ", ".join(map(str, record.stale_ranks))
        return f"{STALE}: the model on rank {ranks} does not see the new weights"
    if record.gradient is not None and not record.gradient.ok:
        return _of_gradient(evidence)
    if evidence.placed.use_muon and not evidence.gradient.any():
        return f"{WITHOUT_GRADIENT}: it is zero everywhere, so that weight, momentum and row variance are to stay"
    is_state_wrong = record.state is not None and not record.state.ok
    # NorMuon's variance follows from the update: one that is wrong makes the other wrong.
    if is_state_wrong and not _is_variance_alone(evidence):
        return _of_state(evidence)
    if record.against_same_dtype.ok:
        if is_state_wrong:
            return f"{ROW_VARIANCE_OFF}: it did not move once, by the squares of this step's result"
        if record.cosine > 0.99 and record.against_fp64.excess < 10:
            return f"{ROUNDING}: the single-process step in the same dtypes errs as much"
        return f"{RULE}: ds_muon.muon_update or the AdamW step in the same dtypes is as wrong"
    return _of_update(evidence)


# ---- the averaged gradient ------------------------------------------------------------------------------------------


def _of_gradient(evidence: Evidence) -> str:
    factor, left = _fit(evidence.averaged, evidence.average)
    if left >= 0.05:
        return f"{OTHER_GRADIENT}: ZeRO's differs in direction from the average of what autograd gave the ranks"
    if abs(factor / evidence.world_size - 1) < 0.05:
        return f"{AVERAGING}: it is {factor:.4g} times the average"
    return f"{OTHER_GRADIENT}: it is {factor:.4g} times the average"


# ---- momentum and moments -------------------------------------------------------------------------------------------


def _is_variance_alone(evidence: Evidence) -> bool:
    """Whether NorMuon's variance is wrong, and the momentum right."""
    if ROW_VARIANCE not in evidence.state_after:
        return False
    momentum = evidence.state_after["momentum_buffer"]
    assert momentum is not None
    return _left(evidence.reference_state["momentum_buffer"].double(), momentum.double()) < _state_fit(evidence)


def _state_fit(evidence: Evidence) -> float:
    return _STATE_FIT[evidence.rule.momentum_dtype if evidence.placed.use_muon else torch.float32]


def _of_state(evidence: Evidence) -> str:
    key = "momentum_buffer" if evidence.placed.use_muon else "exp_avg"
    before, after = evidence.state_before[key], evidence.state_after[key]
    assert before is not None and after is not None
    fit = _state_fit(evidence)
    decay = evidence.group["momentum"] if evidence.placed.use_muon else evidence.group["betas"][0]
    moved_by = after.double() - decay * before.double()
    twice = (1 - decay**2) * evidence.gradient + (decay**2 - decay) * before.double()
    if _left(moved_by, twice) < fit:
        return f"{MOMENTUM_TWICE} in one step"
    factor, left = _fit(moved_by, (1 - decay) * evidence.gradient)
    if left >= fit:
        return f"{UNKNOWN}: the {key} did not move by the averaged gradient"
    if abs(factor) < fit:
        return f"{MOMENTUM_STILL}: the {key} did not move"
    if factor < 0:
        return f"{SIGN} of the gradient: {factor:.4g} times the averaged one moved the {key}"
    if factor < 1:
        return f"{CLIPPED_GRADIENT}: {factor:.4g} times the averaged one moved the {key}"
    if factor == evidence.loss_scale or _is_power_of_two(factor, fit / 10):
        return f"{LOSS_SCALED}: {factor:.6g} times the averaged one moved the {key}"
    return f"{UNKNOWN}: {factor:.6g} times the averaged gradient moved the {key}"


# ---- the update -----------------------------------------------------------------------------------------------------


def _of_update(evidence: Evidence) -> str:
    idle = _idle_rank(evidence)
    if idle is not None:
        return f"{IDLE}: the weights that rank {idle} holds stayed as they were"
    if (text := _single_elements(evidence)) is not None:
        return text
    explanations = dict(_muon_predictions(evidence) if evidence.placed.use_muon else _common_predictions(evidence))
    errors = {text: _left(evidence.applied, change) for text, change in explanations.items()}
    best = min(errors, key=lambda text: errors[text], default=UNKNOWN)
    # Far nearer than the right update is. Not to rounding: two passes, for one, magnify what no reference can predict.
    if errors.get(best, math.inf) > min(_UPDATE_FIT, _left(evidence.applied, evidence.expected) / 2):
        return UNKNOWN
    return best


def _single_elements(evidence: Evidence) -> str | None:
    """A few elements that are far off, where the rest is right."""
    rms = float(evidence.expected.square().mean().sqrt())
    off = ((evidence.applied - evidence.expected).abs() > _FAR_OFF * rms).reshape(-1).nonzero().reshape(-1)
    if not 0 < off.numel() <= max(1, _FEW_ELEMENTS * evidence.applied.numel()):
        return None
    return f"{ELEMENTS}: {off.numel()} of {evidence.applied.numel()} are off, the first at {int(off[0])}"


def _idle_rank(evidence: Evidence) -> int | None:
    """A rank whose piece did not change, though it should have."""
    if evidence.placed.is_strip:
        return None  # it has elements in every row
    for rank, first, numel in evidence.record.pieces:
        applied, expected = (t.reshape(-1)[first : first + numel] for t in (evidence.applied, evidence.expected))
        if not applied.any() and expected.any():
            return rank
    return None


def _common_predictions(evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    decayed = -evidence.group["lr"] * evidence.group["weight_decay"] * evidence.weight
    update = evidence.expected - decayed
    # Both rates at once: an update that is scaled and weights that are decayed otherwise.
    factor, _ = _fit(evidence.applied - decayed, update)
    fault = SIGN if factor < 0 else SCALED_UPDATE if factor > 1 else f"{CLIPPED_UPDATE}, or {SCALED_UPDATE}"
    transposed = _scale_of_the_transpose(evidence)
    if transposed != 1 and abs(factor / transposed - 1) < _SCALE_FIT:
        fault = TRANSPOSED_SCALE
    if factor not in (0, 1):
        yield f"{fault}: {factor:.4g} times the right one", decayed + factor * update
    decay, _ = _fit(evidence.applied - update, -evidence.group["lr"] * evidence.weight)
    yield f"{WEIGHT_DECAY}: {decay:.4g}", update - evidence.group["lr"] * decay * evidence.weight


def _muon_predictions(evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    yield from _common_predictions(evidence)
    group = evidence.group
    direction, other = (_direction(evidence, nesterov=is_so) for is_so in (group["nesterov"], not group["nesterov"]))
    right = _result(direction, evidence)
    rows, cols = direction.shape
    faults: dict[str, Callable[[], Tensor]] = {
        TWICE: lambda: _result(right, evidence),
        f"{NESTEROV}: nesterov is {not group['nesterov']}": lambda: _result(other, evidence),
        f"{TRANSPOSE}: the result lies in memory as its transpose": lambda: right.mT.reshape(rows, cols),
    }
    if evidence.record.straddles and not evidence.placed.is_strip:
        faults[f"{SLICE}: each holder orthogonalized its own"] = lambda: _of_slices(direction, evidence)
        for _, cut, _ in evidence.record.pieces[1:]:
            for shift in _SHIFTS:
                text = f"{PADDING}: shifted by {shift} elements from element {cut} on"
                faults[text] = partial(_of_shifted, direction, cut, shift, evidence)
    decayed = -group["lr"] * group["weight_decay"] * evidence.weight
    scale = -group["lr"] * muon_scale(evidence.rule.adjust_lr_fn, *_turned(direction, evidence).shape)
    for text, orthogonal in faults.items():
        yield text, decayed + scale * orthogonal()
    if evidence.tensor is not None:
        together = _result(evidence.tensor, evidence)
        scale = -group["lr"] * muon_scale(evidence.rule.adjust_lr_fn, *_turned(together, evidence).shape)
        part = evidence.placed.of(together.view(evidence.placed.param.shape))
        yield f"{UNSPLIT}: the matrices of its tensor are orthogonalized as one", decayed + scale * part


def _turned(matrix: Tensor, evidence: Evidence) -> Tensor:
    """(outputs, inputs) of what is stored so, or the other way round; and back."""
    return matrix if evidence.placed.layout == "out_in" else matrix.mT


def _scale_of_the_transpose(evidence: Evidence) -> float:
    """Over the right one; 1 if there is no difference."""
    if not evidence.placed.use_muon or evidence.applied.ndim != 2:
        return 1.0
    rows, cols = _turned(evidence.applied, evidence).shape
    return muon_scale(evidence.rule.adjust_lr_fn, cols, rows) / muon_scale(evidence.rule.adjust_lr_fn, rows, cols)


def _result(matrix: Tensor, evidence: Evidence) -> Tensor:
    """Of Newton-Schulz, and of NorMuon's normalization if it is that."""
    rule = evidence.rule
    orthogonal = reference_newton_schulz(matrix, ns_steps=rule.ns_steps, ns_coefficients=rule.ns_coefficients)
    variance, beta2 = evidence.state_before.get(ROW_VARIANCE), rule.beta2
    if variance is None or beta2 is None:
        return orthogonal
    return _turned(RowNormalization(variance.double(), beta2)(_turned(orthogonal, evidence)), evidence)


def _direction(evidence: Evidence, *, nesterov: bool) -> Tensor:
    """U, from the momentum of the same-dtype reference, which has taken in the engine's gradient."""
    m, mu = evidence.reference_state["momentum_buffer"].double(), evidence.group["momentum"]
    return (1 - mu) * evidence.gradient + mu * m if nesterov else m


def _of_slices(direction: Tensor, evidence: Evidence) -> Tensor:
    result = torch.zeros_like(direction)
    for _, first, numel in evidence.record.pieces:
        alone = torch.zeros_like(direction)
        piece = slice(first, first + numel)
        alone.view(-1)[piece] = direction.view(-1)[piece]
        result.view(-1)[piece] = _result(alone, evidence).view(-1)[piece]
    return result


def _of_shifted(direction: Tensor, cut: int, shift: int, evidence: Evidence) -> Tensor:
    """Zeros where ``shift`` elements of padding were read as the matrix's, and the rest that much later."""
    shifted = direction.clone().view(-1)
    shift = min(shift, shifted.numel() - cut)
    shifted[cut + shift :] = direction.reshape(-1)[cut : direction.numel() - shift]
    shifted[cut : cut + shift] = 0
    return _result(shifted.view(direction.shape), evidence)


# ---- fits -----------------------------------------------------------------------------------------------------------


def _fit(found: Tensor, direction: Tensor) -> tuple[float, float]:
    """The factor f that brings f * direction nearest to what was found, and what is left over, relative to it."""
    square = float(direction.square().sum())
    factor = float((found * direction).sum()) / square if square else 0.0
    return factor, _left(found, factor * direction)


def _left(found: Tensor, predicted: Tensor) -> float:
    return ratio(float((found - predicted).norm()), float(found.norm()))


def _is_power_of_two(factor: float, rounding: float) -> bool:
    """To within a relative error; at least 4, since 2 may be a sum over two ranks."""
    return factor > 3 and abs(math.log2(factor) - round(math.log2(factor))) < rounding
