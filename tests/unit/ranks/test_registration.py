"""Registration with DeepSpeed: importing is enough, twice does nothing, others' engines are left alone."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from torch import nn

import ds_muon
from ds_muon import deepspeed_parts, registration, zero, zero_base, zero_plan
from tests.unit.support.models import Block, PrescribedGradients, ds_config, start
from tests.unit.support.ranks import DEVICE, run_ranks


def test_importing_registers_in_either_order() -> None:
    """Here after DeepSpeed, as in every rank of these tests; before it, in the next."""
    is_supported = deepspeed_engine.DeepSpeedEngine._is_supported_optimizer
    assert is_supported(None, "dsMUON") and not is_supported(None, "dsmuo")


def test_importing_before_deepspeed_leaves_the_commands_modules_alone() -> None:
    code = "import sys, ds_muon; print(*sys.modules); from deepspeed.runtime.engine import DeepSpeedEngine as E; "
    code += "assert E._is_supported_optimizer(None, 'dsMUON') and not E._is_supported_optimizer(None, 'dsmuo')"
    run = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    commands = ("cli", "plan_cost", "bench", "verify.report", "replay")
    assert {f"ds_muon.{name}" for name in commands}.isdisjoint(run.stdout.split())


def test_registering_twice_wraps_once() -> None:
    before = {name: getattr(deepspeed_engine.DeepSpeedEngine, name) for name in deepspeed_parts.ENGINE_METHODS}
    ds_muon.register()
    assert before == {name: getattr(deepspeed_engine.DeepSpeedEngine, name) for name in before}


def test_a_deepspeed_without_the_parts_is_refused_by_name() -> None:
    with (
        mock.patch.object(deepspeed_parts, "ZERO_ATTRIBUTES", ("round_robin_bit16_offsets", "gone")),
        pytest.raises(ImportError, match=r"DeepSpeedZeroOptimizer\.gone.*Install deepspeed 0\.19\.8"),
    ):
        deepspeed_parts.check_parts()


def test_every_part_that_the_zero_optimizer_takes_from_deepspeeds_is_looked_for() -> None:
    tree = ast.parse("".join(map(inspect.getsource, (zero, zero_base, zero_plan))))
    used: dict[str, set[str]] = {"self": set(), "zero": set(), "deepspeed_zero": set()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in used:
            used[node.value.id].add(node.attr)
    base = deepspeed_zero.DeepSpeedZeroOptimizer
    theirs = (used["self"] | used["zero"]) & {*dir(base), *base.__init__.__code__.co_names}
    assert theirs <= {*deepspeed_parts.ZERO_METHODS, *deepspeed_parts.ZERO_ATTRIBUTES}
    assert used["deepspeed_zero"] <= set(dict(deepspeed_parts.MODULE_NAMES)[deepspeed_zero])


def test_the_kernels_of_a_first_step_are_compiled_when_the_engine_is_built() -> None:
    by_backend, by_passes = run_ranks(1, compiled_ahead)[0]
    backend, device, dtype = ("torch", "cpu", torch.float32) if DEVICE == "cpu" else ("triton", "cuda:0", torch.float16)
    assert by_backend == [(backend, {(8, 8), (6, 16)}, torch.device(device), dtype)]
    assert by_passes == [torch.device(device)]


def compiled_ahead() -> tuple[list[Any], list[Any]]:
    with (
        mock.patch.object(registration.backends, "compile_ahead") as by_backend,
        mock.patch.object(registration.passes, "compile_ahead") as by_passes,
    ):
        start(PrescribedGradients([(8, 8), (6, 16), (8, 8)]), ds_config())
    return [call.args for call in by_backend.call_args_list], [call.args[0] for call in by_passes.call_args_list]


def test_a_zero_optimizer_that_lays_out_otherwise_is_refused() -> None:
    """The plan is compared with ZeRO's own layout when the engine is built."""
    assert "does not lay out" in str(run_ranks(1, shifted_layout)[0])


def shifted_layout() -> str:
    def shifted(*args: Any, **kwargs: Any) -> Any:
        layout = ds_muon.flat_layout(*args, **kwargs)
        return ds_muon.FlatLayout(layout.order, tuple(o + 2 for o in layout.offsets), layout.partition_size)

    with mock.patch.object(zero_plan, "flat_layout", shifted):
        try:
            start(PrescribedGradients([(8, 8)]), ds_config())
        except RuntimeError as error:
            return str(error)
    return "not refused"


def optimizer_types(config: dict[str, Any], optimizer: dict[str, Any]) -> tuple[str, str]:
    engine = start(Block(), {**config, "optimizer": optimizer})
    return type(engine.optimizer).__name__, type(engine.optimizer.optimizer).__name__


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["DSMuon", "dsmuon", "DSMUON"])
def test_the_type_matches_in_any_case(name: str) -> None:
    found = run_ranks(2, optimizer_types, ds_config(), {"type": name, "params": {}})
    assert found == [("MuonZeroOptimizer", "DSMuon")] * 2


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "AdamW", "params": {"torch_adam": True}}, "AdamW"),
        ({"type": "Muon", "params": {"lr": 0.02, "torch_adam": True}}, "MuonWithAuxAdam"),
        ({"type": "SGD", "params": {"lr": 0.02}}, "SGD"),
    ],
)
def test_other_optimizers_are_left_to_deepspeed(optimizer: dict[str, Any], expected: str) -> None:
    config = ds_config(zero_allow_untested_optimizer=True)
    assert run_ranks(2, optimizer_types, config, optimizer) == [("DeepSpeedZeroOptimizer", expected)] * 2
    assert deepspeed_engine.DeepSpeedZeroOptimizer is deepspeed_zero.DeepSpeedZeroOptimizer


class Experts(nn.Module):
    """Matrices of which Muon can take an eighth."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8, bias=False)
        self.experts = nn.Module()
        self.experts.w1 = nn.Parameter(torch.zeros(7 * 8, 8))


def shown(model: type[nn.Module], config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What a rank prints and what it warns of at start, with all of DeepSpeed's lines below a warning hidden."""
    printed = io.StringIO()
    warnings: list[str] = []

    def log(line: str, level: int = logging.WARNING) -> None:
        if level == logging.WARNING:
            warnings.append(line)

    with contextlib.redirect_stdout(printed), mock.patch.object(registration, "log", log):
        engine = start(model(), config)
    assert engine.optimizer.optimizer.routing.table().count("\n") >= 2
    return [line for line in printed.getvalue().splitlines() if line.startswith("[ds_muon]")], warnings


def shown_beside_accelerate(ranks_that_it_knows: int) -> list[str]:
    state = SimpleNamespace(PartialState=SimpleNamespace(_shared_state={"num_processes": ranks_that_it_knows}))
    with mock.patch.dict(sys.modules, {"accelerate.state": state}):  # type: ignore[dict-item]
        return shown(Block, ds_config())[1]


@pytest.mark.ranks
def test_ranks_that_accelerate_does_not_know_of_are_warned_about_because_all_get_the_same_data() -> None:
    warned, known = ([*run_ranks(2, shown_beside_accelerate, known)[0]] for known in (1, 2))
    assert [line for line in warned if line not in known] == [line for line in warned if "the same data" in line] != []


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("params", "top", "expected"),
    [
        ({"lr": 0.02}, None, ("0.02", "adam_lr")),
        # What Hugging Face's Trainer fills in by default, and a schedule that goes beyond what is configured.
        ({"lr": 5e-5}, None, ("5e-05", "match_rms_adamw", "muon_lr")),
        ({"lr": 0.01, "muon_lr": 0.02, "adam_lr": 3e-4}, 0.25, ("0.0075", "adam_lr")),
        ({"lr": 0.01, "muon_lr": 0.02, "adam_lr": 3e-4}, 2.5e-5, ("5e-05", "match_rms_adamw", "muon_lr")),
    ],
)
def test_rank_0_shows_a_line_per_half_at_any_log_level_and_warns_of_a_rate_that_is_far_off(
    params: dict[str, float], top: float | None, expected: tuple[str, ...]
) -> None:
    config = ds_config(scheduler=top and {"type": "WarmupLR", "params": {"warmup_max_lr": top}})
    config["optimizer"]["params"] = params
    (lines, warnings), others = run_ranks(2, shown, Block, config)
    assert lines == [
        "[ds_muon] Muon: 3 matrices, 11,520 elements (73.8 %)",
        "[ds_muon] AdamW: 6 tensors, 4,080 elements (26.2 %)",
    ]
    assert len(warnings) == 1 and all(part in warnings[0] for part in expected)
    assert others == ([], [])


@pytest.mark.ranks
def test_rank_0_says_that_the_optimizers_state_is_in_the_hosts_memory() -> None:
    config = ds_config()
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    (lines, _), (others, _) = run_ranks(2, shown, Block, config)
    assert lines[2:] == ["[ds_muon] CPU offload: the optimizer's state is in the host's memory"] and others == []


@pytest.mark.ranks
def test_rank_0_warns_of_a_model_that_muon_hardly_trains() -> None:
    (_, warnings), (_, others) = run_ranks(2, shown, Experts, ds_config())
    assert any("only 12.5 %" in line and "experts.w1 (56 x 8, experts in one matrix)" in line for line in warnings)
    assert not others


def matrices_of_an_engine() -> dict[str, int]:
    config = ds_config()
    config["optimizer"]["params"]["muon_params"] = ["experts.w1"]
    config["optimizer"]["params"]["muon_blocks"] = {"experts.w1": {"split": 7}}
    pieces = start(Experts(), config).optimizer.optimizer.routing.pieces()
    return {name: len(made) for name, made in pieces.items()}


def test_an_engine_splits_its_tensors_as_muon_blocks_says() -> None:
    assert run_ranks(1, matrices_of_an_engine) == [{"body.weight": 1, "experts.w1": 7}]


def routed_of_some(names: list[str]) -> dict[str, str]:
    model = Block()
    given = [p for name, p in model.named_parameters() if name in names]
    engine = start(model, ds_config(), model_parameters=given)
    return {r.name: r.reason for r in engine.optimizer.optimizer.routing.routes if r.half == "none"}


def test_parameters_that_are_not_given_are_shown_as_not_trained() -> None:
    (untrained,) = run_ranks(1, routed_of_some, ["square.weight", "square.bias"])
    assert len(untrained) == 7 and set(untrained.values()) == {"not given to deepspeed.initialize"}
