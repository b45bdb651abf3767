"""Shards that do not belong together, and checkpoints of early versions."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ds_muon.checkpoints.shards import description
from ds_muon.cli import main
from tests.unit.support.checkpoints import (
    CONFIG,
    SHAPES,
    Code,
    Layers,
    assert_same,
    by_name,
    everything,
    forget,
    save_layers,
    say_no_save,
    shard,
    weights,
)
from tests.unit.support.models import (
    PrescribedGradients,
    ds_config,
    start,
    train_step,
)
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import exact_gradients

pytestmark = pytest.mark.ranks


def refuse_all(folder: str, tags: list[str]) -> list[str]:
    """What is said of each checkpoint; proves that none has changed anything."""
    engine = start(Layers(), CONFIG)
    train_step(engine, torch.ones(4, 16, device=engine.device, dtype=torch.bfloat16))
    before, said = everything(engine), []
    tag: str | None
    for tag in tags:
        place = folder
        if tag == "per rank":
            tag = f"step{1 + min(1, torch.distributed.get_rank())}"
        elif tag == "latest":
            tag, place = None, folder if torch.distributed.get_rank() else f"{folder}/step1"
        elif tag == "latest elsewhere":
            tag, place = None, f"{folder}/other"
        elif tag == "empty latest":
            tag, place = None, f"{folder}/step2"
        with pytest.raises((ValueError, RuntimeError, FileNotFoundError)) as refused:
            engine.load_checkpoint(place, tag=tag)
        said.append(str(refused.value))
        assert_same(before, everything(engine))
    engine.load_checkpoint(folder, tag="step2")
    assert engine.global_steps == 2
    engine.destroy()
    return said


def cut_short(folder: Path) -> None:
    shard(folder, 2).write_bytes(shard(folder, 2).read_bytes()[:-100])


def change(folder: Path, rank: int, **said: Any) -> None:
    contents = torch.load(shard(folder, rank), weights_only=False)
    contents["optimizer_state_dict"]["ds_muon_shard"].update(said)
    torch.save(contents, shard(folder, rank))


FATES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: shard(folder, 2).unlink(), r"rank_2_\S+ is missing: it was not saved to its end"),
    "first missing": (lambda folder: shard(folder, 0).unlink(), r"rank_0_\S+ is missing"),
    "cut short": (cut_short, r"rank_2_\S+ cannot be read"),
    "under another's name": (
        lambda folder: shutil.copy(shard(folder, 0), shard(folder, 1)),
        r"rank_1_\S+ is not what rank 1 saved, but rank 0",
    ),
    "of another step": (
        lambda folder: shutil.copy(shard(folder.parent / "step1", 1), shard(folder, 1)),
        r"rank_1_\S+ is of another save than \S+rank_0_\S+: of step 1, as tag 'step1', by 3 ranks, and not of step 2",
    ),
    "of another run": (
        lambda folder: shutil.copy(shard(folder.parent / "other" / "step2", 1), shard(folder, 1)),
        r"rank_1_\S+ is of another save than \S+rank_0_\S+",
    ),
    "weights of another step": (
        lambda folder: shutil.copy(weights(folder.parent / "step1"), weights(folder)),
        r"model_states.pt is of another save than \S+rank_0_\S+: of step 1, as tag 'step1', and not of step 2",
    ),
    "weights of another run": (
        lambda folder: shutil.copy(weights(folder.parent / "other" / "step2"), weights(folder)),
        r"mp_rank_00_model_states.pt is of another save than \S+rank_0_",
    ),
    "early weights of another step": (
        lambda folder: [
            shutil.copy(weights(folder.parent / "step1"), weights(folder)),
            say_no_save(folder),
        ],
        r"mp_rank_00_model_states.pt is of another save than \S+rank_0_\S+: of step 1, and not of step 2",
    ),
    "weights of a later version than shards": (
        lambda folder: [change(folder, rank, save=None) for rank in range(3)],
        r"mp_rank_00_model_states.pt is of another save than \S+rank_0_\S+: of step 2, .* not of an early ds_muon",
    ),
    "weights in place of a shard": (
        lambda folder: shutil.copy(weights(folder), shard(folder, 1)),
        r"rank_1_\S+ holds no state of a ZeRO optimizer",
    ),
    "with code in it": (
        lambda folder: change(folder, 1, dtype=Code(folder / "made")),
        r"rank_1_\S+ holds a posix\.mkdir, and to read that may run any code",
    ),
    "weights with code in them": (
        lambda folder: torch.save({**torch.load(weights(folder)), "args": Code(folder / "made")}, weights(folder)),
        r"mp_rank_00_model_states.pt holds a posix\.mkdir, and to read that may run any code",
    ),
    "no weights": (
        lambda folder: torch.save([1], weights(folder)),
        r"mp_rank_00_model_states.pt is no file of a checkpoint",
    ),
    "of other content": (
        lambda folder: change(folder, 1, params=[]),
        r"rank_1_\S+ holds other parameters than \S+rank_0_",
    ),
    "of a later version": (lambda folder: change(folder, 0, format=2), r"rank_0_\S+ has format 2, of a later ds_muon"),
    "of an early version": (forget, r"does not say what lies in it: it is of an early ds_muon"),
    "of another shape": (
        lambda folder: [
            change(folder, rank, params=[[("a.weight", (8, 32), 8), ("b.weight", (24, 16), 24)]]) for rank in range(3)
        ],
        r"'a.weight' has the shape \(8, 32\) there, and \(16, 16\) here",
    ),
}


def test_shards_that_do_not_belong_together_are_refused_on_every_rank_before_anything_changes(tmp_path: Path) -> None:
    run_ranks(3, save_layers, str(tmp_path))
    run_ranks(3, save_layers, str(tmp_path / "other"))
    tags = [name.replace(" ", "-") for name in FATES]
    for tag, (spoil, _) in zip(tags, FATES.values(), strict=True):
        shutil.copytree(tmp_path / "step2", tmp_path / tag)
        spoil(tmp_path / tag)
    # What an earlier save by more ranks has left behind is none of this one.
    shutil.copy(shard(tmp_path / "step1", 0), shard(tmp_path / "step2", 3))
    (tmp_path / "step2" / "latest").write_text("")
    (tmp_path / "other" / "latest").write_text("../step2")
    for said in run_ranks(
        2, refuse_all, str(tmp_path), [*tags, "latest elsewhere", "per rank", "latest", "empty latest"]
    ):
        for text, (name, (_, pattern)) in zip(said, FATES.items(), strict=False):
            assert re.search(pattern, text), (name, text)
        assert "rank 0 loads the tag 'step1', and rank 1 'step2'" in said[-3]
        assert "latest is there on rank 1, and not on rank 0" in said[-2]
        assert "latest is empty" in said[-1]
        assert "'../step2' leads out of" in said[-4]
    assert not [*tmp_path.glob("*/made")]


def load_early(folder: str) -> list[dict[str, Any]]:
    found = []
    for tag in ("step2", "without a number", "early"):
        engine = start(Layers(), CONFIG)
        engine.load_checkpoint(folder, tag=tag)
        found.append(by_name(engine))
        engine.destroy()
    return found


def test_checkpoints_of_early_versions_load_in_the_layout_that_saved_them(tmp_path: Path) -> None:
    run_ranks(3, save_layers, str(tmp_path))
    shutil.copytree(tmp_path / "step2", tmp_path / "early")
    forget(tmp_path / "early")
    shutil.copytree(tmp_path / "step2", tmp_path / "without a number")
    say_no_save(tmp_path / "without a number")
    for usual, *early in run_ranks(3, load_early, str(tmp_path)):
        assert_same(early, [usual, usual])


def normuon_by(rule: dict[str, Any]) -> dict[str, Any]:
    return ds_config({"variant": "normuon", "muon_blocks": {"b.weight": rule}}, dtype="bfloat16")


def save_without_orders(folder: str) -> None:
    """What a version without ``muon_blocks`` saved: shards that say nothing of the order of outputs."""

    def unsaid(*args: Any) -> dict[str, Any]:
        return {key: value for key, value in description(*args).items() if key != "outputs"}

    engine = start(Layers(), normuon_by({}))
    train_step(engine, torch.ones(4, 16, device=engine.device, dtype=torch.bfloat16))
    with mock.patch("ds_muon.zero_base.description", unsaid):
        engine.save_checkpoint(folder, tag="early")
    engine.destroy()


def load_early_by_blocks(folder: str, rules: list[dict[str, Any]]) -> list[str]:
    """What is said under each rule for ``b.weight``: "" where the checkpoint is loaded."""
    said = []
    for rule in rules:
        engine = start(Layers(), normuon_by(rule))
        before = by_name(engine)
        try:
            engine.load_checkpoint(folder)
            said.append("")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
            assert_same(by_name(engine), before)
        engine.destroy()
    return said


@pytest.mark.parametrize(("how", "ranks"), [("described", 2), ("not described", 3), ("migrated", 2)])
def test_moments_of_an_early_version_are_those_of_whole_tensors(tmp_path: Path, how: str, ranks: int) -> None:
    folder = tmp_path / "run"
    run_ranks(3, save_without_orders, str(folder))
    if how != "described":
        forget(folder / "early")
    if how == "migrated":
        folder = tmp_path / "out"
        assert main(["migrate", str(tmp_path / "run"), str(folder)]) == 0
    rules: list[dict[str, Any]] = [{"split": 2}, {"split": 2, "interleaved": True}, {"split": 2, "axis": "in"}]
    for rows, *others in run_ranks(ranks, load_early_by_blocks, str(folder), rules):
        assert not rows and all("'b.weight' has other outputs there" in said for said in others), (rows, others)


def load_clipped(folder: str) -> str:
    shapes = SHAPES[:3]
    for config in (ds_config(gradient_clipping=1.0), ds_config(zero={"compute_grad_norm": False})):
        engine = start(PrescribedGradients(shapes), config)
        if config["gradient_clipping"]:
            engine.save_checkpoint(folder)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        engine.load_checkpoint(folder)
    return str(refused.value)


def test_clipping_without_norms_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for text in run_ranks(2, load_clipped, str(tmp_path)):
        assert "it was saved with gradient_clipping" in text


def save_and_load_groups(folder: str, saved: list[float], loaded: list[float], scheduler: bool) -> tuple[str, list]:
    """Rates of as many groups that take turns; what is said, and the rates after loading."""
    shapes = SHAPES[:4] + SHAPES[-2:]

    def engine_of(rates: list[float]) -> Any:
        model = PrescribedGradients(shapes)
        parameters, n = list(model.parameters()), len(rates)
        groups = [{"params": parameters[i::n], "lr": rate} for i, rate in enumerate(rates)]
        steps = (lambda o: torch.optim.lr_scheduler.StepLR(o, 5)) if scheduler else None
        return start(model, ds_config(), model_parameters=groups, lr_scheduler=steps)

    engine = engine_of(saved)
    train_step(engine, exact_gradients(shapes, 0, engine.device))
    engine.save_checkpoint(folder)
    engine = engine_of(loaded)
    before, said = by_name(engine), ""
    names = [group["name"] for group in engine.optimizer.param_groups]
    try:
        engine.load_checkpoint(folder)
    except (ValueError, RuntimeError) as error:
        said = str(error)
        assert_same(by_name(engine), before)
        if scheduler:
            engine.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert names == [group["name"] for group in engine.optimizer.param_groups]
    return said, [group["lr"] for group in engine.optimizer.optimizer.param_groups]


@pytest.mark.parametrize(
    ("saved", "loaded", "scheduler", "said", "rates"),
    [
        ([0.5], [0.1, 0.2], False, "", [0.5] * 4),
        ([0.5, 0.5], [0.1], False, "", [0.5] * 2),
        (
            [0.5, 0.25],
            [0.1],
            False,
            "'p0' and 'p1' are in one param group here, and were in two with lr = 0.5 and 0.25",
            [],
        ),
        ([0.5], [0.1, 0.2], True, "for each of which the scheduler, a StepLR, keeps rates of its own", [0.5] * 4),
        ([0.5, 0.25], [0.1, 0.2], True, "", [0.5, 0.25] * 2),
    ],
)
def test_other_param_groups_take_over_rates_unless_it_is_unclear_which(
    tmp_path: Path, saved: list[float], loaded: list[float], scheduler: bool, said: str, rates: list[float]
) -> None:
    for text, found in run_ranks(2, save_and_load_groups, str(tmp_path), saved, loaded, scheduler):
        assert said in text and bool(said) == bool(text)
        assert not rates or found == rates
