"""``param_order``: fewer cuts where that is faster, by a pure function; and the same weights, bit for bit."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_muon import Rates, flat_layout, registration
from ds_muon.param_order import RULES, Order, default_settings, fastest_order, filled
from ds_muon.partition import cut
from ds_muon.planner import MODELS
from ds_muon.verify import UpdateCheck
from tests.unit.models import (
    PrescribedGradients,
    ds_config,
    full_weights,
    sequence_parallel,
    start,
    start_groups,
    train_step,
)
from tests.unit.ranks import RankFailure, run_ranks
from tests.unit.test_checkpoint import assert_same
from tests.unit.test_normuon import variances
from tests.unit.test_partition import Shape, cost, plan_of, rates_of_a_machine, shapes_of_a_group, world_sizes
from tests.unit.test_step import assert_equal, exact_gradients, state_of

MODEL_COST = default_settings().cost
# On 2 and on 3 ranks a boundary cuts a matrix in this order, and none in another.
CUT: list[tuple[int, ...]] = [(16, 8), *[(16, 16)] * 3, (11,), *[(16, 16)] * 2, (8, 16), (40, 1)]
# Two param groups that take turns: each the same.
CUT_TWICE = [shape for shape in CUT for _ in range(2)]


def placed(shapes: list[Shape], order: Order, world_size: int, **layout: Any) -> list[tuple[Shape, int]]:
    """Each matrix in flat order, with the number of partitions that hold a piece of it."""
    found = flat_layout([math.prod(shapes[i]) for i in order], world_size, **layout)
    offsets = zip(order, found.offsets, strict=True)
    return [(shapes[i], len(cut(offset, math.prod(shapes[i]), found.partition_size))) for i, offset in offsets]


# ---- the function ---------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    groups=st.lists(shapes_of_a_group, min_size=1, max_size=3),
    world_size=st.integers(1, 64),
    rates=rates_of_a_machine,
    parameter_alignment=st.booleans(),
    element_size=st.sampled_from([2, 4]),
)
def test_an_order_has_every_matrix_once_and_is_faster_or_the_users(
    groups: list[list[Shape]], world_size: int, rates: Rates, parameter_alignment: bool, element_size: int
) -> None:
    layout: Any = {"parameter_alignment": parameter_alignment, "element_size": element_size}
    orders = fastest_order(groups, world_size, cost, rates=rates, **layout)
    assert orders == fastest_order(groups, world_size, cost, rates=rates, **layout)
    kept = [list(range(len(group))) for group in groups]
    assert [sorted(order) for order in orders] == kept
    reordered = [[group[i] for i in order] for group, order in zip(groups, orders, strict=True)]
    before, after = (plan_of(shapes, world_size, rates, **layout).seconds(rates) for shapes in (groups, reordered))
    assert list(map(list, orders)) == kept or after < before * (1 - rates.least_gain)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.sampled_from([(8, 8), (8, 16), (16, 8), (4, 32), (16, 16), (5, 7)]), min_size=1, max_size=20),
    world_size=world_sizes,
    rule=st.sampled_from(sorted(RULES)),
)
def test_equal_matrices_stay_in_the_users_order(shapes: list[Shape], world_size: int, rule: str) -> None:
    order = filled(shapes, world_size, cost, RULES[rule])
    for alike in {(math.prod(shape), cost(*shape)) for shape in shapes}:
        indices = [i for i in order if (math.prod(shapes[i]), cost(*shapes[i])) == alike]
        assert indices == sorted(indices)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    shapes=shapes_of_a_group,
    world_size=world_sizes,
    rule=st.sampled_from(sorted(RULES)),
    parameter_alignment=st.booleans(),
)
def test_a_matrix_is_cut_only_where_none_fits(
    shapes: list[Shape], world_size: int, rule: str, parameter_alignment: bool
) -> None:
    multiple = 4 if parameter_alignment else 1
    order = filled(shapes, world_size, cost, RULES[rule], multiple)
    size = flat_layout(
        [sum(-(-math.prod(shape) // multiple) * multiple for shape in shapes)], world_size
    ).partition_size
    end = 0
    for place, index in enumerate(order):
        room = size - end % size
        numels = [-(-math.prod(shapes[i]) // multiple) * multiple for i in order[place:]]
        if numels[0] > room:
            assert min(numels) > room
            assert numels[0] > size or max(numels) <= size
        end += -(-math.prod(shapes[index]) // multiple) * multiple


def test_what_no_partition_holds_straddles_first_then_what_is_cheapest_to_send() -> None:
    first = RULES["first"]
    # Partitions of 50: the last two of the first have to hold a piece of something.
    shapes = [*[(4, 4)] * 3, (7, 5), (1, 17), (10, 10)]
    assert filled(shapes, 4, cost, first) == (0, 1, 2, 5, 3, 4)
    # Partitions of 30, of which 20 are left: of 29 nine travel, of 25 five.
    shapes = [(2, 5), (1, 29), (5, 5), (1, 26)]
    assert filled(shapes, 3, cost, first) == (0, 2, 3, 1)


def test_alignment_counts_as_room() -> None:
    # 15 elements take 16: on two ranks three of them and a 16 fill partitions of 32 without a cut.
    shapes = [(3, 8), (3, 5), (3, 8), (3, 5)]
    order = filled(shapes, 2, cost, RULES["first"], 4)
    assert all(pieces == 1 for _, pieces in placed(shapes, order, 2, parameter_alignment=True))


@pytest.mark.parametrize(
    ("model", "world_size", "cuts_before", "cuts", "gain"),
    [
        ("gpt-1.2b", 16, 8, 0, 0.13),
        ("gpt-1.2b", 48, 24, 0, 0.32),
        ("gpt-1.2b", 64, 48, 32, 0.20),
        ("gpt-3b", 64, 32, 0, 0.26),
        ("llama-3-8b", 100, 99, 99, 0.19),
        ("llama-3-70b", 96, 80, 39, 0.055),
    ],
)
def test_known_models_gain(model: str, world_size: int, cuts_before: int, cuts: int, gain: float) -> None:
    shapes = [shape for _, shape in MODELS[model]()]
    (order,) = fastest_order([shapes], world_size, MODEL_COST)
    kept = placed(shapes, tuple(range(len(shapes))), world_size)
    assert sum(pieces > 1 for _, pieces in kept) == cuts_before
    assert sum(pieces > 1 for _, pieces in placed(shapes, order, world_size)) == cuts
    before, after = (seconds([shapes[i] for i in o], world_size) for o in (range(len(shapes)), order))
    assert 1 - after / before == pytest.approx(gain, abs=0.015)


def seconds(shapes: list[Shape], world_size: int) -> float:
    with mock.patch("tests.unit.test_partition.cost", MODEL_COST):
        return plan_of([shapes], world_size, Rates()).seconds()


@pytest.mark.parametrize(("model", "world_size"), [("gpt-1.2b", 8), ("llama-3-8b", 64), ("llama-3-70b", 1024)])
def test_the_users_order_stays_where_none_is_faster(model: str, world_size: int) -> None:
    shapes = [shape for _, shape in MODELS[model]()]
    assert fastest_order([shapes], world_size, MODEL_COST) == (tuple(range(len(shapes))),)


def test_every_rule_is_the_best_somewhere() -> None:
    def best(model: str, world_size: int) -> str:
        shapes = [shape for _, shape in MODELS[model]()]
        times = {
            name: seconds([shapes[i] for i in filled(shapes, world_size, MODEL_COST, rule)], world_size)
            for name, rule in RULES.items()
        }
        fastest, second = sorted(times, key=times.__getitem__)[:2]
        assert times[fastest] < 0.98 * times[second]
        return fastest

    assert best("llama-3-8b", 100) == "largest"
    assert best("gpt-1.2b", 16) == "most even"
    assert best("llama-3-70b", 96) == "first"


def test_an_order_for_4096_ranks_takes_no_time() -> None:
    start_time = time.perf_counter()
    fastest_order([[shape for _, shape in MODELS["llama-3-70b"]()]], 4096, MODEL_COST)
    assert time.perf_counter() - start_time < 5


# ---- in an engine ---------------------------------------------------------------------------------------------------


def config_of(order: str, params: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    return ds_config({"param_order": order, "weight_decay": 0.1, **(params or {})}, **settings)


def train_in_order(config: dict[str, Any], groups: int) -> dict[str, Any]:
    shapes = CUT if groups == 1 else CUT_TWICE
    lines: list[str] = []
    with mock.patch.object(registration, "log_dist", lambda line, ranks: lines.append(line)):
        engine = start_groups(shapes, config, groups)
    names = {id(p): name for name, p in engine.module.named_parameters()}
    for step in range(3):
        train_step(engine, exact_gradients(shapes, step, engine.device))
    normuon = config["optimizer"]["params"].get("variant") == "normuon"
    zero = engine.optimizer
    found = {
        "weights": full_weights(engine),
        "variances": variances(engine) if normuon else {},
        "adamw": {str(i): s for i, (g, s) in enumerate(groups_and_state(zero)) if not g["use_muon"]},
        "order": [[names[id(p)] for p in params] for params in zero.bit16_groups],
        "muon": [g["use_muon"] for g in zero.param_groups],
        "cuts": [len(group.straddlers) for group in zero.plan.groups],
        "lines": [line for line in lines if "param_order" in line],
    }
    engine.destroy()
    return found


def groups_and_state(zero: Any) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    flats = zero.single_partition_of_fp32_groups
    states = ({key: t.cpu().clone() for key, t in zero.optimizer.state[flat].items()} for flat in flats)
    return list(zip(zero.param_groups, states, strict=True))


@pytest.mark.parametrize(
    ("model", "world_size", "digest"),
    [
        ("gpt-303m", 16, "aa02f9365c0a"),
        ("gpt-1.2b", 7, "6795abe43b93"),
        ("llama-3-8b", 96, "bff6a8edd739"),
        ("llama-3-70b", 256, "735b4f54d692"),
    ],
)
def test_orders_are_those_of_released_versions(model: str, world_size: int, digest: str) -> None:
    # A change of RULES, RATES or costs that changes them makes checkpoints with "fastest" unloadable.
    (order,) = fastest_order([[shape for _, shape in MODELS[model]()]], world_size, MODEL_COST)
    assert hashlib.sha256(str(order).encode()).hexdigest()[:12] == digest


@pytest.mark.ranks
@pytest.mark.parametrize("variant", ["muon", "normuon"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_are_bit_equal_in_any_order(world_size: int, stage: int, groups: int, variant: str) -> None:
    params = {"variant": variant}
    model, fewest = (
        run_ranks(world_size, train_in_order, config_of(order, params, stage=stage, gradient_clipping=0.5), groups)
        for order in ("model", "fastest")
    )
    for left, right in zip(model, fewest, strict=True):
        assert_equal(left["weights"], right["weights"])
        assert_equal(left["variances"], right["variances"])
        assert_same(left["adamw"], right["adamw"])
        assert all(left["cuts"]) and not any(right["cuts"])
        for use_muon, before, after in zip(left["muon"], left["order"], right["order"], strict=True):
            assert sorted(before) == sorted(after) and (before != after) == use_muon
        assert left["lines"] == [] and "another order" in right["lines"][0]


@pytest.mark.ranks
def test_a_layout_with_aligned_parameters_is_reordered_for_what_it_is() -> None:
    config = config_of("fastest", zero={"parameter_alignment": True}, dtype="bfloat16")
    found = run_ranks(2, train_in_order, config, 1)
    assert not any(found[0]["cuts"])
    assert "another order" in found[0]["lines"][0]


def train_sequence_parallel(config: dict[str, Any]) -> list[int]:
    with sequence_parallel(2) as mpu:
        engine = start(PrescribedGradients(CUT), config, mpu=mpu)
        assert len(engine.optimizer.plan.loads) == 2
        return [len(group.straddlers) for group in engine.optimizer.plan.groups]


@pytest.mark.ranks
def test_ranks_that_share_a_sequence_share_the_layout() -> None:
    assert run_ranks(2, train_sequence_parallel, config_of("fastest")) == [[0], [0]]


@pytest.mark.ranks
def test_the_given_order_stays_where_no_other_is_faster() -> None:
    (found,) = run_ranks(1, train_in_order, config_of("fastest"), 1)
    assert "keeps the given order" in found["lines"][0]
    assert found["order"] == [["p0", "p1", "p2", "p3", "p5", "p6", "p7"], ["p4", "p8"]]


def check_updates(config: dict[str, Any]) -> list[tuple[str, bool, tuple[int, ...]]]:
    engine = start(PrescribedGradients(CUT), config)
    found = []
    for step in range(2):
        check = UpdateCheck(engine)
        train_step(engine, exact_gradients(CUT, step, engine.device))
        found += [(record.name, record.ok, tuple(record.shape)) for record in check.after_step()]
    engine.destroy()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_check_finds_every_update_right_under_its_name(world_size: int) -> None:
    for found in run_ranks(world_size, check_updates, config_of("fastest")):
        assert all(ok for _, ok, _ in found)
        assert {(name, shape) for name, _, shape in found} == {(f"p{i}", shape) for i, shape in enumerate(CUT)}


def train_and_save(config: dict[str, Any], steps: range, load: str | None, save: str | None) -> dict[str, Any]:
    engine = start(PrescribedGradients(CUT, seed=len(steps)), config)
    if load is not None:
        engine.load_checkpoint(load)
    for step in steps:
        train_step(engine, exact_gradients(CUT, step, engine.device))
    if save is not None:
        engine.save_checkpoint(save)
    found = {"weights": full_weights(engine), "state": state_of(engine)}
    engine.destroy()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("variant", ["muon", "normuon"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_resumed_run_is_bit_equal_to_a_straight_one(tmp_path: Path, stage: int, variant: str) -> None:
    config = config_of("fastest", {"variant": variant}, stage=stage, dtype="bfloat16")
    straight = run_ranks(3, train_and_save, config, range(4), None, None)
    # Another seed, so that what is not restored is seen; the first half starts as the straight run did.
    first = run_ranks(3, train_first_half, config, str(tmp_path))
    resumed = run_ranks(3, train_and_save, config, range(2, 4), str(tmp_path), None)
    assert_same(resumed, straight)
    assert not torch.equal(first[0]["p0"], straight[0]["weights"]["p0"])


def train_first_half(config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    engine = start(PrescribedGradients(CUT, seed=4), config)
    for step in range(2):
        train_step(engine, exact_gradients(CUT, step, engine.device))
    engine.save_checkpoint(folder)
    weights = full_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.ranks
def test_a_checkpoint_fits_other_settings_of_the_iteration(tmp_path: Path) -> None:
    """The order depends on shapes and world size only."""
    run_ranks(2, train_and_save, config_of("fastest"), range(1), None, str(tmp_path))
    other = config_of("fastest", {"ns_method": "standard", "ns_steps": 7, "ns_dtype": "bfloat16"})
    run_ranks(2, train_and_save, other, range(1, 2), str(tmp_path), None)


@pytest.mark.ranks
@pytest.mark.parametrize(("saved", "loaded"), [("model", "fastest"), ("fastest", "model")])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_checkpoint_of_another_order_is_refused_on_every_rank(
    tmp_path: Path, world_size: int, saved: str, loaded: str
) -> None:
    run_ranks(world_size, train_and_save, config_of(saved), range(1), None, str(tmp_path))
    with pytest.raises(RankFailure) as failure:
        run_ranks(world_size, train_and_save, config_of(loaded), range(1, 2), str(tmp_path), None)
    assert set(failure.value.errors) == set(range(world_size))
    for error in failure.value.errors.values():
        assert "does not fit the optimizer: parameters lie in another order" in error and "param_order" in error


@pytest.mark.ranks
def test_deepspeeds_script_extracts_every_weight_under_its_name(tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = run_ranks(3, train_and_save, config_of("fastest"), range(2), None, str(tmp_path))[0]["weights"]
    extracted = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert_same({name: extracted[name] for name in weights}, weights)
