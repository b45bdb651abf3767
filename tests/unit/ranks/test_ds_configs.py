"""Every config in ds_configs/ starts an engine and trains."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_muon.sample.gpt import GPT, GPTConfig
from tests.unit.support.models import full_weights, start, train_step
from tests.unit.support.ranks import run_ranks

CONFIGS = sorted((Path(__file__).parents[3] / "ds_configs").glob("*.json"))


def losses_of_repeated_steps(config: dict[str, Any]) -> list[float]:
    """Loss on the same tokens before training, and after each of three optimizer steps on them."""
    torch.manual_seed(0)
    engine = start(GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)), config)
    tokens = torch.randint(256, (config["train_micro_batch_size_per_gpu"], 17), device=engine.device)
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    losses = []
    for _ in range(3):
        with torch.no_grad():
            losses.append(engine(tokens, targets).item())
        for _ in range(config["gradient_accumulation_steps"]):
            train_step(engine, tokens, targets)
    assert engine.global_steps == 3 and engine.skipped_steps == 0
    assert all(weight.isfinite().all() for weight in full_weights(engine).values())
    return [*losses, engine(tokens, targets).item()]


@pytest.mark.ranks
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_trains(path: Path) -> None:
    for losses in run_ranks(2, losses_of_repeated_steps, json.loads(path.read_text())):
        assert losses[0] == pytest.approx(math.log(256), abs=0.1)
        assert losses[-1] < losses[0]


def test_demo_configs_differ_only_in_the_optimizer() -> None:
    names = ("dsmuon", "normuon", "adamw")
    dsmuon, normuon, adamw = (json.loads((CONFIGS[0].parent / f"demo_{name}.json").read_text()) for name in names)
    assert normuon["optimizer"]["params"].pop("variant") == "normuon"
    assert dsmuon["optimizer"]["params"].keys() == normuon["optimizer"]["params"].keys()
    assert [config.pop("optimizer")["type"] for config in (dsmuon, normuon, adamw)] == ["DSMuon", "DSMuon", "AdamW"]
    assert dsmuon == normuon == adamw
