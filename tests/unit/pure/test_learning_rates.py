"""Under every scheduler both halves keep the ratio of their rates, and ``group["lr"]`` is the rate that is applied."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

from ds_muon import DSMuon, DSMuonConfig
from ds_muon.learning_rates import DEEPSPEED_SCHEDULES
from ds_muon.param_groups import split_param_groups
from ds_muon.refusals import DSMuonRefusal
from ds_muon.routing import route
from tests.unit.support.models import ds_config
from tests.unit.support.rates import ADAM, LR, MUON, Other

# What the config says, and the rate that a scheduler's number stands for then, if its highest one is that of a half.
BOTH = {"muon_lr": MUON, "adam_lr": ADAM}
CONFIGS = {
    "lr and adam_lr": ({"lr": MUON, "adam_lr": ADAM}, MUON),
    "lr and muon_lr": ({"lr": ADAM, "muon_lr": MUON}, ADAM),
    "all three": ({"lr": LR, **BOTH}, LR),
    "adam_lr alone, Muon's": ({"adam_lr": ADAM}, MUON),
    "adam_lr alone, AdamW's": ({"adam_lr": ADAM}, ADAM),
    "muon_lr alone": ({"muon_lr": 0.04}, 0.04),
    "no lr, Muon's": (BOTH, MUON),
    "no lr, AdamW's": (BOTH, ADAM),
    "lr alone": ({"lr": LR}, LR),
    "a half at zero": ({"lr": MUON, "adam_lr": 0.0}, MUON),
}
# The constructors' other arguments, and the rates, as multiples of the one that they stand for.
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "WarmupLR": ({"warmup_num_steps": 4}, {"warmup_min_lr": 0.125, "warmup_max_lr": 1}),
    "WarmupDecayLR": ({"warmup_num_steps": 4, "total_num_steps": 9}, {"warmup_min_lr": 0.125, "warmup_max_lr": 1}),
    "OneCycle": (
        {"cycle_first_step_size": 4, "decay_step_size": 2, "decay_lr_rate": 0.5},
        {"cycle_min_lr": 0.125, "cycle_max_lr": 1},
    ),
    "LRRangeTest": ({"lr_range_test_step_size": 3}, {"lr_range_test_min_lr": 1}),
}


class Twins(nn.Module):
    """Two parts, each with a matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


def dsmuon(params: dict[str, Any], groups: Sequence[dict[str, Any]] | None = None) -> DSMuon:
    """DSMuon as the engine builds it, for one user's group, or for one per part with the given keys."""
    model, config = Twins(), DSMuonConfig.parse(params)
    given: Any = model.parameters()
    if groups is not None:
        parts = (model.first, model.second)
        given = [{"params": part.parameters(), **keys} for part, keys in zip(parts, groups, strict=True)]
    return DSMuon(split_param_groups(model, given, route(model), config), config, route(model))


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def course(scheduler: Any, steps: int = 14) -> list[list[float]]:
    """The rates of all groups at every step, as they are applied and as the scheduler gives account of them."""
    found = [rates_of(scheduler.optimizer)]
    for _ in range(steps):
        scheduler.step()
        assert scheduler.get_last_lr() == rates_of(scheduler.optimizer)
        found.append(rates_of(scheduler.optimizer))
    return found


def alone(build: Callable[[torch.optim.Optimizer], Any], lr: float) -> list[float]:
    """The course of one group's rate in a scheduler of another optimizer."""
    other = Other([nn.Parameter(torch.zeros(1))], lr=lr)
    return [rate for (rate,) in course(build(other))]


def assert_follows(scheduler: Any, expected: Sequence[Sequence[float]]) -> None:
    found = list(zip(*course(scheduler), strict=True))
    assert len(found) == len(expected)
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=0), f"group {i}"


def test_every_scheduler_of_deepspeeds_is_known() -> None:
    """A new one may write one number into every group."""
    without = {"WarmupDecayLR", "WarmupCosineLR"}  # built on WarmupLR; takes fractions of the groups' own rates
    assert set(lr_schedules.VALID_LR_SCHEDULES) == DEEPSPEED_SCHEDULES.keys() | without


# ---- DeepSpeed's schedulers: one number ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("case", CONFIGS)
def test_one_number_stands_for_lr_and_both_halves_keep_their_ratio(name: str, case: str) -> None:
    params, meant = CONFIGS[case]
    fixed, multiples = SCHEDULES[name]
    optimizer, cls = dsmuon(params), getattr(lr_schedules, name)
    configured = rates_of(optimizer)
    scheduler = cls(optimizer, **fixed, **{key: multiple * meant for key, multiple in multiples.items()})
    assert type(scheduler) is cls
    scaled = [{key: multiple * rate for key, multiple in multiples.items()} for rate in configured]
    assert_follows(scheduler, [alone(lambda other, s=s: cls(other, **fixed, **s), 0.5) for s in scaled])


def test_a_number_other_than_lr_scales_both_halves() -> None:
    scheduler = lr_schedules.WarmupLR(dsmuon({"lr": LR, **BOTH}), warmup_min_lr=1e-3, warmup_max_lr=LR / 4)
    assert scheduler.max_lrs == pytest.approx([MUON / 4, ADAM / 4], rel=1e-12)
    assert scheduler.min_lrs == pytest.approx([MUON / 10, ADAM / 10], rel=1e-12)


@pytest.mark.parametrize("number", [0.02, 3e-4, 0.007, 1e-5])
@pytest.mark.parametrize("params", [{"lr": 0.02}, {"lr": 0.02, "adam_lr": 3e-4}, {"lr": 3e-4, "muon_lr": 0.02}])
def test_the_number_itself_is_not_rounded_where_it_stands_for_the_groups_own_rate(params: Any, number: float) -> None:
    scheduler = lr_schedules.WarmupLR(dsmuon(params), warmup_max_lr=number)
    for top, rate in zip(
        scheduler.max_lrs, [params.get("muon_lr", params["lr"]), params.get("adam_lr", params["lr"])], strict=True
    ):
        if rate == params["lr"]:
            assert top == number
        if number == params["lr"]:
            assert top == rate


@pytest.mark.parametrize("params", [{"lr": LR, **BOTH}, {"adam_lr": ADAM}, {"lr": MUON, "adam_lr": 0.0}, {"lr": 0.0}])
@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_without_a_number_of_its_own_a_schedule_reaches_the_groups_own_rates(name: str, params: Any) -> None:
    optimizer, cls = dsmuon(params), getattr(lr_schedules, name)
    given: dict[str, Any] = {"warmup_num_steps": 4}
    if name != "WarmupLR":
        given["total_num_steps"] = 9
    if name == "WarmupDecayLR":
        given["warmup_max_lr"] = None
    configured = rates_of(optimizer)
    assert_follows(cls(optimizer, **given), [alone(lambda other: cls(other, **given), rate) for rate in configured])
    assert max(lr for lr, _ in course(cls(dsmuon(params), **given))) == configured[0]


@pytest.mark.parametrize(
    ("name", "fixed", "default"),
    [("WarmupDecayLR", {"total_num_steps": 9}, 1e-3), ("LRRangeTest", {}, 1e-3)],
)
def test_deepspeeds_default_is_a_number_as_any_other(name: str, fixed: Any, default: float) -> None:
    def tops(params: dict[str, Any]) -> list[float]:
        scheduler = getattr(lr_schedules, name)(dsmuon(params), **fixed)
        return scheduler.min_lr if name == "LRRangeTest" else scheduler.max_lrs

    assert tops({"lr": 0.02, "adam_lr": 5e-4}) == pytest.approx([default, default / 40], rel=1e-12)
    assert tops({"muon_lr": 0.02, "adam_lr": default}) == pytest.approx([0.02, default], rel=1e-12)
    assert tops({}) == [default, default]
    with pytest.raises(DSMuonRefusal, match=r"= 0\.001 is one number for two rates.*optimizer\.params\.lr"):
        tops({"muon_lr": 0.02, "adam_lr": 3e-4})


def test_a_number_that_no_rate_explains_is_refused_by_key() -> None:
    with pytest.raises(DSMuonRefusal) as caught:
        lr_schedules.WarmupDecayLR(dsmuon(BOTH), total_num_steps=9, warmup_max_lr=1e-3)
    for part in ("WarmupDecayLR", "warmup_max_lr = 0.001", "optimizer.params.lr", "muon_lr (0.02)", "adam_lr (0.0003)"):
        assert part in str(caught.value)
    with pytest.raises(DSMuonRefusal, match="warmup_min_lr = 1e-06 is one number for two rates"):
        lr_schedules.WarmupLR(dsmuon(BOTH), warmup_min_lr=1e-6)
    with pytest.raises(DSMuonRefusal, match=r"cycle_min_lr = 1e-06.* cycle_max_lr equals neither"):
        lr_schedules.OneCycle(dsmuon(BOTH), 1e-6, 0.1)


def test_where_there_is_nothing_but_muon_or_one_rate_a_number_needs_no_lr() -> None:
    model, config = nn.Linear(4, 4, bias=False), DSMuonConfig.parse(BOTH)
    matrices = DSMuon(split_param_groups(model, model.parameters(), route(model), config), config, route(model))
    assert lr_schedules.WarmupLR(matrices, warmup_max_lr=1e-3).max_lrs == [1e-3]
    assert lr_schedules.WarmupLR(dsmuon({"muon_lr": MUON}), warmup_max_lr=1e-3).max_lrs == [1e-3, 1e-3]


def test_zero_is_zero_and_no_rate_is_a_multiple_of_it() -> None:
    assert course(lr_schedules.WarmupLR(dsmuon(BOTH), warmup_max_lr=0), 3) == [[0, 0]] * 4
    scheduler = lr_schedules.OneCycle(dsmuon({"lr": MUON, "adam_lr": 0.0}), 1e-3, 0.1, cycle_first_step_size=3)
    assert {adamw for _, adamw in course(scheduler, 9)} == {0.0}
    for params in ({"lr": 0.0, "muon_lr": MUON}, {"lr": 0.0}, {"lr": 0, **BOTH}):
        with pytest.raises(DSMuonRefusal, match=r"warmup_max_lr = 0\.001 stands for a configured rate of 0"):
            lr_schedules.WarmupLR(dsmuon(params), warmup_max_lr=1e-3)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"warmup_max_lr": "auto"}, 'warmup_max_lr = "auto" is a blank'),
        ({"warmup_num_steps": "auto"}, 'warmup_num_steps = "auto" is a blank'),
        ({"warmup_max_lr": "1e-3"}, "warmup_max_lr = '1e-3': a rate is a number"),
        ({"warmup_max_lr": [1e-3, None]}, "a rate is a number"),
        ({"warmup_max_lr": True}, "warmup_max_lr = True: a rate is a number"),
        ({"warmup_max_lr": 1e39}, "finite in fp32"),
        ({"warmup_max_lr": float("nan")}, "warmup_max_lr = nan"),
        ({"warmup_min_lr": -1e-3}, "warmup_min_lr = -0.001"),
    ],
)
def test_what_is_no_rate_is_refused_in_words(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(DSMuonRefusal, match=re.escape(problem)):
        lr_schedules.WarmupLR(dsmuon({"lr": MUON, "adam_lr": ADAM}), **arguments)


def test_arguments_that_do_not_fit_are_left_to_the_class() -> None:
    for cls in (lr_schedules.OneCycle, torch_schedulers.OneCycleLR):
        with pytest.raises(TypeError, match="required positional argument"):
            cls(dsmuon({}))
    with pytest.raises(TypeError, match="warmup_lr"):
        lr_schedules.WarmupLR(dsmuon({}), warmup_lr=1)


def test_other_optimizers_get_what_their_schedulers_always_gave() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.2)]
    other = Other(groups)
    assert lr_schedules.WarmupLR(other, warmup_max_lr=1e-3).max_lrs == [1e-3, 1e-3]
    scheduler = torch_schedulers.OneCycleLR(other, 1e-3, total_steps=9)
    assert [group["max_lr"] for group in other.param_groups] == [1e-3, 1e-3] and scheduler.use_beta1
    assert all(group["betas"][0] == 0.95 and "momentum" not in group for group in other.param_groups)


# ---- lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "given", "expected"),
    [
        # One per group of the optimizer: as it stands.
        ([{}, {}], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]),
        (None, [1.0, 2.0], [1.0, 2.0]),
        # One per group of the user's, for halves of different rates.
        ([{}, {}], [0.02, 0.01], [0.02, 0.01, 3e-4, 1.5e-4]),
        (None, [0.01], [0.01, 1.5e-4]),
        # ... for groups that have a rate of their own.
        ([{"lr": 0.5}, {"lr": 0.25}], [0.02, 0.01], [0.02, 0.01, 0.02, 0.01]),
        ([{"lr": 0.5}, {}], [0.1, 0.01], [0.1, 0.01, 0.1, 1.5e-4]),
        ([{}, {}], [0.0, 0.02], [0.0, 0.02, 0.0, 3e-4]),
    ],
)
def test_a_list_has_one_rate_per_group_of_the_users_or_of_the_optimizer(groups: Any, given: Any, expected: Any) -> None:
    optimizer = dsmuon({"lr": MUON, "adam_lr": ADAM}, groups)
    for form in (list, tuple):
        scheduler = lr_schedules.WarmupLR(optimizer, form([0.0] * len(given)), form(given), 4)
        assert scheduler.max_lrs == pytest.approx(expected, rel=1e-12)
    assert lr_schedules.LRRangeTest(optimizer, given).min_lr == pytest.approx(expected, rel=1e-12)
    scheduler = torch_schedulers.OneCycleLR(optimizer, given, total_steps=9)
    assert [group["max_lr"] for group in optimizer.param_groups] == pytest.approx(expected, rel=1e-12)


def test_groups_of_one_half_each_are_dealt_their_rates_in_the_users_order() -> None:
    model, config = Twins(), DSMuonConfig.parse({"lr": MUON, "adam_lr": ADAM})
    given = [{"params": [model.first.bias, model.second.bias]}, {"params": [model.first.weight, model.second.weight]}]
    optimizer = DSMuon(split_param_groups(model, given, route(model), config), config, route(model))
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    assert lr_schedules.WarmupLR(optimizer, warmup_max_lr=[1e-4, 0.01]).max_lrs == [0.01, 1e-4]


def test_parts_without_decay_get_the_rates_of_their_group() -> None:
    params = {"lr": MUON, "adam_lr": ADAM, "no_decay_params": ["first.*"]}
    scheduler = lr_schedules.WarmupLR(dsmuon(params), warmup_max_lr=[0.01])
    assert scheduler.max_lrs == pytest.approx([0.01, 0.01, 1.5e-4, 1.5e-4], rel=1e-12)


def test_one_number_scales_groups_that_have_a_rate_of_their_own() -> None:
    optimizer = dsmuon({"lr": MUON, "adam_lr": ADAM}, [{}, {"lr": 0.04}])
    scheduler = lr_schedules.WarmupLR(optimizer, warmup_max_lr=0.01)
    assert scheduler.max_lrs == pytest.approx([0.01, 0.02, 1.5e-4, 0.02], rel=1e-12)


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("of", ["rates", "lambdas", "momenta"])
def test_a_list_of_another_length_is_refused_with_those_that_fit(of: str, count: int) -> None:
    optimizer = dsmuon({"lr": MUON, "adam_lr": ADAM}, [{}, {}])
    with pytest.raises(DSMuonRefusal, match=rf"has {count} entries; give one for all, or a list of 2 .* or of 4 "):
        if of == "rates":
            lr_schedules.WarmupDecayLR(optimizer, 9, warmup_max_lr=[0.1] * count)
        elif of == "lambdas":
            torch_schedulers.LambdaLR(optimizer, [lambda step: 1.0] * count)
        else:
            lr_schedules.OneCycle(optimizer, 0.1, 0.2, cycle_min_mom=[0.8] * count)


# ---- torch's schedulers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "scaled"),
    [
        (lambda o, k: torch_schedulers.OneCycleLR(o, 0.01 * k, total_steps=15, cycle_momentum=False), True),
        (lambda o, k: torch_schedulers.OneCycleLR(o, max_lr=0.01 * k, total_steps=15, three_phase=True), True),
        (lambda o, k: torch_schedulers.CyclicLR(o, 1e-3 * k, 0.01 * k, step_size_up=4), True),
        (lambda o, k: torch_schedulers.CyclicLR(o, 0.0, 0.01 * k, 3, mode="triangular2", cycle_momentum=False), True),
        (lambda o, k: torch_schedulers.LambdaLR(o, lambda step: 1 / (1 + step)), False),
        (lambda o, k: torch_schedulers.CosineAnnealingLR(o, 9), False),
        (lambda o, k: torch_schedulers.StepLR(o, 3, 0.5), False),
        (
            lambda o, k: torch_schedulers.SequentialLR(
                o, [torch_schedulers.LinearLR(o, 0.1, total_iters=4), torch_schedulers.ExponentialLR(o, 0.9)], [4]
            ),
            False,
        ),
    ],
)
def test_torchs_schedulers_keep_the_ratio(build: Any, scaled: bool) -> None:
    optimizer = dsmuon({"lr": MUON, "adam_lr": ADAM})
    configured = rates_of(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [alone(lambda other, r=r: build(other, r / MUON if scaled else 1), r) for r in configured]
        assert_follows(build(optimizer, 1), expected)


@pytest.mark.parametrize("cls", [torch_schedulers.LambdaLR, torch_schedulers.MultiplicativeLR])
def test_a_list_of_lambdas_has_one_per_group_of_the_users(cls: Any) -> None:
    lambdas = [lambda step: 0.5, lambda step: 0.25]
    optimizer = dsmuon({"lr": MUON, "adam_lr": ADAM}, [{}, {}])
    scheduler = cls(optimizer, lambdas)
    assert scheduler.lr_lambdas == [*lambdas, *lambdas]
    scheduler.step()
    assert rates_of(optimizer) == [MUON / 2, MUON / 4, ADAM / 2, ADAM / 4]
    each = [*lambdas, *lambdas]
    assert cls(optimizer, each).lr_lambdas == each


def test_a_list_of_floors_has_one_per_group_of_the_users() -> None:
    optimizer = dsmuon({}, [{}, {}])
    assert torch_schedulers.ReduceLROnPlateau(optimizer, min_lr=[0.1, 0.2]).min_lrs == [0.1, 0.2, 0.1, 0.2]
    assert torch_schedulers.ReduceLROnPlateau(optimizer, min_lr=0.1).min_lrs == [0.1] * 4


CYCLES: list[Callable[[Any], Any]] = [
    lambda o: torch_schedulers.OneCycleLR(o, 0.02, total_steps=15),
    lambda o: torch_schedulers.OneCycleLR(optimizer=o, max_lr=0.02, total_steps=15, base_momentum=0.5),
    lambda o: torch_schedulers.CyclicLR(o, 1e-3, 0.02, step_size_up=4, base_momentum=0.6),
    lambda o: lr_schedules.OneCycle(o, 1e-3, 0.02, cycle_first_step_size=4),
    lambda o: lr_schedules.OneCycle(o, 1e-3, 0.02, cycle_first_step_size=3, decay_step_size=2, decay_mom_rate=0.01),
]


@pytest.mark.parametrize("build", CYCLES)
def test_muons_momentum_cycles_as_adamws_beta1(build: Callable[[Any], Any]) -> None:
    optimizer = dsmuon({"lr": MUON, "adam_lr": ADAM, "betas": [0.7, 0.97]})
    other = Other([nn.Parameter(torch.zeros(1))], lr=MUON, betas=(0.7, 0.97))
    muon, adamw = optimizer.param_groups
    keys = muon.keys(), adamw.keys()
    ours, theirs = build(optimizer), build(other)
    seen = set()
    for _ in range(14):
        assert muon["momentum"] == adamw["betas"][0] == other.param_groups[0]["betas"][0]
        assert adamw["betas"] == other.param_groups[0]["betas"]
        seen.add(muon["momentum"])
        ours.step()
        theirs.step()
    assert len(seen) > 3
    assert not {"betas"} & (muon.keys() - keys[0]) and not {"momentum"} & (adamw.keys() - keys[1])
    assert not {"betas", "momentum"} & optimizer.defaults.keys()


def test_lists_of_momenta_are_spread() -> None:
    optimizer = dsmuon({"lr": MUON, "adam_lr": ADAM}, [{}, {}])
    torch_schedulers.OneCycleLR(optimizer, 0.02, total_steps=9, max_momentum=[0.9, 0.8])
    assert [g["momentum"] if g["use_muon"] else g["betas"][0] for g in optimizer.param_groups] == [0.9, 0.8, 0.9, 0.8]


# ---- resume ----------------------------------------------------------------------------------------------------------


def of_deepspeed(name: str, optimizer: DSMuon) -> Any:
    fixed, multiples = SCHEDULES[name]
    return getattr(lr_schedules, name)(optimizer, **fixed, **{key: MUON * value for key, value in multiples.items()})


RESUMED: dict[str, Callable[[Any], Any]] = {
    **{name: functools.partial(of_deepspeed, name) for name in SCHEDULES},
    "WarmupCosineLR": lambda o: lr_schedules.WarmupCosineLR(o, 12, warmup_num_steps=4),
    "LambdaLR": lambda o: torch_schedulers.LambdaLR(o, [lambda step: 0.9**step, lambda step: 0.8**step]),
    "OneCycleLR": lambda o: torch_schedulers.OneCycleLR(o, MUON, total_steps=15),
    "CyclicLR": lambda o: torch_schedulers.CyclicLR(o, 1e-3, MUON, step_size_up=4),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_schedule_goes_on_bit_for_bit(name: str) -> None:
    def settings(optimizer: DSMuon) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    def run(steps: int, saved: Any = None) -> tuple[list[Any], Any]:
        optimizer = dsmuon({"lr": MUON, "adam_lr": ADAM}, [{}, {"lr": 0.01}])
        scheduler = RESUMED[name](optimizer)
        if saved is not None:
            optimizer.load_groups(saved[0]["param_groups"])
            scheduler.load_state_dict(saved[1])
        found = [settings(optimizer)]
        for _ in range(steps):
            scheduler.step()
            found.append(copy.deepcopy(settings(optimizer)))
        return found, copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))

    whole, _ = run(12)
    first, saved = run(5)
    second, _ = run(7, saved)
    assert [*first, *second[1:]] == whole and first[-1] == second[0]


# ---- configs that a trainer filled in --------------------------------------------------------------------------------


def filled_by_hf(config: dict[str, Any], lr: float) -> dict[str, Any]:
    """What ``Trainer`` makes of it: with a stand-in for TrainingArguments, whose import takes seconds."""
    hf = pytest.importorskip("transformers.integrations.deepspeed")
    arguments: Any = SimpleNamespace(
        **{"learning_rate": lr, "weight_decay": 0.0, "max_grad_norm": 1.0, "get_warmup_steps": lambda total: 4},
        **{"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "save_on_each_node": False},
        **{"world_size": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
        **dict.fromkeys(("fp16", "fp16_full_eval", "bf16", "bf16_full_eval"), False),
    )
    filled = hf.HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    filled.trainer_config_process(arguments)
    filled.trainer_config_finalize(arguments, None, 12)
    hf.unset_hf_deepspeed_config()
    return filled.config


def filled_by_accelerate(config: dict[str, Any], lr: float) -> dict[str, Any]:
    """What ``Accelerator.prepare`` makes of it with a DummyOptim and a DummyScheduler."""
    accelerate = pytest.importorskip("accelerate.utils")
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=accelerate.HfDeepSpeedConfig(copy.deepcopy(config)))
    optimizer = accelerate.DummyOptim([], lr)
    plugin.deepspeed_config_process(
        must_match=False,
        **{
            "optimizer.params.lr": optimizer.lr,
            "optimizer.params.weight_decay": optimizer.weight_decay,
            "scheduler.params.warmup_min_lr": 0,
            "scheduler.params.warmup_max_lr": optimizer.lr,
            "scheduler.params.warmup_num_steps": 4,
            "scheduler.params.total_num_steps": 12,
        },
    )
    return plugin.deepspeed_config


def blank_config(**params: Any) -> dict[str, Any]:
    """With every value of the scheduler left to a trainer."""
    keys = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    scheduler = {"type": "WarmupDecayLR", "params": dict.fromkeys(keys, "auto")}
    config = ds_config(scheduler=scheduler, gradient_clipping=1.0)
    config["optimizer"]["params"] = params
    return config


@pytest.mark.parametrize("fill", [filled_by_hf, filled_by_accelerate])
@pytest.mark.parametrize(
    ("params", "rate"),
    [
        ({"lr": "auto", "adam_lr": ADAM}, MUON),
        ({"lr": "auto", "muon_lr": MUON}, ADAM),
        ({"muon_lr": MUON, "adam_lr": ADAM}, ADAM),
        ({"muon_lr": MUON, "adam_lr": ADAM}, MUON),
    ],
)
def test_a_scheduler_section_that_a_trainer_filled_keeps_the_ratio(fill: Any, params: Any, rate: float) -> None:
    config = fill(blank_config(**params), rate)
    section = config["scheduler"]["params"]
    assert section["warmup_max_lr"] == rate
    scheduler = lr_schedules.WarmupDecayLR(dsmuon(config["optimizer"]["params"]), **section)
    found = course(scheduler, 12)
    assert [max(rates) for rates in zip(*found, strict=True)] == pytest.approx([MUON, ADAM], rel=1e-12)
    assert all(muon == pytest.approx(adamw * MUON / ADAM, rel=1e-12) for muon, adamw in found)
