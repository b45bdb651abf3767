"""Hugging Face's Trainer and Accelerate save at one number of ranks and resume at another, with LoRA as well."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.unit.ranks.test_any_size import by_name
from tests.unit.ranks.test_checkpoint import assert_same
from tests.unit.support.frameworks import forget_accelerate
from tests.unit.support.models import ds_config, full_weights, start
from tests.unit.support.ranks import DEVICE, run_ranks

pytest.importorskip("transformers", reason="needs transformers: pip install '.[integrations]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[integrations]'")

pytestmark = pytest.mark.ranks

# Of all ranks together: 1, 2 and 3 divide it.
BATCH = 12
STEPS = 6


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 15), nn.Linear(15, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.second(torch.relu(self.first(x))) - x).square().mean()}


def model_of(kind: str, *adapters: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = Tiny()
    if kind == "LoRA":
        import peft

        settings = peft.LoraConfig(r=4, target_modules=["first", "second"], init_lora_weights=False)
        model = peft.get_peft_model(model, settings)
        for adapter in adapters:
            model.add_adapter(adapter, settings)
            model.set_adapter(adapter)
    return model


def goes_on(resumed: dict[str, Any], stayed: dict[str, Any], *, of_losses: bool = True) -> None:
    """Assert that each step had the samples of the run that stayed; only the order of their sums is another."""
    if of_losses:
        assert max(resumed["losses"]) == max(stayed["losses"])
        for step, loss in resumed["losses"].items():
            assert loss == pytest.approx(stayed["losses"][step], rel=1e-4), step
    for name, weight in stayed["end"]["weight"].items():
        torch.testing.assert_close(resumed["end"]["weight"][name], weight, rtol=1e-3, atol=1e-4)
    assert resumed["end"]["rates"] == stayed["end"]["rates"]


# ---- Trainer --------------------------------------------------------------------------------------------------------


def train_by_trainer(kind: str, folder: str, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    """Losses by step, what the run is at the end, and what it was when it began or last saved."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    seen: dict[str, Any] = {}

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["began"] = by_name(trainer.model_wrapped)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen[state.global_step] = by_name(trainer.model_wrapped)

    config = ds_config(
        {"lr": "auto", "muon_lr": 0.02, "adam_lr": None, "weight_decay": 0.1},
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
    )
    del config["optimizer"]["params"]["adam_lr"]
    try:
        with mock.patch.dict(os.environ):
            arguments = TrainingArguments(
                output_dir=folder, max_steps=STEPS, save_steps=STEPS // 2, learning_rate=1e-3, weight_decay=0.1,
                per_device_train_batch_size=BATCH // dist.get_world_size(), logging_steps=1, deepspeed=config,
                report_to=[], use_cpu=DEVICE == "cpu", disable_tqdm=True, **settings,
            )  # fmt: skip
            data = [{"x": torch.randn(8, generator=torch.Generator().manual_seed(i))} for i in range(4 * BATCH)]
            trainer = Trainer(
                model=model_of(kind), args=arguments, train_dataset=data, eval_dataset=data[:6], callbacks=[Look()]
            )
            trainer.train(resume_from_checkpoint=resume)
            history = trainer.state.log_history
            losses = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
            best = trainer.state.best_model_checkpoint
            return {**seen, "losses": losses, "end": by_name(trainer.model_wrapped), "best": best}
    finally:
        forget_accelerate()


@pytest.mark.parametrize("kind", ["whole", "LoRA"])
def test_trainer_resumes_at_another_number_of_ranks(tmp_path: Path, kind: str) -> None:
    if kind == "LoRA":
        pytest.importorskip("peft", reason="needs peft: pip install '.[integrations]'")
    stayed = run_ranks(2, train_by_trainer, kind, str(tmp_path))[0]
    for ranks in (1, 3):
        folder = str(tmp_path / f"checkpoint-{STEPS // 2}")
        for rank, resumed in enumerate(run_ranks(ranks, train_by_trainer, kind, f"{tmp_path}/{ranks}", folder)):
            assert_same(resumed["began"], stayed[STEPS // 2])
            goes_on(resumed, stayed, of_losses=rank == 0)


@pytest.mark.parametrize("kind", ["whole", "LoRA"])
def test_trainer_loads_the_best_model_at_the_end(tmp_path: Path, kind: str) -> None:
    # The largest loss is called best, so that the first checkpoint is, which the run has left behind.
    settings = {
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "eval_strategy": "steps",
        "label_names": ["x"],
    }
    best = {"load_best_model_at_end": True, "eval_steps": STEPS // 2, **settings}
    for found in run_ranks(2, functools.partial(train_by_trainer, **best), kind, str(tmp_path)):
        assert found["best"] == str(tmp_path / f"checkpoint-{STEPS // 2}")
        assert_same(found["end"], found[STEPS // 2])


@pytest.mark.parametrize("kind", ["whole", "LoRA"])
def test_trainer_saves_the_model_only(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file

    train = functools.partial(train_by_trainer, save_only_model=True)
    found = run_ranks(2, train, kind, str(tmp_path))[0]
    for step in (STEPS // 2, STEPS):
        folder = tmp_path / f"checkpoint-{step}"
        assert not [*folder.glob("global_step*")]
        saved = load_file(folder / ("model.safetensors" if kind == "whole" else "adapter_model.safetensors"))
        model = {name.replace(".default", ""): weight for name, weight in found[step]["model"].items()}
        assert saved and (kind == "LoRA" or saved.keys() == model.keys())
        for name, weight in saved.items():
            assert torch.equal(weight, model[name]), name


# ---- Accelerate -----------------------------------------------------------------------------------------------------


def train_by_accelerate(folder: str, load: bool) -> dict[str, Any]:
    """Losses of steps of two micro-batches each, and what the run is when it has saved, or loaded, and at the end."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

    schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    found: dict[str, Any] = {}
    losses = {}
    try:
        with mock.patch.dict(os.environ):
            if DEVICE == "cpu":
                # Accelerate would take each rank for the only one.
                PartialState(cpu=True)
            plugin = DeepSpeedPlugin(hf_ds_config=ds_config({"weight_decay": 0.1}, gradient_accumulation_steps=2))
            accelerator = Accelerator(deepspeed_plugin=plugin)
            model = model_of("whole")
            optimizer = DummyOptim(model.parameters())
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
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses[micro_step] = float(accelerator.gather(loss.detach()[None]).mean())
                if micro_step == STEPS - 1:
                    accelerator.save_state(folder)
                    found["saved"] = by_name(engine)
            return {**found, "losses": losses, "end": by_name(engine)}
    finally:
        forget_accelerate()


def test_accelerate_resumes_at_another_number_of_ranks(tmp_path: Path) -> None:
    stayed = run_ranks(2, train_by_accelerate, str(tmp_path), False)[0]
    assert stayed["end"]["counters"] == [STEPS, 0]
    for ranks in (1, 3):
        for resumed in run_ranks(ranks, train_by_accelerate, str(tmp_path), True):
            assert_same(resumed["loaded"], stayed["saved"])
            goes_on(resumed, stayed)


# ---- adapters -------------------------------------------------------------------------------------------------------


def train_adapters(folder: str, adapters: tuple[str, ...], load: str | None, save: str | None) -> dict[str, Any]:
    """Steps of the last of these adapters and PEFT's default one, after a load; what was said if it was refused."""
    engine = start(model_of("LoRA", *adapters), ds_config())
    before, said = by_name(engine), ""
    if load is not None:
        try:
            engine.load_checkpoint(folder, tag=load, load_module_strict=False)
        except (ValueError, RuntimeError) as error:
            said = str(error)
            assert_same(by_name(engine), before)
            engine.load_checkpoint(folder, tag=load, load_module_strict=False, load_module_only=True)
    loaded = by_name(engine)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to(engine.device)
    for _ in range(2):
        engine.backward(engine(batch)["loss"])
        engine.step()
    if save is not None:
        engine.save_checkpoint(folder, tag=save, exclude_frozen_parameters=True)
    found = {"said": said, "loaded": loaded, "end": by_name(engine)}
    engine.destroy()
    return found


def test_adapters_come_and_go_between_saves(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install '.[integrations]'")
    first = run_ranks(2, train_adapters, str(tmp_path), (), None, "first")[0]
    # Another adapter is trained now, and the first one stays as it was saved.
    second = run_ranks(2, train_adapters, str(tmp_path), ("more",), "first", "second")[0]
    assert "lora_A.more.weight' and 3 more parameters are trained here, but not in the run" in second["said"]
    assert "load_module_only=True" in second["said"] and not any(
        map(torch.any, second["loaded"]["momentum_buffer"].values())
    )
    for name, weight in first["end"]["model"].items():
        assert torch.equal(second["loaded"]["model"][name], weight), name
        assert torch.equal(second["end"]["model"][name], weight), name
    for name, weight in second["loaded"]["weight"].items():
        assert ".more." in name and not torch.equal(second["end"]["weight"][name], weight), name
    for resumed in run_ranks(3, train_adapters, str(tmp_path), ("more",), "second", None):
        assert not resumed["said"]
        assert_same(
            {key: value for key, value in resumed["loaded"].items() if key != "model"},
            {key: value for key, value in second["end"].items() if key != "model"},
        )


def train_beside_a_reference(reference: str) -> dict[str, Tensor]:
    """Steps of an adapter, each with a look at what the model says without it, as preference training takes."""
    engine = start(model_of("LoRA"), ds_config())
    model = engine.module
    if reference == "another adapter":
        model.add_adapter("reference", model.peft_config["default"])
        model.to(engine.device)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to(engine.device)
    for _ in range(2):
        loss = engine(batch)["loss"]
        with torch.no_grad():
            if reference == "none":
                with model.disable_adapter():
                    model(batch)
            elif reference == "another adapter":
                model.set_adapter("reference")
                model(batch)
                model.set_adapter("default")
        engine.backward(loss)
        engine.step()
    weights = full_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("reference", ["none", "another adapter"])
def test_an_adapter_that_is_switched_off_in_between_trains_on(reference: str) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install '.[integrations]'")
    expected = run_ranks(2, train_beside_a_reference, "itself")[0]
    assert_same(run_ranks(2, train_beside_a_reference, reference)[0], expected)
