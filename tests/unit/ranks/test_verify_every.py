"""``verify_every``: the check of a training run, which goes on whatever becomes of what it says."""

from __future__ import annotations

import functools
import io
import logging
import re
import sys
from contextlib import ExitStack, nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch

from ds_muon.sample.gpt import GPT
from ds_muon.verify import canary, in_training
from ds_muon.verify.canary import Canary, SilentCorruption
from ds_muon.verify.check import StepComparison
from ds_muon.verify.engine_view import EngineView, Placed
from ds_muon.verify.inject import plant
from tests.unit.support.cases import first_of, in_turns
from tests.unit.support.checked import MODEL, train_gpt
from tests.unit.support.models import PrescribedGradients, ds_config, full_weights, start, train_step
from tests.unit.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

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


@in_turns(every=[1, 3], dtype=["float32", "bfloat16"])
def test_verify_every_checks_one_matrix_each_k_steps_in_turn_on_its_owner(every: int, dtype: str) -> None:
    steps = 19 if every == 1 else 4 * every
    config = ds_config({"verify_every": every}, dtype=dtype, stage=1 if every == 3 else 2)
    by_rank = run_ranks(2, train_with_checks, config, steps, None)
    checks = sorted(check for checks in by_rank for check in checks)
    assert [step for step, _, _ in checks] == list(range(every, steps + 1, every))
    assert all(right for _, _, right in checks)
    names = [name for _, name, _ in checks]
    # There are 18, whose turn comes again.
    assert len(set(names)) == min(len(names), 18) and (every > 1 or names[18] == names[0])


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


@pytest.mark.parametrize("kind", ["full", "closed"])
def test_a_run_goes_on_whatever_becomes_of_what_it_says(kind: str) -> None:
    ranks = run_ranks(2, train_into, ds_config({"verify_every": 1}), kind)
    assert [found[:2] for found in ranks] == [(3, 0)] * 2
    ranks = run_ranks(2, train_into, ds_config({"grad_norm_skip_threshold": 1e-9}), kind)
    assert [found[:2] for found in ranks] == [(3, 3)] * 2


def test_a_name_is_escaped_for_a_stream_that_lacks_its_letters_and_begins_no_line() -> None:
    ranks = run_ranks(2, train_into, ds_config({"verify_every": 1}), "ascii")
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


def test_a_skipped_step_is_not_counted_and_its_matrix_is_checked_in_the_next() -> None:
    assert run_ranks(1, check_after_overflow, ds_config({"verify_every": 1}))[0] == [None, "p0", "p1"]


class NoMemory(RuntimeError):
    """Stands for torch's own, which a CPU does not raise."""


# Where a check needs memory: whose method makes it, and the rank that lacks it.
NEEDS: dict[str, tuple[Any, str, int]] = {
    "to listen": (in_training, "StepComparison", 0),
    "to add a gradient": (Placed, "of", 1),
    "to look": (EngineView, "_own_part", 0),
    "for an average": (StepComparison, "_average", 1),
    "to compare": (StepComparison, "_record", 0),
    "for a copy of U": (canary, "_copy", 0),
    "for the owner's copy": (Canary, "_room", 1),
}


def train_without_memory(config: dict[str, Any], need: str) -> tuple[list[str], list[str], Any]:
    """What the ranks log while one lacks the memory for a part of the second check; matrices checked; the weights."""
    torch.manual_seed(0)
    target, method, bad_rank = NEEDS[need]
    original, lines = getattr(target, method), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        if engine is None or engine.global_steps != 1:
            return original(*args, **kwargs)
        raise NoMemory("none")

    engine: Any = None
    with ExitStack() as stack:
        for module in (in_training, canary):
            stack.enter_context(mock.patch.object(module, "log", lines.append))
        if torch.distributed.get_rank() == bad_rank:
            stack.enter_context(mock.patch.object(target, method, fails))
        engine = start(GPT(MODEL), config)
        names = []
        for _ in range(4):
            engine.optimizer.training_check.last = None
            train_gpt(engine, 1)
            record = engine.optimizer.training_check.last
            assert record is None or record.ok, record
            names.append("" if record is None else record.name)
    weights = full_weights(engine)
    engine.destroy()
    return lines, names, weights


@pytest.mark.parametrize("need", NEEDS)
def test_a_check_that_one_rank_cannot_make_is_left_out_on_all_and_the_run_goes_on(need: str) -> None:
    params = {"verify_every": 1, "nan_guard": "skip", "verify_bits": True}
    ranks = run_ranks(2, train_without_memory, ds_config(params), need)
    lines, _, weights = ranks[NEEDS[need][2]]
    assert any("NoMemory('none')" in line for line in lines), lines
    of_steps = ["".join(names) for names in zip(*(names for _, names, _ in ranks), strict=True)]
    left_out = {"to listen": [2], "for a copy of U": [], "for the owner's copy": []}.get(need, [1])
    assert [step for step, name in enumerate(of_steps) if not name] == left_out
    assert all(torch.equal(weights[name], weight) for name, weight in unchecked().items())


@functools.cache
def unchecked() -> dict[str, torch.Tensor]:
    return run_ranks(2, train_to_weights, ds_config({"nan_guard": "skip"}), 4)[0]


# ---- verify_bits ----------------------------------------------------------------------------------------------------


def train_with_a_turned_bit(config: dict[str, Any], bad_rank: int, steps: int) -> list[str]:
    """What each step raises here, if a bit turns in all that Newton-Schulz makes on one rank."""
    torch.manual_seed(0)
    engine = start(GPT(MODEL), config)
    raised = []
    for group in engine.optimizer.muon_groups if torch.distributed.get_rank() == bad_rank else ():

        def turning(batch: Any, original: Any = group.orthogonalize) -> torch.Tensor:
            outputs = original(batch)
            bits = torch.int16 if outputs.element_size() == 2 else torch.int32
            outputs[:, -1, -1:].view(bits).bitwise_xor_(1)
            return outputs

        group.orthogonalize = turning
    for _ in range(steps):
        try:
            train_gpt(engine, 1)
            raised.append("")
        except SilentCorruption as error:
            raised.append(str(error))
    engine.destroy()
    return raised


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["", "offload"])
@pytest.mark.parametrize("world_size", first_of([2, 1, 3]))
def test_verify_bits_stops_all_ranks_and_names_both_that_differ(world_size: int, zero: dict[str, Any]) -> None:
    config = ds_config({"verify_every": 2, "verify_bits": True}, zero=zero)
    assert all(set(raised) == {""} for raised in run_ranks(world_size, train_with_a_turned_bit, config, -1, 8))
    by_rank = run_ranks(world_size, train_with_a_turned_bit, config, 0, 12)
    assert all(raised == by_rank[0] for raised in by_rank)
    said = [text for text in by_rank[0] if text]
    assert said and not any(by_rank[0][::2])
    for text in said:
        assert re.search(r"U of \S+ \(\d+ x \d+\), rank \d makes another result than its owner, rank 0: 1 of ", text)


def test_verify_bits_changes_no_bit_of_the_training() -> None:
    checked, plain = (
        run_ranks(2, train_to_weights, ds_config({**params, "variant": "normuon"}), 2)
        for params in ({"verify_every": 1, "verify_bits": True}, {})
    )
    assert checked[0].keys() == plain[0].keys() and all(
        torch.equal(checked[0][name], plain[0][name]) for name in plain[0]
    )


def train_to_weights(config: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    engine = start(GPT(MODEL), config)
    for _ in range(steps):
        train_gpt(engine, 1)
    weights = full_weights(engine)
    engine.destroy()
    return weights
