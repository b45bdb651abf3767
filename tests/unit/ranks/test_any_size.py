"""A checkpoint of any world size and layout loads at any other, to the last bit; shards that do not belong together do
not."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ds_muon.cli import main
from ds_muon.shards import description
from tests.unit.ranks.test_checkpoint import Layers, assert_same, everything
from tests.unit.support.cases import pairwise
from tests.unit.support.models import PrescribedGradients, ds_config, start, start_groups, train_step, variances
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import exact_gradients

pytestmark = pytest.mark.ranks

# Straddlers, an odd size, which alignment follows by a gap, and so little for AdamW that some ranks hold nothing of it.
SHAPES = [(24, 24), (15, 31), (16, 40), (3, 4, 7), (2, 3), (3, 20), (11,), (5, 1)]
# Rows, columns and parts that take turns; p3 is a stack, each of its matrices of two.
BLOCKS: dict[str, Any] = {
    "p0": {"split": 3},
    "p1": {"split": [16, 15], "axis": "in"},
    "p2": {"split": 4, "interleaved": True},
    "p3": {"split": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "round robin": {"round_robin_gradients": True},
    "aligned": {"parameter_alignment": True},
}
SCHEDULER = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_max_lr": 0.02}}
STEPS = 2


def settings(variant: str, dtype: str, momentum_dtype: str, stage: int, layout: str) -> dict[str, Any]:
    rule, _, blocks = variant.partition(", ")
    params = {"variant": rule, "weight_decay": 0.1, "momentum_dtype": momentum_dtype, "muon_params": ["p3"]}
    params |= {"muon_blocks": BLOCKS} if blocks else {}
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}} if dtype == "float16" else {}
    return ds_config(params, dtype=dtype, stage=stage, zero=LAYOUTS[layout], scheduler=SCHEDULER, **fp16)


def by_name(engine: Any) -> dict[str, Any]:
    """Everything that a checkpoint restores, by parameter, whatever the layout: the same on every rank."""
    zero = engine.optimizer
    found: dict[str, Any] = {"rates": {}, "step": {}, "variance": {}}
    for i, flat in enumerate(zero.single_partition_of_fp32_groups):
        group, state = zero.optimizer.param_groups[i], zero.optimizer.state[flat]
        tensors = {"weight": flat.detach(), **{key: t for key, t in state.items() if t.shape == flat.shape}}
        for key, tensor in tensors.items():
            here = tensor.to(engine.device)
            cuts = [torch.empty_like(here) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(cuts, here)
            joined = torch.cat(cuts).cpu()
            for p, offset in zip(zero.round_robin_bit16_groups[i], zero.round_robin_bit16_offsets[i], strict=True):
                values = joined[offset : offset + p.numel()].view(p.shape).clone()
                found.setdefault(key, {})[zero.param_names[p]] = values
        for p in zero.bit16_groups[i]:
            name = zero.param_names[p]
            found["rates"][name] = {k: group[k] for k in group if k not in ("params", "name", "user_group")}
            found["step"][name] = state["step"].clone().cpu() if "step" in state else None
    if zero.optimizer.config.variant == "normuon":
        found["variance"] = {name: variance.clone() for name, variance in variances(engine).items()}
    found["model"] = {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}
    found["scale"] = zero.loss_scale
    found["scheduler"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler else None
    found["counters"] = [engine.global_steps, engine.skipped_steps]
    return found


def run(config: dict[str, Any], groups: int, folder: str, *, load: bool) -> list[Any]:
    """What a run is when it has saved, or loaded; what it is two steps later; and what is said when it loads."""
    engine = start_groups(SHAPES, config, groups)
    first = 9 if load else 0
    for step in range(first, first + (1 if load else STEPS)):
        train_step(engine, exact_gradients(SHAPES, step, engine.device))
    lines: list[str] = []
    if load:
        with mock.patch("ds_muon.checkpoint.say", lines.append):
            engine.load_checkpoint(folder)
    else:
        engine.save_checkpoint(folder)
    found = [by_name(engine)]
    for step in range(STEPS, 2 * STEPS):
        train_step(engine, exact_gradients(SHAPES, step, engine.device))
    found += [by_name(engine), lines]
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, list[Any]]]:
    """A checkpoint, and what the run was that saved it: made when it is first asked for."""

    @functools.cache
    def make(ranks: int, groups: int, *case: Any) -> tuple[str, list[Any]]:
        folder = str(tmp_path_factory.mktemp("saved"))
        return folder, run_ranks(ranks, functools.partial(run, load=False), settings(*case), groups, folder)[0]

    return make


# Dtype of the model, variant, dtypes of the momentum and stages, then and now.
KINDS = [
    ("float32", "normuon, blocks", ("float32", "float32"), (1, 2)),
    ("bfloat16", "normuon", ("bfloat16", "bfloat16"), (2, 1)),
    ("float16", "muon", ("float32", "float32"), (2, 1)),
    ("bfloat16", "muon", ("float32", "bfloat16"), (2, 2)),
    ("float32", "muon", ("bfloat16", "float32"), (1, 1)),
]


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


def load_by_other_blocks(folder: str, variant: str, blocks: dict[str, Any]) -> dict[str, Any] | str:
    """What the run is when it has loaded, or why it has not."""
    config = settings(variant, "float32", "float32", 2, "plain")
    config["optimizer"]["params"]["muon_blocks"] = blocks
    engine = start_groups(SHAPES, config, 1)
    train_step(engine, exact_gradients(SHAPES, 9, engine.device))
    before = by_name(engine)
    try:
        engine.load_checkpoint(folder)
    except ValueError as error:
        assert_same(by_name(engine), before)
        return str(error)
    finally:
        engine.destroy()
    return by_name(engine)


COLUMNS, IN_TURNS = {k: BLOCKS[k] for k in ("p0", "p2", "p3")}, {**BLOCKS, "p2": {"split": 4}}


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


class Kinds(nn.Module):
    """A tied, a frozen and an empty parameter beside usual ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.frozen, self.square = nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.square(torch.relu(self.frozen(self.embedding(tokens))))
        return self.head(h).square().mean() + self.empty.sum()


def run_kinds(stage: int, folder: str, seed: int, how: dict[str, bool] | None) -> dict[str, Any]:
    torch.manual_seed(seed)
    engine = start(Kinds(), ds_config(stage=stage, dtype="bfloat16"))
    train_step(engine, torch.arange(12, device=engine.device))
    lines: list[str] = []
    if how is None:
        engine.save_checkpoint(folder)
    else:
        with mock.patch("ds_muon.engine_checkpoints.say", lines.append):
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


# ---- shards that do not belong together -----------------------------------------------------------------------------

CONFIG = ds_config(dtype="bfloat16", scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}})


def save_layers(folder: str) -> None:
    engine = start(Layers(), CONFIG)
    for step in range(2):
        train_step(engine, torch.ones(4, 16, device=engine.device, dtype=torch.bfloat16))
        engine.save_checkpoint(folder, tag=f"step{step + 1}")
    engine.destroy()


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


def shard(folder: Path, rank: int) -> Path:
    return folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def weights(folder: Path) -> Path:
    return folder / "mp_rank_00_model_states.pt"


def cut_short(folder: Path) -> None:
    shard(folder, 2).write_bytes(shard(folder, 2).read_bytes()[:-100])


def change(folder: Path, rank: int, **said: Any) -> None:
    contents = torch.load(shard(folder, rank), weights_only=False)
    contents["optimizer_state_dict"]["ds_muon_shard"].update(said)
    torch.save(contents, shard(folder, rank))


def say_no_save(folder: Path) -> None:
    """The weights of an early version."""
    contents = torch.load(weights(folder), weights_only=False)
    del contents["ds_muon_save"]
    torch.save(contents, weights(folder))


def forget(folder: Path) -> None:
    """The checkpoint of an early version."""
    say_no_save(folder)
    for rank in range(3):
        contents = torch.load(shard(folder, rank), weights_only=False)
        del contents["optimizer_state_dict"]["ds_muon_shard"]
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
    for said in run_ranks(2, refuse_all, str(tmp_path), [*tags, "per rank", "latest", "empty latest"]):
        for text, (name, (_, pattern)) in zip(said, FATES.items(), strict=False):
            assert re.search(pattern, text), (name, text)
        assert "rank 0 loads the tag 'step1', and rank 1 'step2'" in said[-3]
        assert "latest is there on rank 1, and not on rank 0" in said[-2]
        assert "latest is empty" in said[-1]


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


# ---- param groups whose meaning is not clear ------------------------------------------------------------------------


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
