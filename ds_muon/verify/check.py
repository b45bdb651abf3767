"""Compares what an engine does to every parameter in a step with what it should have done.

Four comparisons, from the gradient to the weight, so that an error shows where it comes from:

    raw gradients of all ranks  ->  averaged gradient   ``gradient``: did ZeRO average?
    averaged gradient           ->  momentum, moments   ``state``: did the state move once, by that gradient?
    averaged gradient           ->  change of weights   ``against_same_dtype``: is the step the single-process one?
    raw gradients of all ranks  ->  change of weights   ``against_fp64``: all of it, and the rounding

Raw means: as autograd hands them to the parameter on each rank, before ZeRO reduces anything. They are averaged here,
in fp64. Nothing is shared with the partition plan or the exchange, except that the plan is asked who owns a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_muon.verify import tolerances
from ds_muon.verify.diagnose import Evidence, diagnose
from ds_muon.verify.engine_view import ROW_VARIANCE, CannotVerify, EngineView, Placed, ratio
from ds_muon.verify.record import Comparison, UpdateRecord
from ds_muon.verify.reference import AdamWReference, Group, MuonReference, SameDtypeAdamW, SameDtypeMuon

__all__ = ["CannotVerify", "UpdateCheck"]

# The largest batch in which a matrix is orthogonalized again, in elements.
_BATCH_ELEMENTS = 1 << 26


@dataclass
class _RawGradient:
    """What autograd gave a parameter on this rank since the last step."""

    total: Tensor
    magnitude: Tensor
    count: int = 0

    def add(self, gradient: Tensor) -> None:
        self.total += gradient
        self.magnitude += gradient.abs()
        self.count += 1

    def clear(self) -> None:
        self.total.zero_()
        self.magnitude.zero_()
        self.count = 0


@dataclass
class _References:
    """The two references of one parameter, which start from the engine's state."""

    fp64: MuonReference | AdamWReference
    same_dtype: SameDtypeMuon | SameDtypeAdamW


@dataclass
class _Step:
    """What is known of one parameter before the engine steps.

    Attributes:
        weight: fp32.
        average: of the raw gradients, fp64.
        variance: of the error that the engine's sums explain in ``average``.
        engine_gradient: the average that ZeRO has, fp32; None where it cannot be read.
        gradient: comparison of the two.
        state: the engine's, before the step.
        moved: whether the weight is another than after the checked step before.
    """

    weight: Tensor
    average: Tensor
    variance: Tensor
    engine_gradient: Tensor | None
    gradient: Comparison | None
    state: dict[str, Tensor | None] = field(default_factory=dict)
    moved: bool = False


@dataclass(frozen=True)
class _Clip:
    """The factors by which AdamW's gradients are clipped: the averages made here, and the engine's own."""

    of_average: float
    of_engine_gradient: float


class UpdateCheck:
    """Checks every applied change of a DeepSpeed ZeRO-1/2 engine with DSMuon, or with DeepSpeed's ``Muon``.

    Create it before the first backward of the first step to check. Then, on every rank (all of it is collective)::

        check = UpdateCheck(engine)
        loss = engine(batch); engine.backward(loss)          # as often as the accumulation needs
        engine.step()
        records = check.after_step()

    It keeps its own momentum and moments, which start from the engine's at the time of creation, and again after a step
    that was skipped for a non-finite update, in which the engine's momentum moves. Memory: about ten fp64 copies of the
    model on every rank; made for small models and for tests.

    Args:
        engine: what ``deepspeed.initialize`` returned.

    Raises:
        CannotVerify: the engine is not one that can be read.
    """

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer
        self._comparison = StepComparison(self._zero, engine.module)
        self._stepped = False
        # ZeRO's own step, not the engine's: by then every gradient has been reduced, however it accumulates.
        self._original_step = self._zero.step
        self._zero.step = self._step

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        self._comparison.before_step()
        result = self._original_step(*args, **kwargs)
        self._stepped = True
        return result

    @property
    def precision(self) -> str:
        """See ``EngineView.precision``."""
        return self._comparison.precision

    def after_step(self) -> list[UpdateRecord]:
        """One record per parameter, the same on every rank. Empty if the optimizer made no step or skipped it."""
        stepped, self._stepped = self._stepped, False
        return self._comparison.after_step() if stepped else []

    def close(self) -> None:
        """Leave the engine as it was."""
        self._zero.step = self._original_step
        self._comparison.close()


class StepComparison:
    """The comparisons of one ZeRO optimizer's step; every rank must call ``before_step``, then ``after_step``.

    Args:
        zero: DeepSpeed's ZeRO-1/2 optimizer.
        module: the model that it trains.
        names: the parameters to check; all by default.
        keep_state: False to start every step from the engine's own momentum and moments.
        on_owner_only: compute references, and return records, on the owner of a matrix only.

    Raises:
        CannotVerify: the optimizer is not one that can be read.
    """

    def __init__(
        self,
        zero: Any,
        module: nn.Module,
        *,
        names: Collection[str] | None = None,
        keep_state: bool = True,
        on_owner_only: bool = False,
    ) -> None:
        self._view = EngineView(zero, module, names)
        self._on_owner_only = on_owner_only
        self._placed = self._view.placed
        # In training, where one matrix of a large model is checked, fp32 is exact enough: tolerances know its rounding.
        dtype = torch.float64 if keep_state else torch.float32
        self._raw = [_RawGradient(_zeros(placed, dtype), _zeros(placed, dtype)) for placed in self._placed]
        self._hooks = [
            placed.param.register_hook(partial(_add, placed, raw))  # type: ignore[no-untyped-call]
            for placed, raw in zip(self._placed, self._raw, strict=True)
            if placed.param.requires_grad  # one that was frozen since has no gradient
        ]
        self._keep_state = keep_state
        self._references = self._start() if keep_state else []
        self._before: list[_Step] = []
        self._after: list[dict[str, Tensor | None]] = []
        self._weights: list[Tensor] | None = None
        self._groups: list[Group] = []
        self._clip = _Clip(1.0, 1.0)
        self._steps = 0
        self._diagnoses: dict[str, str] = {}

    @property
    def precision(self) -> str:
        """See ``EngineView.precision``."""
        return self._view.precision

    def close(self) -> None:
        """Stop watching the gradients."""
        for hook in self._hooks:
            hook.remove()

    def before_step(self) -> None:
        """Average the raw gradients of all ranks; remember weights and settings. Once ZeRO has reduced them all."""
        self._groups = self._view.groups()
        if not self._keep_state:
            self._references = self._start()
        totals = self._view.sum_over_ranks([raw.total for raw in self._raw])
        magnitudes = self._view.sum_over_ranks([raw.magnitude for raw in self._raw])
        counts = [raw.count for raw in self._raw]
        of_engine = (self._view.averaged_gradients(), self._view.weights(), self._view.states())
        self._before = [self._observe(*known) for known in zip(totals, magnitudes, counts, *of_engine, strict=True)]
        if self._weights is not None:  # of a step that was skipped as well, nothing may be left
            for step, weight in zip(self._before, self._weights, strict=True):
                step.moved = not torch.equal(step.weight, weight)
        for raw in self._raw:
            raw.clear()
        self._clip = self._adamw_clip()

    def after_step(self) -> list[UpdateRecord]:
        """One record per parameter; empty if the step was skipped."""
        if self._view.zero.overflow:
            if self._keep_state and self._view.skipped_for_an_update:
                self._references = self._start()
            return []
        self._steps += 1
        weights = self._view.weights()
        self._weights = weights if self._keep_state else None
        stale, states = self._view.stale_ranks(weights), self._view.states()
        self._after = states
        return [
            self._record(*known)
            for known in zip(self._placed, self._references, self._before, weights, states, stale, strict=True)
            if not self._on_owner_only or self._view.owner(known[0]) == self._view.rank
        ]

    # ---- before the step ----------------------------------------------------------------------------------------

    def _start(self) -> list[_References]:
        return [self._references_of(*known) for known in zip(self._placed, self._view.states(), strict=True)]

    def _references_of(self, placed: Placed, found: dict[str, Tensor | None]) -> _References:
        # State that cannot be read is that of a first step.
        state = {key: _zeros(placed, torch.float32) if t is None else t for key, t in found.items()}
        doubles = {key: tensor.double() for key, tensor in state.items()}
        if placed.use_muon:
            rule = self._view.rule
            exact = MuonReference(doubles["momentum_buffer"], rule, doubles.get(ROW_VARIANCE), placed.layout)
            return _References(exact, SameDtypeMuon(state, rule, placed.layout))
        step = self._view.adamw_step(placed)
        return _References(
            AdamWReference(doubles["exp_avg"], doubles["exp_avg_sq"], step), SameDtypeAdamW(placed, state, step)
        )

    def _observe(
        self,
        total: Tensor,
        magnitude: Tensor,
        count: int,
        engine_gradient: Tensor | None,
        weight: Tensor,
        state: dict[str, Tensor | None],
    ) -> _Step:
        view = self._view
        average, magnitude = total.double() / view.divisor, magnitude.double() / view.divisor
        variance = tolerances.sum_variance(magnitude, view.summed_in, count + view.world_size - 1, view.loss_scale)
        gradient = None
        if engine_gradient is not None:
            size = float(average.norm())
            gradient = Comparison(
                error=ratio(float((engine_gradient.double() - average).norm()), size),
                tolerance=ratio(tolerances.SAFETY * float(variance.sum().sqrt()), size),
            )
        return _Step(weight, average, variance, engine_gradient, gradient, state)

    def _adamw_clip(self) -> _Clip:
        clip, everything = self._view.clipping
        if clip <= 0:
            return _Clip(1.0, 1.0)
        scope = [s for s, placed in zip(self._before, self._placed, strict=True) if everything or not placed.use_muon]
        exact = _norm([step.average for step in scope])
        theirs = _norm([step.average if step.engine_gradient is None else step.engine_gradient for step in scope])
        return _Clip(*(min(1.0, clip / (norm + 1e-6)) for norm in (exact, theirs)))

    # ---- after the step -----------------------------------------------------------------------------------------

    def _record(
        self,
        placed: Placed,
        references: _References,
        before: _Step,
        weight: Tensor,
        state: dict[str, Tensor | None],
        stale_ranks: tuple[int, ...],
    ) -> UpdateRecord:
        group, old = self._groups[placed.group], before.weight.double()
        applied = weight.double() - old
        exact, theirs = (1.0, 1.0) if placed.use_muon else (self._clip.of_average, self._clip.of_engine_gradient)
        averaged = before.average.float() if before.engine_gradient is None else before.engine_gradient
        if placed.use_muon and not averaged.any():
            # Of a matrix without a gradient nothing moves: neither the weight nor the reference's own momentum. Decided
            # by the engine's average where it can be read: rounding may leave nothing of the other, or something.
            expected, rounding = torch.zeros_like(old), 0.0
        else:
            expected, rounding = references.fp64.change(old, before.average * exact, before.variance * exact**2, group)
        size = float(expected.norm())
        rule = self._view.rule
        iterated_in = rule.ns_dtype if placed.use_muon else torch.float32
        # Where nothing may change, nothing is rounded.
        weight_rounding = tolerances.WEIGHT_ROUNDINGS * float(weight.double().norm()) / size if size else 0.0
        tolerance = tolerances.AGAINST_FP64[iterated_in] + ratio(rounding, size) + weight_rounding

        gradient = averaged * theirs if theirs < 1 else averaged
        same_tolerance = tolerances.AGAINST_SAME_DTYPE[iterated_in] + weight_rounding
        same = self._same_dtype(references, before, gradient, weight, group, same_tolerance * size)
        difference = weight.double() - same.double()
        if before.engine_gradient is None:
            against_same_dtype = Comparison(ratio(float(difference.norm()), size), tolerance)
        else:
            against_same_dtype = _worse_of_norm_and_elements(difference, weight, size, iterated_in)
        record = UpdateRecord(
            step=self._steps,
            name=placed.name,
            shape=placed.shape,
            half="muon" if placed.use_muon else "adamw",
            group=placed.group,
            cuts=self._view.cuts(placed),
            owner=self._view.owner(placed),
            against_fp64=Comparison(ratio(float((applied - expected).norm()), size), tolerance),
            cosine=_cosine(applied, expected),
            against_same_dtype=against_same_dtype,
            gradient=before.gradient,
            state=self._compare_state(references, state) if before.engine_gradient is not None else None,
            stale_ranks=stale_ranks,
            moved_before=before.moved,
        )
        if record.ok:
            return record
        evidence = Evidence(
            record=record,
            placed=placed,
            rule=rule,
            group=group,
            loss_scale=self._view.loss_scale,
            world_size=self._view.world_size,
            weight=old,
            applied=applied,
            expected=same.double() - old,
            average=before.average,
            averaged=averaged.double(),
            gradient=gradient.double(),
            state_before=before.state,
            state_after=state,
            reference_state=references.same_dtype.state,
            tensor=self._direction_of_tensor(placed, group),
        )
        return replace(record, diagnosis=self._diagnosis(evidence))

    def _direction_of_tensor(self, placed: Placed, group: Group) -> Tensor | None:
        """U of the whole parameter, as (rows, cols), where all of its several matrices are looked at; fp64."""
        known = zip(self._placed, self._before, self._after, strict=True)
        alike = [(p, b.engine_gradient, a["momentum_buffer"]) for p, b, a in known if p.param is placed.param]
        if placed.piece is None or sum(math.prod(p.shape) for p, _, _ in alike) < placed.param.numel():
            return None
        tensor = torch.zeros(placed.param.shape, dtype=torch.float64, device=placed.param.device)
        for other, gradient, momentum in alike:
            if gradient is None or momentum is None:
                return None
            mu, m = group["momentum"], momentum.double()
            other.put((1 - mu) * gradient.double() + mu * m if group["nesterov"] else m, tensor)
        return tensor.view(-1, placed.param.shape[-1] if placed.param.ndim < 4 else placed.piece.cols)

    def _same_dtype(
        self,
        references: _References,
        before: _Step,
        gradient: Tensor,
        weight: Tensor,
        group: Group,
        allowed: float,
    ) -> Tensor:
        """The weight by the same-dtype reference; of those that differ by the size of the batch alone, the nearest."""
        reference = references.same_dtype
        same = reference.new_weight(before.weight, gradient, group)
        if not isinstance(reference, SameDtypeMuon) or before.engine_gradient is None or weight.device.type == "cpu":
            return same
        most = min(self._view.shapes[tuple(weight.shape)], _BATCH_ELEMENTS // weight.numel())
        others = reference.new_weights_in_batches(before.weight, gradient, before.state, group, most)
        error = float((weight - same).norm())
        while error > allowed and (other := next(others, None)) is not None:
            if float((weight - other).norm()) < error:
                same, error = other, float((weight - other).norm())
        return same

    def _compare_state(self, references: _References, state: dict[str, Tensor | None]) -> Comparison | None:
        """Of the comparisons of all tensors of a state, the worst."""
        comparisons = []
        for key, expected in references.same_dtype.state.items():
            found = state[key]
            if found is None:
                return None
            error = ratio(float((found.double() - expected.double()).norm()), float(expected.double().norm()))
            comparisons.append(Comparison(error, self._state_tolerance(key)))
        return max(comparisons, key=lambda comparison: comparison.excess)

    def _state_tolerance(self, key: str) -> float:
        rule = self._view.rule
        if key == ROW_VARIANCE:  # of squares of the iteration's results
            return 2 * tolerances.AGAINST_SAME_DTYPE[rule.ns_dtype]
        return tolerances.STATE[rule.momentum_dtype if key == "momentum_buffer" else torch.float32]

    def _diagnosis(self, evidence: Evidence) -> str:
        """Of the first bad step of a parameter: after it, state and reference have parted for good."""
        name = evidence.record.name
        if name not in self._diagnoses:
            self._diagnoses[name] = diagnose(evidence)
        return self._diagnoses[name]


def _worse_of_norm_and_elements(
    difference: Tensor, weight: Tensor, size: float, iterated_in: torch.dtype
) -> Comparison:
    """Of the norm of a difference over ``size``, and of its largest element over the root mean square of that size."""
    allowed, numel = tolerances.AGAINST_SAME_DTYPE[iterated_in], difference.numel()
    comparisons = []
    for ord, unit, times in ((2.0, size, 1.0), (math.inf, size / math.sqrt(numel), tolerances.LARGEST_ELEMENT)):
        of_weight = tolerances.WEIGHT_ROUNDINGS * float(torch.linalg.vector_norm(weight.double(), ord))
        error = ratio(float(torch.linalg.vector_norm(difference, ord)), unit)
        comparisons.append(Comparison(error, times * allowed + (of_weight / unit if unit else 0.0)))
    return max(comparisons, key=lambda comparison: comparison.excess)


def _zeros(placed: Placed, dtype: torch.dtype) -> Tensor:
    return torch.zeros(placed.shape, dtype=dtype, device=placed.param.device)


def _add(placed: Placed, raw: _RawGradient, gradient: Tensor) -> None:
    raw.add(placed.of(gradient))


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _cosine(a: Tensor, b: Tensor) -> float:
    """1 for two zeros."""
    norms = float(a.norm()) * float(b.norm())
    if norms == 0:
        return 1.0 if float(a.norm()) == float(b.norm()) else 0.0
    return float((a * b).sum()) / norms
