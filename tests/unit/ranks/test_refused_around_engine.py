"""What a script may not do around an engine is refused on every rank, in words that name the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn

from ds_muon import DSMuon
from ds_muon.refusals import NO_GRADIENTS
from tests.unit.support.around_engine import SHAPES, away, config_of, gradients_of, is_bound
from tests.unit.support.models import PrescribedGradients, ds_config, full_weights, start, train_step
from tests.unit.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


# ---- what is refused ------------------------------------------------------------------------------------------------


def error_of(do: Callable[[], object]) -> str:
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def misuse(config: dict[str, Any]) -> dict[str, str]:
    """Errors of what cannot be right, each followed by a step that must be."""
    found: dict[str, str] = {}
    model = PrescribedGradients(SHAPES)
    model.p3.requires_grad_(False)
    engine = start(model, config)
    new = nn.Parameter(torch.ones(4, 4))

    def step(number: int) -> None:
        train_step(engine, gradients_of(engine, number))

    found["step before backward"] = error_of(engine.step)
    found["optimizer.step() before backward"] = error_of(engine.optimizer.step)
    step(0)
    found["a second step"] = error_of(engine.step)
    found["the inner optimizer's step"] = error_of(engine.optimizer.optimizer.step)
    found["add_param_group"] = error_of(lambda: engine.optimizer.add_param_group({"params": [new]}))
    if isinstance(engine.optimizer.optimizer, DSMuon):  # AdamW takes it, and cannot step any more
        found["the inner add_param_group"] = error_of(
            lambda: engine.optimizer.optimizer.add_param_group({"params": [new]})
        )
    engine.backward(engine(gradients_of(engine, 1)))
    away(engine, include=[OffloadStateTypeEnum.lp_params])
    found["step while away"] = error_of(engine.step)
    engine.reload_states()
    if found["step while away"].startswith("DSMuonRefusal"):
        engine.step()
    else:
        step(1)
    model.p3.requires_grad_(True)
    found["unfrozen"] = error_of(lambda: step(2))
    model.p3.requires_grad_(False)
    model.p3.grad = None
    found["in the end"] = error_of(lambda: step(2))
    return found


def thaw_on_one_rank(config: dict[str, Any]) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """What is wrong on the last rank alone stops all of them, and moves nothing; the next step is good again."""
    model = PrescribedGradients(SHAPES)
    model.p3.requires_grad_(False)
    engine = start(model, config)
    before = full_weights(engine)
    model.p3.requires_grad_(torch.distributed.get_rank() == torch.distributed.get_world_size() - 1)
    error = error_of(lambda: train_step(engine, gradients_of(engine, 0)))
    assert not engine.optimizer.optimizer.momentum_buffer(0).any()
    unmoved = full_weights(engine)
    model.p3.requires_grad_(False)
    model.p3.grad = None
    train_step(engine, gradients_of(engine, 1))
    assert all(not torch.equal(new, before[name]) for name, new in full_weights(engine).items())
    return error, before, unmoved


@pytest.mark.parametrize("nan_guard", ["off", "skip"])
def test_what_one_rank_alone_refuses_stops_all_before_anything_moves(nan_guard: str) -> None:
    for error, before, unmoved in run_ranks(2, thaw_on_one_rank, ds_config({"nan_guard": nan_guard})):
        assert "p3 was frozen at deepspeed.initialize" in error
        assert before.keys() == unmoved.keys() and all(torch.equal(unmoved[name], before[name]) for name in before)


def away_on_one_rank(config: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """One rank alone has offloaded its states: what all are told, and the weights after good steps that follow."""
    engine = start(PrescribedGradients(SHAPES), config)
    train_step(engine, gradients_of(engine, 0))
    engine.backward(engine(gradients_of(engine, 1)))
    here = torch.distributed.get_rank() == 1
    if here:
        away(engine)
    error = error_of(engine.step)
    if here:
        engine.reload_states()
    train_step(engine, gradients_of(engine, 2))
    weights, check = full_weights(engine), engine.optimizer.training_check
    assert check is None or check.last is None or check.last.ok, check.last
    engine.destroy()
    return error, weights


def train_twice(config: dict[str, Any]) -> dict[str, Tensor]:
    engine = start(PrescribedGradients(SHAPES), config)
    for step in (0, 2):
        train_step(engine, gradients_of(engine, step))
    weights = full_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize(
    ("stage", "params", "top"),
    [(1, {"variant": "normuon"}, {}), (2, {"verify_every": 1}, {"dtype": "bfloat16"}),
     (1, {"verify_every": 1}, {"dtype": "bfloat16", "data_types": {"grad_accum_dtype": "fp32"}}),
     (2, {"nan_guard": "skip"}, {"dtype": "bfloat16", "data_types": {"grad_accum_dtype": "fp32"}})],
)  # fmt: skip
def test_a_rank_that_alone_has_no_gradients_to_take_stops_all_and_the_next_step_is_right(
    stage: int, params: dict[str, Any], top: dict[str, Any]
) -> None:
    config = ds_config(params, stage=stage, **top)
    found = run_ranks(2, away_on_one_rank, config)
    assert found[1][0].startswith("DSMuonRefusal: engine.step() while")
    assert found[0][0].startswith("RuntimeError: rank 1 stopped, and this rank with it. DSMuonRefusal: engine.step()")
    expected = run_ranks(2, train_twice, config)[0]
    assert all(torch.equal(found[0][1][name], weight) for name, weight in expected.items())


def test_misuse_is_refused_with_the_remedy_on_every_rank_and_a_good_step_follows() -> None:
    first, second = run_ranks(2, misuse, ds_config())
    assert first == second
    nothing = f"DSMuonRefusal: {NO_GRADIENTS}"
    assert [
        first.pop(key) for key in ("step before backward", "optimizer.step() before backward", "a second step")
    ] == [nothing] * 3
    assert "call engine.step()" in first.pop("the inner optimizer's step")
    assert "all parameters that are ever to train" in first["add_param_group"]
    assert first.pop("add_param_group") == first.pop("the inner add_param_group")
    assert "call engine.reload_states() first" in first.pop("step while away")
    assert "p3 was frozen at deepspeed.initialize" in first["unfrozen"] and "before initialize" in first.pop("unfrozen")
    assert first == {"in the end": "no error"}


def test_adamw_does_no_better_with_misuse() -> None:
    found = run_ranks(2, misuse, config_of("AdamW"))[0]
    for key in ("step before backward", "optimizer.step() before backward"):
        assert found[key] == "KeyError: 0"
    assert found["a second step"].startswith("TypeError: 'NoneType'")
    assert found["step while away"].startswith("IndexError: list index")
    assert found["add_param_group"].startswith("AttributeError")
    # Nothing is said of what changes nothing.
    assert found["the inner optimizer's step"] == found["unfrozen"] == "no error"


def add_to_the_inner_optimizer(config: dict[str, Any]) -> list[str]:
    engine = start(PrescribedGradients(SHAPES), config)
    new = nn.Parameter(torch.ones(4, 4, device=engine.device))
    adding = error_of(lambda: engine.optimizer.optimizer.add_param_group({"params": [new]}))
    return [adding, error_of(lambda: train_step(engine, gradients_of(engine, 0)))]


def test_adamw_takes_a_param_group_that_ends_its_next_step() -> None:
    found = run_ranks(2, add_to_the_inner_optimizer, config_of("AdamW"))
    assert found == [["no error", "IndexError: list index out of range"]] * 2


def step_before_backward(config: dict[str, Any]) -> str:
    return error_of(start(PrescribedGradients(SHAPES), config).step)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_before_backward_is_refused_where_the_script_accumulates_by_itself(stage: int) -> None:
    config = ds_config(stage=stage, managed_gradient_accumulation=False)
    assert run_ranks(2, step_before_backward, config) == [f"DSMuonRefusal: {NO_GRADIENTS}"] * 2


def cycle_momentum(config: dict[str, Any]) -> tuple[str, bool]:
    engine = start(PrescribedGradients(SHAPES), config)
    train_step(engine, gradients_of(engine, 0))
    before = full_weights(engine)
    engine.optimizer.param_groups[0]["momentum"] = 0.999
    error = error_of(lambda: train_step(engine, gradients_of(engine, 1)))
    unmoved = all(torch.equal(w, before[name]) for name, w in full_weights(engine).items())
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    train_step(engine, gradients_of(engine, 1))
    return error, unmoved and is_bound(engine)


def test_a_scheduler_that_cycles_bf16_momentum_too_high_is_stopped_before_anything_moves() -> None:
    for error, unmoved_and_well_after in run_ranks(2, cycle_momentum, ds_config({"momentum_dtype": "bfloat16"})):
        assert "param group 'muon' has momentum = 0.999" in error and 'set momentum_dtype to "float32"' in error
        assert unmoved_and_well_after


@pytest.mark.parametrize("arguments", [{"lr": 0.02}, {}, {"config": 0.02}])
def test_an_optimizer_made_by_hand_is_refused_with_the_config_entry(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r'set "optimizer": \{"type": "DSMuon"'):
        DSMuon(nn.Linear(4, 4).parameters(), **arguments)  # type: ignore[arg-type]
