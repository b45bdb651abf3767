"""Compares the changes that an engine applies with an fp64 reference fed by the raw gradients.

Raw means: as autograd hands them to the parameter on each rank, before ZeRO reduces anything. They are averaged here,
in fp64. Nothing is shared with the partition plan, the exchange or the fast Newton-Schulz, except that the plan is
asked who owned a matrix, for the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.verify.reference import AdamWReference, MuonReference

# Relative error against fp64 that the dtype of the iteration explains, for condition numbers up to 1e4.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.06}
# On top, this many times what the rounding of the reference's own input changes. A shadow of the reference measures it:
# the same rule, fed with gradients that carry one rounding of the engine's sums. An ill-conditioned matrix magnifies
# it, and sums over ranks and micro-batches round more than once.
_INPUT_ROUNDINGS = 2.0
# Rounding of an fp32 weight: once for the decay, once for the update.
_FP32_ROUNDINGS = 2 * 2.0**-24


@dataclass(frozen=True)
class UpdateRecord:
    """One parameter's applied change beside its reference.

    Attributes:
        name: the parameter.
        shape: its shape.
        half: ``"muon"`` or ``"adamw"``.
        holders: ranks that hold a piece of it.
        owner: the rank that orthogonalizes it; None in the AdamW half.
        relative_error: Frobenius norm of (applied - reference) over that of the reference.
        cosine: between the applied and the reference change.
        tolerance: what ``relative_error`` may be: that of the iteration's dtype, plus what the rounding of the fp32
            weights and of the direction explains.
        weights_match: the weights the model sees are, on every rank, the rounded fp32 weights.
    """

    name: str
    shape: tuple[int, ...]
    half: str
    holders: tuple[int, ...]
    owner: int | None
    relative_error: float
    cosine: float
    tolerance: float
    weights_match: bool

    @property
    def straddles(self) -> bool:
        return len(self.holders) > 1

    @property
    def ok(self) -> bool:
        return self.relative_error <= self.tolerance and self.weights_match


@dataclass
class _Watched:
    """One parameter under watch: where it lies, what autograd gave it so far, its reference and the shadow of that."""

    name: str
    param: Tensor
    group: int
    offset: int
    gradient: Tensor
    magnitude: Tensor
    reference: MuonReference | AdamWReference
    shadow: MuonReference | AdamWReference

    def accumulate(self, gradient: Tensor) -> None:
        self.gradient += gradient
        self.magnitude += gradient.abs()


class UpdateCheck:
    """Checks every applied change of a DeepSpeed ZeRO-1/2 engine with DSMuon.

    Create it before the first step to check; state that exists by then is read from the engine. Then, on every rank
    (both calls are collectives)::

        check = UpdateCheck(engine)
        loss = engine(batch); engine.backward(loss)          # as often as the accumulation needs
        check.before_step()
        engine.step()
        records = check.after_step()

    It keeps several fp64 copies of the model on every rank: made for small models and for tests.
    """

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer
        config = self._zero.optimizer.config
        settings = {key: getattr(config, key) for key in ("adjust_lr_fn", "ns_steps", "ns_coefficients")}
        self._matrices = {matrix.name: matrix for matrix in self._zero.plan.matrices}
        self._watched = [self._watch(*located, settings) for located in self._located()]
        self._hooks = [w.param.register_hook(w.accumulate) for w in self._watched]  # type: ignore[no-untyped-call]
        self._before: list[Tensor] = []
        self._groups: list[dict[str, Any]] = []
        self._gradients: list[Tensor] = []
        self._roundings: list[Tensor] = []
        self._steps = 0

    def close(self) -> None:
        """Stop watching the gradients."""
        for hook in self._hooks:
            hook.remove()

    def before_step(self) -> None:
        """Average the raw gradients of all ranks and remember the weights and learning rates. Before ``step``."""
        zero = self._zero
        ranks = dist.get_world_size(zero.dp_process_group)
        divisor = zero.loss_scale * (ranks / zero.sequence_parallel_size if zero.gradient_average else 1)
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in zero.param_groups]
        self._before = self._full_weights()
        self._gradients, self._roundings = [], []
        summed_in = max((*zero.ipg_buckets, zero.gradient_accumulation_dtype), key=lambda dtype: torch.finfo(dtype).eps)
        for w in self._watched:
            for total in (w.gradient, w.magnitude):
                dist.all_reduce(total, group=zero.dp_process_group)
            self._gradients.append(w.gradient / divisor)
            self._roundings.append(_rounding_of(w.magnitude / divisor, summed_in, zero.loss_scale))
            w.gradient.zero_()
            w.magnitude.zero_()
        self._clip_adamw()

    def after_step(self) -> list[UpdateRecord]:
        """One record per parameter, the same on every rank. Empty if the step was skipped."""
        if self._zero.overflow:
            return []
        self._steps += 1
        after = self._full_weights()
        mismatches = torch.tensor(
            [not torch.equal(w.param, new.to(w.param.dtype)) for w, new in zip(self._watched, after, strict=True)],
            dtype=torch.int32,
            device=self._watched[0].param.device,
        )
        dist.all_reduce(mismatches, group=self._zero.dp_process_group)
        return [
            self._record(w, gradient, rounding, old.double(), new.double(), not mismatch)
            for w, gradient, rounding, old, new, mismatch in zip(
                self._watched, self._gradients, self._roundings, self._before, after, mismatches.tolist(), strict=True
            )
        ]

    def _record(
        self, w: _Watched, gradient: Tensor, rounding: Tensor, old: Tensor, new: Tensor, weights_match: bool
    ) -> UpdateRecord:
        group = self._groups[w.group]
        expected = w.reference.change(old, gradient, group)
        # At random for a matrix, whose singular values mix all elements; in AdamW each element against itself.
        errors = _uniform(gradient, seed=self._steps) if group["use_muon"] else -torch.sign(gradient)
        shadow = w.shadow.change(old, gradient + errors * rounding, group)
        explained = _INPUT_ROUNDINGS * float((shadow - expected).norm()) + _FP32_ROUNDINGS * float(new.norm())
        iterated_in = self._zero.newton_schulz.dtype if group["use_muon"] else torch.float32
        applied = new - old
        size = float(expected.norm())
        error = float((applied - expected).norm())
        first = w.offset // self._zero.partition_size[w.group]
        last = (w.offset + w.param.numel() - 1) // self._zero.partition_size[w.group]
        return UpdateRecord(
            name=w.name,
            shape=tuple(w.param.shape),
            half="muon" if group["use_muon"] else "adamw",
            holders=tuple(range(first, last + 1)),
            owner=self._matrices[w.name].owner if group["use_muon"] else None,
            relative_error=_ratio(error, size),
            cosine=_ratio(float((applied * expected).sum()), size * float(applied.norm())) if size or error else 1.0,
            tolerance=TOLERANCES[iterated_in] + _ratio(explained, size),
            weights_match=weights_match,
        )

    def _clip_adamw(self) -> None:
        clip, everything = self._zero.clip_grad, self._zero.optimizer.config.clip_norm_scope == "all"
        if clip <= 0:
            return
        pairs = [
            (gradient, self._groups[w.group]["use_muon"])
            for w, gradient in zip(self._watched, self._gradients, strict=True)
        ]
        norm = math.sqrt(sum(float(g.square().sum()) for g, use_muon in pairs if everything or not use_muon))
        factor = min(1.0, clip / (norm + 1e-6))
        for (gradient, use_muon), rounding in zip(pairs, self._roundings, strict=True):
            if not use_muon:
                gradient.mul_(factor)
                rounding.mul_(factor)

    # ---- reading the engine -------------------------------------------------------------------------------------

    def _located(self) -> Iterator[tuple[int, Tensor, int]]:
        for group, (params, offsets) in enumerate(
            zip(self._zero.round_robin_bit16_groups, self._zero.round_robin_bit16_offsets, strict=True)
        ):
            for param, offset in zip(params, offsets, strict=True):
                yield group, param, offset

    def _watch(self, group: int, param: Tensor, offset: int, settings: dict[str, Any]) -> _Watched:
        state = self._zero.optimizer.state[self._zero.single_partition_of_fp32_groups[group]]

        def full(key: str) -> Tensor:
            return self._whole(self._gathered(state[key], group), param, offset).double()

        references: list[MuonReference | AdamWReference]
        if self._zero.param_groups[group]["use_muon"]:
            dtypes = (None, self._zero.newton_schulz.dtype)
            references = [MuonReference(full("momentum_buffer"), settings, dtype) for dtype in dtypes]
        else:
            step = float(state["step"])
            references = [AdamWReference(full("exp_avg"), full("exp_avg_sq"), step) for _ in range(2)]
        gradient, magnitude = (torch.zeros_like(param, dtype=torch.float64, requires_grad=False) for _ in range(2))
        name = self._zero.param_names[param]
        return _Watched(name, param, group, offset, gradient, magnitude, *references)

    def _full_weights(self) -> list[Tensor]:
        flats = [self._gathered(flat.detach(), i) for i, flat in enumerate(self._zero.single_partition_of_fp32_groups)]
        return [self._whole(flats[w.group], w.param, w.offset) for w in self._watched]

    def _gathered(self, partition: Tensor, group: int) -> Tensor:
        process_group = self._zero.real_dp_process_group[group]
        pieces = [torch.empty_like(partition) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(pieces, partition.contiguous(), group=process_group)
        return torch.cat(pieces)

    @staticmethod
    def _whole(flat: Tensor, param: Tensor, offset: int) -> Tensor:
        return flat.narrow(0, offset, param.numel()).view(param.shape).clone()


def _rounding_of(magnitude: Tensor, dtype: torch.dtype, loss_scale: float) -> Tensor:
    """The error of one rounding of an average to ``dtype``, given the average magnitude of its terms, unscaled."""
    limits = torch.finfo(dtype)
    smallest = limits.tiny * limits.eps / loss_scale
    return torch.where(magnitude > 0, magnitude * (limits.eps / 2) + smallest, 0.0)


def _uniform(like: Tensor, *, seed: int) -> Tensor:
    """Uniform in [-1, 1), the same on every rank; no generator of the user's moves."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(like.shape, dtype=like.dtype, generator=generator).mul_(2).sub_(1).to(like.device)


def _ratio(value: float, size: float) -> float:
    if size == 0:
        return 0.0 if value == 0 else math.inf
    return value / size
