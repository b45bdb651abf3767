"""Save and resume with the same settings, in new processes, and what of other checkpoints is refused."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_muon.checkpoints import shards
from tests.unit.support.cases import in_turns
from tests.unit.support.checkpoints import Layers, assert_same, everything
from tests.unit.support.models import Block, PrescribedGradients, ds_config, full_weights, start, train_step
from tests.unit.support.ranks import RankFailure, run_ranks, stop_all
from tests.unit.support.steps import exact_gradients, state_of

pytestmark = pytest.mark.ranks


def train_block(config: dict[str, Any], first: int, last: int, load: str | None, save: str | None) -> dict[str, Any]:
    """Steps ``first`` to ``last`` of a run whose data depends on the step; loads before, saves after."""
    torch.manual_seed(0)
    engine = start(Block(), config)
    if load is not None:
        engine.load_checkpoint(load)
    loaded_state = state_of(engine)
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        tokens, targets = torch.randint(0, 40, (2, 2, 16), generator=generator).to(engine.device)
        train_step(engine, tokens, targets)
    if save is not None:
        engine.save_checkpoint(save)
    result = {
        "weights": full_weights(engine),
        "model": {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()},
        "state": state_of(engine),
        "loaded": loaded_state,
        "scale": engine.optimizer.loss_scale,
        "lr": [g["lr"] for g in engine.optimizer.param_groups],
    }
    engine.destroy()
    return result


@in_turns(
    rule=[("float32", "muon"), ("bfloat16", "muon"), ("float32", "normuon")],
    dtype=["float16", "float32", "bfloat16"],
    stage=[2, 1],
)
def test_a_resumed_run_is_bit_equal_to_a_straight_one(
    tmp_path: Path, rule: tuple[str, str], dtype: str, stage: int
) -> None:
    momentum_dtype, variant = rule
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}} if dtype == "float16" else {}
    params = {"weight_decay": 0.1, "momentum_dtype": momentum_dtype, "variant": variant}
    config = ds_config(params, stage=stage, dtype=dtype, **fp16)
    straight = run_ranks(2, train_block, config, 0, 6, None, None)
    half = run_ranks(2, train_block, config, 0, 3, None, str(tmp_path))
    if stage == 2 and rule == ("float32", "muon"):
        stop_all()  # resume in new processes
    resumed = run_ranks(2, train_block, config, 3, 6, str(tmp_path), None)
    for rank in range(2):
        # Loading before the first step restores momentum and moments.
        assert_same(resumed[rank]["loaded"], half[rank]["state"])
        for key in ("weights", "model", "state", "scale", "lr"):
            assert_same(resumed[rank][key], straight[rank][key])


def load_twice(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Load over a run under way: what DeepSpeed links to parameters must be the restored state."""
    from deepspeed.utils import safe_get_full_optimizer_state

    shapes = [(48, 48), (9,)]
    engine = start(PrescribedGradients(shapes), config)
    train_step(engine, exact_gradients(shapes, 0, engine.device))
    engine.save_checkpoint(folder)
    saved, saved_weights = state_of(engine), full_weights(engine)
    train_step(engine, exact_gradients(shapes, 1, engine.device))
    engine.load_checkpoint(folder)
    linked = safe_get_full_optimizer_state(engine.module.p0, "momentum_buffer")
    own = engine.optimizer.optimizer.state[engine.optimizer.single_partition_of_fp32_groups[0]]["momentum_buffer"]
    total = own.square().sum()
    torch.distributed.all_reduce(total)
    restored = state_of(engine), full_weights(engine)
    train_step(engine, exact_gradients(shapes, 1, engine.device))
    relinked = safe_get_full_optimizer_state(engine.module.p0, "momentum_buffer")
    return {
        "saved": (saved, saved_weights),
        "restored": restored,
        "linked": float(linked.norm()),
        "own": float(total.sqrt()),
        "moved": bool((relinked != linked).any()),
    }


def test_loading_over_a_run_under_way_keeps_deepspeeds_links(tmp_path: Path) -> None:
    for found in run_ranks(2, load_twice, ds_config(), str(tmp_path)):
        assert_same(list(found["saved"]), list(found["restored"]))
        assert found["linked"] == pytest.approx(found["own"], rel=1e-6)
        assert found["moved"]


def save_layers(config: dict[str, Any], folder: str, model: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    torch.manual_seed(1)
    engine = start(Layers(**model), config)
    for _ in range(2):
        train_step(engine, torch.ones(4, 16, device=engine.device, dtype=next(engine.module.parameters()).dtype))
    engine.save_checkpoint(folder)
    saved = {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return saved


def refuse_layers(
    config: dict[str, Any],
    folder: str,
    saved: Mapping[str, Tensor] | None = None,
    model: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """What is said of the checkpoint; proves that it has changed nothing, and that its weights can be had."""
    torch.manual_seed(2)
    engine = start(Layers(**model), config)
    batch = torch.ones(4, 16, device=engine.device, dtype=next(engine.module.parameters()).dtype)
    train_step(engine, batch)
    before = everything(engine)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        engine.load_checkpoint(folder)
    assert_same(before, everything(engine))
    if saved is not None:
        names = {name for name, _ in engine.module.named_parameters()}
        engine.load_checkpoint(folder, load_module_only=True, load_module_strict=names == saved.keys())
        for name, p in engine.module.named_parameters():
            assert name not in saved or torch.equal(p.cpu(), saved[name]), name
        for name, weight in full_weights(engine).items():
            assert name not in saved or torch.equal(weight, saved[name].float()), name
    train_step(engine, batch)
    engine.destroy()
    return str(refused.value)


SCHEDULED = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
DSMUON = ds_config(dtype="bfloat16", **SCHEDULED)
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"frozen": ("b.weight",)}, {}, "'b.weight' is trained here, but not in the run that saved it"),
        ({"frozen": ("b.bias",)}, {}, "'b.bias' is trained here, but not in the run that saved it"),
        ({}, {"frozen": ("b.weight",)}, "'b.weight' is not trained here (frozen, or not among the model_parameters)"),
        ({}, {"frozen": ("a.bias", "b.bias", "c.bias")}, "'a.bias' and 2 more parameters are not trained here"),
    ],
)
def test_a_checkpoint_of_other_trained_parameters_is_refused_by_name_and_changes_nothing(
    tmp_path: Path, then: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    saved = run_ranks(2, save_layers, DSMUON, str(tmp_path), then)[0]
    for message in run_ranks(2, refuse_layers, DSMUON, str(tmp_path), saved, now):
        assert said in message and "load_module_only=True" in message and "from_pretrained" in message


@pytest.mark.parametrize(("then", "now"), [(True, False), (False, True)])
def test_a_checkpoint_of_another_model_is_refused_by_the_names_of_its_parameters(
    tmp_path: Path, then: bool, now: bool
) -> None:
    saved = run_ranks(2, save_layers, DSMUON, str(tmp_path), {"last": then})[0]
    said = "is trained here, but not" if now else "are not in this model, or under another name"
    for message in run_ranks(2, refuse_layers, DSMUON, str(tmp_path), saved, {"last": now}):
        assert "'c.weight' and 1 more parameter" in message and said.split(" ", 1)[1] in message
        assert "load_module_strict=False where the model has other parameters" in message


def test_the_optimizer_is_named_where_another_one_saved_the_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, save_layers, ds_config(dtype="bfloat16", **ADAMW, **SCHEDULED), str(tmp_path))
    for message in run_ranks(2, refuse_layers, DSMUON, str(tmp_path)):
        assert "another optimizer, AdamW, and not by DSMuon" in message


def test_the_optimizer_is_named_by_its_state_where_the_config_has_none() -> None:
    adam = {"state": {0: {"step": 1, "exp_avg": 0, "exp_avg_sq": 0}}, "param_groups": []}
    for config, base, named in (
        ({"optimizer": {"type": "Lamb"}}, adam, "Lamb"),
        ({}, adam, "Adam or AdamW"),
        ("config.json", {"state": {0: {"momentum_buffer": 0}}}, "whose state is momentum_buffer"),
        (None, {"state": {}}, "which has no state"),
        (None, [adam], "which has no state"),
    ):
        saved = {"ds_config": config, "optimizer_state_dict": {"base_optimizer_state": base}}
        assert shards.optimizer_of(saved) == named


@pytest.mark.parametrize("fate", ["missing", "cut short"])
def test_a_shard_that_one_rank_cannot_read_stops_all_and_is_named(tmp_path: Path, fate: str) -> None:
    run_ranks(2, save_layers, DSMUON, str(tmp_path))
    (shard,) = tmp_path.glob("*/*rank_1_mp_rank_00_optim_states.pt")
    if fate == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:1000])
    messages = run_ranks(2, refuse_layers, DSMUON, str(tmp_path))
    assert all(shard.name in message for message in messages)


def test_a_checkpoint_that_is_not_there_is_said_to_be() -> None:
    assert "there is no such checkpoint" in run_ranks(1, load_nothing)[0]


def load_nothing() -> str:
    engine = start(Layers(), DSMUON)
    with pytest.raises(FileNotFoundError) as refused:
        engine.load_checkpoint("/tmp", tag="no such tag")
    return str(refused.value)


def save_then_load(save: dict[str, Any], load: dict[str, Any], folder: str) -> None:
    # Matrices that round robin puts in another order, one of an odd size, after which alignment leaves a gap.
    shapes = [(48, 48), (33, 49), (40, 48), (9,)]
    engine = start(PrescribedGradients(shapes), save)
    train_step(engine, exact_gradients(shapes, 0, engine.device))
    engine.save_checkpoint(folder)
    engine = start(PrescribedGradients(shapes), load)
    before = [tensor.data_ptr() for state in engine.optimizer.optimizer.state.values() for tensor in state.values()]
    try:
        engine.load_checkpoint(folder)
    finally:
        # What DeepSpeed has linked to parameters is still in use, also where the checkpoint was refused.
        states = engine.optimizer.optimizer.state.values()
        assert before == [tensor.data_ptr() for state in states for tensor in state.values()]


def test_a_checkpoint_of_another_routing_is_refused_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, save_then_load, ds_config(), ds_config({"adamw_params": ["p1"]}), str(tmp_path))
    assert set(failure.value.errors) == {0, 1}
    assert all("does not fit the optimizer" in error for error in failure.value.errors.values())
    assert any("'p1' is in another param group" in error for error in failure.value.errors.values())


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (["*.bias"], [], "'a.bias' is in another param group: no_decay_params named it then, and not here"),
        ([], ["b.*"], "'b.weight' is in another param group: no_decay_params named it here, and not then"),
        # As many groups of the same parameters: the checkpoint's weight decay would take the place of the config's.
        (["*"], [], "'a.weight' is in another param group: no_decay_params named it then, and not here"),
    ],
)
def test_a_checkpoint_of_other_no_decay_params_is_refused_by_that_name(
    tmp_path: Path, then: list[str], now: list[str], said: str
) -> None:
    config_of = [ds_config({"weight_decay": 0.1, "no_decay_params": globs}, **SCHEDULED) for globs in (then, now)]
    run_ranks(2, save_layers, config_of[0], str(tmp_path))
    assert all(said in message for message in run_ranks(2, refuse_layers, config_of[1], str(tmp_path)))


@pytest.mark.parametrize(("saved", "loaded"), [("muon", "normuon"), ("normuon", "muon")])
def test_a_checkpoint_of_another_variant_is_refused_on_every_rank(tmp_path: Path, saved: str, loaded: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, save_then_load, ds_config({"variant": saved}), ds_config({"variant": loaded}), str(tmp_path))
    assert set(failure.value.errors) == {0, 1}
    assert all("another optimizer or variant" in error for error in failure.value.errors.values())


def save_deepspeeds_muon_then_load(folder: str) -> None:
    """Matrices in the order in which DeepSpeed's Muon, too, lays them out: the cuts do not tell the two apart."""
    shapes = [(48, 96), (48, 48), (7,)]
    theirs = ds_config(optimizer={"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3, "torch_adam": True}})
    engine = start(PrescribedGradients(shapes), theirs)
    train_step(engine, exact_gradients(shapes, 0, engine.device))
    engine.save_checkpoint(folder)
    weights = full_weights(engine)
    engine.destroy()
    engine = start(PrescribedGradients(shapes), ds_config())
    with pytest.raises((ValueError, RuntimeError), match="saved by another optimizer"):
        engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert_same(full_weights(engine), weights)
    train_step(engine, exact_gradients(shapes, 1, engine.device))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_of_deepspeeds_muon_is_refused_but_for_its_weights(tmp_path: Path, world_size: int) -> None:
    run_ranks(world_size, save_deepspeeds_muon_then_load, str(tmp_path))


def load_older_groups() -> None:
    """Param groups as another version of torch, and another device, save them."""
    shapes = [(8, 6), (5,)]
    engine = start(PrescribedGradients(shapes), ds_config())
    optimizer = engine.optimizer.optimizer
    before = deepcopy(optimizer.state_dict())
    older = deepcopy(before["param_groups"])
    for group in older:
        if not group["use_muon"]:
            group.pop("decoupled_weight_decay", None)
            group["fused"] = not group.get("fused")
    optimizer.load_groups(older)
    assert_same(optimizer.state_dict(), before)
    train_step(engine, exact_gradients(shapes, 0, engine.device))
    # Their own would load other tensors than those that are linked to parameters, or this rank's shard alone.
    for loads in (engine.optimizer, optimizer):
        with pytest.raises(NotImplementedError, match=r"use engine\.load_checkpoint"):
            loads.load_state_dict(before)


def test_groups_of_an_older_torch_load_and_state_dicts_are_refused() -> None:
    run_ranks(1, load_older_groups)


def test_a_checkpoint_of_the_same_routing_loads(tmp_path: Path) -> None:
    run_ranks(2, save_then_load, ds_config(), ds_config({"lr": 0.1}), str(tmp_path))
