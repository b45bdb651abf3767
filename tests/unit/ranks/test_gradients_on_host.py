"""Gradients under CPU offload: where they lie after the backward pass, and what scripts do to them before the step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from torch import Tensor

from ds_muon.passes import host_passes
from tests.unit.support.checkpoints import by_name
from tests.unit.support.models import PrescribedGradients, Sometimes, ds_config, full_weights, start
from tests.unit.support.on_host import ON_HOST, assert_same
from tests.unit.support.ranks import RankFailure, run_ranks
from tests.unit.support.steps import SHAPES, exact_gradients

pytestmark = pytest.mark.ranks


def where_things_are(config: dict[str, Any]) -> dict[str, Any]:
    """The types of device of what lives long, and whether the host's is pinned, before a step and after it."""
    engine = start(PrescribedGradients(SHAPES), config)
    engine.backward(engine(exact_gradients(SHAPES, 0, engine.device)))
    zero, found = engine.optimizer, {}
    found["left on the model"] = [name for name, p in engine.module.named_parameters() if p.grad is not None]
    averaged = [safe_get_full_grad(p).cpu() for p in engine.module.parameters()]
    world_size = torch.distributed.get_world_size()
    expected = exact_gradients(SHAPES, 0, torch.device("cpu"))
    found["right"] = torch.distributed.get_rank() > 0 or all(
        torch.equal(a, e / world_size) for a, e in zip(averaged, expected, strict=True)
    )
    engine.step()
    flats = zero.single_partition_of_fp32_groups
    states = [state[key] for state in zero.optimizer.state.values() for key in state if key != "row_variance"]
    found["host"] = {tensor.device.type for tensor in [*flats, *states, *(flat.grad for flat in flats)]}
    found["pinned"] = {flat.grad.is_pinned() for flat in flats}
    found["kept beside"] = zero.param_buffer_of_bit16_for_cpu_offload_groups
    engine.destroy()
    return found


@pytest.mark.parametrize("pinned", [True, False])
def test_gradients_are_on_the_host_after_backward_and_all_state_always(pinned: bool) -> None:
    section = {"offload_optimizer": {"device": "cpu", "pin_memory": pinned}}
    on_gpu = get_accelerator().device_name() != "cpu"
    for found in run_ranks(2, where_things_are, ds_config({"variant": "normuon"}, zero=section)):
        assert found == {
            "left on the model": [],
            "right": True,
            "host": {"cpu"},
            "pinned": {pinned and on_gpu},
            "kept beside": [],
        }


def pinned_by(config: dict[str, Any]) -> tuple[list[int], list[int], bool]:
    """Bytes of what is pinned while an engine is made, and of the gradients; and whether the engine says so."""
    accelerator, found = get_accelerator(), []

    def counted(original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name in ("pin_memory", "pin_empty_like"):
            original = getattr(accelerator, name)
            stack.enter_context(mock.patch.object(accelerator, name, partial(counted, original)))
        engine = start(PrescribedGradients(SHAPES), config)
    zero = engine.optimizer
    gradients = [flat.grad.nbytes for flat in zero.single_partition_of_fp32_groups]
    engine.destroy()
    return found, gradients, zero.cpu_offload_pin_memory


@pytest.mark.parametrize("pinned", [True, False])
def test_of_the_hosts_memory_only_gradients_are_pinned_because_only_they_are_copied_to(pinned: bool) -> None:
    section = {"offload_optimizer": {"device": "cpu", "pin_memory": pinned}}
    for found, gradients, says in run_ranks(2, pinned_by, ds_config(zero=section, dtype="bfloat16")):
        assert found == gradients * pinned and says is pinned


def set_by_a_script(config: dict[str, Any], how: str) -> tuple[dict[str, Any], list[int]]:
    """What the run is after a step, and of how many elements the host has taken squares in it.

    The script zeroes one gradient after the backward pass and makes AdamW's larger, or does nothing.
    """
    engine = start(PrescribedGradients(SHAPES), config)
    loops, read = host_passes, []

    def counted(original: Callable[..., Tensor], x: Tensor, *segments: Any) -> Tensor:
        read.append(x.numel())
        return original(x, *segments)

    engine.backward(engine(exact_gradients(SHAPES, 0, engine.device)))
    named = dict(engine.module.named_parameters())
    if how == "set":
        for name, factor in (("p0", 0.0), ("p7", 4.0)):
            safe_set_full_grad(named[name], safe_get_full_grad(named[name]) * factor)
    elif how == "written":
        for flat in engine.optimizer.single_partition_of_fp32_groups:
            flat.grad.mul_(0.25)
    with mock.patch.object(loops, "sum_of_squares", partial(counted, loops.sum_of_squares)):
        engine.step()
    found = by_name(engine)
    found["norm"] = float(engine.get_global_grad_norm())
    engine.destroy()
    return found, read


def test_the_host_reads_gradients_before_they_move_only_if_a_script_has_set_them() -> None:
    config = ds_config({"weight_decay": 0.1}, gradient_clipping=0.5, zero=ON_HOST)
    for _, read in run_ranks(2, set_by_a_script, config, ""):
        assert not read
    set_on_host = run_ranks(2, set_by_a_script, config, "set")
    for (found, _), (expected, _) in zip(
        set_on_host,
        run_ranks(2, set_by_a_script, ds_config({"weight_decay": 0.1}, gradient_clipping=0.5), "set"),
        strict=True,
    ):
        assert_same(found, expected, of_adamw=("p7", "p8"))
    assert any(read for _, read in set_on_host)
    (left, read), (untouched, _) = (run_ranks(1, set_by_a_script, config, how)[0] for how in ("written", ""))
    assert read and left["norm"] == pytest.approx(untouched["norm"] / 4)


@pytest.mark.parametrize("how", ["set", "written"])
def test_what_a_script_has_set_before_it_ends_a_step_by_itself_is_measured_anew(how: str) -> None:
    by_itself = {"managed_gradient_accumulation": False}
    (expected, _), (found, read) = (
        run_ranks(
            1, set_by_a_script, ds_config({"weight_decay": 0.1}, gradient_clipping=0.5, zero=ON_HOST, **more), how
        )[0]
        for more in ({}, by_itself)
    )
    assert read
    assert_same(found, expected)


IN_FP32 = {"dtype": "bfloat16", "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize("managed", [False, True])
def test_sums_in_fp32_are_read_and_set_before_the_step_whoever_ends_it(managed: bool) -> None:
    of_run: dict[str, Any] = {**IN_FP32, "managed_gradient_accumulation": managed, "gradient_clipping": 0.5}
    (found, _), (expected, _) = (
        run_ranks(2, set_by_a_script, ds_config({"weight_decay": 0.1}, zero=zero, **of_run), "set")[0]
        for zero in (ON_HOST, {})
    )
    assert_same(found, expected, of_adamw=("p7", "p8"))
    for zero in () if managed else (ON_HOST, {}):  # at stage 1 a script's own have not been averaged before the step
        with pytest.raises(RankFailure, match="only available immediately after backward"):
            run_ranks(1, set_by_a_script, ds_config(stage=1, zero=zero, **of_run), "set")


def set_while_they_come_down(sums: dict[str, Any]) -> bool:
    """Whether what a script sets is still there when copies that were on their way have come."""
    engine = start(PrescribedGradients(SHAPES), ds_config(zero=ON_HOST, **sums))
    engine.backward(engine(exact_gradients(SHAPES, 0, engine.device)))
    zero, first = engine.optimizer, next(iter(engine.module.parameters()))
    arrives = SimpleNamespace(synchronize=lambda: zero.gradient_on_host(0).fill_(2.0))
    zero._pending_offload_events[object()] = arrives
    safe_set_full_grad(first, torch.ones_like(first, device="cpu"))
    zero._wait_for_offload_copies()
    there = bool((safe_get_full_grad(first) == 1).all())
    engine.destroy()
    return there


@pytest.mark.parametrize("sums", [{}, IN_FP32], ids=["of the model", "in fp32"])
def test_what_a_script_sets_is_not_overwritten_by_gradients_on_their_way(sums: dict[str, Any]) -> None:
    assert run_ranks(1, set_while_they_come_down, sums) == [True]


def repaired(repair: bool, sums: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The weights after a step, and how many were skipped; a NaN of its first micro-batch may have been repaired."""
    engine = start(Sometimes(SHAPES), ds_config(gradient_accumulation_steps=2, zero=ON_HOST, **sums))
    gradients: list[Tensor | None] = [*exact_gradients(SHAPES, 0, engine.device)]
    first = dict(engine.module.named_parameters())["p0"]
    good, bad = gradients[0], gradients[0].clone()
    bad[0, 0] = torch.nan
    engine.backward(engine([bad if repair else good, *gradients[1:]]))
    engine.step()
    if repair:
        safe_set_full_grad(first, (good / 2).float())
    engine.backward(engine([None, *gradients[1:]]))
    engine.step()
    found = full_weights(engine), engine.skipped_steps
    engine.destroy()
    return found


@pytest.mark.parametrize("sums", [{}, IN_FP32], ids=["of the model", "in fp32"])
def test_a_gradient_that_is_repaired_between_micro_batches_is_that_of_the_step(sums: dict[str, Any]) -> None:
    (found, skipped), (expected, _) = (run_ranks(1, repaired, repair, sums)[0] for repair in (True, False))
    assert skipped == 0
    assert_same(found, expected)
