"""CPU offload of the optimizer: the run without it, bit for bit, with each matrix orthogonalized once.

On CPU ranks the accelerator is the CPU as well, and all copies between the two are made.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_muon import muon_group, offload
from ds_muon.offload import Journey
from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.orthogonalize.torch_backend import TorchOperations
from ds_muon.passes import Goal, host_passes, lift
from ds_muon.replay import read_capture
from tests.unit.support.around_engine import BUT_THE_MODEL, offload_and_reload
from tests.unit.support.bad_steps import STRADDLING, WHOLE, bad_second_step
from tests.unit.support.captures import captured_step, environment
from tests.unit.support.cases import in_turns, pairwise
from tests.unit.support.checked import assert_right, check_block
from tests.unit.support.checkpoints import by_name, run
from tests.unit.support.checkpoints import settings as any_settings
from tests.unit.support.models import PrescribedGradients, Sometimes, ds_config, full_weights, start, train_step
from tests.unit.support.on_host import ON_HOST, assert_same
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import SHAPES as PLAIN
from tests.unit.support.steps import exact_gradients

pytestmark = pytest.mark.ranks

# Straddlers at two ranks and at three; tensors of several matrices, side by side and in strips; no element at all; and
# for AdamW so little that some ranks hold nothing.
SHAPES = [(36, 20), (40, 18), (4, 12, 10), (24, 24), (24, 24), (24, 24), (0, 4), (7, 13), (2, 3), (11,), (40, 1)]
BLOCKS = {
    "muon_params": ["p2"],
    "muon_blocks": {"p0": {"split": 3}, "p1": {"split": [6, 2, 10], "axis": "in"}, "p2": {"split": 2}},
}
ADAMWS = ("p6", "p9", "p10")
STEPS = 3
# How many micro-batches make a step, and how the engine knows.
ACCUMULATION: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (1, {}),
    "twice": (2, {"gradient_accumulation_steps": 2}),
    "thrice in fp32": (3, {"gradient_accumulation_steps": 3, "data_types": {"grad_accum_dtype": "fp32"}}),
    "by the script": (2, {"managed_gradient_accumulation": False}),
    "by the script in fp32": (2, {"managed_gradient_accumulation": False, "data_types": {"grad_accum_dtype": "fp32"}}),
}


def left_out(step: int, micro_batch: int) -> tuple[int, ...]:
    """The parameters without a gradient: of one micro-batch, of the first or the last, or of a whole step."""
    return {0: (3,), 1: (9, 4), 2: (0,)}.get(step, ()) + ((5, 10) if (step, micro_batch) == (1, 1) else ())


def train(config: dict[str, Any], groups: int, micro_batches: int, steps: int = STEPS) -> tuple[dict[str, Any], int]:
    """What the run is in the end, by parameter, and how many matrices this rank has orthogonalized."""
    model = Sometimes(SHAPES)
    parameters = list(model.parameters())
    dealt: Any = parameters if groups == 1 else [{"params": parameters[first::groups]} for first in range(groups)]
    engine = start(model, config, model_parameters=dealt)
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    runs = 0

    def counted(matrices: Sequence[Tensor], settings: NewtonSchulz) -> Tensor:
        nonlocal runs
        runs += len(matrices)
        partitions = engine.optimizer.single_partition_of_fp32_groups
        if engine.optimizer.cpu_offload:
            homes = {flat.grad.untyped_storage().data_ptr() for flat in partitions}
            assert not homes & {matrix.untyped_storage().data_ptr() for matrix in matrices}, "has not been copied"
        return original(matrices, settings)

    original = muon_group.orthogonalize_batch
    with mock.patch.object(muon_group, "orthogonalize_batch", counted):
        for step in range(steps):
            for micro_batch in range(micro_batches):
                gradients: list[Tensor | None] = [torch.randn(shape, generator=generator) for shape in SHAPES]
                for index in left_out(step, micro_batch):
                    gradients[index] = None
                engine.backward(engine([None if g is None else g.to(engine.device) for g in gradients]))
                if micro_batch == micro_batches - 1 or "gradient_accumulation_steps" in config:
                    engine.step()
    matrices = len(engine.optimizer.plan.matrices)
    found = by_name(engine)
    found["norm"] = float(engine.get_global_grad_norm())
    engine.destroy()
    return found, runs if torch.distributed.get_rank() else runs - steps * matrices


def settings(
    dtype: str, stage: int, variant: str, momentum_dtype: str, guard: str, accumulation: str, zero: dict[str, Any]
) -> dict[str, Any]:
    params = {"variant": variant, "nan_guard": guard, "momentum_dtype": momentum_dtype, "weight_decay": 0.1, **BLOCKS}
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}} if dtype == "float16" else {}
    how = ACCUMULATION[accumulation][1]
    return ds_config(params, dtype=dtype, stage=stage, zero=zero, gradient_clipping=0.5, **fp16, **how)


@pairwise(
    of_all=2,
    world_size=[1, 2, 3],
    stage=[1, 2, "2, overlapping"],
    dtype=["float32", "bfloat16", "float16"],
    rule=[("muon", "float32"), ("normuon", "float32"), ("muon", "bfloat16")],
    guard=["off", "skip"],
    accumulation=[*ACCUMULATION],
    lies=[(1, True, {}), (2, False, {"round_robin_gradients": True}), (2, True, {"parameter_alignment": True})],
)
def test_a_run_with_offload_is_the_run_without_and_orthogonalizes_each_matrix_once(
    world_size: int,
    stage: int | str,
    dtype: str,
    rule: tuple[str, str],
    guard: str,
    accumulation: str,
    lies: tuple[int, bool, dict[str, bool]],
) -> None:
    groups, pinned, zero = lies
    zero = zero | {"overlap_comm": stage == "2, overlapping"}
    micro_batches, _ = ACCUMULATION[accumulation]
    without, offloaded = (
        run_ranks(
            world_size,
            train,
            settings(dtype, 1 if stage == 1 else 2, *rule, guard, accumulation, {**zero, **offload}),
            groups,
            micro_batches,
        )
        for offload in ({}, {"offload_optimizer": {"device": "cpu", "pin_memory": pinned}})
    )
    for (expected, _), (found, _) in zip(without, offloaded, strict=True):
        assert_same(found, expected, of_adamw=ADAMWS)
    assert sum(runs for _, runs in without) == sum(runs for _, runs in offloaded) == 0


# ---- skipped steps ---------------------------------------------------------------------------------------------------


@in_turns(case=[(1, WHOLE), (2, STRADDLING), (3, STRADDLING)], variant=["muon", "normuon"], stage=[1, 2])
def test_a_step_that_is_skipped_for_an_update_leaves_what_it_leaves_without_offload(
    case: tuple[int, tuple[int, int]], variant: str, stage: int
) -> None:
    world_size, shape = case
    params = {"variant": variant, "nan_guard": "skip"}
    without, offloaded = (
        run_ranks(world_size, bad_second_step, ds_config(params, stage=stage, zero=zero), shape)
        for zero in ({}, ON_HOST)
    )
    assert offloaded == without
    for found in offloaded:
        assert found["skipped"] == 1 and found["moved"] == {"momentum_buffer"}
        assert found["weights stayed"] and found["model stayed"] and found["finite"]


def overflow(config: dict[str, Any]) -> list[dict[str, Any]]:
    """What the run is before and after a step in which a gradient of one rank is infinite, and a step later."""
    engine = start(PrescribedGradients(PLAIN), config)
    found = []
    for step in range(3):
        gradients = exact_gradients(PLAIN, step, engine.device)
        if step == 1 and torch.distributed.get_rank() == 0:
            gradients[2][0, 0] = torch.inf
        train_step(engine, gradients)
        found.append(by_name(engine))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_moves_nothing_and_the_next_step_is_right(stage: int) -> None:
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    without, offloaded = (
        run_ranks(2, overflow, ds_config(dtype="float16", stage=stage, zero=zero, **fp16))[0] for zero in ({}, ON_HOST)
    )
    for after, expected in zip(offloaded, without, strict=True):
        assert_same(after, expected, of_adamw=("p7", "p8"))
    before, skipped, _ = offloaded
    assert skipped["scale"] == before["scale"] / 2 and skipped["counters"] == [2, 1]
    for key in ("weight", "momentum_buffer", "exp_avg", "step", "model"):
        assert_same(skipped[key], before[key])


# ---- checkpoints and states ------------------------------------------------------------------------------------------


@in_turns(
    then=[(2, False), (3, True), (1, True), (2, True)],
    now=[(3, True), (2, False), (2, True), (1, True)],
    kind=[("float32", "normuon"), ("bfloat16", "muon"), ("float16", "muon"), ("bfloat16", "normuon")],
)
def test_a_checkpoint_goes_on_with_offload_and_without(
    tmp_path: Path, then: tuple[int, bool], now: tuple[int, bool], kind: tuple[str, str]
) -> None:
    dtype, variant = kind
    config = any_settings(variant, dtype, "float32", 2, "plain")
    plain = config["zero_optimization"]
    sections = [{**plain, **(ON_HOST if offloads else {})} for _, offloads in (then, now)]
    saved, loaded = ({**config, "zero_optimization": section} for section in sections)
    before, after, _ = run_ranks(then[0], run_and_save, saved, str(tmp_path))[0]
    for found, went_on, _ in run_ranks(now[0], load_and_run, loaded, str(tmp_path)):
        assert_same(found, before)
        assert_same(went_on, after, of_adamw=ADAMWS)


def run_and_save(config: dict[str, Any], folder: str) -> list[Any]:
    return run(config, 2, folder, load=False)


def load_and_run(config: dict[str, Any], folder: str) -> list[Any]:
    return run(config, 1, folder, load=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", [{}, {"include": BUT_THE_MODEL}])
def test_states_that_were_away_come_back_to_where_they_were(how: dict[str, Any], dtype: str) -> None:
    config = ds_config(dtype=dtype, zero=ON_HOST)
    stayed, returned = (run_ranks(2, offload_and_reload, config, away)[0] for away in (None, how))
    assert_same(returned, stayed)
    assert returned["linked"] and returned["bound"]


# ---- what goes up ----------------------------------------------------------------------------------------------------


ALIKE = [*[(24, 24)] * 7, (40, 40), (5,)]


def in_pieces_of(most: int | None, config: dict[str, Any]) -> tuple[dict[str, Tensor], list[int]]:
    """The weights, and how many bytes of U went up at a time, with so many bytes to stage."""
    # Slots that hold less than a matrix, or several.
    with mock.patch.object(lift, "SLOT_BYTES", 2048 if most is None else 6016):
        engine = start(PrescribedGradients(ALIKE), config)
    ups: list[int] = []
    (ferry,) = {group._ferry for group in engine.optimizer.muon_groups}
    original = ferry.up_from

    def up_from(write: Callable[..., None], matrices: Sequence[Tensor]) -> Journey:
        ups.append(sum(matrix.nbytes for matrix in matrices))
        return original(write, matrices)

    staged = mock.patch.object(muon_group, "STAGING_BYTES", muon_group.STAGING_BYTES if most is None else most)
    with (
        mock.patch.object(ferry, "up_from", up_from),
        mock.patch.object(TorchOperations, "alone", lambda *_: False),
        staged,
    ):
        for step in range(2):
            train_step(engine, exact_gradients(ALIKE, step, engine.device))
    weights = full_weights(engine)
    engine.destroy()
    return weights, [nbytes for nbytes in ups if nbytes]


def test_what_is_written_beside_other_work_is_waited_for_and_what_it_raises_is_raised() -> None:
    ferry, halves = offload.Ferry(torch.device("cpu"), pinned=False), torch.zeros(2, 4, 4).unbind()
    begun, may_end = threading.Event(), threading.Event()
    written = []

    def write(first: Tensor, into: Tensor | Goal) -> None:
        begun.set()
        assert may_end.wait(60)
        written.append(into.numel())

    def fail(first: Tensor, into: Tensor | Goal) -> None:
        raise ValueError("cannot be written")

    ferry.up_from(write, halves)
    assert begun.wait(60) and not written
    threading.Timer(0.2, may_end.set).start()
    ferry.settle()
    assert written == [32]
    with pytest.raises(ValueError, match="cannot be written"):
        ferry.up_from(fail, halves).on_accelerator()


@pytest.mark.parametrize(("threads", "left"), [(2, 2), (8, 7)])
def test_a_core_of_many_is_left_to_the_thread_that_launches_and_to_all_others(threads: int, left: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        writer = offload.Ferry(torch.device("cpu"), pinned=False)._writer
        found = writer.submit(host_passes._LIBRARY.omp_get_max_threads).result()
        with ThreadPoolExecutor(1) as begun_later:
            of_others = begun_later.submit(torch.get_num_threads).result()
    finally:
        torch.set_num_threads(before)
    assert (found, of_others) == (left, threads)


def test_matrices_go_up_in_batches_that_fit_the_staging_whatever_there_is() -> None:
    config, matrix = ds_config(zero=ON_HOST), 4 * 24 * 24
    whole, at_once = run_ranks(1, in_pieces_of, None, config)[0]
    assert at_once == [7 * matrix, 4 * 40 * 40] * 2
    # Half of it while the other half is worked on; a larger matrix is alone.
    for most, expected in ((6 * matrix, [2, 2, 3]), (1, [1] * 7)):
        cut, in_pieces = run_ranks(1, in_pieces_of, most, config)[0]
        assert in_pieces == [*(matrix * count for count in expected), 4 * 40 * 40] * 2
        assert_same(cut, whole)


def passes_of_a_step(config: dict[str, Any]) -> tuple[dict[str, int], set[tuple[str, int]]]:
    """How many elements of Muon each compiled pass went through in a step, and what the weights moved by."""
    engine = start(PrescribedGradients(ALIKE), config)
    loops = engine.optimizer.optimizer.host_passes
    elements: dict[str, int] = {}
    moved_by: set[tuple[str, int]] = set()

    def counted(name: str, original: Callable[..., Any], first: Tensor, *others: Any, **settings: Any) -> Any:
        elements[name] = elements.get(name, 0) + first.numel()
        if name == "apply_update_":
            moved_by.add((str(others[0].dtype), others[0].untyped_storage().data_ptr()))
        return original(first, *others, **settings)

    names = ("sum_of_squares", "advance_momentum_", "store_updates", "apply_update_", "adamw_")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(loops, name, partial(counted, name, getattr(loops, name))))
        train_step(engine, exact_gradients(ALIKE, 0, engine.device))
    (place,) = {flat.grad.untyped_storage().data_ptr() for flat in engine.optimizer.single_partition_of_fp32_groups[:1]}
    engine.destroy()
    return elements, {(dtype, "place" if at == place else "elsewhere") for dtype, at in moved_by}  # type: ignore[misc]


@pytest.mark.parametrize(("variant", "dtype"), [("muon", "float16"), ("normuon", "float32")])
def test_a_step_goes_through_the_hosts_memory_once_for_each_pass_and_stores_no_update_again(
    variant: str, dtype: str
) -> None:
    config = ds_config({"variant": variant, "ns_dtype": "float16", "nan_guard": "skip"}, zero=ON_HOST)
    muon, adamw = 7 * 24 * 24 + 40 * 40, 5
    ((elements, moved_by),) = run_ranks(1, passes_of_a_step, config)
    padding = 16
    # Beside an accelerator gradients are looked at there.
    assert elements.pop("sum_of_squares", 0) <= muon + adamw + padding, "looked at the updates again"
    assert elements.pop("apply_update_") <= muon + padding
    assert elements == {"advance_momentum_": muon, "adamw_": pytest.approx(adamw, abs=padding)}
    # O lies where the gradients were.
    assert (f"torch.{dtype}", "place") in moved_by and {where for _, where in moved_by} == {"place"}


# ---- checks and captures ---------------------------------------------------------------------------------------------


@in_turns(world_size=[2, 3], dtype=["float32", "bfloat16", "float16"], variant=["muon", "normuon"])
def test_every_update_is_right_by_the_references(world_size: int, dtype: str, variant: str) -> None:
    params = {"variant": variant, "verify_every": 1, "ns_dtype": "float32"}
    config = ds_config(params, dtype=dtype, zero=ON_HOST, gradient_accumulation_steps=2, gradient_clipping=0.1)
    for records in run_ranks(world_size, check_block, config, 2):
        assert_right(records)


def test_a_capture_holds_what_went_up(tmp_path: Path) -> None:
    env = environment(tmp_path, DS_MUON_NAN_CAPTURE_RAISE="0")
    found = run_ranks(2, captured_step, ds_config({"nan_guard": "skip"}, zero=ON_HOST), env, True)
    (path,) = tmp_path.iterdir()
    capture = read_capture(path)
    assert capture.name == "p0" and not capture.output.isfinite().all()
    assert (capture.input - found[0]["blend"]).norm() <= 1e-6 * found[0]["blend"].norm()
    assert all(rank["raised"] is None and rank["skipped"] == 1 for rank in found)
