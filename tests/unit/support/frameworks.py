"""Models and comparisons for tests of the frameworks, in ranks that live on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

# Of all ranks together: 1, 2 and 3 divide it.
BATCH = 12


@contextmanager
def accelerate_anew() -> Iterator[None]:
    """Within this context Trainer and Accelerate see a process where they have not run.

    Ranks live on from test to test, and Accelerate keeps in the process and in its environment what it is asked once.
    """
    with mock.patch.dict(os.environ):
        try:
            yield
        finally:
            if "accelerate" in sys.modules:
                from accelerate.state import AcceleratorState, GradientState

                AcceleratorState._reset_state(reset_partial_state=True)
                GradientState._reset_state()


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 15), nn.Linear(15, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.second(torch.relu(self.first(x))) - x).square().mean()}


def tiny(*, lora: bool = False, adapters: tuple[str, ...] = ()) -> nn.Module:
    """The same at every call; with ``adapters`` of PEFT beside its default one, of which the last is trained."""
    torch.manual_seed(0)
    model: nn.Module = Tiny()
    if lora:
        import peft

        settings = peft.LoraConfig(r=4, target_modules=["first", "second"], init_lora_weights=False)
        model = peft.get_peft_model(model, settings)
        for adapter in adapters:
            model.add_adapter(adapter, settings)
            model.set_adapter(adapter)
    return model


def tiny_llama() -> nn.Module:
    """A causal model of transformers with random weights, the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))
    return model


def counting(count: int) -> list[dict[str, Tensor]]:
    """Samples for ``tiny_llama``: 16 tokens that count up."""
    rows = [(torch.arange(16) + start) % 64 for start in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def goes_on(resumed: dict[str, Any], stayed: dict[str, Any], *, of_losses: bool = True) -> None:
    """Assert that each step had the samples of the run that stayed; only the order of their sums is another."""
    if of_losses:
        assert max(resumed["losses"]) == max(stayed["losses"])
        for step, loss in resumed["losses"].items():
            assert loss == pytest.approx(stayed["losses"][step], rel=1e-4), step
    for name, weight in stayed["end"]["weight"].items():
        torch.testing.assert_close(resumed["end"]["weight"][name], weight, rtol=1e-3, atol=1e-4)
    assert resumed["end"]["rates"] == stayed["end"]["rates"]
