"""``nan_guard``: what one rank's bad Newton-Schulz result does to a step, with every mode, on every rank."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_muon.passes import Moves
from ds_muon.skipped import SkippedSteps
from tests.unit.support.bad_steps import CASES, SHAPES, STRADDLING, TINY, WHOLE, bad_second_step, engine_of
from tests.unit.support.cases import first_of, in_turns, some
from tests.unit.support.faulty import faulty_backend, sick
from tests.unit.support.models import PrescribedGradients, ds_config, full_weights, start, train_step
from tests.unit.support.ranks import DEVICE, RankFailure, run_ranks
from tests.unit.support.steps import assert_equal, exact_gradients

pytestmark = pytest.mark.ranks


@some([((2, STRADDLING), 1), ((2, WHOLE), 2)], case=CASES, stage=[1, 2])
def test_off_applies_the_nan_and_shows_what_it_does(case: tuple[int, tuple[int, int]], stage: int) -> None:
    world_size, shape = case
    for found in run_ranks(world_size, bad_second_step, ds_config(stage=stage), shape):
        assert not found["finite"] and not found["weights stayed"]
        assert found["skipped"] == 0 and found["warnings"] == []


@in_turns(case=CASES, stage=[1, 2], variant=["muon", "normuon"])
def test_skip_moves_nothing_but_the_momentum(case: tuple[int, tuple[int, int]], stage: int, variant: str) -> None:
    world_size, shape = case
    params = {"nan_guard": "skip", "weight_decay": 0.1, "variant": variant}
    config = ds_config(params, stage=stage)
    ranks = run_ranks(world_size, bad_second_step, config, shape)
    for found in ranks:
        assert found["weights stayed"] and found["model stayed"] and found["moved"] == {"momentum_buffer"}
        assert found["skipped"] == 1 and found["rates stayed"] and found["scale stayed"]
        assert 0 < found["norm"] < float("inf")
    (warning,) = ranks[0]["warnings"]
    name = f"p{SHAPES.index(shape)} ({shape[0]} x {shape[1]})"
    assert name in warning and "in step 2" in warning and "faulty backend, float" in warning
    assert all(found["warnings"] == [] for found in ranks[1:])


@pytest.mark.parametrize(
    ("rule", "shape", "said"),
    [
        (
            {"split": [8, 12], "axis": "in"},
            (30, 12),
            r"p0\[1\] \(30 x 12\) is not finite in step 2 since start: Newton-Schulz on",
        ),
        ({"split": 2, "axis": "in"}, (30, 10), r"p0\[0\] \(30 x 10\) .* nor those of 1 more matrix: "),
        ({"split": 3, "interleaved": True}, (10, 20), r"p0\[0\] \(10 x 20\) .* nor those of 2 more matrices: "),
    ],
)
def test_a_bad_block_is_named(rule: dict[str, Any], shape: tuple[int, int], said: str) -> None:
    config = ds_config({"nan_guard": "skip", "muon_blocks": {"p0": rule}})
    found, _ = run_ranks(2, bad_second_step, config, shape)
    (warning,) = found["warnings"]
    assert re.search(said, warning), warning


def three_steps(config: dict[str, Any], shape: tuple[int, int] | None) -> dict[str, Tensor]:
    """Muon's weights after three steps at one rate. The second is skipped for ``shape``; or, for None, its rates are 0.

    So is its weight decay, which is times the rate. Momentum moves in either case.
    """
    engine = start(PrescribedGradients(SHAPES), config)
    with faulty_backend(engine):
        for step in range(3):
            rates = [group["lr"] for group in engine.optimizer.param_groups]
            if step == 1 and shape is None:
                for group in engine.optimizer.param_groups:
                    group["lr"] = 0.0
            with sick(shape if step == 1 else None):
                train_step(engine, exact_gradients(SHAPES, step, engine.device))
            for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
    return {name: w for name, w in full_weights(engine).items() if w.ndim == 2}


@pytest.mark.parametrize("world_size", first_of([3, 2]))
def test_muon_goes_on_bit_for_bit_as_if_the_rate_had_been_zero_in_the_skipped_step(world_size: int) -> None:
    config = ds_config({"nan_guard": "skip", "weight_decay": 0.1})
    skipped, muted = (run_ranks(world_size, three_steps, config, s) for s in (STRADDLING, None))
    for found, other in zip(skipped, muted, strict=True):
        assert_equal(found, other)


@some([((2, WHOLE), 1), ((3, STRADDLING), 2), ((4, TINY), 1)], case=CASES, stage=[1, 2])
def test_raise_raises_the_same_error_on_every_rank_and_applies_nothing(
    case: tuple[int, tuple[int, int]], stage: int
) -> None:
    world_size, shape = case
    config = ds_config({"nan_guard": "raise", "weight_decay": 0.1}, stage=stage)
    ranks = run_ranks(world_size, bad_second_step, config, shape)
    assert len({found["raised"] for found in ranks}) == 1
    assert f"p{SHAPES.index(shape)} (" in ranks[0]["raised"] and "Nothing was applied" in ranks[0]["raised"]
    for found in ranks:
        assert found["weights stayed"] and found["model stayed"] and found["moved"] == {"momentum_buffer"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_skip_holds_in_half_precision_and_says_nothing_to_the_loss_scaler(dtype: str) -> None:
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4}} if dtype == "float16" else {}
    config = ds_config({"nan_guard": "skip", "ns_dtype": "float16"}, dtype=dtype, **fp16)
    for found in run_ranks(2, bad_second_step, config, STRADDLING):
        assert found["weights stayed"] and found["model stayed"] and found["moved"] == {"momentum_buffer"}
        assert found["skipped"] == 1 and found["scale stayed"]


def one_sick_rank(config: dict[str, Any], bad_rank: int) -> list[bool]:
    """Only ``bad_rank`` is sick, in the straddling matrix: whether each step was skipped here."""
    engine = engine_of(config)
    skipped = []
    with faulty_backend(engine):
        for step in range(2):
            shape = STRADDLING if torch.distributed.get_rank() == bad_rank and step else None
            before = engine.skipped_steps
            with sick(shape):
                train_step(engine, exact_gradients(SHAPES, step, engine.device))
            skipped.append(engine.skipped_steps > before)
    return skipped


@pytest.mark.parametrize("world_size", first_of([3, 2, 4]))
def test_only_the_owner_of_a_matrix_can_spoil_it_and_then_all_skip(world_size: int) -> None:
    config = ds_config({"nan_guard": "skip"})
    by_rank = [run_ranks(world_size, one_sick_rank, config, rank) for rank in range(world_size)]
    assert all(len({tuple(skipped) for skipped in ranks}) == 1 for ranks in by_rank)
    assert sum(ranks[0] == [False, True] for ranks in by_rank) == 1


def flags_as_on_a_gpu(moves: Any, start: int, chunk: Tensor) -> Any:
    return moves.of_elements(start, start + chunk.numel()) if isinstance(moves, Moves) else moves


def collectives(config: dict[str, Any]) -> tuple[int, list[str]]:
    """Calls of all_reduce in a step, one of them for the byte, and by what the host read from the device."""
    engine = engine_of(config)
    train_step(engine, exact_gradients(SHAPES, 0, engine.device))
    engine.backward(engine(exact_gradients(SHAPES, 1, engine.device)))
    reads: list[str] = []
    with ExitStack() as stack:
        for name in ("tolist", "item", "__bool__", "__float__", "__int__", "cpu", "numpy"):
            original = getattr(Tensor, name)
            counting = lambda tensor, *args, _original=original, _name=name: (  # noqa: E731
                reads.append(_name),
                _original(tensor, *args),
            )[1]
            stack.enter_context(mock.patch.object(Tensor, name, counting))
        if DEVICE == "cpu":  # where torch's own AdamW reads its count of steps, and the passes whether all moves
            stack.enter_context(mock.patch.object(engine.optimizer.optimizer._adamw, "step"))
            stack.enter_context(mock.patch("ds_muon.passes.torch_passes._flags", flags_as_on_a_gpu))
            stack.enter_context(mock.patch.dict("ds_muon.passes._COMPILED", clear=True))
        reduced = stack.enter_context(
            mock.patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce)
        )
        engine.optimizer.step()
    return reduced.call_count, reads


@in_turns(
    case=[
        ({}, 2),
        ({"nan_guard": "skip"}, 2),
        ({"nan_guard": "raise"}, 2),
        ({"variant": "normuon"}, 4),
    ],
    threshold=[None, 1e6],
)
def test_the_host_waits_once_a_step(case: tuple[dict[str, Any], int], threshold: float | None) -> None:
    params, reductions = case
    config = ds_config({**params, "grad_norm_skip_threshold": threshold}, gradient_clipping=0.1)
    assert run_ranks(2, collectives, config) == [(reductions, ["tolist"])] * 2


def is_queued_behind(config: dict[str, Any]) -> bool:
    """Whether the commit is launched while what runs in Newton-Schulz's place is not done."""
    engine = engine_of(config)
    train_step(engine, exact_gradients(SHAPES, 0, engine.device))
    engine.backward(engine(exact_gradients(SHAPES, 1, engine.device)))
    zero = engine.optimizer
    stage, commit = zero.stage, zero.commit
    behind: list[bool] = []

    def long_stage(*args: Any) -> Any:
        staged = stage(*args)
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        done.record()
        return staged

    def looked(*args: Any) -> None:
        behind.append(not done.query())
        commit(*args)

    done = torch.cuda.Event()
    with mock.patch.object(zero, "stage", long_stage), mock.patch.object(zero, "commit", looked):
        zero.step()
    torch.cuda.synchronize()
    return behind == [True]


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU has no queue")
@pytest.mark.parametrize(
    ("world_size", "nan_guard", "behind"), [(1, "off", True), (1, "skip", False), (2, "off", False)]
)
def test_with_nothing_to_agree_on_the_host_does_not_wait_for_newton_schulz(
    world_size: int, nan_guard: str, behind: bool
) -> None:
    assert run_ranks(world_size, is_queued_behind, ds_config({"nan_guard": nan_guard})) == [behind] * world_size


def spoiled_momentum(config: dict[str, Any]) -> list[str]:
    engine = engine_of(config)
    train_step(engine, exact_gradients(SHAPES, 0, engine.device))
    engine.optimizer.optimizer.momentum_buffer(0)[0] = torch.inf
    with mock.patch("ds_muon.skipped.log") as warning:
        train_step(engine, exact_gradients(SHAPES, 1, engine.device))
    assert engine.skipped_steps == 1
    return [call.args[0] for call in warning.call_args_list]


def test_a_momentum_that_is_not_finite_is_not_blamed_on_newton_schulz() -> None:
    (warning,), none = run_ranks(2, spoiled_momentum, ds_config({"nan_guard": "skip"}))
    assert "its momentum is not finite" in warning and "Newton-Schulz" not in warning and none == []


# ---- what is said ---------------------------------------------------------------------------------------------------


def sick_for(config: dict[str, Any], steps: int) -> list[str]:
    engine = engine_of(config)
    with faulty_backend(engine), sick(WHOLE), mock.patch("ds_muon.skipped.log") as warning:
        for step in range(steps):
            train_step(engine, exact_gradients(SHAPES, step, engine.device))
        engine.destroy()
        engine.destroy()
    return [call.args[0] for call in warning.call_args_list]


def test_repeated_skips_are_warned_of_ever_less_often_and_counted_at_the_end() -> None:
    first, second = run_ranks(2, sick_for, ds_config({"nan_guard": "skip"}), 9)
    assert second == []
    *warnings, last = first
    assert [text.rsplit(" ", 1)[1] for text in warnings] == ["1)", "2)", "4)", "8)"]
    assert last == "steps skipped in all for non-finite updates: 9"


def nan_gradients(config: dict[str, Any], steps: int) -> tuple[list[str], int]:
    engine = engine_of(config)
    gradients = exact_gradients(SHAPES, 0, engine.device)
    gradients[4][0, 0] = torch.inf
    with mock.patch("ds_muon.skipped.log") as warning:
        for _ in range(steps):
            train_step(engine, gradients)
    return [call.args[0] for call in warning.call_args_list], engine.skipped_steps


def test_non_finite_gradients_are_warned_of_by_param_group_unless_a_loss_scaler_looks_for_them() -> None:
    (first, skipped), (second, _) = run_ranks(2, nan_gradients, ds_config(), 3)
    assert skipped == 3 and second == [] and len(first) == 2
    assert "a gradient is not finite, in param group" in first[0] and "muon" in first[0]
    dynamic = ds_config(fp16={"enabled": True, "initial_scale_power": 4})
    assert run_ranks(2, nan_gradients, dynamic, 3)[0] == ([], 3)


def test_a_count_of_zero_is_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch("ds_muon.skipped.log") as warning:
        skipped = SkippedSteps("spikes")
        skipped.close()
    warning.assert_not_called()


def always_raises(config: dict[str, Any]) -> None:
    engine = engine_of(config)
    with faulty_backend(engine), sick(STRADDLING):
        train_step(engine, exact_gradients(SHAPES, 0, engine.device))


def test_an_uncaught_error_of_the_guard_stops_every_rank() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, always_raises, ds_config({"nan_guard": "raise"}))
    assert set(failure.value.errors) == {0, 1}
    assert all("NonFiniteUpdate" in text for text in failure.value.errors.values())
