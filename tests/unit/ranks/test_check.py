"""The check itself: it finds and names every planted fault, is silent where nothing is wrong, and leaves no trace."""

from __future__ import annotations

import functools
import io
import logging
import sys
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_muon import muon_update
from ds_muon.sample.gpt import GPT
from ds_muon.verify import CannotVerify, UpdateCheck, UpdateRecord, tolerances
from ds_muon.verify.engine_view import MuonRule
from ds_muon.verify.inject import found, plant
from ds_muon.verify.reference import SameDtypeMuon
from tests.unit.support.checked import MODEL, SHOWN, check_gpt, train_gpt
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


# On a CPU, where fewer kernels are at work, each fault in fp32 and in one other, in turns.
PLANTED = [
    (fault, precision)
    for i, fault in enumerate(SHOWN)
    for j, precision in enumerate(PRECISIONS)
    if DEVICE != "cpu" or j in (0, 1 + i % (len(PRECISIONS) - 1))
]


@ranks
@pytest.mark.parametrize(("fault", "precision"), PLANTED)
def test_every_planted_fault_is_found_and_named(fault: str, precision: str) -> None:
    settings = dict(PRECISIONS[precision])
    params = {"weight_decay": 0.01, "adam_weight_decay": 0.1, **settings.pop("params", {})}
    config = ds_config(params, gradient_clipping=1.0, **settings)
    for records in run_ranks(2, check_gpt, config, fault):
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


def swap_two_updates(original: Any, zero: Any, gradients: list[Tensor], findings: Any) -> None:
    """Two matrices of one shape on one rank get each other's update."""
    held = zero.plan.groups[0].held(torch.distributed.get_rank())
    square = [piece for matrix, piece in held if not matrix.straddles and matrix.rows == matrix.cols]
    first, second = (gradients[0].narrow(0, piece.offset, piece.numel) for piece in square[:2])
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    original(gradients, findings)


def change_one_weight(original: Any, zero: Any, gradients: list[Tensor], findings: Any) -> None:
    """One element of one rank's fp32 weights moves by a thousandth more."""
    original(gradients, findings)
    if torch.distributed.get_rank() == 0:
        zero.single_partition_of_fp32_groups[0].data[7] += 1e-3


def lose_one_element(original: Any, zero: Any, gradients: list[Tensor], findings: Any) -> None:
    """One element of rank 0's partition, one as large as usual, is not updated."""
    if torch.distributed.get_rank() == 0:
        update = gradients[0]
        update[(update.abs() - update.square().mean().sqrt()).abs().argmin()] = 0
    original(gradients, findings)


def forget_the_variance(original: Any, zero: Any, gradients: list[Tensor], findings: Any) -> None:
    zero.muon_groups[0].commit = lambda variance: None
    original(gradients, findings)


def advance_the_variance_twice(original: Any, zero: Any, gradients: list[Tensor], findings: Any) -> None:
    original(gradients, findings)
    zero.optimizer.row_variance(0).mul_(1.95)


def turn_the_sign(original: Any, zero: Any, gradients: list[Tensor], findings: Any) -> None:
    gradients[0].neg_()
    original(gradients, findings)


def check_with_commit(config: dict[str, Any], fault: Any) -> list[UpdateRecord]:
    torch.manual_seed(0)
    engine = start(GPT(MODEL), config)
    check = UpdateCheck(engine)
    zero = engine.optimizer
    zero.commit = functools.partial(fault, zero.commit, zero)
    train_gpt(engine, 1)
    return check.after_step()


@ranks
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "count", "diagnosis"),
    [
        (swap_two_updates, 4, "no known fault"),
        (change_one_weight, 1, "single elements: 1 of 2304 are off, the first at 7"),
        (turn_the_sign, 18, "wrong sign"),
    ],
)
def test_faults_that_the_check_does_not_know_are_found_too(fault: Any, count: int, diagnosis: str, dtype: str) -> None:
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
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_lost_element_is_found_though_it_is_nothing_in_the_norm_of_a_large_matrix(dtype: str) -> None:
    config = ds_config({"ns_dtype": dtype}, dtype=dtype)
    assert all(record.ok for record in run_ranks(2, check_large_matrix, config, None)[0])
    (wrong,) = (r for r in run_ranks(2, check_large_matrix, config, lose_one_element)[0] if not r.ok)
    assert wrong.diagnosis.startswith("single elements: 1 of 81920 are off, the first at ")
    assert wrong.against_fp64.ok or dtype == "float32"  # by the norm alone it would pass


def check_with_a_change_between(config: dict[str, Any], skip: bool) -> list[list[UpdateRecord]]:
    """Three steps; after the first, one weight of rank 0 changes by itself, or while a step is skipped."""
    torch.manual_seed(0)
    engine = start(GPT(MODEL), config)
    check = UpdateCheck(engine)
    zero, records = engine.optimizer, []
    for step in range(3):
        if step == 1 and torch.distributed.get_rank() == 0:
            zero.single_partition_of_fp32_groups[0].data[7] += 1e-3
        if step == 1 and skip:
            tokens = torch.zeros(4, 17, dtype=torch.long, device=engine.device)
            engine.backward(engine(tokens[:, :-1], tokens[:, 1:]) * torch.inf)
            engine.step()
            assert check.after_step() == []
        train_gpt(engine, 1)
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
    wrong = [r for r in run_ranks(2, check_gpt, config, None, 1)[0] if not r.ok and r.half == "muon"]
    assert len(wrong) == 18
    assert all(
        r.diagnosis == "not finite: the applied change is not, nor is the reference: the coefficients diverge"
        for r in wrong
    )


# ---- no false alarms, no trace --------------------------------------------------------------------------------------

# Small matrices, among which some are near to singular: their updates magnify roundings most.
SMALL = [(9, 9)] * 8 + [(32, 32)] * 4 + [(2, 2)] * 8 + [(3, 17)] * 4 + [(40, 10)] * 4 + [(7,), (33,)]


def check_small(config: dict[str, Any], one_direction: bool) -> list[UpdateRecord]:
    records = []
    for seed in range(3):
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
@pytest.mark.parametrize("one_direction", [False, True])
@pytest.mark.parametrize(
    ("dtype", "ns_dtype", "accumulation", "of_directions", "of_noise"),
    [
        ("float32", "float32", 1, "quintic", "polar_express"),
        ("float32", "float16", 1, "polar_express", "quintic"),
        ("bfloat16", "bfloat16", 4, "quintic", "polar_express"),
        ("bfloat16", "bfloat16", 4, "polar_express", "quintic"),
        ("float16", "float16", 8, "polar_express", "quintic"),
    ],
)
def test_small_and_ill_conditioned_matrices_raise_no_false_alarm(
    dtype: str, ns_dtype: str, accumulation: int, of_directions: str, of_noise: str, one_direction: bool
) -> None:
    coefficients = of_directions if one_direction else of_noise
    config = ds_config(
        {"ns_dtype": ns_dtype, "ns_coefficients": coefficients},
        dtype=dtype,
        gradient_accumulation_steps=accumulation,
    )
    records = run_ranks(2, check_small, config, one_direction)[0]
    assert len(records) == 9 * len(SMALL)
    assert not [record for record in records if not record.ok]


def check_tiny_adamw(config: dict[str, Any]) -> list[UpdateRecord]:
    shapes = [(16, 16), *[(1,)] * 60, *[(3,)] * 30, (17,)]
    engine = start(PrescribedGradients(shapes), config)
    check = UpdateCheck(engine)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    records = []
    for _ in range(6):
        train_step(engine, [torch.randn(shape, generator=generator).to(engine.device) for shape in shapes])
        records += check.after_step()
    return records


@ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_adamw_tensors_of_one_element_raise_no_false_alarm(dtype: str) -> None:
    records = run_ranks(2, check_tiny_adamw, ds_config(dtype=dtype))[0]
    assert len(records) == 6 * 92 and not [record for record in records if not record.ok]


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


class LoudGPT(GPT):
    """Its gradients make nothing of DeepSpeed's eps of 1e-7, also where that iterates in fp32: on CPUs without fp16."""

    def forward(self, *args: Tensor) -> Tensor:
        return 1e4 * super().forward(*args)


def check_deepspeeds_muon(clipping: float | None) -> list[UpdateRecord]:
    optimizer = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}}
    config = ds_config(optimizer=optimizer, gradient_clipping=clipping)
    with torch.compiler.set_stance("force_eager"):  # it compiles for minutes on CPU
        return check_gpt(config, model=LoudGPT)


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


MUON = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}}
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


# ---- verify_every ---------------------------------------------------------------------------------------------------


def train_with_checks(config: dict[str, Any], steps: int, fault: str | None) -> list[tuple[int, str, bool]]:
    """(step, name, right) of the checks that this rank made."""
    torch.manual_seed(0)
    engine = start(GPT(MODEL), config)
    checks = []
    with nullcontext() if fault is None else plant(fault, engine):
        for step in range(1, steps + 1):
            engine.optimizer.training_check.last = None
            train_gpt(engine, 1)
            if (record := engine.optimizer.training_check.last) is not None:
                assert record.owner == torch.distributed.get_rank()
                checks.append((step, record.name, record.ok))
    engine.destroy()
    return checks


@ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("every", [1, 3])
def test_verify_every_checks_one_matrix_each_k_steps_in_turn_on_its_owner(every: int, dtype: str) -> None:
    steps = 19 * every
    config = ds_config({"verify_every": every}, dtype=dtype, stage=1 if every == 3 else 2)
    by_rank = run_ranks(2, train_with_checks, config, steps, None)
    checks = sorted(check for checks in by_rank for check in checks)
    assert [step for step, _, _ in checks] == list(range(every, steps + 1, every))
    assert all(right for _, _, right in checks)
    names = [name for _, name, _ in checks]
    assert len(set(names)) == 18 and names[18] == names[0]


def warnings_of(config: dict[str, Any], fault: str | None) -> list[str]:
    """What the check logs as a warning on this rank during three steps."""
    from deepspeed.utils import logger

    caught: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda entry: caught.append(entry.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        train_with_checks(config, 3, fault)
    finally:
        logger.removeHandler(handler)
    return [text for text in caught if "[ds_muon] step" in text]


@ranks
def test_verify_every_warns_of_a_wrong_update_with_its_diagnosis_and_trains_on() -> None:
    config = ds_config({"verify_every": 1})
    wrong = [text for texts in run_ranks(2, warnings_of, config, "orthogonalized-twice") for text in texts]
    assert len(wrong) == 3 and all("WRONG: orthogonalized twice" in text for text in wrong)
    assert not any(run_ranks(2, warnings_of, config, None))


def train_on_frozen(config: dict[str, Any]) -> int:
    """Steps made after both matrices were frozen."""
    shapes = [(16, 16), (12, 16), (5,)]
    engine = start(PrescribedGradients(shapes), config)
    for step in range(4):
        train_step(engine, [torch.ones(shape, device=engine.device) for shape in shapes])
        if step == 0:
            engine.module.p0.requires_grad_(False)
            engine.module.p1.requires_grad_(False)
    return int(engine.global_steps)


@ranks
def test_verify_every_goes_on_when_matrices_are_frozen() -> None:
    assert run_ranks(2, train_on_frozen, ds_config({"verify_every": 1})) == [4, 4]


class Umlaut(PrescribedGradients):
    """Its matrix has a name that not every stream can take, and that would begin a line."""

    def __init__(self) -> None:
        super().__init__([(16, 16), (5,)])
        self.register_parameter("gr\u00f6\u00dfe\n[ds_muon] fake", self.p0)
        del self.p0


def train_into(config: dict[str, Any], kind: str) -> tuple[int, int, str]:
    """Steps made and skipped while stdout, stderr and the log are full, closed or ASCII; and what they took."""
    engine = start(Umlaut(), config)
    gradients = [torch.ones(5, device=engine.device), torch.eye(16, device=engine.device)]
    taken = io.BytesIO()
    with open("/dev/full", "w") as full, io.TextIOWrapper(taken, "ascii") as ascii_only:
        stream = ascii_only if kind == "ascii" else full
        if kind == "closed":
            stream.close()
        with (
            mock.patch.object(sys, "stdout", stream),
            mock.patch.object(sys, "stderr", stream),
            mock.patch.object(logging.getLogger("DeepSpeed"), "handlers", [logging.StreamHandler(stream)]),
        ):
            for _ in range(3):
                train_step(engine, gradients)
            engine.destroy()
        text = taken.getvalue().decode()
        with suppress(OSError):
            full.close()  # what a log's handler has left in its buffer
    return int(engine.global_steps), int(engine.skipped_steps), text


@ranks
@pytest.mark.parametrize("kind", ["full", "closed"])
def test_a_run_goes_on_whatever_becomes_of_what_it_says(kind: str) -> None:
    ranks = run_ranks(2, train_into, ds_config({"verify_every": 1}), kind, timeout=60.0)
    assert [found[:2] for found in ranks] == [(3, 0)] * 2
    ranks = run_ranks(2, train_into, ds_config({"grad_norm_skip_threshold": 1e-9}), kind, timeout=60.0)
    assert [found[:2] for found in ranks] == [(3, 3)] * 2


@ranks
def test_a_name_is_escaped_for_a_stream_that_lacks_its_letters_and_begins_no_line() -> None:
    ranks = run_ranks(2, train_into, ds_config({"verify_every": 1}), "ascii", timeout=60.0)
    lines = "".join(text for _, _, text in ranks).splitlines()
    name = r"gr\xf6\xdfe\n[ds_muon] fake"
    assert len(lines) == 3 and all(f": update of {name} on rank " in line for line in lines)


def check_after_overflow(config: dict[str, Any]) -> list[str | None]:
    """Name checked after each of three steps, the first of which overflows."""
    shapes = [(16, 16), (12, 16), (5,)]
    engine = start(PrescribedGradients(shapes), config)
    names: list[str | None] = []
    for step in range(3):
        gradients = [torch.ones(shape) + torch.eye(*shape) for shape in shapes[:2]]
        gradients.append(torch.full((5,), float("inf") if step == 0 else 1.0))
        engine.optimizer.training_check.last = None
        train_step(engine, [gradient.to(engine.device) for gradient in gradients])
        last = engine.optimizer.training_check.last
        names.append(last and last.name)
    return names


@ranks
def test_a_skipped_step_is_not_counted_and_its_matrix_is_checked_in_the_next() -> None:
    assert run_ranks(1, check_after_overflow, ds_config({"verify_every": 1}))[0] == [None, "p0", "p1"]


# ---- the arithmetic of tolerances -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("additions", [2, 8, 32])
def test_the_variance_of_a_sum_bounds_that_of_real_sums_and_is_not_far_above(
    dtype: torch.dtype, additions: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(additions, 20_000, generator=generator).to(dtype)
    total = torch.zeros(20_000, dtype=dtype)
    for term in terms:
        total += term
    error = total.double() - terms.double().sum(0)
    magnitude = terms.double().abs().sum(0)
    bound = tolerances.sum_variance(magnitude, dtype, additions, 1.0).mean().sqrt()
    measured = error.square().mean().sqrt()
    assert measured < bound < 10 * measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_rounding_has_the_variance_that_is_said(dtype: torch.dtype) -> None:
    value = torch.randn(50_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    measured = (value.to(dtype).double() - value).square().mean().sqrt()
    explained = tolerances.stored_variance(value, dtype).mean().sqrt()
    assert measured < explained < 3 * measured
