"""Lightning's Trainer and Fabric on CPU ranks: their checks for a GPU are stood in for, the rest is theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ds_muon.zero import MuonZeroOptimizer
from tests.unit.support.checkpoints import assert_same, by_name
from tests.unit.support.frameworks import BATCH, goes_on, tiny
from tests.unit.support.models import ds_config
from tests.unit.support.ranks import DEVICE, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(DEVICE != "cpu", reason="the checks for a GPU are stood in for"),
]

STEPS = 6


@contextmanager
def cpu_instead_of_cuda() -> Iterator[None]:
    """Within this context the strategy takes CPU ranks: it asks for CUDA's accelerator and for numbers of devices."""
    from lightning.fabric.accelerators import CPUAccelerator as OfFabric
    from lightning.fabric.strategies import deepspeed as fabric
    from lightning.pytorch.accelerators import CPUAccelerator as OfTrainer
    from lightning.pytorch.strategies import deepspeed as trainer

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        for module, accelerator in ((fabric, OfFabric), (trainer, OfTrainer)):
            stack.enter_context(mock.patch.object(module, "CUDAAccelerator", accelerator))
            devices = [torch.device("cpu", rank) for rank in range(dist.get_world_size())]
            stack.enter_context(mock.patch.object(accelerator, "get_parallel_devices", lambda _, found=devices: found))
        yield


def samples(step: int) -> torch.Tensor:
    """This rank's part of a step's."""
    whole = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
    return whole[dist.get_rank() :: dist.get_world_size()]


def config() -> dict[str, Any]:
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 2, "warmup_type": "linear"}
    top = {"scheduler": {"type": "WarmupDecayLR", "params": {**params, "total_num_steps": 8}}}
    return ds_config({"lr": 0.02, "adam_lr": 1e-3, "weight_decay": 0.1}, **top)


def train_by_lightning(folder: str, resume: str | None) -> dict[str, Any]:
    """Losses by step, the rates of both halves, and what the run is at the start, after three steps and at the end."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DeepSpeedStrategy

    found: dict[str, Any] = {"losses": {}, "rates": []}

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny()

        def training_step(self, _: torch.Tensor, index: int) -> torch.Tensor:
            # A loader that has been interrupted begins anew.
            loss: torch.Tensor = self.model(samples(self.global_step))["loss"]
            found["losses"][self.global_step] = float(self.all_gather(loss.detach()).mean())
            return loss

        def on_train_start(self) -> None:
            found["began"] = by_name(self.trainer.model)

        def on_train_batch_end(self, *args: Any) -> None:
            optimizer = self.trainer.optimizers[0]
            assert isinstance(optimizer, MuonZeroOptimizer)
            found["rates"].append({group["use_muon"]: group["lr"] for group in optimizer.param_groups})
            if self.global_step == STEPS // 2 and resume is None:
                self.trainer.save_checkpoint(folder)
                found["saved"] = by_name(self.trainer.model)

        def configure_optimizers(self) -> None:
            raise AssertionError("it is not called where the config has an optimizer")

    with cpu_instead_of_cuda():
        trainer = pl.Trainer(
            accelerator="cpu", devices=dist.get_world_size(), max_steps=STEPS, logger=False, barebones=False,
            strategy=DeepSpeedStrategy(config=config(), process_group_backend="gloo"),
            plugins=[TorchElasticEnvironment()], use_distributed_sampler=False, gradient_clip_val=1.0,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(torch.zeros(STEPS, 1)), ckpt_path=resume)
        found["end"] = by_name(trainer.model)
        trainer.model.destroy()
        return found


def test_lightnings_trainer_follows_the_schedule_of_the_config_and_resumes(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    stayed = run_ranks(2, train_by_lightning, folder, None)[0]
    assert [*stayed["losses"]] == [*range(STEPS)]
    assert max(rates[True] for rates in stayed["rates"]) == pytest.approx(0.02)
    for rates in stayed["rates"]:
        assert rates[True] == pytest.approx(20 * rates[False])
    for ranks in (2, 3):
        resumed = run_ranks(ranks, train_by_lightning, folder, folder)[0]
        assert_same(resumed["began"], stayed["saved"])
        goes_on(resumed, stayed)
        if ranks == 2:
            assert_same(resumed["end"], stayed["end"])


def train_by_fabric(folder: str, load: bool) -> dict[str, Any]:
    """As above, with Fabric: the config has the optimizer, and Fabric is given None for it."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DeepSpeedStrategy

    found: dict[str, Any] = {"losses": {}}
    with cpu_instead_of_cuda():
        fabric = Fabric(
            accelerator="cpu", devices=dist.get_world_size(), plugins=[TorchElasticEnvironment()],
            strategy=DeepSpeedStrategy(config=config(), process_group_backend="gloo"),
        )  # fmt: skip
        fabric.launch()
        model, optimizer, scheduler = fabric.setup(tiny(), None)
        engine = fabric.strategy.model
        assert isinstance(engine.optimizer, MuonZeroOptimizer) and scheduler is engine.lr_scheduler
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        if load:
            fabric.load(folder, state)
            found["began"] = by_name(engine)
        for step in range(engine.global_steps, STEPS):
            loss = model(samples(step))["loss"]
            fabric.backward(loss)
            # Fabric's optimizer.step() does not reach the engine, which then counts no step and moves no schedule.
            engine.step()
            found["losses"][step] = float(fabric.all_gather(loss.detach()).mean())
            if step + 1 == STEPS // 2 and not load:
                fabric.save(folder, state)
                found["saved"] = by_name(engine)
        found["end"] = by_name(engine)
        rates = {group["use_muon"]: group["lr"] for group in optimizer.param_groups}
        engine.destroy()
        return {**found, "rates": rates}


def test_fabric_takes_the_optimizer_of_the_config_and_resumes(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    stayed = run_ranks(2, train_by_fabric, folder, False)[0]
    assert stayed["end"]["counters"] == [STEPS, 0]
    # From step 2 to 8 the rates fall to zero. DeepSpeed counts from 0: it has come to step 5.
    assert stayed["rates"] == {True: pytest.approx(0.02 / 2), False: pytest.approx(1e-3 / 2)}
    for ranks in (2, 1):
        resumed = run_ranks(ranks, train_by_fabric, folder, True)[0]
        assert_same(resumed["began"], stayed["saved"])
        goes_on(resumed, stayed)
        if ranks == 2:
            assert_same(resumed["end"], stayed["end"])
