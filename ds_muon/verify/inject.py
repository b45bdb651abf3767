"""Known faults, planted one at a time into a running engine: the test of the check itself.

Each fault is one that an optimizer has had, made at the place where it would be made. The check must find it in the
weights, the state or the gradient, and name it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.exchange import Transfer
from ds_muon.guard import Findings, Verdict
from ds_muon.layout import out_and_in
from ds_muon.muon_group import MuonGroup, Staged, in_turns
from ds_muon.orthogonalize import orthogonalize
from ds_muon.passes import Moves
from ds_muon.plan.partition import GroupPlan, Matrix, Unit
from ds_muon.plan.zero_layout import Slice
from ds_muon.update import advance_row_variance, update_scale
from ds_muon.verify import diagnose
from ds_muon.verify.engine_view import CannotVerify
from ds_muon.verify.record import UpdateRecord

# ZeRO pads in such steps (16 bytes of fp32).
_PADDING = 4
# Taken for the loss scale where there is none.
_LOSS_SCALE = 1024.0
_WEIGHT_DECAY = 0.1

# Replaces a method of the ZeRO optimizer (or of what it is given as `target`) by one that calls the original.
_Replace = Callable[..., None]


@dataclass(frozen=True)
class Fault:
    """A fault, what it does, and how the diagnosis of it begins.

    ``plant`` makes it, by replacing methods; what it returns, if anything, takes back what else it did. ``steps`` says
    how many of them it takes to show.
    """

    name: str
    summary: str
    diagnosis: str
    plant: Callable[[Any, _Replace], Callable[[], None] | None]
    steps: int = 1


@contextmanager
def plant(name: str, engine: Any) -> Iterator[None]:
    """Within this context the engine's optimizer makes one fault. Call it on every rank, before there is a check: what
    the fault does to a gradient, autograd then does for the check.

    Raises:
        CannotVerify: the optimizer is not DSMuon's, or has nothing that this fault could change.
    """
    zero = engine.optimizer
    if not hasattr(zero, "newton_schulz"):
        raise CannotVerify('faults can be planted in DSMuon only: set optimizer.type to "DSMuon"')
    with ExitStack() as stack:

        def replace(method: str, new: Callable[..., Any], target: Any = zero) -> None:
            original = getattr(target, method)

            def replaced(*args: Any) -> Any:
                return new(original, *args)

            stack.enter_context(mock.patch.object(target, method, replaced))

        take_back = FAULTS[name].plant(zero, replace)
        if take_back is not None:
            stack.callback(take_back)
        yield


def found(name: str, records: Iterable[UpdateRecord]) -> bool:
    """Whether the check has found this fault and named it."""
    diagnosis = FAULTS[name].diagnosis
    return any(not record.ok and (record.diagnosis or "").startswith(diagnosis) for record in records)


# ---- of the gradient ------------------------------------------------------------------------------------------------


def _clipped_gradient(zero: Any, replace: _Replace) -> None:
    """Muon's gradients are scaled down where the norm of all gradients exceeds half of what it was at first."""
    limits: list[float] = []

    def measure(original: Callable[..., Verdict], gradients: list[Tensor]) -> Verdict:
        verdict = original(gradients)
        norm = math.sqrt(float(verdict.squares.sum()))
        if math.isfinite(norm):
            limits.append(norm / 2)
            for gradient in _of_muon(zero, gradients):
                gradient.mul_(min(1.0, limits[0] / norm))
        return verdict

    replace("measure", measure)


def _loss_scaled(zero: Any, replace: _Replace) -> None:
    """The loss scale is not taken out of Muon's gradients (times 1024 where there is none)."""

    def take_gradients(original: Callable[[], list[Tensor]]) -> list[Tensor]:
        gradients = original()
        for gradient in _of_muon(zero, gradients):
            gradient.mul_(_LOSS_SCALE if zero.loss_scale == 1 else zero.loss_scale)
        return gradients

    replace("take_gradients", take_gradients)


def _not_averaged(zero: Any, replace: _Replace) -> None:
    """The gradients of the ranks are added up, not averaged."""
    ranks = _more_than_one_rank(zero)

    def reduce(original: Callable[..., Tensor], *args: Any) -> Tensor:
        return original(*args).mul_(ranks)

    replace("gradient_reduction_w_predivide", reduce)


# ---- of the momentum ------------------------------------------------------------------------------------------------


def _momentum_twice(zero: Any, replace: _Replace) -> None:
    """The momentum takes in the same gradient two times."""

    def advance(original: Callable[..., None], group_index: int, gradient: Tensor, moves: Moves) -> None:
        original(group_index, gradient.clone(), moves)
        original(group_index, gradient, moves)

    replace("advance_momentum_", advance, zero.optimizer)


def _idle_moves(zero: Any, replace: _Replace) -> Callable[[], None]:
    """A matrix that has no gradient goes on by its momentum and decays. One of them has none after the first step."""
    units = zero.plan.units
    chosen = next((unit for unit in units if unit.straddles), units[0])
    (param,) = (param for param, name in zero.param_names.items() if name == chosen.tensor)
    steps: list[int] = []

    def commit(original: Callable[..., None], *args: Any) -> None:
        original(*args)
        steps.append(len(steps))

    def measure(original: Callable[..., Verdict], gradients: list[Tensor]) -> Verdict:
        verdict = original(gradients)
        all_move = tuple(verdict.may_move.repeat(len(moves)) for moves in verdict.moves)
        return dataclasses.replace(verdict, moves=all_move)

    replace("commit", commit)
    replace("measure", measure)
    hook = param.register_hook(lambda gradient: torch.zeros_like(gradient) if steps else None)
    take_back: Callable[[], None] = hook.remove
    return take_back


# ---- of the update --------------------------------------------------------------------------------------------------


def _slice(zero: Any, replace: _Replace) -> None:
    """Every holder of a straddling matrix orthogonalizes its own slice, zeros in place of the rest."""
    _a_straddling_matrix(zero)

    def orthogonalize_slices(group: MuonGroup, plan: GroupPlan, staged: Staged, u: Tensor) -> None:
        partition, variance = staged.flat, staged.variance
        for unit, part in plan.held(_rank(zero)):
            if not unit.straddles:
                continue
            alone = partition.new_zeros(unit.rows, unit.cols)
            alone.view(-1)[part.start : part.start + part.numel] = _held(u, part)
            for matrix in unit.matrices:
                (output,) = orthogonalize([matrix.piece.matrix(alone, matrix.number)], zero.newton_schulz)
                if group.row_variance is not None and variance is not None:
                    before, beta2 = group.row_variance.of(variance, matrix.name), zero.optimizer.config.beta2
                    _, factors = advance_row_variance(output[None], before[None], beta2=beta2, layout=matrix.layout)
                    output = output * factors[0]
                output = output * update_scale(zero.optimizer.config.adjust_lr_fn, *matrix.sides)
                matrix.piece.store(output, alone, matrix.number)
                if not matrix.piece.strips:
                    alone = output
            _held(partition, part).copy_(alone.reshape(-1)[part.start : part.start + part.numel])

    _spoil_updates(zero, replace, orthogonalize_slices)


def _orthogonalized_twice(zero: Any, replace: _Replace) -> None:
    """Newton-Schulz runs on the result of Newton-Schulz, as when two layers of code each do it."""

    def orthogonalize_twice(group: MuonGroup, plan: GroupPlan, staged: Staged, u: Tensor) -> None:
        in_turns([MuonGroup.run_stage(group, staged)])

    _spoil_updates(zero, replace, orthogonalize_twice)


def _transposed(zero: Any, replace: _Replace) -> None:
    """The result of a tall matrix, which is iterated on as a wide one, is stored without turning it back."""

    def is_tall(unit: Unit) -> bool:
        return unit.rows > unit.cols and not unit.straddles

    if not any(is_tall(unit) for unit in zero.plan.units):
        raise CannotVerify("no tall matrix lies whole on one rank")

    def transpose(group: MuonGroup, plan: GroupPlan, staged: Staged, u: Tensor) -> None:
        for unit, part in plan.held(_rank(zero)):
            if is_tall(unit):
                stored = _held(staged.flat, part)
                stored.copy_(stored.view(unit.rows, unit.cols).mT.reshape(-1))

    _spoil_updates(zero, replace, transpose)


def _conv1d_scale(zero: Any, replace: _Replace) -> None:
    """A weight that is stored as (in, out), as transformers' Conv1D does, gets the scale of its transpose."""
    adjust_lr_fn = zero.optimizer.config.adjust_lr_fn

    def scale(original: Callable[[Matrix], float], matrix: Matrix) -> float:
        return update_scale(adjust_lr_fn, matrix.rows, matrix.cols)

    matrices = zero.plan.matrices
    if all(update_scale(adjust_lr_fn, *m.sides) == update_scale(adjust_lr_fn, m.rows, m.cols) for m in matrices):
        raise CannotVerify(
            "no weight that is stored as (in, out), as transformers' Conv1D's, has another scale than its transpose"
        )
    for group in zero.muon_groups:
        replace("_scale", scale, group)


def _unsplit(zero: Any, replace: _Replace) -> None:
    """The matrices of a tensor are orthogonalized as one."""
    of_tensors: dict[str, list[Unit]] = {}
    for unit in zero.plan.units:
        of_tensors.setdefault(unit.tensor, []).append(unit)
    several = [
        name
        for name, units in of_tensors.items()
        if sum(len(unit.matrices) for unit in units) > 1 and len({rank for u in units for rank in u.holders}) == 1
    ]
    if not several:
        raise CannotVerify("no tensor of several matrices (experts, muon_blocks) lies whole on one rank")
    if zero.optimizer.config.variant == "normuon":
        raise CannotVerify("with NorMuon, rows are also evened out by moments that such a tensor does not have")

    def together(group: MuonGroup, plan: GroupPlan, staged: Staged, u: Tensor) -> None:
        for name in several:
            held = [(unit, part) for unit, part in plan.held(_rank(zero)) if unit.tensor == name]
            if held:
                start, end = held[0][1].offset, held[-1][1].offset + held[-1][1].numel
                one = u[start:end].view(-1, held[0][0].cols)
                (output,) = orthogonalize([one], zero.newton_schulz)
                sides = out_and_in(one.shape[0], one.shape[1], held[0][0].matrices[0].layout)
                scale = update_scale(zero.optimizer.config.adjust_lr_fn, *sides)
                staged.flat[start:end].copy_(output.reshape(-1)).mul_(scale)

    _spoil_updates(zero, replace, together)


def _padding(zero: Any, replace: _Replace) -> None:
    """Padding at the start of the second holder's partition is read as part of a straddling matrix."""
    _a_straddling_matrix(zero)
    for group in zero.muon_groups:

        def gather(
            original: Callable[[Tensor], Transfer], partition: Tensor, owned: Any = group.exchange.owned
        ) -> Transfer:
            transfer = original(partition)
            for matrix, whole in zip(owned, transfer.wait(), strict=True):
                if not matrix.straddles:
                    continue
                flat, cut = whole.view(-1), matrix.slices[1].start
                padding = min(_PADDING, flat.numel() - cut)
                flat[cut + padding :] = flat[cut : flat.numel() - padding].clone()
                flat[cut : cut + padding] = 0
            return transfer

        replace("gather", gather, group.exchange)


def _clipped_update(zero: Any, replace: _Replace) -> None:
    """Updates are clipped to the norm that ``gradient_clipping`` allows gradients (1 where it is off)."""

    def commit(
        original: Callable[..., None], staged: list[Staged], gradients: list[Tensor], findings: Findings
    ) -> None:
        flats = [*(of_group.flat for of_group in staged), *gradients]
        square = torch.stack([flat.double().square().sum() for flat in flats]).sum()
        dist.all_reduce(square, group=zero.dp_process_group)
        factor = min(1.0, (zero.clip_grad or 1.0) / (math.sqrt(float(square)) + 1e-6))
        for of_group in staged:
            of_group.flat.mul_(factor)
        original(staged, gradients, findings)

    replace("commit", commit)


def _weight_decay(zero: Any, replace: _Replace) -> None:
    """Muon's weights are decayed by AdamW's rate as well (by 0.1 where that is none)."""
    rates = [group["weight_decay"] for group in zero.param_groups if not group["use_muon"]]
    decay = max(rates, default=0.0) or _WEIGHT_DECAY

    def commit(original: Callable[..., None], *args: Any) -> None:
        for group, flat in zip(zero.param_groups, zero.single_partition_of_fp32_groups, strict=True):
            if group["use_muon"]:
                flat.data.mul_(1 - group["lr"] * decay)
        original(*args)

    replace("commit", commit)


# ---- of one rank ----------------------------------------------------------------------------------------------------


def _idle_rank(zero: Any, replace: _Replace) -> None:
    """The last rank does not apply its updates."""
    _keep_on_the_last_rank(zero, replace, zero.single_partition_of_fp32_groups, "commit")


def _stale_rank(zero: Any, replace: _Replace) -> None:
    """The model on the last rank keeps the weights of the step before."""
    _more_than_one_rank(zero)
    _keep_on_the_last_rank(zero, replace, [p for group in zero.bit16_groups for p in group], "update_lp_params")


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("slice", "update from a partition's slice", diagnose.SLICE, _slice),
        Fault("orthogonalized-twice", "Newton-Schulz of Newton-Schulz", diagnose.TWICE, _orthogonalized_twice),
        Fault("clipped-update", "the update is clipped like a gradient", diagnose.CLIPPED_UPDATE, _clipped_update),
        Fault("clipped-gradient", "Muon's gradient is clipped", diagnose.CLIPPED_GRADIENT, _clipped_gradient),
        Fault("loss-scaled", "the gradient is in loss-scaled units", diagnose.LOSS_SCALED, _loss_scaled),
        Fault("not-averaged", "gradients of ranks are summed", diagnose.AVERAGING, _not_averaged),
        Fault("momentum-twice", "the momentum moves twice a step", diagnose.MOMENTUM_TWICE, _momentum_twice),
        Fault("transposed", "a tall result is stored transposed", diagnose.TRANSPOSE, _transposed),
        Fault("idle-rank", "one rank does not apply its updates", diagnose.IDLE, _idle_rank),
        Fault("stale-rank", "one rank's model keeps old weights", diagnose.STALE, _stale_rank),
        Fault("padding", "padding is read as part of a matrix", diagnose.PADDING, _padding),
        Fault("weight-decay", "AdamW's weight decay on Muon's weights", diagnose.WEIGHT_DECAY, _weight_decay),
        Fault("idle-moves", "a matrix without a gradient moves", diagnose.WITHOUT_GRADIENT, _idle_moves, steps=2),
        Fault("conv1d-scale", "a Conv1D's scale is its transpose's", diagnose.TRANSPOSED_SCALE, _conv1d_scale),
        Fault("unsplit", "a tensor's matrices are taken as one", diagnose.UNSPLIT, _unsplit),
    )
}


# ---- what faults need -----------------------------------------------------------------------------------------------


def _rank(zero: Any) -> int:
    return dist.get_rank(zero.dp_process_group)


def _of_muon(zero: Any, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for group, tensor in zip(zero.param_groups, tensors, strict=True) if group["use_muon"]]


def _keep_on_the_last_rank(zero: Any, replace: _Replace, tensors: Sequence[Tensor], method: str) -> None:
    """Have a method of the optimizer leave these tensors as they were, on the last rank only."""

    def forgetful(original: Callable[..., None], *args: Any) -> None:
        before = [tensor.detach().clone() for tensor in tensors]
        original(*args)
        if _rank(zero) == dist.get_world_size(zero.dp_process_group) - 1:
            for tensor, old in zip(tensors, before, strict=True):
                tensor.data.copy_(old)

    replace(method, forgetful)


def _spoil_updates(zero: Any, replace: _Replace, spoil: Callable[[MuonGroup, GroupPlan, Staged, Tensor], None]) -> None:
    """Have ``spoil`` change what each Muon group has made of U in its partition."""
    if zero.cpu_offload:
        raise CannotVerify("with CPU offload updates lie in several places: plant it without offload_optimizer")
    for plan, group in zip(zero.plan.groups, zero.muon_groups, strict=True):

        def run_stage(
            original: Callable[[Staged], Iterator[None]],
            staged: Staged,
            plan: GroupPlan = plan,
            group: MuonGroup = group,
        ) -> Iterator[None]:
            u = staged.flat.clone()
            yield from original(staged)
            spoil(group, plan, staged, u)

        replace("run_stage", run_stage, group)


def _held(partition: Tensor, part: Slice) -> Tensor:
    return partition.narrow(0, part.offset, part.numel)


def _a_straddling_matrix(zero: Any) -> None:
    if not any(unit.straddles for unit in zero.plan.units):
        raise CannotVerify("no matrix straddles a partition boundary with this model and world size")


def _more_than_one_rank(zero: Any) -> int:
    ranks = dist.get_world_size(zero.dp_process_group)
    if ranks == 1:
        raise CannotVerify("one rank has no other to differ from")
    return ranks
