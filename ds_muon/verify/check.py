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
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_muon.verify import tolerances
from ds_muon.verify.diagnose import Evidence, diagnose
from ds_muon.verify.engine_view import ROW_VARIANCE, CannotVerify, EngineView, Look, Placed, ratio
from ds_muon.verify.record import Comparison, UpdateRecord
from ds_muon.verify.reference import AdamWReference, Group, MuonReference, SameDtypeAdamW, SameDtypeMuon

__all__ = ["CannotVerify", "UpdateCheck"]

# The largest batch in which a matrix is orthogonalized again, in elements.
_BATCH_ELEMENTS = 1 << 26


@dataclass(eq=False)
class _Watched:
    """A matrix, or a tensor of AdamW's: raw gradients, references, and what is known of it before the engine steps.

    Attributes:
        placed: what it is, and where it lies.
        total, magnitude, count: of what autograd gave it on this rank since the last step.
        error: why something of that is missing.
        fp64, same_dtype: the references, which start from the engine's state.
        after: its fp32 weight after the checked step before; None in the first one.
        moved: whether the weight is another than that.
        weight: fp32.
        average: of the raw gradients of all ranks, fp64.
        variance: of the error that the engine's sums explain in ``average``.
        engine_gradient: the average that ZeRO has, fp32; None where it cannot be read.
        gradient: comparison of the two.
        state, state_after: the engine's, before the step and after it.
    """

    placed: Placed
    total: Tensor
    magnitude: Tensor
    count: int = 0
    error: Exception | None = None
    after: Tensor | None = None
    moved: bool = False
    fp64: MuonReference | AdamWReference = field(init=False)
    same_dtype: SameDtypeMuon | SameDtypeAdamW = field(init=False)
    weight: Tensor = field(init=False)
    average: Tensor = field(init=False)
    variance: Tensor = field(init=False)
    engine_gradient: Tensor | None = field(init=False)
    gradient: Comparison | None = field(init=False)
    state: dict[str, Tensor | None] = field(init=False)
    state_after: dict[str, Tensor | None] = field(init=False)

    def add(self, gradient: Tensor) -> None:
        try:
            gradient = self.placed.of(gradient)
            self.total += gradient
            self.magnitude += gradient.abs()
            self.count += 1
        except Exception as error:  # in a backward pass, of which other ranks wait for the gradients
            self.error = error

    def clear(self) -> None:
        self.error = None
        self.total.zero_()
        self.magnitude.zero_()
        self.count = 0


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
        return self._comparison.view.precision

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
        only: the one Muon matrix to check, each step from the engine's own momentum, with references and a record on
            its owner only. By default all parameters, from state that is the check's own.

    Raises:
        CannotVerify: the optimizer is not one that can be read.
    """

    def __init__(self, zero: Any, module: nn.Module, *, only: str | None = None) -> None:
        self.view = EngineView(zero, module, only)
        self._only = only
        # In training, where one matrix of a large model is checked, fp32 is exact enough: tolerances know its rounding.
        dtype = torch.float64 if only is None else torch.float32
        self._watched = [_Watched(p, _zeros(p, dtype), _zeros(p, dtype)) for p in self.view.placed]
        self._hooks = [
            watched.placed.param.register_hook(watched.add)  # type: ignore[no-untyped-call]
            for watched in self._watched
            if watched.placed.param.requires_grad  # one that was frozen since has no gradient
        ]
        if only is None:
            self._start(self.view.complete(self.view.look()))
        self._groups: list[Group] = []
        # By which AdamW's gradients are clipped: the averages made here, and the engine's own.
        self._clip = 1.0, 1.0
        self._steps = 0
        self._diagnoses: dict[str, str] = {}

    def close(self) -> None:
        """Stop watching the gradients."""
        for hook in self._hooks:
            hook.remove()

    def forget(self) -> None:
        """Drop the gradients of a step that will not be."""
        for watched in self._watched:
            watched.clear()

    def look(self, *, before: bool) -> Look:
        """What this rank has of a step, before it or after. No collective.

        Raises:
            Exception: it cannot be had, or a gradient could not be added to the others.
        """
        for watched in self._watched:
            if watched.error is not None:
                raise watched.error
        return self.view.look(gradients=before)

    def before_step(self, seen: Look | None = None) -> None:
        """Average the raw gradients of all ranks; remember weights and settings. Once ZeRO has reduced them all.

        A collective, which comes first, and takes no memory if one matrix is checked.

        Args:
            seen: by ``look``; by default it is called.
        """
        view, all_watched = self.view, self._watched
        seen = self.look(before=True) if seen is None else seen
        view.complete(seen)
        view.sum_over_ranks([watched.total for watched in all_watched])
        view.sum_over_ranks([watched.magnitude for watched in all_watched])
        self._groups = view.groups()
        if self._only is not None:
            self._start(seen)
        for watched, gradient, weight, state in zip(
            all_watched, seen.gradients, seen.weights, seen.states, strict=True
        ):
            watched.engine_gradient, watched.weight, watched.state = gradient, weight, state
            # Of a step that was skipped as well, nothing may be left.
            watched.moved = watched.after is not None and not torch.equal(watched.weight, watched.after)
            self._average(watched, watched.total.double() / view.divisor, watched.magnitude.double() / view.divisor)
            watched.clear()
        self._clip = self._adamw_clip()

    def after_step(self, seen: Look | None = None) -> list[UpdateRecord]:
        """One record per parameter; empty if the step was skipped. A collective.

        Args:
            seen: by ``look``; by default it is called.
        """
        view = self.view
        if view.zero.overflow:
            if self._only is None and view.skipped_for_an_update:
                self._start(view.complete(view.look()))
            return []
        self._steps += 1
        seen = view.complete(self.look(before=False) if seen is None else seen)
        weights, states = seen.weights, seen.states
        stale = view.stale_ranks(weights)
        for watched, weight, state in zip(self._watched, weights, states, strict=True):
            watched.after, watched.state_after = weight, state
        return [
            self._record(*known)
            for known in zip(self._watched, weights, states, stale, strict=True)
            if self._only is None or view.owner(known[0].placed) == view.rank
        ]

    # ---- before the step ----------------------------------------------------------------------------------------

    def _start(self, seen: Look) -> None:
        """Take the references from the engine's state; what cannot be read of it is that of a first step."""
        rule = self.view.rule
        for watched, found in zip(self._watched, seen.states, strict=True):
            placed = watched.placed
            # The reference advances its own.
            state = {key: _zeros(placed, torch.float32) if t is None else t.clone() for key, t in found.items()}
            doubles = {key: tensor.double() for key, tensor in state.items()}
            if placed.use_muon:
                momentum, variance = doubles["momentum_buffer"], doubles.get(ROW_VARIANCE)
                watched.fp64 = MuonReference(momentum, rule, variance, placed.layout)
                watched.same_dtype = SameDtypeMuon(state, rule, placed.layout)
            else:
                step = self.view.adamw_step(placed)
                watched.fp64 = AdamWReference(doubles["exp_avg"], doubles["exp_avg_sq"], step)
                watched.same_dtype = SameDtypeAdamW(placed, state, step)

    def _average(self, watched: _Watched, average: Tensor, magnitude: Tensor) -> None:
        """Compare the engine's averaged gradient with the average of the raw ones, given the latter's magnitude."""
        view, additions = self.view, watched.count + self.view.world_size - 1
        watched.average = average
        watched.variance = tolerances.sum_variance(magnitude, view.summed_in, additions, view.loss_scale)
        watched.gradient = None
        if watched.engine_gradient is not None:
            size = float(average.norm())
            watched.gradient = Comparison(
                error=ratio(float((watched.engine_gradient.double() - average).norm()), size),
                tolerance=ratio(tolerances.SAFETY * float(watched.variance.sum().sqrt()), size),
            )

    def _adamw_clip(self) -> tuple[float, float]:
        clip, everything = self.view.clipping
        if clip <= 0:
            return 1.0, 1.0
        scope = [watched for watched in self._watched if everything or not watched.placed.use_muon]
        exact = _norm([watched.average for watched in scope])
        theirs = _norm([w.average if w.engine_gradient is None else w.engine_gradient for w in scope])
        return min(1.0, clip / (exact + 1e-6)), min(1.0, clip / (theirs + 1e-6))

    # ---- after the step -----------------------------------------------------------------------------------------

    def _record(
        self, watched: _Watched, weight: Tensor, state: dict[str, Tensor | None], stale_ranks: tuple[int, ...]
    ) -> UpdateRecord:
        placed, view = watched.placed, self.view
        group, old = self._groups[placed.group], watched.weight.double()
        applied = weight.double() - old
        exact, theirs = (1.0, 1.0) if placed.use_muon else self._clip
        averaged = watched.average.float() if watched.engine_gradient is None else watched.engine_gradient
        if placed.use_muon and not averaged.any():
            # Of a matrix without a gradient nothing moves: neither the weight nor the reference's own momentum. Decided
            # by the engine's average where it can be read: rounding may leave nothing of the other, or something.
            expected, rounding = torch.zeros_like(old), 0.0
        else:
            average, variance = watched.average * exact, watched.variance * exact**2
            expected, rounding = watched.fp64.change(old, average, variance, group)
        size = float(expected.norm())
        iterated_in = view.rule.ns_dtype if placed.use_muon else torch.float32
        # Where nothing may change, nothing is rounded.
        weight_rounding = tolerances.WEIGHT_ROUNDINGS * float(weight.double().norm()) / size if size else 0.0
        tolerance = tolerances.AGAINST_FP64[iterated_in] + ratio(rounding, size) + weight_rounding

        gradient = averaged * theirs if theirs < 1 else averaged
        same_tolerance = tolerances.AGAINST_SAME_DTYPE[iterated_in] + weight_rounding
        same = self._same_dtype(watched, gradient, weight, group, same_tolerance * size)
        difference = weight.double() - same.double()
        if watched.engine_gradient is None:
            against_same_dtype = Comparison(ratio(float(difference.norm()), size), tolerance)
        else:
            against_same_dtype = _worse_of_norm_and_elements(difference, weight, size, iterated_in)
        record = UpdateRecord(
            step=self._steps,
            name=placed.name,
            shape=placed.shape,
            half="muon" if placed.use_muon else "adamw",
            group=placed.group,
            cuts=view.cuts(placed),
            owner=view.owner(placed),
            against_fp64=Comparison(ratio(float((applied - expected).norm()), size), tolerance),
            cosine=_cosine(applied, expected),
            against_same_dtype=against_same_dtype,
            gradient=watched.gradient,
            state=None if watched.engine_gradient is None else self._compare_state(watched.same_dtype.state, state),
            stale_ranks=stale_ranks,
            moved_before=watched.moved,
        )
        if record.ok:
            return record
        evidence = Evidence(
            record=record,
            placed=placed,
            rule=view.rule,
            group=group,
            loss_scale=view.loss_scale,
            world_size=view.world_size,
            weight=old,
            applied=applied,
            expected=same.double() - old,
            average=watched.average,
            averaged=averaged.double(),
            gradient=gradient.double(),
            state_before=watched.state,
            state_after=state,
            reference_state=watched.same_dtype.state,
            tensor=self._direction_of_tensor(placed, group),
        )
        return replace(record, diagnosis=self._diagnosis(evidence))

    def _direction_of_tensor(self, placed: Placed, group: Group) -> Tensor | None:
        """U of the whole parameter, as (rows, cols), where all of its several matrices are looked at; fp64."""
        alike = [watched for watched in self._watched if watched.placed.param is placed.param]
        numel = sum(math.prod(watched.placed.shape) for watched in alike)
        if placed.piece is None or numel < placed.param.numel():
            return None
        tensor = torch.zeros(placed.param.shape, dtype=torch.float64, device=placed.param.device)
        for watched in alike:
            gradient, momentum = watched.engine_gradient, watched.state_after["momentum_buffer"]
            if gradient is None or momentum is None:
                return None
            mu, m = group["momentum"], momentum.double()
            watched.placed.put((1 - mu) * gradient.double() + mu * m if group["nesterov"] else m, tensor)
        return tensor.view(-1, placed.piece.cols)

    def _same_dtype(self, watched: _Watched, gradient: Tensor, weight: Tensor, group: Group, allowed: float) -> Tensor:
        """The weight by the same-dtype reference; of those that differ by the size of the batch alone, the nearest."""
        reference, before = watched.same_dtype, watched.weight
        same = reference.new_weight(before, gradient, group)
        if not isinstance(reference, SameDtypeMuon) or watched.engine_gradient is None or weight.device.type == "cpu":
            return same
        most = min(self.view.shapes[tuple(weight.shape)], _BATCH_ELEMENTS // weight.numel())
        others = reference.new_weights_in_batches(before, gradient, watched.state, group, most)
        error = float((weight - same).norm())
        while error > allowed and (other := next(others, None)) is not None:
            if float((weight - other).norm()) < error:
                same, error = other, float((weight - other).norm())
        return same

    def _compare_state(self, reference: dict[str, Tensor], state: dict[str, Tensor | None]) -> Comparison | None:
        """Of the comparisons of all tensors of a state, the worst."""
        comparisons = []
        for key, expected in reference.items():
            found = state[key]
            if found is None:
                return None
            error = ratio(float((found.double() - expected.double()).norm()), float(expected.double().norm()))
            comparisons.append(Comparison(error, self._state_tolerance(key)))
        return max(comparisons, key=lambda comparison: comparison.excess)

    def _state_tolerance(self, key: str) -> float:
        rule = self.view.rule
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


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _cosine(a: Tensor, b: Tensor) -> float:
    """1 for two zeros."""
    norms = float(a.norm()) * float(b.norm())
    if norms == 0:
        return 1.0 if float(a.norm()) == float(b.norm()) else 0.0
    return float((a * b).sum()) / norms
