"""Accelerate: a plugin from a file, param groups, schedules by a callable, the gradients' norm, and what it saves."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.support.checkpoints import assert_same, by_name
from tests.unit.support.frameworks import BATCH, Tiny, accelerate_anew, goes_on, tiny
from tests.unit.support.models import PrescribedGradients, ds_config
from tests.unit.support.ranks import DEVICE, run_ranks

pytestmark = pytest.mark.ranks

STEPS = 6


def train(config: str, folder: str, load: bool) -> dict[str, Any]:
    """Losses of steps of two micro-batches each, and what the run is when it has saved, or loaded, and at the end."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

    schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    found: dict[str, Any] = {}
    losses = {}
    with accelerate_anew():
        if DEVICE == "cpu":
            # Accelerate would take each rank for the only one.
            PartialState(cpu=True)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = tiny()
        assert isinstance(model, Tiny)
        groups = [
            {"params": list(model.first.parameters()), "lr": 0.03},
            {"params": list(model.second.parameters()), "weight_decay": 0.0},
        ]
        optimizer = DummyOptim(groups, lr=0.02, weight_decay=0.1)
        scheduler = DummyScheduler(optimizer, lr_scheduler_callable=schedule)
        engine, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if load:
            accelerator.load_state(folder)
            found["loaded"] = by_name(engine)
        for micro_step in range(STEPS * load, 2 * STEPS):
            generator = torch.Generator().manual_seed(micro_step)
            samples = torch.randn(BATCH, 8, generator=generator)[dist.get_rank() :: dist.get_world_size()]
            with accelerator.accumulate(engine):
                loss = engine(samples.to(engine.device))["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(engine.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses[micro_step] = float(accelerator.gather(loss.detach()[None]).mean())
            if micro_step == STEPS - 1:
                accelerator.save_state(folder)
                found["saved"] = by_name(engine)
        return {**found, "losses": losses, "end": by_name(engine)}


def test_accelerate_trains_groups_from_a_file_and_resumes_at_any_number_of_ranks(tmp_path: Path) -> None:
    config = ds_config({"lr": "auto", "weight_decay": "auto", "adam_lr": 1e-3}, gradient_accumulation_steps=2)
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    stayed = run_ranks(2, train, str(file), str(tmp_path / "saved"), False)[0]
    assert stayed["end"]["counters"] == [STEPS, 0]
    # A group's own rate and decay are those of its Muon half; both are halved twice or thrice by the schedule.
    rates = stayed["end"]["rates"]
    assert rates["first.weight"]["lr"] == pytest.approx(1.5 * rates["second.weight"]["lr"])
    assert [rates[f"{name}.weight"]["weight_decay"] for name in ("first", "second")] == [0.1, 0.0]
    assert max(stayed["losses"]) == 2 * STEPS - 1
    for ranks in (2, 1, 3):
        for resumed in run_ranks(ranks, train, str(file), str(tmp_path / "saved"), True):
            assert_same(resumed["loaded"], stayed["saved"])
            goes_on(resumed, stayed)
            if ranks == 2:
                assert_same(resumed["end"], stayed["end"])


def norms_of_gradients(config: dict[str, Any]) -> list[dict[str, float | None]]:
    """Of four steps, the last one infinite: the gradients' norm by Accelerate, by the engine, and as it is."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim

    shapes = [(12, 8), (8, 12), (5,)]
    norms: list[dict[str, float | None]] = []
    with accelerate_anew():
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = PrescribedGradients(shapes)
        engine, optimizer = accelerator.prepare(model, DummyOptim(model.parameters()))
        generator = torch.Generator().manual_seed(dist.get_rank())
        for factor in (1.0, 1.0, 1.0, float("inf")):
            gradients = [factor * torch.randn(shape, generator=generator) for shape in shapes]
            accelerator.backward(engine([g.to(engine.device) for g in gradients]))
            by_accelerate = accelerator.clip_grad_norm_(engine.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            whole = torch.cat([g.flatten() for g in gradients]).to(engine.device)
            dist.all_reduce(whole)
            norms.append(
                {
                    "by Accelerate": float(by_accelerate),
                    "by the engine": engine.get_global_grad_norm().item() if factor == 1.0 else None,
                    "right": (whole / dist.get_world_size()).norm().item(),
                }
            )
    return norms


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["DSMuon", "AdamW"])
def test_accelerate_reports_the_norm_of_the_gradients_as_with_adamw(optimizer: str, dtype: str) -> None:
    config = ds_config(dtype=dtype, gradient_clipping=0.5)
    if optimizer == "AdamW":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    for norms in run_ranks(2, norms_of_gradients, config):
        for norm in norms[:-1]:
            assert norm["by Accelerate"] == norm["by the engine"]
            assert norm["by the engine"] == pytest.approx(norm["right"], rel=1e-6 if dtype == "float32" else 1e-2)
        assert norms[-1]["by Accelerate"] == float("inf")
