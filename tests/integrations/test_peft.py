"""PEFT's adapters: they come, go and change between saves, and one that is switched off in between trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.support.checkpoints import assert_same, by_name
from tests.unit.support.frameworks import tiny
from tests.unit.support.models import ds_config, full_weights, start
from tests.unit.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def train_adapters(folder: str, adapters: tuple[str, ...], load: str | None, save: str | None) -> dict[str, Any]:
    """Steps of the last of these adapters and PEFT's default one, after a load; what was said if it was refused."""
    engine = start(tiny(lora=True, adapters=adapters), ds_config())
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
    engine = start(tiny(lora=True), ds_config())
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
    expected = run_ranks(2, train_beside_a_reference, "itself")[0]
    assert_same(run_ranks(2, train_beside_a_reference, reference)[0], expected)
