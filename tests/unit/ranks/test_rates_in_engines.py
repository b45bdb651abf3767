"""Rates in engines, under the schedulers that DeepSpeed and scripts build."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

from tests.unit.support.models import Block, ds_config, start, train_step
from tests.unit.support.ranks import RankFailure, run_ranks
from tests.unit.support.rates import ADAM, MUON, Other

# ---- engines ---------------------------------------------------------------------------------------------------------

# Of the engine: sections of the config, or functions of the optimizer; with the rates after two steps.
STARTED: dict[str, tuple[Any, list[float]]] = {
    "DeepSpeed's, by config": (
        {"type": "WarmupLR", "params": {"warmup_max_lr": MUON, "warmup_num_steps": 2, "warmup_type": "linear"}},
        [MUON / 2, ADAM / 2],
    ),
    "DeepSpeed's, by a function": (
        lambda o: lr_schedules.WarmupLR(o, warmup_max_lr=MUON, warmup_num_steps=2, warmup_type="linear"),
        [MUON / 2, ADAM / 2],
    ),
    "OneCycle by config": (
        {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": MUON, "cycle_first_step_size": 2}},
        [MUON, ADAM],
    ),
    "torch's, by config": ({"type": "ExponentialLR", "params": {"gamma": 0.5}}, [MUON / 4, ADAM / 4]),
    "torch's, by a function": (
        lambda o: torch_schedulers.OneCycleLR(o, MUON, total_steps=5, pct_start=0.6, anneal_strategy="linear"),
        [MUON, ADAM],
    ),
}


def drive(folder: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Four steps of an engine per scheduler, with the rates; and the same of one that is resumed after two."""
    found = {}
    for name in STARTED:
        scheduler = sections.get(name)
        courses = []
        for resumed in (False, True):
            config = ds_config({"lr": MUON, "adam_lr": ADAM}, scheduler=scheduler)
            given = copy.deepcopy(config)
            kwargs = {} if scheduler else {"lr_scheduler": STARTED[name][0]}
            torch.manual_seed(0)
            engine = start(Block(), config, **kwargs)
            assert config == given
            if resumed:
                engine.load_checkpoint(folder, name)
            rates = [engine.get_lr()]
            for step in range(2 if resumed else 4):
                generator = torch.Generator().manual_seed(step + 2 * resumed)
                train_step(engine, *torch.randint(40, (2, 1, 6), generator=generator).to(engine.device))
                assert engine.get_lr() == engine.lr_scheduler.get_last_lr()
                rates.append(engine.get_lr())
                if step == 1 and not resumed:
                    engine.save_checkpoint(folder, name)
            weights = [p.detach().clone() for p in engine.module.parameters()]
            courses.append((rates, weights, [group.get("momentum") for group in engine.optimizer.param_groups]))
        (whole, weights, momenta), (second, resumed_weights, resumed_momenta) = courses
        same = all(map(torch.equal, weights, resumed_weights)) and momenta == resumed_momenta
        found[name] = (whole[2], same and second == whole[2:])
    return found


@pytest.mark.ranks
def test_engines_keep_the_ratio_and_resume_bit_for_bit(tmp_path: Path) -> None:
    sections = {name: section for name, (section, _) in STARTED.items() if isinstance(section, dict)}
    for found in run_ranks(2, drive, str(tmp_path), sections):
        assert {name: resumed for name, (_, resumed) in found.items()} == dict.fromkeys(STARTED, True)
        for name, (rates, _) in found.items():
            assert rates == pytest.approx(STARTED[name][1], rel=1e-12), name


def start_with(kind: str) -> None:
    params = {"muon_lr": MUON, "adam_lr": ADAM}
    section = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}
    scheduler: Any = None
    if kind == "another optimizer":
        scheduler = torch_schedulers.StepLR(Other([nn.Parameter(torch.zeros(1))]), 1)
    elif kind == "one rank fails":
        scheduler = lambda o: torch_schedulers.LambdaLR(o, [lambda step: 1.0] * (2 + torch.distributed.get_rank()))  # noqa: E731
    elif kind == "other rates":
        scheduler = lambda o: torch_schedulers.LambdaLR(o, lambda step: 1.0 / (1 + torch.distributed.get_rank()))  # noqa: E731
    config = ds_config(scheduler=None if scheduler else section)
    config["optimizer"]["params"] = params
    start(Block(), config, lr_scheduler=scheduler)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("a number for two rates", "warmup_max_lr = 0.001 is one number for two rates"),
        ("another optimizer", "lr_scheduler = a StepLR of another optimizer, a Other"),
        ("one rank fails", "lr_lambda has 3 entries"),
        ("other rates", "muon.lr is 0.02 on rank 0, 0.01 on rank 1"),
    ],
)
def test_a_scheduler_is_refused_on_every_rank(kind: str, problem: str) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, start_with, kind)
    assert len(caught.value.errors) == 2 and all(problem in error for error in caught.value.errors.values())
