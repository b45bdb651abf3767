"""What the check reads of a DeepSpeed engine: where parameters lie, whole tensors from partitions, rules and scales.

Everything here comes from DeepSpeed's own ZeRO-1/2 optimizer, by its own maps, so that it holds for DSMuon and for
DeepSpeed's ``Muon`` alike. DSMuon's partition plan is asked for one thing, the owner of a matrix.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_muon.agree import gather, raise_together
from ds_muon.dtypes import DTYPES
from ds_muon.layout import Layout, Piece

# NorMuon's state, which is not cut like a partition.
ROW_VARIANCE = "row_variance"


class CannotVerify(Exception):
    """The engine or its config is one that the check cannot read, or that cannot show what is asked for."""


@dataclass(frozen=True)
class Placed:
    """A matrix, or a tensor of AdamW's, and where it lies.

    Attributes:
        name: of the parameter; with an index, where that has several matrices.
        param: the parameter.
        group: its param group.
        offset: the parameter's first element in the group's flat buffer.
        layout: what the rows of a matrix are.
        piece: of the parameter, and the number of the ``strip`` in it. None for all of the parameter.
    """

    name: str
    param: Tensor
    group: int
    offset: int
    use_muon: bool
    layout: Layout = "out_in"
    piece: Piece | None = None
    strip: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.param.shape) if self.piece is None else self.piece.shapes()[self.strip]

    @property
    def is_strip(self) -> bool:
        """Whether other matrices lie between its elements."""
        return self.piece is not None and bool(self.piece.strips)

    def of(self, tensor: Tensor) -> Tensor:
        """This matrix in a tensor of the parameter's shape: a copy, or the tensor itself if it is all of that."""
        if self.piece is None:
            return tensor
        part = tensor.reshape(-1).narrow(0, self.piece.start, self.piece.numel).view(self.piece.rows, self.piece.cols)
        if self.piece.strips:
            part = self.piece.strips[self.strip].of(part, self.piece.axis)
        return part.clone(memory_format=torch.contiguous_format)

    def put(self, matrix: Tensor, tensor: Tensor) -> None:
        """Write ``matrix`` to its place in a contiguous tensor of the parameter's shape."""
        if self.piece is None:
            tensor.copy_(matrix)
            return
        part = tensor.view(-1).narrow(0, self.piece.start, self.piece.numel).view(self.piece.rows, self.piece.cols)
        if self.piece.strips:
            self.piece.strips[self.strip].store(matrix, part, self.piece.axis)
        else:
            part.copy_(matrix)


@dataclass(frozen=True)
class MuonRule:
    """The settings of Muon's update that are not in ``param_groups``, and the dtypes it runs in.

    ``beta2`` is NorMuon's; None for plain Muon.
    """

    adjust_lr_fn: str
    ns_steps: int | None
    ns_coefficients: Any
    ns_method: str
    ns_dtype: torch.dtype
    ns_eps: float
    momentum_dtype: torch.dtype
    ns_backend: str = "torch"
    beta2: float | None = None


@dataclass(frozen=True)
class Look:
    """What is looked at, for each of ``EngineView.placed``, in fp32: all of it, or this rank's part with zeros.

    Attributes:
        gradients: what ZeRO's reduction left of them, unscaled once it is whole. None where DeepSpeed's Muon has
            overwritten it with its update. Empty if they were not asked for.
        weights: the fp32 weights.
        states: momentum or moments by their keys; None where they cannot be read.
    """

    gradients: list[Tensor | None]
    weights: list[Tensor]
    states: list[dict[str, Tensor | None]]


class EngineView:
    """Reads one ZeRO-1/2 optimizer. Methods that say so are collectives over its data-parallel group.

    Args:
        zero: ``engine.optimizer``.
        module: ``engine.module``.
        only: the name of the one matrix to look at; by default all, and AdamW's tensors.

    Attributes:
        placed: those, in flat order.
        shapes: how many Muon matrices of each shape there are, over all ranks.

    Raises:
        CannotVerify: not a ZeRO-1/2 optimizer with DSMuon or DeepSpeed's Muon.
    """

    def __init__(self, zero: Any, module: nn.Module, only: str | None = None) -> None:
        if not hasattr(zero, "single_partition_of_fp32_groups") or not hasattr(zero, "round_robin_bit16_offsets"):
            raise CannotVerify(
                f"the engine's optimizer is {type(zero).__name__}: only DeepSpeed's ZeRO optimizer of stage 1 or 2 can "
                'be checked. Set zero_optimization.stage to 1 or 2 (with DeepSpeed\'s "Muon" at stage 1 in bf16, leave '
                "data_types.grad_accum_dtype out)"
            )
        self.zero = zero
        self.is_dsmuon = hasattr(zero, "newton_schulz")
        self.rule = _dsmuon_rule(zero) if self.is_dsmuon else _deepspeed_rule(zero)
        self.process_group = zero.dp_process_group
        self.rank = dist.get_rank(self.process_group)
        self.world_size = dist.get_world_size(self.process_group)
        located = list(self._located(module))
        self.placed = [placed for placed in located if only in (None, placed.name)]
        self.shapes = Counter(placed.shape for placed in located if placed.use_muon)
        units = zero.plan.units if self.is_dsmuon else ()
        self._owners = {matrix.name: unit.owner for unit in units for matrix in unit.matrices}

    def _located(self, module: nn.Module) -> Iterable[Placed]:
        zero = self.zero
        pieces = zero.optimizer.routing.pieces() if self.is_dsmuon else {}
        layouts = zero.optimizer.routing.layouts() if self.is_dsmuon else {}
        for group, (params, offsets) in enumerate(
            zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
        ):
            for param, offset in zip(params, offsets, strict=True):
                name, use_muon = zero.param_names[param], bool(zero.param_groups[group]["use_muon"])
                there = (param, group, offset, use_muon)
                matrices = [(piece, i, m) for piece in pieces.get(name, ()) for i, m in enumerate(piece.names(name))]
                if use_muon and (len(matrices) > 1 or param.ndim > 2):
                    for piece, strip, matrix in matrices:
                        yield Placed(matrix, *there, layouts[name], piece, strip)
                else:
                    # An own look at the module, for the optimizer's routing may be wrong.
                    yield Placed(name, *there, _layout(module, name))

    # ---- settings -----------------------------------------------------------------------------------------------

    def groups(self) -> list[dict[str, Any]]:
        """The settings of every param group, as they are now."""
        theirs = {"nesterov": True}  # what DeepSpeed's Muon does, without a key for it
        return [
            {**theirs, **{key: value for key, value in group.items() if key != "params"}}
            for group in self.zero.param_groups
        ]

    @property
    def divisor(self) -> float:
        """What the sum over all ranks of the raw gradients is divided by: loss scale, and ranks that average."""
        zero = self.zero
        averaged_over = self.world_size / zero.sequence_parallel_size if zero.gradient_average else 1
        return float(zero.loss_scale * averaged_over)

    @property
    def loss_scale(self) -> float:
        return float(self.zero.loss_scale)

    @property
    def summed_in(self) -> torch.dtype:
        """The coarsest dtype in which gradients are summed over micro-batches or ranks."""
        dtypes = (*self.zero.ipg_buckets, self.zero.gradient_accumulation_dtype)
        coarsest: torch.dtype = max(dtypes, key=lambda dtype: float(torch.finfo(dtype).eps))
        return coarsest

    @property
    def clipping(self) -> tuple[float, bool]:
        """``gradient_clipping``, and whether AdamW's gradients are clipped by the norm of all or by their own."""
        everything = not self.is_dsmuon or self.zero.optimizer.config.clip_norm_scope == "all"
        return float(self.zero.clip_grad), everything

    @property
    def skipped_for_an_update(self) -> bool:
        """Whether the last skipped step was so for an update that is not finite: there the momentum has moved."""
        skips = getattr(self.zero, "skips", None)
        return skips is not None and skips.last is skips.bad_updates

    @property
    def precision(self) -> str:
        """One line: the dtypes of model, sums, iteration and momentum, and the forms of the iteration that run."""
        dtypes = self.zero.dtype, self.summed_in, self.rule.ns_dtype, self.rule.momentum_dtype
        model, sums, iteration, momentum = map(_short, dtypes)
        forms = " and ".join(sorted({self._form(shape) for shape in self.shapes}))
        variant = "" if self.rule.beta2 is None else ", NorMuon"
        return f"{model} model, {sums} sums, {forms} in {iteration}, {momentum} momentum{variant}"

    def _form(self, shape: tuple[int, ...]) -> str:
        rows, *rest = shape
        cols = math.prod(rest)
        if self.is_dsmuon:
            form: str = self.zero.newton_schulz.form(rows, cols)
            return form
        return "standard" if rows == cols else self.rule.ns_method

    def owner(self, placed: Placed) -> int | None:
        return self._owners.get(placed.name)

    def cuts(self, placed: Placed) -> tuple[tuple[int, int], ...]:
        """(rank, elements) of every part that ZeRO has cut it into, in flat order; of a strip those of its piece."""
        first, numel = (0, placed.param.numel()) if placed.piece is None else (placed.piece.start, placed.piece.numel)
        size, start = self.zero.partition_size[placed.group], placed.offset + first
        end = start + numel
        return tuple(
            (rank, min(end, (rank + 1) * size) - max(start, rank * size))
            for rank in range(start // size, (end - 1) // size + 1)
        )

    # ---- whole tensors, from the pieces that ranks hold -----------------------------------------------------------

    def look(self, *, gradients: bool = False) -> Look:
        """This rank's part, in memory of its own. No collective: ``complete`` makes it whole.

        Args:
            gradients: whether ZeRO has averaged gradients now, between reduction and ``step``.
        """
        flats = self.zero.single_partition_of_fp32_groups
        return Look(
            [self._own_part(p, self._gradient_pieces(p.group)) if self._is_readable(p) else None for p in self.placed]
            if gradients
            else [],
            [self._own_part(p, [flats[p.group].detach()]) for p in self.placed],
            [
                {
                    key: self._own_part(p, [self._state_partition(p, key)]) if self._is_readable(p) else None
                    for key in self._partition_keys(p)
                }
                | self._row_variance(p)
                for p in self.placed
            ],
        )

    def complete(self, look: Look) -> Look:
        """Add up what the ranks have, in place: every element has one holder, and is zero elsewhere. A collective."""
        states = [tensor for state in look.states for key, tensor in state.items() if key != ROW_VARIANCE]
        for tensors in (look.gradients, look.weights, states):
            self.sum_over_ranks([tensor for tensor in tensors if tensor is not None])
        for gradient in look.gradients:
            if gradient is not None:
                gradient.mul_(1 / self.loss_scale)
        return look

    def _partition_keys(self, placed: Placed) -> tuple[str, ...]:
        """The keys of state that is cut like the partition."""
        return ("momentum_buffer",) if placed.use_muon else ("exp_avg", "exp_avg_sq")

    def _row_variance(self, placed: Placed) -> dict[str, Tensor | None]:
        """This rank's copy of NorMuon's (rows,) state of a matrix, which every rank has whole."""
        if not placed.use_muon or self.rule.beta2 is None:
            return {}
        variance = self.zero.optimizer.row_variance(placed.group)
        return {ROW_VARIANCE: self.zero.muon_groups[placed.group].row_variance.of(variance, placed.name).clone()}

    def _is_readable(self, placed: Placed) -> bool:
        return self.is_dsmuon or not placed.use_muon

    def _state_partition(self, placed: Placed, key: str) -> Tensor:
        flat = self.zero.single_partition_of_fp32_groups[placed.group]
        state = self.zero.optimizer.state.get(flat, {})
        return state[key] if key in state else torch.zeros_like(flat)

    def _gradient_pieces(self, group: int) -> Sequence[Tensor]:
        pieces: Sequence[Tensor] = self.zero.averaged_gradients[group]
        flat: Tensor | None = getattr(pieces, "flat_partition", None)
        return pieces if flat is None else [flat]

    def adamw_step(self, placed: Placed) -> float:
        """How many steps AdamW has made for this parameter."""
        flat = self.zero.single_partition_of_fp32_groups[placed.group]
        state = self.zero.optimizer.state.get(flat, {})
        return float(state.get("step", self.zero.param_groups[placed.group].get("step", 0)))

    def stale_ranks(self, weights: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """For each parameter, the ranks whose model does not hold the fp32 weight rounded to its dtype. A collective.

        Raises:
            Exception: a rank could not look. The others raise a ``RuntimeError`` that quotes it.
        """
        stale: list[bool] = []
        error: Exception | None = None
        try:
            stale = [
                not torch.equal(placed.of(placed.param.detach()), weight.to(placed.param.dtype))
                for placed, weight in zip(self.placed, weights, strict=True)
            ]
        except Exception as caught:  # the other ranks are on their way to the collective
            error = caught
        raise_together(error, self.process_group)
        by_parameter = zip(*gather(stale, self.process_group), strict=True)
        return [tuple(rank for rank, is_stale in enumerate(flags) if is_stale) for flags in by_parameter]

    def sum_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        """Replace contiguous tensors of one dtype by their sums, in one collective. One alone takes no memory."""
        if len(tensors) == 1:
            dist.all_reduce(tensors[0], group=self.process_group)
        elif tensors:
            together = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(together, group=self.process_group)
            sums = torch.split(together, [tensor.numel() for tensor in tensors])
            for tensor, total in zip(tensors, sums, strict=True):
                tensor.copy_(total.view(tensor.shape))

    def _own_part(self, placed: Placed, pieces: Sequence[Tensor]) -> Tensor:
        """What this rank's flat partition, given as pieces in order, has of a matrix or tensor; else zeros, in fp32."""
        part = torch.zeros(placed.param.shape, dtype=torch.float32, device=placed.param.device)
        flat = part.view(-1)
        position = self.rank * self.zero.partition_size[placed.group] - placed.offset
        for piece in pieces:
            start, end = max(0, position), min(flat.numel(), position + piece.numel())
            if start < end:
                flat[start:end] = piece.reshape(-1)[start - position : end - position]
            position += piece.numel()
        return placed.of(part)


def _layout(module: nn.Module, name: str) -> Layout:
    """How transformers' Conv1D lays out the weight of this name, or every other module."""
    # A module of this type cannot be there unless this was imported.
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())
    path = name.split(".")[:-1]
    if "parametrizations" in path:  # a folder that torch puts into the module, for the parts of a weight
        path = path[: path.index("parametrizations")]
    return "in_out" if isinstance(module.get_submodule(".".join(path)), conv1d) else "out_in"


def _dsmuon_rule(zero: Any) -> MuonRule:
    config, resolved = zero.optimizer.config, zero.newton_schulz
    return MuonRule(
        adjust_lr_fn=config.adjust_lr_fn,
        ns_steps=config.ns_steps,
        ns_coefficients=config.ns_coefficients,
        ns_method=resolved.method,
        ns_dtype=resolved.dtype,
        ns_eps=resolved.eps,
        momentum_dtype=DTYPES[config.momentum_dtype],
        ns_backend=resolved.backend,
        beta2=config.beta2 if config.variant == "normuon" else None,
    )


def _deepspeed_rule(zero: Any) -> MuonRule:
    if type(zero.optimizer).__name__ != "MuonWithAuxAdam":
        raise CannotVerify(
            f"the optimizer is {type(zero.optimizer).__name__}: "
            'set optimizer.type to "DSMuon" (or to "Muon", which is DeepSpeed\'s own)'
        )
    groups = zero.optimizer.param_groups
    if not zero.optimizer.adam_w_mode and any(group["weight_decay"] for group in groups if not group["use_muon"]):
        raise CannotVerify("adam_w_mode is false: remove the key, the check knows decoupled weight decay only")
    if any(zero.optimizer.state.get(flat) for flat in zero.single_partition_of_fp32_groups):
        raise CannotVerify('DeepSpeed\'s "Muon" can only be checked from its first step on')
    from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

    methods = {group.get("ns_method", "gram") for group in groups if group["use_muon"]} or {"gram"}
    if len(methods) > 1:
        raise CannotVerify(f"param groups with different ns_method ({', '.join(sorted(methods))}): give all the same")
    (method,) = methods
    return MuonRule(
        adjust_lr_fn="original",
        ns_steps=5,
        ns_coefficients="quintic",
        ns_method=method,
        ns_dtype=ns_compute_dtype(method),
        ns_eps=1e-15,
        momentum_dtype=zero.dtype,
    )


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, str(dtype))


def ratio(value: float, size: float) -> float:
    """``value / size``; 0 / 0 is 0."""
    if size == 0:
        return 0.0 if value == 0 else math.inf
    return value / size
