"""DeepSpeed's own script extracts the fp32 weights of a checkpoint, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

from tests.unit.support.models import ds_config, full_weights, start, train_step
from tests.unit.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Kinds(nn.Module):
    """A tied and a frozen parameter and a buffer beside usual ones, of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.frozen, self.tall, self.wide = nn.Linear(7, 7), nn.Linear(7, 13), nn.Linear(13, 7, bias=False)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.frozen(self.embedding(tokens) * self.scale.to(self.tall.weight.dtype))
        return self.head(h + self.wide(torch.relu(self.tall(h)))).square().mean()


def train_and_save(config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """What a state dict of the whole model in fp32 has to hold."""
    torch.manual_seed(0)
    engine = start(Kinds(), config)
    for _ in range(2):
        train_step(engine, torch.arange(11, device=engine.device))
    engine.save_checkpoint(folder)
    weights = {name: t.detach().cpu().float() for name, t in engine.module.state_dict().items()}
    weights.update(full_weights(engine))
    weights["head.weight"] = weights["embedding.weight"]
    engine.destroy()
    return weights


@pytest.mark.parametrize(
    ("stage", "zero", "params"),
    [
        (1, {}, {}),
        (2, {}, {"variant": "normuon"}),
        (1, {"parameter_alignment": True}, {"no_decay_params": ["*.bias"]}),
        (2, {"round_robin_gradients": True}, {}),
    ],
)
def test_deepspeeds_script_extracts_the_fp32_weights(
    tmp_path: Path, stage: int, zero: dict[str, Any], params: dict[str, Any]
) -> None:
    config = ds_config(params, stage=stage, zero=zero, dtype="bfloat16")
    expected = run_ranks(3, train_and_save, config, str(tmp_path))[0]
    assert (tmp_path / "zero_to_fp32.py").exists()
    extracted = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    # At stage 1 DeepSpeed's checkpoints hold frozen parameters among the model's weights only, with any optimizer.
    expected = {name: weight for name, weight in expected.items() if stage == 2 or "frozen" not in name}
    assert extracted.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(extracted[name].float(), weight), name
