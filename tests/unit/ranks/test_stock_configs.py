"""ZeRO-2 configs that people have: what the doctor says of them an engine says as well, and what it writes trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_muon import DSMuonConfigError, DSMuonRefusal
from ds_muon.config import AUTO_IS_A_CHOICE
from ds_muon.doctor.examine import examine
from ds_muon.doctor.mend import mend
from ds_muon.doctor.switch import switch
from ds_muon.doctor.trainer import fill
from ds_muon.ds_config import ABSENT, changed
from tests.unit.support.models import Block, ds_config, full_weights, start, train_step
from tests.unit.support.ranks import run_ranks

CONFIGS = sorted((Path(__file__).parents[1] / "support" / "stock_configs").glob("*.json"))


def refused_by_an_engine(config: dict[str, Any]) -> list[str]:
    """The lines of the error; none if an engine starts."""
    try:
        start(Block(), config).destroy()
    except (DSMuonRefusal, DSMuonConfigError, ValueError) as error:
        return [line for line in str(error).splitlines() if not line.startswith("DSMuon refuses")]
    return []


def four_steps(config: dict[str, Any]) -> tuple[float, float, bool]:
    """The loss before and after, and whether every weight has moved and is finite. DeepSpeed's warmup begins with two
    steps at a rate of 0."""
    torch.manual_seed(0)
    engine = start(Block(), config)
    before = full_weights(engine)
    tokens = torch.arange(40, device=engine.device).view(8, 5)
    losses = [engine(tokens, tokens).item()]
    for _ in range(4):
        for _ in range(engine.gradient_accumulation_steps()):
            train_step(engine, tokens, tokens)
    assert (engine.global_steps, engine.skipped_steps) == (4, 0)
    losses.append(engine(tokens, tokens).item())
    after = full_weights(engine)
    moved = all(after[name].isfinite().all() and not torch.equal(after[name], before[name]) for name in before)
    engine.destroy()
    return losses[0], losses[1], moved


def filled_in(config: dict[str, Any], **params: Any) -> dict[str, Any]:
    """As the engine gets it on two ranks: with Trainer's values, and a rate that can be seen after four steps."""
    filled = fill(config, AUTO_IS_A_CHOICE)
    values = {("optimizer", "params", key): value for key, value in params.items()}
    warmup = ("scheduler", "params", "warmup_max_lr")
    if warmup in filled.places and "lr" in params:
        values[warmup] = params["lr"]
    return changed(filled.config, {**values, ("train_batch_size",): ABSENT})


@pytest.mark.ranks
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_stock_config_is_refused_as_the_doctor_says_and_trains_once_it_is_mended(path: Path) -> None:
    config = json.loads(path.read_text())
    assert {finding.kind for finding in examine(config)} >= {"refused"}
    switched = changed(config, {change.place: change.value for change in switch(config)})
    said = [finding.text for finding in examine(switched) if finding.kind == "refused"]
    assert said and run_ranks(2, refused_by_an_engine, filled_in(switched)) == [said] * 2

    _, mended = mend(config)
    assert not [finding.text for finding in examine(mended) if finding.kind != "note"]
    for first, last, moved in run_ranks(2, four_steps, filled_in(mended, lr=3e-3)):
        assert last < first and moved


@pytest.mark.ranks
def test_a_config_of_zero_3_trains_once_it_is_mended() -> None:
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    offload = {name: {"device": "cpu", "pin_memory": True} for name in ("offload_optimizer", "offload_param")}
    zero = {"stage": 3, **offload, "sub_group_size": 1e9, **dict.fromkeys(keys, "auto")}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "amsgrad": False}}
    _, mended = mend({"train_micro_batch_size_per_gpu": 8, "optimizer": optimizer, "zero_optimization": zero})
    assert not [finding.text for finding in examine(mended) if finding.kind != "note"]
    for first, last, moved in run_ranks(2, four_steps, filled_in(mended)):
        assert last < first and moved


@pytest.mark.ranks
@pytest.mark.parametrize(
    "config",
    [
        ds_config({"momentum": 2, "torch_adam": True}, stage=3),
        ds_config({"ns_backend": "triton"}, zero={"elastic_checkpoint": True, "reduce_scatter": True}),
        ds_config(bf16={"enabled": True, "bf16_master_weights_and_grads": True}, compile={"deepcompile": True}),
        ds_config({"lr": None}, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}),
    ],
    ids=["stage-3", "backend", "master-weights", "params"],
)
def test_the_doctor_refuses_what_an_engine_refuses(config: dict[str, Any]) -> None:
    config["optimizer"]["params"] = {k: v for k, v in config["optimizer"]["params"].items() if v is not None}
    said = [finding.text.removesuffix(" (on this machine)") for finding in examine(config) if finding.kind == "refused"]
    assert said
    for lines in run_ranks(2, refused_by_an_engine, config):
        assert sorted(lines) == sorted(said)
