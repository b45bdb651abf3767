"""The check itself: it finds and names every planted fault, is silent where nothing is wrong, and leaves no trace."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_muon import muon_update
from ds_muon.muon_group import Staged
from ds_muon.sample.gpt import GPT
from ds_muon.verify import CannotVerify, UpdateCheck, UpdateRecord
from ds_muon.verify.engine_view import MuonRule
from ds_muon.verify.inject import FAULTS, found, plant
from ds_muon.verify.reference import SameDtypeMuon
from tests.unit.support.cases import first_of, in_turns
from tests.unit.support.checked import MODEL, SHOWN, check_gpt, check_prescribed, train_gpt
from tests.unit.support.faulty import faulty_backend, sick
from tests.unit.support.models import PrescribedGradients, ds_config, full_weights, start, train_step
from tests.unit.support.ranks import DEVICE, run_ranks

ranks = pytest.mark.ranks


# ---- teeth ----------------------------------------------------------------------------------------------------------

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"stage": 2},
    "bf16": {"stage": 1, "dtype": "bfloat16", "params": {"ns_dtype": "bfloat16"}},
    "normuon": {"stage": 2, "params": {"variant": "normuon"}},
    "bf16 momentum": {"stage": 2, "params": {"momentum_dtype": "bfloat16"}},
    "fp16": {"stage": 2, "fp16": {"enabled": True, "loss_scale": 256.0}, "params": {"ns_dtype": "float16"}},
}


@ranks
@in_turns(fault=SHOWN, precision=[*PRECISIONS])
def test_every_planted_fault_is_found_and_named(fault: str, precision: str) -> None:
    settings = dict(PRECISIONS[precision])
    params = {"weight_decay": 0.01, "adam_weight_decay": 0.1, **settings.pop("params", {})}
    config = ds_config(params, gradient_clipping=1.0, **settings)
    for records in run_ranks(2, check_gpt, config, fault, FAULTS[fault].steps):
        assert found(fault, records)
        # A fault is found where it is, and there only.
        of_adamw = [record for record in records if record.half == "adamw" and not record.ok]
        assert not of_adamw or fault in ("idle-rank", "stale-rank", "not-averaged")


@ranks
def test_without_a_fault_the_same_engine_is_right_and_bit_equal_to_the_single_process_step() -> None:
    for records in run_ranks(2, check_gpt, ds_config({"weight_decay": 0.1}, gradient_clipping=1.0)):
        assert len(records) == 3 * 27 and all(record.ok for record in records)
        assert not any(record.diagnosis for record in records)
        if DEVICE == "cpu":  # a vendor's product may depend on the batch; see docs/newton-schulz.md
            muon = [record for record in records if record.half == "muon"]
            assert all(record.against_same_dtype.error == 0 and record.state.error == 0 for record in muon)
        assert sum(record.straddles for record in records if record.half == "muon") == 3


@ranks
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_fault_that_cannot_be_shown_is_refused(world_size: int) -> None:
    """With three layers and three ranks no matrix is cut."""
    messages = run_ranks(world_size, refusal_of, ds_config(), "slice")
    assert all("no matrix straddles" in message for message in messages)


def refusal_of(config: dict[str, Any], fault: str) -> str:
    engine = start(GPT(MODEL), config)
    try:
        with plant(fault, engine):
            return "planted"
    except CannotVerify as error:
        return str(error)


def swap_two_updates(original: Any, zero: Any, staged: list[Staged], *args: Any) -> None:
    """Two matrices of one shape on one rank get each other's update."""
    held = zero.plan.groups[0].held(torch.distributed.get_rank())
    square = [piece for matrix, piece in held if not matrix.straddles and matrix.rows == matrix.cols]
    first, second = (staged[0].flat.narrow(0, piece.offset, piece.numel) for piece in square[:2])
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    original(staged, *args)


def change_one_weight(original: Any, zero: Any, staged: list[Staged], *args: Any) -> None:
    """One element of one rank's fp32 weights moves by a thousandth more."""
    original(staged, *args)
    if torch.distributed.get_rank() == 0:
        zero.single_partition_of_fp32_groups[0].data[7] += 1e-3


def lose_one_element(original: Any, zero: Any, staged: list[Staged], *args: Any) -> None:
    """One element of rank 0's partition, one as large as usual, is not updated."""
    if torch.distributed.get_rank() == 0:
        update = staged[0].flat
        update[(update.abs() - update.square().mean().sqrt()).abs().argmin()] = 0
    original(staged, *args)


def forget_the_variance(original: Any, zero: Any, staged: list[Staged], *args: Any) -> None:
    staged[0].rows = None
    original(staged, *args)


def advance_the_variance_twice(original: Any, zero: Any, staged: list[Staged], *args: Any) -> None:
    original(staged, *args)
    zero.optimizer.row_variance(0).mul_(1.95)


def turn_the_sign(original: Any, zero: Any, staged: list[Staged], *args: Any) -> None:
    staged[0].flat.neg_()
    original(staged, *args)


def check_with_commit(config: dict[str, Any], fault: Any) -> list[UpdateRecord]:
    torch.manual_seed(0)
    engine = start(GPT(MODEL), config)
    check = UpdateCheck(engine)
    zero = engine.optimizer
    zero.commit = functools.partial(fault, zero.commit, zero)
    train_gpt(engine, 1)
    return check.after_step()


@ranks
@in_turns(
    case=[
        (swap_two_updates, 4, "no known fault"),
        (change_one_weight, 1, "single elements: 1 of 2304 are off, the first at 7"),
        (turn_the_sign, 18, "wrong sign"),
    ],
    dtype=["float32", "float16", "bfloat16"],
)
def test_faults_that_the_check_does_not_know_are_found_too(case: tuple[Any, int, str], dtype: str) -> None:
    fault, count, diagnosis = case
    config = ds_config({"ns_dtype": dtype}, dtype=dtype)
    wrong = [r for r in run_ranks(2, check_with_commit, config, fault)[0] if not r.ok]
    assert len(wrong) == count and all(record.diagnosis.startswith(diagnosis) for record in wrong)


def check_large_matrix(config: dict[str, Any], fault: Any) -> list[UpdateRecord]:
    engine = start(PrescribedGradients([(320, 256), (7,)]), config)
    check = UpdateCheck(engine)
    zero = engine.optimizer
    if fault is not None:
        zero.commit = functools.partial(fault, zero.commit, zero)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    train_step(engine, [torch.randn(shape, generator=generator).to(engine.device) for shape in ((320, 256), (7,))])
    return check.after_step()


@ranks
@pytest.mark.parametrize("dtype", first_of(["float32", "bfloat16", "float16"], 2))
def test_one_lost_element_is_found_though_it_is_nothing_in_the_norm_of_a_large_matrix(dtype: str) -> None:
    config = ds_config({"ns_dtype": dtype}, dtype=dtype)
    assert all(record.ok for record in run_ranks(2, check_large_matrix, config, None)[0])
    (wrong,) = (r for r in run_ranks(2, check_large_matrix, config, lose_one_element)[0] if not r.ok)
    assert wrong.diagnosis.startswith("single elements: 1 of 81920 are off, the first at ")
    assert wrong.against_fp64.ok or dtype == "float32"  # by the norm alone it would pass


def check_with_a_change_between(config: dict[str, Any], skip: bool) -> list[list[UpdateRecord]]:
    """Three steps; after the first, one weight of rank 0 changes by itself, or while a step is skipped."""
    shapes = [(30, 20), (12, 16), (5,)]
    engine = start(PrescribedGradients(shapes), config)
    check = UpdateCheck(engine)
    zero, records = engine.optimizer, []
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for step in range(3):
        gradients = [torch.randn(shape, generator=generator).to(engine.device) for shape in shapes]
        if step == 1 and torch.distributed.get_rank() == 0:
            zero.single_partition_of_fp32_groups[0].data[7] += 1e-3
        if step == 1 and skip:
            train_step(engine, [gradient * torch.inf for gradient in gradients])
            assert check.after_step() == []
        train_step(engine, gradients)
        records.append(check.after_step())
    return records


def check_around_a_bad_update(config: dict[str, Any]) -> list[list[UpdateRecord]]:
    """Four steps; in the second a matrix comes out with a NaN."""
    shapes = [(30, 20), (12, 16), (5,)]
    engine, records = start(PrescribedGradients(shapes), config), []
    with faulty_backend(engine):
        check = UpdateCheck(engine)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
            with sick((30, 20) if step == 1 else None):
                train_step(engine, [torch.randn(shape, generator=generator).to(engine.device) for shape in shapes])
            records.append(check.after_step())
        check.close()
    engine.destroy()
    return records


@ranks
@pytest.mark.parametrize("variant", ["muon", "normuon"])
def test_a_step_that_is_skipped_for_an_update_is_no_false_alarm_later(variant: str) -> None:
    for records in run_ranks(2, check_around_a_bad_update, ds_config({"nan_guard": "skip", "variant": variant})):
        assert [len(of_step) for of_step in records] == [3, 0, 3, 3]
        assert all(record.ok for of_step in records for record in of_step)


@ranks
@pytest.mark.parametrize("skip", [False, True])
def test_weights_that_change_outside_a_step_are_found_and_named(skip: bool) -> None:
    first, second, third = run_ranks(2, check_with_a_change_between, ds_config(), skip)[0]
    assert all(record.ok for record in first)
    wrong = [record for record in second if not record.ok]
    assert len(wrong) == 1 and wrong[0].diagnosis.startswith("weights changed outside a step")
    assert all(record.ok for record in third)


def check_with_reduction(config: dict[str, Any], kind: str) -> list[UpdateRecord]:
    """ZeRO's average of each bucket is halved, or turned round."""
    torch.manual_seed(0)
    engine = start(GPT(MODEL), config)
    check = UpdateCheck(engine)
    zero = engine.optimizer
    original = zero.gradient_reduction_w_predivide
    change = {"halved": lambda t: t.mul_(0.5), "turned round": lambda t: t.copy_(t.flip(0))}[kind]
    zero.gradient_reduction_w_predivide = lambda *args: change(original(*args))
    train_gpt(engine, 1)
    return check.after_step()


@ranks
@pytest.mark.parametrize(
    ("kind", "words"), [("halved", "it is 0.5 times the average"), ("turned round", "in direction")]
)
def test_a_gradient_that_is_wrong_otherwise_is_not_said_to_be_summed(kind: str, words: str) -> None:
    wrong = [r for r in run_ranks(2, check_with_reduction, ds_config(), kind)[0] if not r.ok]
    assert len(wrong) == 27
    assert all(r.diagnosis.startswith("another gradient than the average") and words in r.diagnosis for r in wrong)


@ranks
@pytest.mark.parametrize("fault", [forget_the_variance, advance_the_variance_twice])
def test_a_wrong_row_variance_is_found_and_named_before_it_changes_an_update(fault: Any) -> None:
    config = ds_config({"variant": "normuon"})
    wrong = [r for r in run_ranks(2, check_with_commit, config, fault)[0] if not r.ok]
    assert len(wrong) == 18 and all(record.diagnosis.startswith("wrong row variance") for record in wrong)


@ranks
@pytest.mark.parametrize("variant", ["muon", "normuon"])
def test_coefficients_that_diverge_are_wrong_and_named(variant: str) -> None:
    config = ds_config({"ns_coefficients": [[4.0, 3.0, 2.0]], "ns_steps": 12, "variant": variant})
    (records,) = run_ranks(2, check_prescribed, [(30, 20), (20, 30), (12, 12), (5,)], config, 1)[0]
    wrong = [record for record in records if not record.ok and record.half == "muon"]
    assert len(wrong) == 3
    assert all(
        r.diagnosis == "not finite: the applied change is not, nor is the reference: the coefficients diverge"
        for r in wrong
    )


# ---- no false alarms, no trace --------------------------------------------------------------------------------------

# Small matrices, among which some are near to singular: their updates magnify roundings most.
SMALL = [(9, 9)] * 8 + [(32, 32)] * 4 + [(2, 2)] * 8 + [(3, 17)] * 4 + [(40, 10)] * 4 + [(7,), (33,)]


def check_small(config: dict[str, Any], one_direction: bool, seeds: int) -> list[UpdateRecord]:
    records = []
    for seed in range(seeds):
        engine = start(PrescribedGradients(SMALL), config)
        check = UpdateCheck(engine)
        generator = torch.Generator().manual_seed(100 * seed + torch.distributed.get_rank())
        for _ in range(3):
            for _ in range(engine.gradient_accumulation_steps()):
                train_step(engine, [draw(shape, generator, one_direction).to(engine.device) for shape in SMALL])
            records += check.after_step()
        check.close()
        engine.destroy()
    return records


def draw(shape: tuple[int, ...], generator: torch.Generator, one_direction: bool) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if not one_direction or len(shape) != 2:
        return noise
    left, right = torch.randn(shape[0], 1, generator=generator), torch.randn(1, shape[1], generator=generator)
    return left @ right + 1e-3 * noise


@ranks
@pytest.mark.parametrize("seeds", first_of([1, 3]))
@in_turns(
    case=[
        ("float32", "float32", 1, "quintic", "polar_express"),
        ("float32", "float16", 1, "polar_express", "quintic"),
        ("bfloat16", "bfloat16", 4, "quintic", "polar_express"),
        ("bfloat16", "bfloat16", 4, "polar_express", "quintic"),
        ("float16", "float16", 8, "polar_express", "quintic"),
        ("bfloat16", "bfloat16", 4, "minimax", "cubic5"),
        ("float16", "float16", 8, "cubic5", "minimax"),
    ],
    one_direction=[True, False],
)
def test_small_and_ill_conditioned_matrices_raise_no_false_alarm(
    case: tuple[str, str, int, str, str], one_direction: bool, seeds: int
) -> None:
    dtype, ns_dtype, accumulation, of_directions, of_noise = case
    coefficients = of_directions if one_direction else of_noise
    config = ds_config(
        {"ns_dtype": ns_dtype, "ns_coefficients": coefficients},
        dtype=dtype,
        gradient_accumulation_steps=accumulation,
    )
    records = run_ranks(2, check_small, config, one_direction, seeds)[0]
    assert len(records) == 3 * seeds * len(SMALL)
    assert not [record for record in records if not record.ok]


def check_tiny_adamw(config: dict[str, Any], steps: int) -> list[UpdateRecord]:
    shapes = [(16, 16), *[(1,)] * 60, *[(3,)] * 30, (17,)]
    engine = start(PrescribedGradients(shapes), config)
    check = UpdateCheck(engine)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    records = []
    for _ in range(steps):
        train_step(engine, [torch.randn(shape, generator=generator).to(engine.device) for shape in shapes])
        records += check.after_step()
    return records


@ranks
@pytest.mark.parametrize("steps", first_of([2, 6]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_adamw_tensors_of_one_element_raise_no_false_alarm(dtype: str, steps: int) -> None:
    records = run_ranks(2, check_tiny_adamw, ds_config(dtype=dtype), steps)[0]
    assert len(records) == steps * 92 and not [record for record in records if not record.ok]


def weights_after(config: dict[str, Any], checked: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = start(GPT(MODEL), config)
    step = engine.optimizer.step
    if checked:
        check = UpdateCheck(engine)
        train_gpt(engine, 2)
        assert check.after_step()
        check.close()
    else:
        train_gpt(engine, 2)
    assert engine.optimizer.step == step
    listening = [p for p in engine.module.parameters() if p._backward_hooks]
    assert len(listening) == bool(config["optimizer"]["params"].get("verify_every"))
    return full_weights(engine)


@ranks
def test_verify_every_changes_no_bit() -> None:
    without, with_checks = (
        run_ranks(2, weights_after, ds_config({"verify_every": every, "weight_decay": 0.1}), False)[0]
        for every in (0, 1)
    )
    assert all(torch.equal(without[name], with_checks[name]) for name in without)


@ranks
def test_checking_changes_no_bit_and_closing_leaves_the_engine_as_it_was() -> None:
    unchecked, checked = (run_ranks(2, weights_after, ds_config(), checked)[0] for checked in (False, True))
    assert all(torch.equal(unchecked[name], checked[name]) for name in unchecked)


@ranks
def test_an_engine_without_zero_cannot_be_checked() -> None:
    assert "stage to 1 or 2" in run_ranks(1, refusal_without_zero)[0]


def refusal_without_zero() -> str:
    config = ds_config(stage=0, optimizer={"type": "SGD", "params": {"lr": 1e-3}})
    with pytest.raises(CannotVerify) as error:
        UpdateCheck(start(PrescribedGradients([(4, 4)]), config))
    return str(error.value)


# ---- DeepSpeed's own Muon -------------------------------------------------------------------------------------------

# With torch's Adam for the rest: DeepSpeed's is compiled when it is first used.
MUON = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3, "torch_adam": True}}


class LoudGPT(GPT):
    """Its gradients make nothing of DeepSpeed's eps of 1e-7, also where that iterates in fp32: on CPUs without fp16."""

    def forward(self, *args: Tensor) -> Tensor:
        return 1e4 * super().forward(*args)


def check_deepspeeds_muon(clipping: float | None) -> list[UpdateRecord]:
    config = ds_config(optimizer=MUON, gradient_clipping=clipping)
    with torch.compiler.set_stance("force_eager"):  # it compiles for minutes on CPU
        return check_gpt(config, steps=1, model=LoudGPT)


@ranks
def test_deepspeeds_muon_is_right_without_clipping_and_fails_by_the_clip_that_is_its_default() -> None:
    unclipped = [record for record in run_ranks(2, check_deepspeeds_muon, 0.0)[0] if record.half == "muon"]
    assert unclipped and all(record.ok and record.relative_error > 0 for record in unclipped)
    clipped = [record for record in run_ranks(2, check_deepspeeds_muon, None)[0] if record.half == "muon"]
    assert all(not record.ok and record.diagnosis.startswith("clipped update") for record in clipped)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_same_dtype_reference_keeps_the_momentum_in_the_engines_dtype(dtype: torch.dtype) -> None:
    """DeepSpeed's Muon keeps it in that of the gradients, fp16 for one."""
    rule = MuonRule("original", 5, "quintic", "gram", torch.float32, 1e-15, momentum_dtype=dtype)
    group = {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95, "nesterov": True}
    gradient, weight = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 9)
    reference = SameDtypeMuon({"momentum_buffer": torch.zeros(6, 9)}, rule)
    exact = torch.zeros(6, 9)
    for _ in range(2):
        exact = exact.to(dtype).float()
        expected = weight - 0.02 * muon_update(gradient, exact)
        assert torch.equal(reference.new_weight(weight, gradient, group), expected)
        assert torch.equal(reference.state["momentum_buffer"], exact.to(dtype))


# ---- what it says of the engine ------------------------------------------------------------------------------------


def precision_of(config: dict[str, Any], shapes: list[tuple[int, int]]) -> str:
    engine = start(PrescribedGradients(shapes), config)
    check = UpdateCheck(engine)
    check.close()
    engine.destroy()
    return check.precision


SQUARE, WIDE = (48, 48), (48, 96)


@ranks
@pytest.mark.parametrize(
    ("config", "shapes", "iteration"),
    [
        (ds_config({"ns_dtype": "float32"}), [SQUARE, WIDE], "standard in fp32"),
        (ds_config({"ns_dtype": "float16"}), [SQUARE, WIDE], "gram and standard in fp16"),
        (ds_config({"ns_dtype": "float16"}), [WIDE], "gram in fp16"),
        (ds_config({"ns_dtype": "bfloat16"}), [SQUARE], "standard in bf16"),
        (ds_config({"ns_dtype": "float16", "ns_method": "standard"}), [SQUARE, WIDE], "standard in fp16"),
        (ds_config(optimizer=MUON), [SQUARE, WIDE], "gram and standard in fp"),
        (ds_config(optimizer=MUON), [SQUARE], "standard in fp"),
    ],
)
def test_the_forms_of_the_iteration_that_run_are_named(
    config: dict[str, Any], shapes: list[tuple[int, int]], iteration: str
) -> None:
    assert f" sums, {iteration}" in run_ranks(1, precision_of, config, shapes)[0]
