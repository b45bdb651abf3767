"""A checkpoint of any world size and layout loads at any other, to the last bit; shards that do not belong together do
not."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.unit.support.cases import pairwise
from tests.unit.support.checkpoints import (
    BLOCKS,
    COLUMNS,
    CONFIG,
    IN_TURNS,
    KINDS,
    LAYOUTS,
    SHAPES,
    Kinds,
    Layers,
    assert_same,
    by_name,
    load_by_other_blocks,
    run,
    settings,
)
from tests.unit.support.models import PrescribedGradients, ds_config, start, start_groups, train_step
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import exact_gradients

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, list[Any]]]:
    """A checkpoint, and what the run was that saved it: made when it is first asked for."""

    @functools.cache
    def make(ranks: int, groups: int, *case: Any) -> tuple[str, list[Any]]:
        folder = str(tmp_path_factory.mktemp("saved"))
        return folder, run_ranks(ranks, functools.partial(run, load=False), settings(*case), groups, folder)[0]

    return make


@pairwise(
    of_all=2,
    then=[1, 2, 3, 4],
    now=[1, 2, 3, 4],
    laid_out=[*LAYOUTS],
    lies=[*LAYOUTS],
    groups=[(1, 1), (1, 2), (2, 1), (2, 2)],
    kind=KINDS,
)
def test_a_run_goes_on_at_another_size_and_layout_as_the_one_that_stayed(
    saved: Callable[..., tuple[str, list[Any]]],
    then: int,
    now: int,
    laid_out: str,
    lies: str,
    groups: tuple[int, int],
    kind: tuple[str, str, tuple[str, str], tuple[int, int]],
) -> None:
    dtype, rule, momentum, stages = kind
    folder, stayed = saved(then, groups[0], rule, dtype, momentum[0], stages[0], laid_out)
    config = settings(rule, dtype, momentum[1], stages[1], lies)
    converted = getattr(torch, momentum[1])
    before, after, _ = stayed
    before = {**before, "momentum_buffer": {k: m.to(converted) for k, m in before["momentum_buffer"].items()}}
    for rank, (loaded, went_on, lines) in enumerate(
        run_ranks(now, functools.partial(run, load=True), config, groups[1], folder)
    ):
        assert_same(loaded, before)
        if momentum[0] == momentum[1]:
            assert_same(went_on, after)
        said = [f"momentum, {momentum[0]}, is converted to {momentum[1]}"] if momentum[0] != momentum[1] else []
        said += ["saved with other param groups"] if groups[0] != groups[1] else []
        assert len(lines) == len(said) and all(map(str.__contains__, lines, said)), rank


def variances_of_tensors(found: dict[str, Any]) -> dict[str, Tensor]:
    """The moments of each tensor, those of its matrices one after another."""
    joined: dict[str, list[Tensor]] = {}
    for name, moments in found["variance"].items():
        joined.setdefault(name.partition("[")[0], []).append(moments)
    return {name: torch.cat(moments) for name, moments in joined.items()}


@pytest.mark.parametrize("blocks", [{}, COLUMNS, {**BLOCKS, "p0": {"split": 2, "axis": "in"}}])
def test_momentum_is_loaded_whatever_matrices_a_tensor_is_made_of(
    saved: Callable[..., tuple[str, list[Any]]], blocks: dict[str, Any]
) -> None:
    folder, (before, *_) = saved(2, 1, "muon, blocks", "float32", "float32", 2, "plain")
    for loaded in run_ranks(3, load_by_other_blocks, folder, "muon", blocks):
        assert_same(loaded, before)


def test_moments_of_rows_are_loaded_by_other_blocks_of_whole_rows(saved: Callable[..., tuple[str, list[Any]]]) -> None:
    folder, (before, *_) = saved(2, 1, "normuon, blocks", "float32", "float32", 2, "plain")
    blocks = {"p1": BLOCKS["p1"], "p2": BLOCKS["p2"], "p0": {"split": [20, 4]}}
    for loaded in run_ranks(3, load_by_other_blocks, folder, "normuon", blocks):
        assert_same(variances_of_tensors(loaded), variances_of_tensors(before))
        assert_same({**loaded, "variance": {}}, {**before, "variance": {}})


@pytest.mark.parametrize(("blocks", "tensor"), [({}, "p1"), (COLUMNS, "p1"), (IN_TURNS, "p2")])
def test_moments_of_other_outputs_are_refused_by_name(
    saved: Callable[..., tuple[str, list[Any]]], blocks: dict[str, Any], tensor: str
) -> None:
    # Of p2 there are as many, in another order.
    folder, _ = saved(2, 1, "normuon, blocks", "float32", "float32", 2, "plain")
    for said in run_ranks(3, load_by_other_blocks, folder, "normuon", blocks):
        assert f"'{tensor}' has other outputs there" in said and "muon_blocks it was saved with" in said


DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize(("then", "now"), [(then, now) for then in DTYPES for now in DTYPES if then != now])
def test_a_model_goes_on_in_another_dtype_from_its_fp32_weights(
    saved: Callable[..., tuple[str, list[Any]]], then: str, now: str
) -> None:
    folder, (before, *_) = saved(2, 1, "muon", then, "float32", 2, "plain")
    config = settings("muon", now, "float32", 2, "plain")
    weights = {name: weight.to(getattr(torch, now)) for name, weight in before["weight"].items()}
    for loaded, went_on, lines in run_ranks(2, functools.partial(run, load=True), config, 1, folder):
        assert_same(loaded, {**before, "model": weights, "scale": 16.0 if now == "float16" else 1.0})
        assert any((went_on["weight"][name] != before["weight"][name]).any() for name in weights)
        assert [line[:30] for line in lines] == [f"the checkpoint's model, {then}"[:30]] and now in lines[0]


# ---- all ranks hold the weights that were saved ----------------------------------------------------------------------


def load_what_differs(folder: str) -> list[str]:
    """What is said where one rank loads another file, or the script has written into a weight before it saved."""
    engine = start(Kinds(), ds_config(dtype="bfloat16"))
    rank, original, said = torch.distributed.get_rank(), type(engine).load_module_state_dict, []
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)

    def load(values: float, name: str, **how: bool) -> None:
        def other(self: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            changed = checkpoint["module"][name].clone()
            changed.view(-1)[-1] += values
            frozen, ours = checkpoint["frozen_param_fragments"], {name: changed}
            checkpoint = {**checkpoint, "module": {**checkpoint["module"], **ours}}
            original(self, {**checkpoint, "frozen_param_fragments": {**frozen, **ours}}, *args, **kwargs)

        with mock.patch.object(type(engine), "load_module_state_dict", other):
            with pytest.raises(ValueError, match="Do not train on") as refused:
                engine.load_checkpoint(folder, **how)
            said.append(str(refused.value))

    load(1.0 if rank == 2 else 0.0, "square.weight")
    load(1.0 if rank == 2 else 0.0, "frozen.bias", load_module_only=True)
    load(1.0, "square.weight")
    engine._config.zero_config.load_from_fp32_weights = False
    load(1.0 if rank == 1 else 0.0, "square.weight", load_optimizer_states=False)
    engine.load_checkpoint(folder)
    engine.destroy()
    return said


def test_weights_that_differ_after_loading_are_an_error_on_every_rank(tmp_path: Path) -> None:
    for said in run_ranks(3, load_what_differs, str(tmp_path)):
        assert "'square.weight' has other values on rank 2 than on rank 0" in said[0]
        assert "'frozen.bias' has other values on rank 2 than on rank 0" in said[1]
        assert "'square.weight' is not what its fp32 weights are in bfloat16" in said[2]
        assert "'square.weight' has other values on rank 1 than on rank 0" in said[3]


@pytest.mark.full
@pytest.mark.parametrize(("then", "now"), [(8, 2), (2, 8)])
def test_a_run_goes_on_from_eight_ranks_and_to_eight(
    saved: Callable[..., tuple[str, list[Any]]], then: int, now: int
) -> None:
    case = ("normuon", "bfloat16", "float32", 2, "plain")
    folder, (before, after, _) = saved(then, 1, *case)
    for loaded, went_on, _ in run_ranks(
        now, functools.partial(run, load=True), settings(*case), 1, folder, timeout=300
    ):
        assert_same([loaded, went_on], [before, after])


def load_slowly(folder: str) -> list[list[str]]:
    """What is said of a load that takes a second for each time that is asked for, and of a usual one."""
    engine, said = start_groups(SHAPES, ds_config()), []
    engine.save_checkpoint(folder)
    for clock in (itertools.count(), None):
        lines: list[str] = []
        with mock.patch("ds_muon.progress.say", lines.append):
            if clock is None:
                engine.load_checkpoint(folder)
            else:
                with mock.patch("ds_muon.progress.time", SimpleNamespace(monotonic=lambda of=clock: next(of))):
                    engine.load_checkpoint(folder)
        said.append(lines)
    return said


def test_a_long_load_says_now_and_then_how_far_it_is(tmp_path: Path) -> None:
    (long, usual), *_ = run_ranks(1, load_slowly, str(tmp_path))
    assert [line.rpartition(" in ")[2] for line in long] == ["5 s"] and not usual


# ---- parameters of every kind ---------------------------------------------------------------------------------------


def run_kinds(stage: int, folder: str, seed: int, how: dict[str, bool] | None) -> dict[str, Any]:
    torch.manual_seed(seed)
    engine = start(Kinds(), ds_config(stage=stage, dtype="bfloat16"))
    train_step(engine, torch.arange(12, device=engine.device))
    lines: list[str] = []
    if how is None:
        engine.save_checkpoint(folder)
    else:
        with mock.patch("ds_muon.checkpoints.engine_methods.say", lines.append):
            engine.load_checkpoint(folder, **how)
    assert [line[:8] for line in lines] == (["momentum"] if how else [])
    found = by_name(engine)
    train_step(engine, torch.arange(12, device=engine.device))
    engine.destroy()
    return found


@pytest.mark.parametrize("stages", [(1, 2), (2, 1)])
def test_tied_frozen_and_empty_parameters_are_loaded_at_another_size(tmp_path: Path, stages: tuple[int, int]) -> None:
    folder = str(tmp_path)
    then = run_ranks(3, run_kinds, stages[0], folder, 1, None)[0]
    for now in run_ranks(2, run_kinds, stages[1], folder, 2, {}):
        assert_same(now, then)
    for how in ({"load_module_only": True}, {"load_optimizer_states": False}):
        for now in run_ranks(2, run_kinds, stages[1], folder, 2, how):
            assert_same(now["model"], then["model"])
            assert all(torch.equal(now["weight"][name], then["model"][name].float()) for name in now["weight"])


def link_after_loading(folder: str) -> list[bool]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    shapes = SHAPES[:3] + SHAPES[-2:]
    engine = start(PrescribedGradients(shapes), ds_config())
    train_step(engine, exact_gradients(shapes, 0, engine.device))
    if torch.distributed.get_world_size() == 3:
        engine.save_checkpoint(folder)
    else:
        train_step(engine, exact_gradients(shapes, 1, engine.device))
        engine.load_checkpoint(folder)
    found = by_name(engine)
    same = []
    for name, p in engine.module.named_parameters():
        same.append(torch.equal(safe_get_full_fp32_param(p).cpu(), found["weight"][name]))
        for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            if name in found[key]:
                same.append(torch.equal(safe_get_full_optimizer_state(p, key).cpu(), found[key][name]))
    return same


def test_deepspeeds_links_read_what_was_loaded_at_another_size(tmp_path: Path) -> None:
    for ranks in (3, 2):
        assert all(map(all, run_ranks(ranks, link_after_loading, str(tmp_path))))


# ---- names -----------------------------------------------------------------------------------------------------------


def load_by_odd_names(folder: str) -> None:
    engine = start(Layers(), CONFIG)
    # DeepSpeed looks for files by patterns, to which a bracket and an asterisk stand for others.
    for step, tag in enumerate(["a/b", "[b]", "c*d", "c**d", "\u00fc x"]):
        place = f"{folder}/[{step}]"
        engine.global_steps = step
        engine.save_checkpoint(place, tag=tag)
        engine.save_checkpoint(place, tag="cxd", save_latest=False)
        path, _ = engine.load_checkpoint(place)
        assert path == f"{place}/{tag}/mp_rank_00_model_states.pt" and engine.global_steps == step
    engine.destroy()


def test_folders_and_tags_are_taken_as_they_are(tmp_path: Path) -> None:
    run_ranks(2, load_by_odd_names, str(tmp_path))
