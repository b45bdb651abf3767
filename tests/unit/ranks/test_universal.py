"""A checkpoint in the universal layout is as good as the one it was made from."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.unit.support.cases import pairwise
from tests.unit.support.checkpoints import (
    ADAMWS,
    CONFIG,
    IN_TURNS,
    KINDS,
    LAYOUTS,
    SHAPES,
    STEPS,
    UNIVERSAL,
    Kinds,
    Layers,
    assert_same,
    by_name,
    converted,
    cut_short,
    everything,
    load_by_other_blocks,
    run,
    save_layers,
    settings,
)
from tests.unit.support.models import PrescribedGradients, ds_config, start, train_step
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import exact_gradients

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, list[Any]]]:
    """A checkpoint in the universal layout, and what the run was that saved it: made when it is first asked for."""

    @functools.cache
    def make(ranks: int, groups: int, *case: Any) -> tuple[str, list[Any]]:
        folder = tmp_path_factory.mktemp("saved")
        stayed = run_ranks(ranks, functools.partial(run, load=False), settings(*case), groups, str(folder / "run"))[0]
        return converted("to-universal", folder / "run", folder / "universal"), stayed

    return make


@pairwise(
    of_all=2,
    then=[1, 2, 3],
    now=[1, 2, 3],
    laid_out=[*LAYOUTS],
    asked=[True, False],
    groups=[(1, 1), (1, 2), (2, 2)],
    kind=KINDS,
)
def test_a_run_goes_on_from_the_universal_layout_as_the_one_that_stayed(
    saved: Callable[..., tuple[str, list[Any]]],
    then: int,
    now: int,
    laid_out: str,
    asked: bool,
    groups: tuple[int, int],
    kind: tuple[str, str, tuple[str, str], tuple[int, int]],
) -> None:
    dtype, rule, momentum, stages = kind
    folder, (before, after, _) = saved(then, groups[0], rule, dtype, momentum[0], stages[0], laid_out)
    config = {**settings(rule, dtype, momentum[1], stages[1], "plain"), **(UNIVERSAL if asked else {})}
    kept = getattr(torch, momentum[1])
    before = {**before, "momentum_buffer": {k: m.to(kept) for k, m in before["momentum_buffer"].items()}}
    for loaded, went_on, lines in run_ranks(now, functools.partial(run, load=True), config, groups[1], folder):
        assert_same(loaded, before)
        if momentum[0] == momentum[1]:
            assert_same(went_on, after)
        said = [f"momentum, {momentum[0]}, is converted to {momentum[1]}"] if momentum[0] != momentum[1] else []
        said += ["saved with other param groups"] if groups[0] != groups[1] else []
        assert len(lines) == len(said) and all(map(str.__contains__, lines, said))


def test_moments_of_other_outputs_are_refused_in_the_universal_layout_too(
    saved: Callable[..., tuple[str, list[Any]]],
) -> None:
    folder, _ = saved(2, 1, "normuon, blocks", "float32", "float32", 2, "plain")
    for said in run_ranks(2, load_by_other_blocks, folder, "normuon", IN_TURNS):
        assert "'p2' has other outputs there" in said


def run_kinds(folder: str, seed: int, how: dict[str, bool] | None, config: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(seed)
    engine = start(Kinds(), ds_config(dtype="bfloat16", **config))
    engine.module.register_buffer("seen", torch.full((3,), float(seed), device=engine.device))
    train_step(engine, torch.arange(12, device=engine.device))
    if how is None:
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder, **how)
    found = {**by_name(engine), "buffer": engine.module.seen.cpu()}
    engine.destroy()
    return found


def test_buffers_and_tied_frozen_and_empty_parameters_are_loaded(tmp_path: Path) -> None:
    then = run_ranks(3, run_kinds, str(tmp_path / "run"), 1, None, {})[0]
    folder = converted("to-universal", tmp_path / "run", tmp_path / "universal")
    for now in run_ranks(2, run_kinds, folder, 2, {}, UNIVERSAL):
        assert_same(now, then)
    for how in ({"load_module_only": True}, {"load_optimizer_states": False}):
        now = run_ranks(1, run_kinds, folder, 2, how, UNIVERSAL)[0]
        assert_same(now["model"], then["model"])
        assert all(torch.equal(now["weight"][name], then["model"][name].float()) for name in now["weight"])


def load_both_ways(folder: str) -> tuple[list[str], list[int]]:
    """What is said of what is newer, and which step is loaded, by the universal layout's name and by the usual one."""
    lines: list[str] = []
    steps = []
    for config in ({**CONFIG, **UNIVERSAL}, CONFIG):
        engine = start(Layers(), config)
        with mock.patch("ds_muon.checkpoints.engine_methods.say", lines.append):
            engine.load_checkpoint(folder)
        steps.append(engine.global_steps)
        if len(steps) == 1:
            assert not lines
            train_step(engine, torch.ones(4, 16, device=engine.device, dtype=torch.bfloat16))
            engine.save_checkpoint(folder)
            with mock.patch("ds_muon.checkpoints.engine_methods.say", lines.append):
                engine.load_checkpoint(folder)
            steps.append(engine.global_steps)
        engine.destroy()
    return lines, steps


def test_it_is_said_where_load_universal_passes_over_what_was_saved_last(tmp_path: Path) -> None:
    run_ranks(3, save_layers, str(tmp_path / "run"))
    folder = converted("to-universal", tmp_path / "run", tmp_path / "universal")
    for lines, steps in run_ranks(2, load_both_ways, folder):
        assert steps == [2, 2, 3]
        assert len(lines) == 1 and "takes 'step2', which latest_universal names, and not 'global_step3'" in lines[0]


def test_the_files_are_those_that_other_tools_read(saved: Callable[..., tuple[str, list[Any]]]) -> None:
    folder, (before, *_) = saved(3, 1, "muon", "bfloat16", "float32", 2, "round robin")
    tag = Path(folder, Path(folder, "latest_universal").read_text())
    assert (tag / "mp_rank_00_model_states.pt").is_file() and tag.name == Path(folder, "latest").read_text()
    for key, kind in (("weight", "fp32"), ("exp_avg",) * 2, ("exp_avg_sq",) * 2, ("momentum_buffer",) * 2):
        for name, tensor in before[key].items():
            place = "ds_muon" if key == "momentum_buffer" else "zero"
            contents = torch.load(tag / place / name / f"{kind}.pt", weights_only=True)
            assert torch.equal(contents["param"], tensor) and contents["param"].untyped_storage().nbytes() == (
                tensor.numel() * tensor.element_size()
            )
    assert all(torch.load(tag / "zero" / name / "step.pt") == STEPS for name in ADAMWS)


def load_by_deepspeed(folder: str) -> dict[str, Any]:
    """DeepSpeed's own AdamW, in a group for each half."""
    model = PrescribedGradients(SHAPES)
    parameters = list(model.parameters())
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    config = ds_config(dtype="bfloat16", **adamw, **UNIVERSAL)
    engine = start(model, config, model_parameters=[{"params": parameters[:6]}, {"params": parameters[6:]}])
    engine.load_checkpoint(folder)
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    named = dict(engine.module.named_parameters())
    found = {
        "weight": {name: safe_get_full_fp32_param(p).cpu() for name, p in named.items()},
        **{
            key: {name: safe_get_full_optimizer_state(named[name], key).cpu() for name in ADAMWS}
            for key in ("exp_avg", "exp_avg_sq")
        },
    }
    train_step(engine, exact_gradients(SHAPES, 0, engine.device))
    engine.destroy()
    return found


def test_deepspeeds_own_adamw_reads_weights_and_moments(saved: Callable[..., tuple[str, list[Any]]]) -> None:
    folder, (before, *_) = saved(3, 1, "muon", "bfloat16", "float32", 2, "round robin")
    for found in run_ranks(2, load_by_deepspeed, folder):
        assert_same(found, {key: before[key] for key in found})


# ---- files that do not belong together ------------------------------------------------------------------------------


def change(path: Path, **said: Any) -> None:
    contents = torch.load(path, weights_only=False)
    contents["ds_muon_universal"].update(said)
    torch.save(contents, path)


def strip(path: Path) -> None:
    contents = torch.load(path, weights_only=False)
    del contents["ds_muon_universal"]
    torch.save(contents, path)


COMMON = "zero/optimizer_state.pt"
FATES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: (f / "zero/b.weight/fp32.pt").unlink(), "b.weight/fp32.pt is missing"),
    "torn": (lambda f: cut_short(f / "ds_muon/a.weight/momentum_buffer.pt"), "momentum_buffer.pt cannot be read"),
    "not finished": (lambda f: (f / COMMON).unlink(), "optimizer_state.pt is missing: it was not converted to its end"),
    "mixed up": (
        lambda f: shutil.copy(f.parents[1] / "other/step2/zero/c.bias/exp_avg.pt", f / "zero/c.bias/exp_avg.pt"),
        "c.bias/exp_avg.pt is of another conversion",
    ),
    "of a later version": (lambda f: change(f / COMMON, format=2), "has format 2, of a later ds_muon"),
    "of DeepSpeed's converter": (lambda f: strip(f / COMMON), "was not written by ds-muon; convert the checkpoint"),
    "weights of another step": (lambda f: change(f / COMMON, step=1), "model_states.pt is of another save than"),
}  # fmt: skip


def refuse_all(folder: str, tags: list[str]) -> list[str]:
    """What is said of each checkpoint; proves that none has changed anything."""
    engine = start(Layers(), {**CONFIG, **UNIVERSAL})
    train_step(engine, torch.ones(4, 16, device=engine.device, dtype=torch.bfloat16))
    before, said = everything(engine), []
    for tag in (*tags, None):
        with pytest.raises((ValueError, RuntimeError, FileNotFoundError)) as refused:
            engine.load_checkpoint(folder if tag else str(Path(folder).parent / "run"), tag=tag)
        said.append(str(refused.value))
        assert_same(before, everything(engine))
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2 and engine.load_universal_checkpoint()
    engine.destroy()
    return said


def test_files_that_do_not_belong_together_are_refused_on_every_rank_before_anything_changes(tmp_path: Path) -> None:
    run_ranks(3, save_layers, str(tmp_path / "run"))
    for out in ("universal", "other"):
        converted("to-universal", tmp_path / "run", tmp_path / out)
    tags = [name.replace(" ", "-") for name in FATES]
    for tag, (spoil, _) in zip(tags, FATES.values(), strict=True):
        shutil.copytree(tmp_path / "universal/step2", tmp_path / "universal" / tag)
        spoil(tmp_path / "universal" / tag)
    for said in run_ranks(2, refuse_all, str(tmp_path / "universal"), tags):
        for text, (name, (_, words)) in zip(said, FATES.items(), strict=False):
            assert words in text, (name, text)
        assert "there is no" in said[-1] and "latest_universal; write it by ds-muon to-universal" in said[-1]
