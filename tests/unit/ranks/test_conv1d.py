"""Weights that are stored as (in, out), as GPT-2's: sides by what they mean, not by where they lie."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ds_muon import muon_group, muon_update
from ds_muon.routing import route
from ds_muon.verify import UpdateCheck, UpdateRecord
from ds_muon.verify.engine_view import CannotVerify
from ds_muon.verify.inject import found, plant
from tests.unit.support.batches import cut_into
from tests.unit.support.models import ds_config, full_weights, start, train_step
from tests.unit.support.ranks import run_ranks

pytest.importorskip("transformers.pytorch_utils", reason="needs transformers, whose Conv1D this is about")

# Inputs and outputs. Stored, those of a line have one shape in pairs: 24 x 60 and 60 x 24.
SIDES = [(24, 60), (60, 24), (36, 36)]


class Both(nn.Module):
    """Layers of both kinds with the same weights and gradients, so that they stay each other's transpose."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        generator = torch.Generator().manual_seed(0)
        self.linear = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in SIDES)
        self.conv1d = nn.ModuleList(Conv1D(o, i) for i, o in SIDES)
        for linear, conv1d in zip(self.linear, self.conv1d, strict=True):
            weight = 0.1 * torch.randn(linear.weight.shape, generator=generator)
            linear.weight.data, conv1d.weight.data = weight, weight.mT.contiguous()

    def forward(self, gradients: list[Tensor]) -> Tensor:
        layers = zip(self.linear, self.conv1d, gradients, strict=True)
        return torch.stack([(l.weight * g).sum() + (c.weight * g.mT).sum() for l, c, g in layers]).sum()  # noqa: E741


def gradients_of(step: int, device: torch.device) -> list[Tensor]:
    """Of ranks alike."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(o, i, generator=generator).to(device) for i, o in SIDES]


def train(config: dict[str, Any]) -> dict[str, Tensor]:
    with mock.patch.object(muon_group, "batches", cut_into(100)):
        engine = start(Both(), config)
        for step in range(3):
            train_step(engine, gradients_of(step, engine.device))
        return full_weights(engine)


@pytest.mark.ranks
@pytest.mark.parametrize("variant", ["muon", "normuon"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_conv1d_moves_as_the_linear_layer_that_does_the_same(world_size: int, variant: str) -> None:
    """Under "original", in batches of whole and straddling matrices, among which both kinds have one shape."""
    config = ds_config({"variant": variant, "weight_decay": 0.1, "ns_dtype": "float32"})
    before = {name: p.detach() for name, p in Both().named_parameters()}
    weights = run_ranks(world_size, train, config)[0]
    for index in range(len(SIDES)):
        linear, conv1d = (weights[f"{kind}.{index}.weight"] for kind in ("linear", "conv1d"))
        moved = linear - before[f"linear.{index}.weight"]
        assert (conv1d.mT - linear).norm() <= 1e-5 * moved.norm()


def check(config: dict[str, Any], fault: str | None) -> list[UpdateRecord]:
    engine = start(Both(), config)
    records = []
    with mock.patch.object(muon_group, "batches", cut_into(100)):
        if fault is None:
            records = checked(engine)
        else:
            with plant(fault, engine):
                records = checked(engine)
    engine.destroy()
    return records


def checked(engine: Any) -> list[UpdateRecord]:
    check, records = UpdateCheck(engine), []
    for step in range(2):
        train_step(engine, gradients_of(step, engine.device))
        records += check.after_step()
    check.close()
    return records


@pytest.mark.ranks
@pytest.mark.parametrize("variant", ["muon", "normuon"])
def test_the_check_knows_which_side_is_which_and_finds_the_scale_of_the_transpose(variant: str) -> None:
    config = ds_config({"variant": variant})
    for records in run_ranks(2, check, config, None):
        assert len(records) == 2 * 9 and all(record.ok for record in records)
    for records in run_ranks(2, check, config, "conv1d-scale"):
        assert found("conv1d-scale", records)
        wrong = {record.name for record in records if not record.ok}
        assert wrong == {"conv1d.0.weight", "conv1d.1.weight"}  # a square one has no other scale


def refusal(config: dict[str, Any]) -> str:
    engine = start(Both(), config)
    with pytest.raises(CannotVerify) as error, plant("conv1d-scale", engine):
        pass
    return str(error.value)


@pytest.mark.ranks
def test_a_scale_that_does_not_ask_which_side_is_which_cannot_be_the_transposes() -> None:
    assert "stored as (in, out)" in run_ranks(1, refusal, ds_config({"adjust_lr_fn": "match_rms_adamw"}))[0]


@pytest.mark.parametrize("normuon", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SIDES)
def test_muon_update_takes_either_layout(inputs: int, outputs: int, normuon: bool) -> None:
    buffers = torch.zeros(outputs, inputs), torch.zeros(inputs, outputs)
    variances = [torch.zeros(outputs) if normuon else None for _ in buffers]
    for step in range(2):
        gradient = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(step))
        linear = muon_update(gradient, buffers[0], row_variance=variances[0])
        conv1d = muon_update(gradient.mT, buffers[1], row_variance=variances[1], layout="in_out")
        assert conv1d.shape == (inputs, outputs) and (conv1d.mT - linear).norm() <= 1e-5 * linear.norm()
    if normuon:
        torch.testing.assert_close(variances[0], variances[1])
        with pytest.raises(ValueError, match=rf"row_variance of shape \({outputs},\)"):
            shape = (inputs, outputs)
            muon_update(torch.ones(shape), torch.zeros(shape), row_variance=torch.zeros(7), layout="in_out")


def test_an_unknown_layout_is_refused() -> None:
    buffer = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=r"layout = 'transposed': choose \"out_in\" or \"in_out\""):
        muon_update(torch.ones(4, 6), buffer, layout="transposed")  # type: ignore[arg-type]
    assert not buffer.any()


def test_the_routing_says_what_is_stored_as_in_out() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=8))
    routing = route(model)
    turned = {name for name, layout in routing.layouts().items() if layout == "in_out"}
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert turned == {f"transformer.h.0.{layer}.weight" for layer in layers}
    lines = {line.split()[0]: line for line in routing.table().splitlines()}
    assert all(("stored as (in, out)" in line) is (name in turned) for name, line in lines.items())


def test_a_class_of_that_name_of_somebody_elses_is_not_turned() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 6))

    assert route(nn.Sequential(Conv1D())).layouts() == {"0.weight": "out_in"}
