"""A checkpoint of another optimizer gives what there is a use for; what cannot be converted is refused."""

from __future__ import annotations

import errno
import os
import re
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim import lr_scheduler

from ds_muon.checkpoints.shards import layout
from ds_muon.cli import main
from tests.unit.support.cases import pairwise
from tests.unit.support.checkpoints import (
    ADAMWS,
    CONFIG,
    LAYOUTS,
    MUONS,
    SCHEDULER,
    SHAPES,
    UNIVERSAL,
    Code,
    Layers,
    assert_same,
    by_name,
    converted,
    cut_short,
    forget,
    save_layers,
    weights,
)
from tests.unit.support.models import (
    PrescribedGradients,
    assembled,
    ds_config,
    full_weights,
    start,
    start_groups,
    train_step,
)
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import exact_gradients

pytestmark = pytest.mark.ranks
# Of models that other optimizers have trained: with a matrix in place of the stack, which they do not take apart.
OTHERS = [(7, 13) if len(shape) == 3 else shape for shape in SHAPES]


def config_of(optimizer: dict[str, Any] | None, dtype: str, stage: int, **top: Any) -> dict[str, Any]:
    replaced = {} if optimizer is None else {"optimizer": optimizer}
    return ds_config(dtype=dtype, stage=stage, scheduler=SCHEDULER, **replaced, **top)


def train_another(config: dict[str, Any], groups: int, folder: str, steps: int = 3) -> dict[str, Any]:
    """Steps with another optimizer; its fp32 weights, and moments of what has any."""
    engine = start_groups(OTHERS, config, groups)
    for step in range(steps):
        train_step(engine, exact_gradients(OTHERS, step, engine.device))
    engine.save_checkpoint(folder)
    zero = engine.optimizer
    flats = zero.single_partition_of_fp32_groups
    states = [zero.optimizer.state[flat] for flat in flats]
    found = {"weight": full_weights(engine)}
    for key in ("exp_avg", "exp_avg_sq"):
        has = {name for names, state in zip(layout(zero), states, strict=True) for name, _ in names if key in state}
        held = [state.get(key, flat) for state, flat in zip(states, flats, strict=True)]
        found[key] = {name: tensor for name, tensor in assembled(engine, held).items() if name in has}
    engine.destroy()
    return found


def load_another(config: dict[str, Any], groups: int, folder: str) -> tuple[dict[str, Any], list[str], Any]:
    """What a run with DSMuon has loaded over steps of its own, what it says, and that it goes on."""
    engine = start_groups(OTHERS, config, groups)
    train_step(engine, exact_gradients(OTHERS, 9, engine.device))
    lines: list[str] = []
    with mock.patch("ds_muon.checkpoints.universal.say", lines.append):
        engine.load_checkpoint(folder)
    found = by_name(engine)
    train_step(engine, exact_gradients(OTHERS, 3, engine.device))
    finite = all(bool(p.isfinite().all()) for p in engine.module.parameters())
    engine.destroy()
    return found, lines, finite


ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}
FREE = {"zero_allow_untested_optimizer": True}
MUON = {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "torch_adam": True}}


@pairwise(
    of_all=2,
    then=[1, 2, 3],
    now=[1, 2, 3],
    laid_out=[*LAYOUTS],
    dtype=["float32", "bfloat16"],
    stages=[(1, 2), (2, 1)],
    groups=[1, 2],
)
def test_adamws_moments_go_to_what_stays_in_adamw(
    tmp_path: Path, then: int, now: int, laid_out: str, dtype: str, stages: tuple[int, int], groups: int
) -> None:
    then_config = config_of(ADAMW, dtype, stages[0], zero=LAYOUTS[laid_out])
    before = run_ranks(then, train_another, then_config, groups, str(tmp_path / "run"))[0]
    folder = converted("migrate", tmp_path / "run", tmp_path / "out")
    config = config_of(None, dtype, stages[1], **(UNIVERSAL if groups == 1 else {}))
    for loaded, lines, finite in run_ranks(now, load_another, config, 3 - groups, folder):
        assert_same(loaded["weight"], before["weight"])
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same(loaded[key], {name: before[key][name] for name in ADAMWS})
        assert all(loaded["step"][name] == 3 for name in ADAMWS)
        assert not any(bool(momentum.any()) for momentum in loaded["momentum_buffer"].values())
        # Warm-up over three steps has just ended: rates are those of this run, not AdamW's 1e-3 and 0.02.
        assert {name: rates["lr"] for name, rates in loaded["rates"].items()} == {
            name: pytest.approx(0.02 if name in MUONS else 1e-3) for name in (*MUONS, *ADAMWS)
        }
        assert loaded["counters"] == [3, 0] and finite
        (line,) = lines
        assert "from the checkpoint of AdamW this run takes over the moments of 2 parameters; from zero" in line
        assert "from zero start the momentum of 6 parameters (" in line


SCALES = {"static": {"loss_scale": 8.0}, "dynamic": {"initial_scale_power": 4}}


@pytest.mark.parametrize(
    ("then", "now", "dtype", "stage", "scale"),
    [
        (1, 2, "float32", 2, None),
        (3, 1, "float32", 1, None),
        (2, 3, "bfloat16", 2, None),
        (3, 2, "float16", 2, "static"),
        (2, 2, "float16", 2, "dynamic"),
        (3, 2, "bfloat16", 2, "offload"),
    ],
)
def test_the_momentum_of_deepspeeds_muon_is_taken_over_where_it_is_the_same_quantity(
    tmp_path: Path, then: int, now: int, dtype: str, stage: int, scale: str | None
) -> None:
    fp16 = {"fp16": {"enabled": True, **SCALES[scale]}} if scale in SCALES else {}
    offload = {"zero": {"offload_optimizer": {"device": "cpu"}}} if scale == "offload" else {}
    before = run_ranks(then, train_another, config_of(MUON, dtype, stage, **fp16, **offload), 1, str(tmp_path / "run"))[
        0
    ]
    folder = converted("migrate", tmp_path / "run", tmp_path / "out")
    expected = averages(0.9, 3)
    for loaded, lines, finite in run_ranks(now, load_another, config_of(None, dtype, 2, **fp16), 1, folder):
        assert_same(loaded["weight"], before["weight"])
        # The column p7 is Muon's for DeepSpeed, and AdamW's here.
        assert_same(loaded["exp_avg"], {**before["exp_avg"], "p7": torch.zeros(5, 1)})
        for name in MUONS:
            found = loaded["momentum_buffer"][name]
            if scale == "dynamic":
                assert not found.any()
            else:
                tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
                assert (found - expected[name]).norm() <= tolerance * expected[name].norm(), name
        taken = "the momentum of 6 parameters" + (
            f" (in {dtype}, converted to float32)" if dtype == "bfloat16" and not offload else ""
        )
        took, anew, _ = lines[0].split("; ")
        assert finite and (taken in took) is (scale != "dynamic") and "the moments of 1 parameter (p7)" in anew


def averages(momentum: float, steps: int) -> dict[str, torch.Tensor]:
    """Exponential averages of the gradients of those steps."""
    found = {name: torch.zeros(OTHERS[i]) for i, name in enumerate(MUONS)}
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randint(-64, 65, shape, generator=generator) / 1024.0 for shape in OTHERS]
        for name, gradient in zip(MUONS, gradients, strict=False):
            found[name].lerp_(gradient, 1 - momentum)
    return found


def load_layers(folder: str) -> dict[str, Any]:
    engine = start(Layers(), CONFIG)
    engine.load_checkpoint(folder)
    return by_name(engine)


def test_shards_of_an_early_version_load_at_any_size_when_migrated(tmp_path: Path) -> None:
    run_ranks(3, save_layers, str(tmp_path))
    usual = run_ranks(2, load_layers, str(tmp_path))[0]
    forget(tmp_path / "step2")
    folder = converted("migrate", tmp_path, tmp_path / "out")
    for migrated in run_ranks(2, load_layers, folder):
        assert_same(migrated, usual)


# ---- the commands ---------------------------------------------------------------------------------------------------


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "zero/a.weight/fp32.pt")


def test_what_cannot_be_converted_is_said_and_nothing_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, save_layers, str(tmp_path / "run"))
    run_ranks(1, train_another, config_of(SGD, "float32", 1, **FREE), 1, str(tmp_path / "sgd"))
    run_ranks(1, train_another, config_of(ADAMW, "float32", 1), 1, str(tmp_path / "adamw"))
    shutil.copytree(tmp_path / "run", tmp_path / "torn")
    cut_short(tmp_path / "torn/step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    shutil.copytree(tmp_path / "run", tmp_path / "two")
    of_rank_1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "two/step1" / of_rank_1, tmp_path / "two/step2" / of_rank_1)
    shutil.copytree(tmp_path / "run", tmp_path / "less")
    (tmp_path / "less/step2" / of_rank_1).unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    strangers = {
        "code": {"ds_version": Code(tmp_path / "made")},
        "own": {"loss": Decimal(1)},
        "named": {"param_shapes": [{"../../../x": torch.Size([16, 16])}]},
        "other": {"param_shapes": 1},
    }
    for name, contents in strangers.items():
        shutil.copytree(tmp_path / "run", tmp_path / name)
        torch.save({**torch.load(weights(tmp_path / name / "step2")), **contents}, weights(tmp_path / name / "step2"))
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
    (tmp_path / "elsewhere/latest").write_text("../run/step2")
    (tmp_path / "run/step2/out").mkdir()
    for command, source, out, said in (
        ("to-universal", "nowhere", "out", "is no folder"),
        ("to-universal", "empty", "out", "is no checkpoint of DeepSpeed's: there is no"),
        ("to-universal", "run", "run", "is there and is not an empty folder"),
        ("migrate", "run", "run/step2/out", "lies in the checkpoint itself"),
        ("migrate", "run", "file/out", "Not a directory"),
        ("to-universal", "torn", "out", f"{of_rank_1} cannot be read"),
        ("to-universal", "less", "out", f"{of_rank_1} is missing"),
        ("migrate", "two", "out", f"{of_rank_1} is of another save than"),
        ("migrate", "code", "out", "model_states.pt holds a posix.mkdir, and to read that may run any code"),
        ("to-universal", "own", "out", "model_states.pt holds a decimal.Decimal"),
        ("to-universal", "named", "out", "'../../../x' leads out of"),
        ("to-universal", "other", "out", "is damaged, or not of DeepSpeed: TypeError"),
        ("migrate", "elsewhere", "out", "'../run/step2' leads out of"),
        ("to-universal", "adamw", "out", "was saved by AdamW, and not by DSMuon; use ds-muon migrate"),
        ("migrate", "sgd", "out", "was saved by SGD, whose state is of no use to DSMuon"),
    ):
        assert main([command, str(tmp_path / source), str(tmp_path / out)]) == 2
        assert said in capfd.readouterr().err
        assert not (tmp_path / "out").exists() and not (tmp_path / "made").exists()
    assert main(["to-universal", "--trust", str(tmp_path / "own"), str(tmp_path / "trusted")]) == 0
    with mock.patch("torch.save", full):
        assert main(["to-universal", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "No space left on device" in capfd.readouterr().err and not (tmp_path / "out" / "latest").exists()


def test_migrate_tells_what_every_parameter_has_and_keeps_the_files_beside_the_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, train_another, config_of(MUON, "float32", 2), 1, str(tmp_path / "run"))
    (tmp_path / "run/trainer_state.json").write_text("{}")
    converted("migrate", tmp_path / "run", tmp_path / "out")
    lines = capfd.readouterr().out.splitlines()[-3:]
    assert re.match(r"state +parameters +elements", lines[0])
    assert re.match(r"momentum +7 +1,843 +what goes to Muon goes on +p", lines[1])
    assert re.match(r"moments +1 +11 +what goes to AdamW goes on.* p6$", lines[2])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "global_step3", "latest", "latest_universal", "trainer_state.json"
    ]  # fmt: skip


# ---- schedulers and trainers ----------------------------------------------------------------------------------------

SCHEDULERS = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
}


def rates_after(name: str, optimizer: dict[str, Any] | None, steps: int, load: str | None, save: str | None) -> list:
    """Rates of p0 and p7 in each of those steps, after what is loaded."""
    config = ds_config(**({} if optimizer is None else {"optimizer": optimizer}))
    model = PrescribedGradients(OTHERS)
    engine = start(model, config, lr_scheduler=SCHEDULERS[name], model_parameters=list(model.parameters()))
    if load:
        engine.load_checkpoint(load)
    rates = []
    for step in range(steps):
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
        train_step(engine, exact_gradients(OTHERS, step, engine.device))
    if save:
        engine.save_checkpoint(save)
    engine.destroy()
    return rates


@pytest.mark.parametrize("name", [*SCHEDULERS])
def test_a_schedule_goes_on_from_its_place_with_the_rates_of_this_run(tmp_path: Path, name: str) -> None:
    run_ranks(1, rates_after, name, ADAMW, 3, None, str(tmp_path / "run"))
    folder = converted("migrate", tmp_path / "run", tmp_path / "out")
    (straight,) = run_ranks(1, rates_after, name, None, 6, None, None)
    (resumed,) = run_ranks(1, rates_after, name, None, 3, folder, None)
    assert resumed == [pytest.approx(rates) for rates in straight[3:]]
