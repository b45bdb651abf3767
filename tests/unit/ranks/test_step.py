"""What a step does and does not: clipping, scale, zeros, counts, state, skips."""

from __future__ import annotations

import functools
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ds_muon import muon_group
from ds_muon.guard import Verdict
from ds_muon.offload import HostPart
from ds_muon.passes import Moves
from tests.unit.support.cases import first_of, full, in_turns, pairwise
from tests.unit.support.models import PrescribedGradients, ds_config, full_weights, start, start_groups, train_step
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import SHAPES, assert_equal, exact_gradients, muon_names, state_of, train

pytestmark = pytest.mark.ranks


# ---- clipping and norms ---------------------------------------------------------------------------------------------


@functools.cache
def unclipped() -> dict[str, Tensor]:
    return run_ranks(2, train, SHAPES, ds_config(gradient_clipping=0), 3)[0]


@in_turns(clipping=[None, 1.0, 1e-8], stage=[1, 2])
def test_clipping_leaves_muon_weights_bit_equal(clipping: float | None, stage: int) -> None:
    clipped = run_ranks(2, train, SHAPES, ds_config(stage=stage, gradient_clipping=clipping), 3)[0]
    assert_equal(clipped, unclipped(), muon_names(SHAPES))


def norms(config: dict[str, Any]) -> dict[str, float]:
    shapes = [(48, 48), (20,)]
    engine = start(PrescribedGradients(shapes), config)
    gradients = exact_gradients(shapes, 0, engine.device)
    train_step(engine, gradients)
    averaged = [g / torch.distributed.get_world_size() for g in gradients]
    vector = engine.optimizer.optimizer.state[engine.optimizer.single_partition_of_fp32_groups[1]]["exp_avg"]
    total = torch.stack([vector.square().sum()])
    torch.distributed.all_reduce(total)
    return {
        "reported": float(engine.get_global_grad_norm()),
        "raw": float(torch.cat([g.flatten() for g in averaged]).norm()),
        "adamw": float(averaged[1].norm()),
        "first_moment": float(total.sqrt()),
    }


@pytest.mark.parametrize("scope", ["adamw", "all"])
def test_adamw_is_clipped_by_the_norm_of_its_scope_and_the_raw_norm_is_reported(scope: str) -> None:
    clip = 0.01
    found = run_ranks(2, norms, ds_config({"clip_norm_scope": scope}, gradient_clipping=clip))[0]
    assert found["reported"] == pytest.approx(found["raw"], rel=1e-6)
    factor = clip / found["adamw" if scope == "adamw" else "raw"]
    # After one step the first moment is (1 - beta1) times the clipped gradient.
    assert found["first_moment"] == pytest.approx(0.1 * factor * found["adamw"], rel=1e-4)


def test_compute_grad_norm_false_reports_none() -> None:
    assert run_ranks(2, reported_norms, ds_config(zero={"compute_grad_norm": False}))[0] == [None] * 3


@in_turns(dtype=["float32", "bfloat16", "float16"], stage=[1, 2])
def test_the_norm_is_a_tensor_as_deepspeeds_own_and_infinite_in_an_overflow(dtype: str, stage: int) -> None:
    ours, adamws = ds_config(dtype=dtype, stage=stage), ds_config(dtype=dtype, stage=stage)
    adamws["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
    for found, theirs in zip(run_ranks(2, reported_norms, ours), run_ranks(2, reported_norms, adamws), strict=True):
        good, overflow, good_again = found
        assert good["dtype"] == theirs[0]["dtype"] and good["device"] == theirs[0]["device"] and good["shape"] == ()
        assert good["norm"] == pytest.approx(theirs[0]["norm"], rel=1e-6) == good_again["norm"]
        # DeepSpeed's is a float here, on which .item() fails.
        assert {**overflow, "norm": good["norm"]} == good and overflow["norm"] == float("inf")


def reported_norms(config: dict[str, Any]) -> list[dict[str, Any] | None]:
    """Of a good step, one with an infinite gradient, and a good one."""
    engine = start(PrescribedGradients([(8, 8), (5,)]), config)
    found: list[dict[str, Any] | None] = []
    for factor in (1.0, float("inf"), 1.0):
        train_step(engine, [factor * torch.ones(shape, device=engine.device) for shape in ((8, 8), (5,))])
        norm = engine.get_global_grad_norm()
        if isinstance(norm, Tensor):
            about = {"dtype": str(norm.dtype), "device": str(norm.device), "shape": tuple(norm.shape)}
            found.append({"norm": norm.item(), **about})
        else:
            found.append(None)
    return found


# ---- scale and zeros ------------------------------------------------------------------------------------------------

MATRICES: list[tuple[int, ...]] = [(48, 48), (16, 48), (48, 16)]


@functools.cache
def scaled_by(factor: float) -> dict[str, Tensor]:
    return run_ranks(2, train, MATRICES, ds_config({"lr": 1.0, "ns_dtype": "float32"}), 1, factor)[0]


@pytest.mark.parametrize("exponent", first_of([-30, 15, -20, -10, -7, 7], 2))
def test_an_engine_step_does_not_depend_on_the_gradients_scale(exponent: int) -> None:
    before = dict(PrescribedGradients(MATRICES).named_parameters())
    unscaled, scaled = scaled_by(1.0), scaled_by(10.0**exponent)
    for name in unscaled:
        change = unscaled[name] - before[name].data
        assert (scaled[name] - unscaled[name]).norm() <= 1e-5 * change.norm(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", full("float32")])
def test_zero_gradients_leave_muon_weights_untouched(dtype: str) -> None:
    shapes = [(48, 48), (16, 48)]
    config = ds_config(dtype=dtype)
    start_weights = run_ranks(2, train, shapes, config, 0)[0]
    assert_equal(run_ranks(2, train, shapes, config, 2, 0.0)[0], start_weights)


# ---- each matrix once -----------------------------------------------------------------------------------------------


def count_orthogonalizations(shapes: list[tuple[int, ...]], config: dict[str, Any], tag: bool) -> tuple[int, int]:
    from deepspeed.runtime.zero.muon import original_muon

    model = PrescribedGradients(shapes)
    if tag:
        for p in model.parameters():
            p.use_muon = p.ndim == 2 and min(p.shape) > 1
    engine = start(model, config)
    ours: list[int] = []
    original = muon_group.orthogonalize_batch
    with (
        mock.patch.object(muon_group, "orthogonalize_batch", lambda m, s: (ours.append(len(m)), original(m, s))[1]),
        mock.patch.object(original_muon, "muon_update", side_effect=AssertionError("DeepSpeed's Muon ran")) as theirs,
    ):
        train_step(engine, exact_gradients(shapes, 0, engine.device))
    return sum(ours), theirs.call_count


@pairwise(world_size=[1, 2, 4], stage=[1, 2], dtype=["float32", "bfloat16"], tag=[False, True])
def test_every_matrix_is_orthogonalized_once_and_never_by_deepspeed(
    world_size: int, stage: int, dtype: str, tag: bool
) -> None:
    counts = run_ranks(world_size, count_orthogonalizations, SHAPES, ds_config(stage=stage, dtype=dtype), tag)
    assert sum(ours for ours, _ in counts) == len(muon_names(SHAPES))
    assert all(theirs == 0 for _, theirs in counts)


# ---- state ----------------------------------------------------------------------------------------------------------


def inspect_state(config: dict[str, Any]) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    shapes = [(48, 48), (63, 63), (9,)]
    engine = start(PrescribedGradients(shapes), config)
    zero = engine.optimizer
    parameters = dict(engine.module.named_parameters())
    before = safe_get_full_optimizer_state(parameters["p0"], "momentum_buffer").norm()
    gradients = exact_gradients(shapes, 0, engine.device)
    buffer = zero.optimizer.state[zero.single_partition_of_fp32_groups[0]]["momentum_buffer"]
    address = buffer.data_ptr()
    train_step(engine, gradients)
    momentum = {n: safe_get_full_optimizer_state(parameters[n], "momentum_buffer") for n in ("p0", "p1")}
    mean = [g.clone() for g in gradients]
    for g in mean:
        torch.distributed.all_reduce(g)
    return {
        "before": float(before),
        "sizes": [(buffer.numel(), zero.partition_size[0]), buffer.dtype],
        "in place": address
        == zero.optimizer.state[zero.single_partition_of_fp32_groups[0]]["momentum_buffer"].data_ptr(),
        "momentum": [
            float((momentum[f"p{i}"] - expected).norm() / expected.norm())
            for i, expected in enumerate(0.05 * g / torch.distributed.get_world_size() for g in mean[:2])
        ],
        "exp_avg": float(safe_get_full_optimizer_state(parameters["p2"], "exp_avg").norm()),
        "weight": safe_get_full_fp32_param(parameters["p1"]).shape,
        "keys": [sorted(s) for s in zero.optimizer.state.values()],
    }


@in_turns(stage=[1, 2], momentum_dtype=["float32", "bfloat16"])
def test_momentum_is_one_partition_sized_tensor_that_deepspeed_can_read(stage: int, momentum_dtype: str) -> None:
    for found in run_ranks(2, inspect_state, ds_config({"momentum_dtype": momentum_dtype}, stage=stage)):
        (size, partition), dtype = found["sizes"]
        assert size == partition and dtype == getattr(torch, momentum_dtype)
        assert found["before"] == 0 and found["in place"]
        assert all(error < (1e-6 if momentum_dtype == "float32" else 2**-8) for error in found["momentum"])
        assert found["exp_avg"] > 0 and found["weight"] == (63, 63)
        assert found["keys"] == [["momentum_buffer"], ["exp_avg", "exp_avg_sq", "step"]]


# ---- param groups ---------------------------------------------------------------------------------------------------


def train_groups(config: dict[str, Any], kind: str) -> list[tuple[str, float, float, int]]:
    shapes = [(8, 8), (8,), (8, 16), (4,), (0, 8)]
    model = PrescribedGradients(shapes)
    model.p2.requires_grad_(kind != "frozen")
    parameters: Any = list(model.parameters())
    if kind == "generator":
        parameters = (p for p in model.parameters())
    elif kind == "groups":
        parameters = [
            {"params": [model.p0, model.p1], "lr": 0.5, "weight_decay": 0.0},
            {"params": (p for p in (model.p2, model.p3)), "name": "rest"},
        ]
    elif kind == "matrices only":
        parameters = [model.p0, model.p2]
    engine = start(model, config, model_parameters=parameters)
    before = full_weights(engine)
    train_step(engine, exact_gradients(shapes, 0, engine.device))
    after = full_weights(engine)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    return [(g["name"], g["lr"], g["weight_decay"], len(g["params"])) for g in engine.optimizer.param_groups]


def test_param_groups_keep_their_settings_and_muon_comes_first() -> None:
    config = ds_config({"weight_decay": 0.1})
    groups = run_ranks(2, train_groups, config, "groups")[0]
    assert [(name.rsplit("-", 1)[1], lr, decay) for name, lr, decay, _ in groups] == [
        ("muon", 0.5, 0.0),
        ("muon", 0.02, 0.1),
        ("adamw", 0.5, 0.0),
        ("adamw", 1e-3, 0.1),
    ]


@pytest.mark.parametrize("kind", ["list", "generator", "frozen", "matrices only"])
def test_any_kind_of_model_parameters_trains(kind: str) -> None:
    groups = run_ranks(2, train_groups, ds_config(), kind)[0]
    assert len(groups) == (1 if kind == "matrices only" else 2)


def train_with_scheduler(config: dict[str, Any]) -> tuple[list[float], list[str]]:
    import warnings

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))  # noqa: E731
        engine = start(model, config, lr_scheduler=scheduler)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8, device=engine.device)).sum())
            engine.step()
    return [g["lr"] for g in engine.optimizer.param_groups], [str(w.message) for w in caught]


def test_a_torch_scheduler_scales_both_rates_and_does_not_complain() -> None:
    rates, warnings = run_ranks(2, train_with_scheduler, ds_config({"lr": 0.3, "adam_lr": 0.03}))[0]
    assert rates == pytest.approx([0.1, 0.01])
    assert not [w for w in warnings if "lr_scheduler.step()" in w]


# ---- non-finite gradients -------------------------------------------------------------------------------------------


def step_with_nan(config: dict[str, Any], position: int | None, bad_rank: int) -> dict[str, Any]:
    """Two steps; between them one in which a gradient of one rank has a NaN, or none at all."""
    shapes = [(16, 16), (5,), (16, 8), (3,)]
    model = PrescribedGradients(shapes)
    parameters = list(model.parameters())
    engine = start(model, config, model_parameters=[{"params": parameters[:2]}, {"params": parameters[2:]}])
    train_step(engine, exact_gradients(shapes, 0, engine.device))
    before, momentum = full_weights(engine), state_of(engine)
    if position is not None:
        gradients = exact_gradients(shapes, 1, engine.device)
        if torch.distributed.get_rank() == bad_rank:
            gradients[position].view(-1)[0] = float("nan")
        train_step(engine, gradients)
    after, momentum_after = full_weights(engine), state_of(engine)
    skipped = engine.skipped_steps
    train_step(engine, exact_gradients(shapes, 2, engine.device))
    return {
        "untouched": all(torch.equal(before[n], after[n]) for n in before)
        and all(torch.equal(a, b) for a, b in zip(momentum, momentum_after, strict=True)),
        "skipped": skipped,
        "weights": full_weights(engine),
        "state": state_of(engine),
    }


@functools.cache
def without_a_nan(dtype: str) -> list[dict[str, Any]]:
    return run_ranks(2, step_with_nan, ds_config({"weight_decay": 0.1}, dtype=dtype), None, 1)


@in_turns(position=[0, 1, 2, 3], dtype=["float32", "bfloat16", "float16"])
def test_a_nan_on_one_rank_moves_nothing_anywhere(position: int, dtype: str) -> None:
    config = ds_config({"weight_decay": 0.1}, dtype=dtype)
    clean = without_a_nan(dtype)
    for found, other in zip(run_ranks(2, step_with_nan, config, position, 1), clean, strict=True):
        assert found["untouched"] and found["skipped"] == 1
        assert all(weight.isfinite().all() for weight in found["weights"].values())
        # The next step is that of a run that never saw the bad batch.
        assert_equal(found["weights"], other["weights"])
        assert all(torch.equal(a, b) for a, b in zip(found["state"], other["state"], strict=True))


# ---- spikes ---------------------------------------------------------------------------------------------------------


def steps_with_a_spike(config: dict[str, Any], position: int | None, bad_rank: int) -> dict[str, Any]:
    """Two steps on ordinary gradients; between them one in which a gradient of one rank is a thousand times larger."""
    shapes = [(16, 16), (5,), (16, 8), (3,)]
    model = PrescribedGradients(shapes)
    parameters = list(model.parameters())
    scheduler = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)  # noqa: E731
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    engine = start(model, config, model_parameters=groups, lr_scheduler=scheduler)
    scale = engine.optimizer.loss_scale
    train_step(engine, exact_gradients(shapes, 0, engine.device))
    before, state = full_weights(engine), state_of(engine)
    found: dict[str, Any] = {}
    if position is not None:
        gradients = exact_gradients(shapes, 1, engine.device)
        if torch.distributed.get_rank() == bad_rank:
            gradients[position] = torch.full_like(gradients[position], 1000.0)
        train_step(engine, gradients)
        found["untouched"] = all(torch.equal(before[n], w) for n, w in full_weights(engine).items()) and all(
            torch.equal(a, b) for a, b in zip(state, state_of(engine), strict=True)
        )
        found["norm"] = engine.get_global_grad_norm()
    found["skipped"], found["scale"] = engine.skipped_steps, engine.optimizer.loss_scale / scale
    if position is None or found["untouched"]:
        train_step(engine, exact_gradients(shapes, 2, engine.device))
    return {**found, "weights": full_weights(engine)}


def with_a_threshold(dtype: str, stage: int) -> dict[str, Any]:
    return ds_config({"weight_decay": 0.1, "grad_norm_skip_threshold": 10.0}, dtype=dtype, stage=stage)


@functools.cache
def without_a_spike(dtype: str) -> dict[str, Tensor]:
    """The weights, which depend on neither the world size nor the stage."""
    return run_ranks(2, steps_with_a_spike, with_a_threshold(dtype, 2), None, 0)[0]["weights"]


@in_turns(world_size=[2, 3], dtype=["float32", "bfloat16", "float16"], stage=[2, 1], position=[1, 3])
def test_a_spike_in_adamws_gradients_skips_the_step_as_if_it_had_never_been(
    world_size: int, dtype: str, stage: int, position: int
) -> None:
    for found in run_ranks(world_size, steps_with_a_spike, with_a_threshold(dtype, stage), position, 1):
        assert found["untouched"] and found["skipped"] == 1 and found["scale"] == 1
        assert 10 < found["norm"] < float("inf")
        assert_equal(found["weights"], without_a_spike(dtype))


@pytest.mark.parametrize(("threshold", "position"), [(None, 1), (1e6, 1), (10.0, 0), (10.0, 2)])
def test_neither_an_allowed_norm_nor_a_huge_muon_gradient_skips_a_step(threshold: float | None, position: int) -> None:
    config = ds_config({"grad_norm_skip_threshold": threshold})
    for found in run_ranks(2, steps_with_a_spike, config, position, 1):
        assert not found["untouched"] and found["skipped"] == 0


def warnings_of_spikes(config: dict[str, Any], steps: int) -> list[str]:
    shapes = [(8, 8), (5,)]
    engine = start(PrescribedGradients(shapes), config)
    with mock.patch("ds_muon.skipped.log") as warning:
        for step in range(steps):
            train_step(engine, exact_gradients(shapes, step, engine.device))
    assert engine.skipped_steps == engine.optimizer.skips.spikes.count == steps
    return [call.args[0] for call in warning.call_args_list]


def test_spikes_are_warned_of_on_rank_0_at_the_first_second_fourth_and_eighth() -> None:
    first, second = run_ranks(2, warnings_of_spikes, ds_config({"grad_norm_skip_threshold": 1e-6}), 9)
    assert second == [] and [text.rsplit(" ", 1)[1] for text in first] == ["1)", "2)", "4)", "8)"]
    assert all("grad_norm_skip_threshold 1e-06" in text for text in first)


def of_steps() -> list[Any]:
    return [each for each in gc.get_objects() if type(each) in (HostPart, Moves, Verdict)]


def left_behind(config: dict[str, Any], spoiled: bool) -> list[str]:
    """The kinds of what a step has made for itself, if they outlive it, or reach AdamW by ``.grad``."""
    engine = start_groups(SHAPES, config)
    gradients = exact_gradients(SHAPES, 0, engine.device)
    if spoiled:
        gradients[0][0, 0] = torch.nan
    flats, of_others = engine.optimizer.single_partition_of_fp32_groups, of_steps()
    adamw, found = engine.optimizer.optimizer._adamw, []

    def looked(*args: Any) -> None:
        found.extend("gradient" for flat in flats if flat.grad is not None)
        step(*args)

    step = adamw.step
    with mock.patch.object(adamw, "step", looked):
        train_step(engine, gradients)
    if engine.optimizer.ferry is not None:
        found.clear()  # the place of gradients that come down
    found += [type(each).__name__ for each in of_steps() if id(each) not in map(id, of_others)]
    assert engine.skipped_steps == spoiled
    engine.destroy()
    return found


@in_turns(spoiled=[False, True], offload=[None, {"offload_optimizer": {"device": "cpu"}}])
def test_nothing_of_a_step_stays_on_the_engine(spoiled: bool, offload: dict[str, Any] | None) -> None:
    assert run_ranks(2, left_behind, ds_config({"variant": "normuon"}, zero=offload), spoiled) == [[], []]


def ranges_of_a_step() -> list[str]:
    engine = start_groups(SHAPES, ds_config())
    engine.backward(engine(exact_gradients(SHAPES, 0, engine.device)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.step()
    found = [event for event in profile.events() if event.name.startswith("ds_muon::")]
    return [event.name.removeprefix("ds_muon::") for event in sorted(found, key=lambda event: event.time_range.start)]


def test_the_phases_of_a_step_are_ranges_of_torchs_profiler() -> None:
    for ranges in run_ranks(2, ranges_of_a_step):
        inside = {"exchange", "newton_schulz"}
        assert [name for name in ranges if name not in inside] == [
            *("take_gradients", "measure", "stage", "decide", "commit")
        ]
        assert inside <= set(ranges[ranges.index("stage") : ranges.index("decide")])
