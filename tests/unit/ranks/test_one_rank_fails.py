"""One rank fails, wherever in a step: all stop, in words, and what can be kept whole is whole."""

from __future__ import annotations

import copy
import gc
import pickle
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_muon.guard import FAILED, StepGuard, Verdict
from tests.unit.support.bad_steps import model_matches
from tests.unit.support.cases import in_turns
from tests.unit.support.drills import COMMIT, MOMENTUM, PLACES, NoMemory, fail_at, gradients_of, killed, load_after
from tests.unit.support.models import (
    PrescribedGradients,
    ds_config,
    full_momentum,
    full_weights,
    start,
    start_groups,
    train_step,
)
from tests.unit.support.ranks import DEVICE, run_ranks, run_side_by_side
from tests.unit.support.steps import SHAPES, exact_gradients, state_by_key

pytestmark = pytest.mark.ranks


def fail_everywhere(config: dict[str, Any], bad_rank: int) -> dict[str, str]:
    """A failure at every place before the commit, each followed by a good step: what was raised."""
    engine = start_groups(SHAPES, config, groups=2)
    train_step(engine, gradients_of(engine, 0))
    raised = {}
    for number, (place, (phase, _, _)) in enumerate(PLACES.items(), start=1):
        weights, momentum, state = full_weights(engine), full_momentum(engine), state_by_key(engine)
        engine.backward(engine(gradients_of(engine, number)))
        raised[place] = fail_at(place, engine, bad_rank, engine.step)
        same = {key for key, tensor in state_by_key(engine).items() if torch.equal(tensor, state[key])}
        assert {key for key in state if "momentum_buffer" not in key} <= same, place
        after = full_weights(engine)
        assert all(torch.equal(after[name], weights[name]) for name in weights), place
        assert model_matches(engine, weights), place
        for name, moved in full_momentum(engine).items():
            was, gradient = momentum[name], averaged(number)[name]
            if phase in ("take_gradients", "measure"):
                assert torch.equal(moved, was), (place, name)
            elif place not in MOMENTUM:
                expected = torch.lerp(gradient, was, 0.95)
                if engine.optimizer.cpu_offload or engine.optimizer.failure.alone:
                    # It moves a batch at a time, and a rank alone stops at once.
                    expected = torch.where(moved == was, was, expected)
                torch.testing.assert_close(moved, expected, msg=f"{place}, {name}")
        momentum = full_momentum(engine)
        train_step(engine, gradients_of(engine, number + 100))
        for name, moved in full_momentum(engine).items():
            gradient = averaged(number + 100)[name]
            torch.testing.assert_close(moved, torch.lerp(gradient, momentum[name], 0.95), msg=f"after {place}, {name}")
        assert all(not torch.equal(full_weights(engine)[name], weights[name]) for name in weights), place
        assert engine.optimizer.failure.error is None
    engine.destroy()
    return raised


def averaged(step: int) -> dict[str, Tensor]:
    """What ``exact_gradients`` are on average."""
    gradients = exact_gradients(SHAPES, step, torch.device(DEVICE))
    for gradient in gradients:
        dist.all_reduce(gradient)
    return {f"p{i}": gradient.cpu() / dist.get_world_size() for i, gradient in enumerate(gradients)}


ON_HOST = {"offload_optimizer": {"device": "cpu"}}


# What may fail on one rank while an engine is made, in order; the model is moved first, then DeepSpeed makes the rest.
TO_BEGIN = (
    "ds_muon.registration.prepare",
    "torch.nn.Module.to",
    "ds_muon.registration.split_param_groups",
    "ds_muon.registration.DSMuon",
    "ds_muon.optimizer.DSMuon.init_state",
    "ds_muon.zero_plan.flat_layout",
    "ds_muon.zero_plan.make_plan",
    "ds_muon.zero.MuonGroup",
    "ds_muon.registration.refuse_torn_weights",
    "ds_muon.telemetry.Telemetry",
    "ds_muon.registration.far_off",
    "deepspeed.runtime.engine.EngineTimers",
)
TO_BEGIN_ON_HOST = ("ds_muon.passes.lift.Lift.__init__", "ds_muon.optimizer.DSMuon.init_state")


def fail_to_begin(config: dict[str, Any], places: Sequence[str]) -> list[str]:
    """What is raised on this rank if the last one fails at a place of an engine's making; then the model gets one."""
    model, raised = PrescribedGradients(SHAPES), []
    for place in places:
        with ExitStack() as stack:
            if dist.get_rank() == dist.get_world_size() - 1:
                stack.enter_context(mock.patch(place, side_effect=NoMemory(f"none for {place}")))
            try:
                start(model, config)
                raised.append("nothing")
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
    engine = start(model, config)
    train_step(engine, gradients_of(engine, 0))
    engine.destroy()
    return raised


PINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


@pytest.mark.parametrize(("places", "zero"), [(TO_BEGIN, {}), (TO_BEGIN_ON_HOST, PINNED)], ids=["device", "host"])
def test_a_rank_that_fails_while_an_engine_is_made_stops_all_before_there_is_one(
    places: Sequence[str], zero: dict[str, Any]
) -> None:
    config = ds_config({"telemetry_every": 1}, zero=zero)
    quoted, errors = run_ranks(2, fail_to_begin, config, places, timeout=60.0)
    assert errors == [f"NoMemory: none for {place}" for place in places]
    for said, error in zip(quoted, errors, strict=True):
        assert said.startswith(f"RuntimeError: rank 1 stopped, and this rank with it. {error}. In initialize, at ")
        assert said.endswith("set offload_optimizer.pin_memory to false" if zero else ". No engine is made")
    assert run_ranks(1, fail_to_begin, config, places) == [errors]


def fail_in_a_scheduler(other: dict[str, Any] | None, bad_rank: int) -> tuple[str, bool]:
    """What is raised if a rank fails as it builds a scheduler, perhaps after another engine; and whether a debugger
    finds the locals of the function that has failed."""

    def build(optimizer: Any) -> Any:
        evidence = None if other is None else start(PrescribedGradients(SHAPES), other)
        if dist.get_rank() == bad_rank:
            raise NoMemory("none for a scheduler")
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=evidence is None)

    try:
        start(PrescribedGradients(SHAPES), ds_config(), lr_scheduler=build)
        return "nothing", False
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        return f"{type(error).__name__}: {error}", "evidence" in frame.f_locals


ADAMW = {**ds_config(), "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}


@pytest.mark.parametrize("other", [ds_config(), ADAMW], ids=["DSMuon", "AdamW"])
def test_a_rank_that_fails_after_an_engine_within_another_s_making_stops_all(other: dict[str, Any]) -> None:
    (quoted, _), (error, _) = run_ranks(2, fail_in_a_scheduler, other, 1, timeout=60.0)
    assert error == "NoMemory: none for a scheduler"
    assert quoted.startswith(f"RuntimeError: rank 1 stopped, and this rank with it. {error}. In initialize, at ")


def test_what_fails_on_a_rank_alone_while_an_engine_is_made_keeps_its_locals_for_a_debugger() -> None:
    assert run_ranks(1, fail_in_a_scheduler, None, 0) == [("NoMemory: none for a scheduler", True)]


@in_turns(
    params=[{"variant": "normuon"}, {"nan_guard": "skip"}],
    offload=[False, True],
    bad_rank=[1, 0],
    stage=[1, 2],
    dtype=["bfloat16", "float32"],
    managed=[False, True],
)
def test_a_rank_that_fails_before_the_commit_stops_all_and_no_weight_moves(
    params: dict[str, Any], offload: bool, bad_rank: int, stage: int, dtype: str, managed: bool
) -> None:
    zero = ON_HOST if offload else {}
    # Of such a model DeepSpeed adds to the gradients that it still has.
    of_models = {"managed_gradient_accumulation": managed, "data_types": {"grad_accum_dtype": "fp32"}}
    config = ds_config(params, stage=stage, zero=zero, dtype=dtype, **of_models)
    ranks = run_ranks(2, fail_everywhere, config, bad_rank)
    for number, (place, (phase, _, _)) in enumerate(PLACES.items(), start=1):
        error, quoted = ranks[bad_rank][place], ranks[1 - bad_rank][place]
        assert error == f"NoMemory: none for {place}"
        assert quoted.startswith(f"RuntimeError: rank {bad_rank} stopped, and this rank with it. {error}. In {phase}, ")
        assert f", step {2 * number} since start" in quoted
        assert (". Nothing has moved on any rank" in quoted) == (phase in ("take_gradients", "measure"))


def test_a_rank_alone_that_fails_before_the_commit_makes_the_next_step_of_its_own_gradients() -> None:
    config = ds_config(dtype="bfloat16", data_types={"grad_accum_dtype": "fp32"})  # sums to which DeepSpeed adds
    (raised,) = run_ranks(1, fail_everywhere, config, 0)
    assert raised == {place: f"NoMemory: none for {place}" for place in PLACES}


def test_a_rank_that_has_failed_looks_at_no_update() -> None:
    def flats() -> Iterator[Tensor]:
        raise AssertionError("it may have none, or half of them")
        yield

    failure: Any = SimpleNamespace(error=NoMemory("none"), alone=False, holding=lambda phase: nullcontext())
    capture: Any = SimpleNamespace(stops_training=False)
    verdict = Verdict(torch.zeros(1), torch.tensor(True), (), torch.zeros(3, dtype=torch.float64), None)
    with mock.patch.object(dist, "all_reduce"):
        assert StepGuard("skip", None, capture, failure, None).decide(verdict, flats()).worst == FAILED


def fail_in_explaining(config: dict[str, Any]) -> list[str]:
    """What two steps raise: an update of the first is not finite, and rank 1 fails as it looks for it."""
    engine = start_groups(SHAPES, config, groups=2)
    group, said = engine.optimizer.muon_groups[0], []
    original = group.orthogonalize
    with mock.patch.object(group, "orthogonalize", lambda batch: original(batch).mul_(torch.nan)), ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch("ds_muon.skipped._nonfinite", side_effect=NoMemory("none for its name")))
        for step in range(2):
            try:
                train_step(engine, gradients_of(engine, step))
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
            stack.close()
            group.orthogonalize = original
    engine.destroy()
    return said


def test_a_rank_that_cannot_say_which_update_is_bad_stops_all_in_that_step() -> None:
    (quoted, *then), (error, *so) = run_ranks(2, fail_in_explaining, ds_config({"nan_guard": "skip"}))
    assert error == "NoMemory: none for its name" and error in quoted and quoted.startswith("RuntimeError: rank 1")
    assert then == so == ["nothing"]


def fail_in_commit(config: dict[str, Any], place: str, folder: str, bad_rank: int) -> list[str]:
    """What is raised by a step that fails on one rank as it commits; by saves and steps after it; by a load that fails
    as well, and a step and a save after that. Then a load succeeds."""
    engine = start_groups(SHAPES, config, groups=2)
    train_step(engine, gradients_of(engine, 0))
    engine.save_checkpoint(folder, tag="good")
    good = full_weights(engine)

    def step() -> None:
        train_step(engine, gradients_of(engine, 1))

    def save() -> None:
        engine.save_checkpoint(folder, tag="torn")

    raised = [fail_at(place, engine, bad_rank, step)]
    raised += [fail_at("nowhere", engine, bad_rank, do) for do in (save, step, save, step)]
    raised.append(fail_at("what a load has read", engine, bad_rank, lambda: engine.load_checkpoint(folder)))
    raised += [fail_at("nowhere", engine, bad_rank, do) for do in (step, save)]
    engine.load_checkpoint(folder)
    assert all(torch.equal(weight, good[name]) for name, weight in full_weights(engine).items())
    assert model_matches(engine, good)
    step()
    engine.save_checkpoint(folder, tag="better")
    engine.destroy()
    return raised


@in_turns(place=list(COMMIT), offload=[False, True], dtype=["float32", "bfloat16"])
def test_after_a_rank_has_failed_in_its_commit_all_stop_and_nothing_is_saved_until_a_load(
    place: str, offload: bool, dtype: str, tmp_path: Path
) -> None:
    zero = ON_HOST if offload else {}
    config = ds_config({"variant": "normuon"}, zero=zero, dtype=dtype)
    (first, *others), (second, *own) = run_ranks(2, fail_in_commit, config, place, str(tmp_path), 1)
    assert first == second == "nothing"
    assert not (tmp_path / "torn").exists() or not list((tmp_path / "torn").iterdir())
    for number, (quoted, error) in enumerate(zip(others, own, strict=True)):
        where, phase = (place, "commit, step 2") if number < 4 else ("what a load has read", "load_checkpoint, step 4")
        assert f"NoMemory: none for {where}" in error and "rank 1" in quoted
        assert f"none for {where}. In {phase} since start" in quoted and "load a checkpoint" in quoted


def test_alone_as_well_nothing_is_stepped_or_saved_after_a_failed_commit_until_a_load(tmp_path: Path) -> None:
    ((first, *then),) = run_ranks(1, fail_in_commit, ds_config({}), "the model's weights", str(tmp_path), 0)
    assert first == "NoMemory: none for the model's weights" and not list((tmp_path / "torn").iterdir())
    about = f"{first}. In commit, step 2 since start, at "
    saves, steps, load = then[0:4:2], then[1:4:2], then[4]
    assert all(f"nothing is saved: rank 0 has failed. {about}" in error for error in saves)
    assert all(error.startswith(f"RuntimeError: no step is made: {about}") for error in steps)
    assert load == "NoMemory: none for what a load has read"
    assert all(f"{load}. In load_checkpoint, step 4 since start" in error for error in then[5:])


class WithPart(PrescribedGradients):
    """A module whose parts can be asked for as well."""

    def __init__(self) -> None:
        super().__init__(SHAPES)
        self.part = nn.Identity()


TOGETHER: dict[str, Callable[[Any, str], object]] = {
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder, tag="torn"),
    "exclude_frozen_parameters": lambda engine, folder: engine.save_checkpoint(
        folder, tag="torn", exclude_frozen_parameters=True
    ),
}
BY_ONE_RANK: dict[str, Callable[[Any, str], object]] = {
    "save_16bit_model": lambda engine, folder: engine.save_16bit_model(folder, "torn.bin"),
    "save_fp16_model": lambda engine, folder: engine.save_fp16_model(folder, "torn.bin"),
    "HF's save_model and save_pretrained": lambda engine, folder: torch.save(
        engine.module.state_dict(), f"{folder}/torn.bin"
    ),
    "the engine's state_dict": lambda engine, folder: engine.state_dict(),
    "a module around the model": lambda engine, folder: nn.ModuleDict({"model": engine.module}).state_dict(),
    "a module deep around the model": lambda engine, folder: nn.Sequential(
        nn.ModuleDict({"model": engine.module})
    ).state_dict(),
    "a module around a part": lambda engine, folder: nn.ModuleDict({"part": engine.module.part}).state_dict(),
    "a module far around the model": lambda engine, folder: engine.module.state_dict(prefix="agent.policy."),
    "a part of the model": lambda engine, folder: engine.module.part.state_dict(),
    "a part under its name": lambda engine, folder: engine.module.part.state_dict(prefix="part."),
    "the state of ZeRO": lambda engine, folder: engine.optimizer.state_dict(),
}


def save_in_every_way(engine: Any, folder: str) -> dict[str, str]:
    """What each raises; where ranks need not save together, on one after the other."""
    raised = {way: fail_at("nowhere", engine, 0, partial(save, engine, folder)) for way, save in TOGETHER.items()}
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            for way, save in BY_ONE_RANK.items():
                raised[way] = fail_at("nowhere", engine, 0, partial(save, engine, folder))
        dist.barrier()
    return raised


def save_torn_weights(place: str, bad_rank: int, folder: str) -> list[dict[str, str]]:
    """What every way to save raises after a failed commit, after the next step, and after a load; and of a new engine
    that takes over the model of one that has failed."""
    engine = start(WithPart(), ds_config())
    train_step(engine, gradients_of(engine, 0))
    engine.save_checkpoint(folder, tag="good")

    def step() -> None:
        train_step(engine, gradients_of(engine, 1))

    fail_at(place, engine, bad_rank, step)
    raised = [save_in_every_way(engine, folder)]
    fail_at("nowhere", engine, bad_rank, step)
    copied = copy.deepcopy(engine.module).state_dict()
    assert copied.keys() == dict(engine.module.named_parameters()).keys()
    assert b"ds_muon" not in pickle.dumps(engine.module.part)  # what a machine without it can load
    raised.append(save_in_every_way(engine, folder))
    assert not [*Path(folder).glob("torn.bin"), *Path(folder).glob("torn/*")]
    engine.load_checkpoint(folder, tag="good")
    raised.append(save_in_every_way(engine, f"{folder}/whole"))
    fail_at(place, engine, bad_rank, step)
    engine.destroy()
    engine = start(engine.module, ds_config())
    engine.load_checkpoint(folder, tag="good")
    raised.append(save_in_every_way(engine, f"{folder}/new"))
    engine.destroy()
    return raised


# Of several ranks the one that fails, and one that does not; a rank alone.
@pytest.mark.parametrize(("ranks", "bad_rank", "place"), [(2, 1, "AdamW"), (1, 0, "the model's weights")])
def test_after_a_failed_commit_no_way_to_save_writes_torn_weights_on_any_rank(
    ranks: int, bad_rank: int, place: str, tmp_path: Path
) -> None:
    for raised in run_ranks(ranks, save_torn_weights, place, bad_rank, str(tmp_path)):
        for of_moment in raised[:2]:
            for way, error in of_moment.items():
                assert f"none for {place}. In commit, step 2 since start" in error, way
                assert "load a checkpoint with its optimizer states" in error, way
        assert {error for of_moment in raised[2:] for error in of_moment.values()} == {"nothing"}


def forget_an_engine(zero: dict[str, Any]) -> bool:
    """Whether nothing holds an engine that has failed in a commit, and its model, once a script has let go of them."""
    engine = start(WithPart(), ds_config(zero=zero))
    fail_at("AdamW", engine, 0, partial(train_step, engine, gradients_of(engine, 0)))
    left = weakref.ref(engine), weakref.ref(engine.module)
    engine.destroy()
    del engine
    gc.collect()
    return left[0]() is left[1]() is None


@pytest.mark.parametrize("zero", [{}, ON_HOST], ids=["on the device", "on the host"])
def test_an_engine_with_torn_weights_can_be_let_go_of(zero: dict[str, Any]) -> None:
    assert run_ranks(2, forget_an_engine, zero) == [True, True]


def load_another_dtype_after_a_failed_commit(folder: str) -> bool:
    """Whether a model in bf16 holds the weights of a checkpoint in fp16, if it is loaded after a failed commit."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
    engine = start_groups(SHAPES, ds_config(dtype="float16", **fp16), groups=2)
    train_step(engine, gradients_of(engine, 0))
    engine.save_checkpoint(folder, tag="good")
    good = full_weights(engine)
    engine.destroy()
    zero = ON_HOST
    engine = start_groups(SHAPES, ds_config(dtype="bfloat16", zero=zero), groups=2)
    assert "none for AdamW" in fail_at("AdamW", engine, 0, lambda: train_step(engine, gradients_of(engine, 1)))
    engine.load_checkpoint(folder)
    assert all(torch.equal(weight, good[name]) for name, weight in full_weights(engine).items())
    matches = model_matches(engine, good)
    engine.destroy()
    return matches


def test_weights_that_had_gone_up_before_a_commit_failed_go_up_again_after_a_load(tmp_path: Path) -> None:
    assert run_ranks(1, load_another_dtype_after_a_failed_commit, str(tmp_path)) == [True]


# ---- a rank that is gone --------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_ends_the_others_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    config = ds_config({"nan_guard": "skip"})
    folders = [tmp_path / moment for moment in ("take_gradients", "measure", "stage", "decide", "commit")]
    for folder in folders:
        folder.mkdir()
    failures = run_side_by_side(2, killed, [(config, folder.name, str(folder)) for folder in folders])
    for folder, failure in zip(folders, failures, strict=True):
        assert failure is not None and failure.errors[1] == "the process died", folder.name
        assert (folder / "killed").exists()
        if DEVICE == "cpu":  # over NCCL a rank waits until the launcher ends it
            assert "hangs" not in failure.errors[0], folder.name
    assert run_ranks(2, load_after, config, *map(str, folders)) == [True, True]
