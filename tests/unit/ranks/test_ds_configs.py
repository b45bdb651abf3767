"""Every config in ds_configs/ starts an engine and trains; `ds-muon config` prints it, and the doctor finds nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_muon import cli
from ds_muon.config import AUTO_IS_A_CHOICE
from ds_muon.config_command import SUMMARIES, folder
from ds_muon.doctor.examine import examine
from ds_muon.doctor.trainer import fill
from ds_muon.sample.gpt import GPT, GPTConfig
from tests.unit.support.models import full_weights, start, train_step
from tests.unit.support.ranks import run_ranks

CONFIGS = sorted((Path(__file__).parents[3] / "ds_configs").glob("*.json"))


class Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it, named as PEFT names it."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return out


class Experts(nn.Module):
    """Stacks as transformers has them, without a router: every expert sees every token."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.02 * torch.randn(experts, 4 * width, width))
        self.down_proj = nn.Parameter(0.02 * torch.randn(experts, width, 2 * width))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("btd,ehd->ebth", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("ebth,edh->btd", nn.functional.silu(gate) * up, self.down_proj)


def model_for(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16))
    block: Any = model.blocks[0]
    if name == "lora":
        model.requires_grad_(False)
        for layers in (block.attn, block.mlp):
            for key, layer in list(layers.named_children()):
                setattr(layers, key, Adapted(layer))
    if name == "moe":
        block.mlp = nn.Sequential()
        block.mlp.add_module("experts", Experts(3, 32))
    return model


def losses_of_repeated_steps(name: str, config: dict[str, Any]) -> tuple[list[float], dict[str, list[tuple[int, int]]]]:
    """Loss on the same tokens before training, and after each of three optimizer steps on them; Muon's matrices."""
    engine = start(model_for(name), config)
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
    routing = getattr(engine.optimizer.optimizer, "routing", None)  # AdamW has none
    pieces = {} if routing is None else routing.pieces()
    shapes = {weight: [shape for piece in made for shape in piece.shapes()] for weight, made in pieces.items()}
    return [*losses, engine(tokens, targets).item()], shapes


def as_trained(path: Path) -> dict[str, Any]:
    """With what Trainer fills in, and where the rate is a fine-tuner's, one that shows in three steps in bf16."""
    config = fill(json.loads(path.read_text()), AUTO_IS_A_CHOICE).config
    config.pop("train_batch_size", None)
    if path.stem in ("hf_auto", "lora"):
        config["optimizer"]["params"]["lr"] = 0.01
    return config


@pytest.mark.ranks
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_trains(path: Path) -> None:
    for losses, shapes in run_ranks(2, losses_of_repeated_steps, path.stem, as_trained(path)):
        assert losses[0] == pytest.approx(math.log(256), abs=0.1)
        assert losses[-1] < losses[0]
        if path.stem == "lora":
            assert set(shapes) == {name for name in shapes if "lora_" in name} and len(shapes) == 12
        if path.stem == "moe":
            assert shapes["blocks.0.mlp.experts.gate_up_proj"] == [(64, 32)] * 6
            assert shapes["blocks.0.mlp.experts.down_proj"] == [(32, 64)] * 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_doctor_finds_nothing_in_a_config(path: Path) -> None:
    found = {finding.kind for finding in examine(json.loads(path.read_text()))} - {"note"}
    assert found == ({"refused"} if path.stem == "demo_adamw" else set())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_printed_as_it_is(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", path.stem]) == 0
    assert capsys.readouterr().out == path.read_text()


def test_every_config_is_listed_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines) == [path.stem for path in CONFIGS]
    assert list(SUMMARIES) == [line.split()[0] for line in lines] and all(len(line.split()) > 3 for line in lines)


def test_the_wheel_has_the_configs_where_they_are_looked_for() -> None:
    tomllib = pytest.importorskip("tomllib")
    root = Path(__file__).parents[3]
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"ds_configs": "ds_muon/ds_configs"}
    assert folder() == root / "ds_configs"


def test_the_config_to_switch_by_has_keys_of_deepspeeds_muon_only() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    config = json.loads((folder() / "from_deepspeed_muon.json").read_text())
    keys = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS, "adam_lr"}
    assert set(config["optimizer"]["params"]) == keys


def test_demo_configs_differ_only_in_the_optimizer() -> None:
    names = ("dsmuon", "normuon", "adamw")
    dsmuon, normuon, adamw = (json.loads((CONFIGS[0].parent / f"demo_{name}.json").read_text()) for name in names)
    assert normuon["optimizer"]["params"].pop("variant") == "normuon"
    assert dsmuon["optimizer"]["params"].keys() == normuon["optimizer"]["params"].keys()
    assert [config.pop("optimizer")["type"] for config in (dsmuon, normuon, adamw)] == ["DSMuon", "DSMuon", "AdamW"]
    assert dsmuon == normuon == adamw
