"""The optimizer's param groups keep what the user set and hold every tensor once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_muon.config import DSMuonConfig, DSMuonConfigError
from ds_muon.param_groups import split_param_groups
from ds_muon.routing import Routing, RoutingError, route
from tests.unit.support.models import Block, ds_config, full_weights, start, train_step
from tests.unit.support.modules import GPT, Holder, linear, raw
from tests.unit.support.ranks import run_ranks

CONFIG = DSMuonConfig.parse(
    {"muon_lr": 0.02, "adam_lr": 3e-4, "muon_weight_decay": 0.1, "adam_weight_decay": 0.01, "betas": [0.8, 0.9]}
)


def split(model: nn.Module, model_parameters: object, routing: Routing | None = None) -> list[dict]:
    return split_param_groups(model, model_parameters, routing or route(model), CONFIG)  # type: ignore[arg-type]


def names_of(model: nn.Module, group: dict) -> list[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    return [names[id(param)] for param in group["params"]]


@pytest.mark.parametrize("make", [list, tuple, iter, lambda params: (p for p in params)])
def test_loose_tensors_give_two_groups_with_the_config_of_their_half(make):
    model = GPT()
    muon, adamw = split(model, make(model.parameters()))
    assert names_of(model, muon) == [f"h.{i}.{name}.weight" for i in range(2) for name in ("attn", "mlp")]
    assert len(adamw["params"]) == 9
    assert {k: v for k, v in muon.items() if k != "params"} == {
        "use_muon": True,
        "name": "muon",
        "user_group": 0,
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
    }
    assert {k: v for k, v in adamw.items() if k != "params"} == {
        "use_muon": False,
        "name": "adamw",
        "user_group": 0,
        "lr": 3e-4,
        "weight_decay": 0.01,
        "betas": (0.8, 0.9),
        "eps": 1e-8,
    }


def test_the_groups_are_what_a_torch_optimizer_takes():
    model = GPT()
    optimizer = torch.optim.Optimizer(split(model, model.parameters()), {})
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_shared_values_reach_both_halves():
    model = GPT()
    config = DSMuonConfig.parse({"lr": 0.001, "weight_decay": 0.0, "adam_weight_decay": 0.5})
    muon, adamw = split_param_groups(model, model.parameters(), route(model), config)
    assert (muon["lr"], muon["weight_decay"], adamw["lr"], adamw["weight_decay"]) == (0.001, 0.0, 0.001, 0.5)


def test_muon_groups_come_first_in_the_users_order():
    model = GPT()
    given = [
        {"params": [model.wte.weight, model.h[0].mlp.weight]},
        {"params": iter([model.h[1].attn.weight])},
        {"params": [model.wpe.weight], "name": "positions"},
        {"params": model.h[1].mlp.parameters(), "name": "last"},
        {"params": []},
    ]
    groups = split(model, given)
    assert [group["name"] for group in groups] == [
        "group0-muon",
        "group1-muon",
        "last-muon",
        "group0-adamw",
        "positions-adamw",
    ]
    assert [group["use_muon"] for group in groups] == [True, True, True, False, False]
    assert [group["user_group"] for group in groups] == [0, 1, 3, 0, 2]
    assert [names_of(model, group) for group in groups] == [
        ["h.0.mlp.weight"],
        ["h.1.attn.weight"],
        ["h.1.mlp.weight"],
        ["wte.weight"],
        ["wpe.weight"],
    ]


def test_a_single_named_group_keeps_its_name():
    model = GPT()
    names = [group["name"] for group in split(model, [{"params": model.parameters(), "name": "all"}])]
    assert names == ["all-muon", "all-adamw"]


def test_loose_tensors_form_one_group_in_place_of_the_first():
    model = GPT()
    given = [
        {"params": model.h[0].mlp.weight},
        model.h[1].mlp.weight,
        {"params": [model.wte.weight]},
        model.wpe.weight,
    ]
    groups = split(model, given)
    assert [group["name"] for group in groups] == ["group0-muon", "group1-muon", "group1-adamw", "group2-adamw"]
    assert names_of(model, groups[1]) + names_of(model, groups[2]) == ["h.1.mlp.weight", "wpe.weight"]


def test_a_groups_own_values_win_and_zero_is_kept():
    model = GPT()
    given = [
        {
            "params": model.h.parameters(),
            "lr": 0.5,
            "weight_decay": 0.0,
            "momentum": 0,
            "eps": 0.0,
            "betas": [0.5, 0.6],
        },
        {"params": [model.wte.weight], "lr": 0.0},
        {"params": [model.wpe.weight], "weight_decay": 0},
    ]
    muon, adamw, wte, wpe = split(model, given)
    assert (muon["lr"], muon["weight_decay"], muon["momentum"], muon["nesterov"]) == (0.5, 0.0, 0.0, True)
    assert (adamw["lr"], adamw["weight_decay"], adamw["eps"], adamw["betas"]) == (0.5, 0.0, 0.0, (0.5, 0.6))
    assert "betas" not in muon and "eps" not in muon and "momentum" not in adamw and "nesterov" not in adamw
    assert (wte["lr"], wte["weight_decay"]) == (0.0, 0.01)
    assert (wpe["lr"], wpe["weight_decay"]) == (3e-4, 0.0)


def test_other_keys_are_carried_along_and_the_given_dict_is_left_alone():
    model = GPT()
    tag = object()
    given = {"params": list(model.parameters()), "layer_scale": 0.5, "tag": tag}
    before = dict(given)
    for group in split(model, [given]):
        assert group["layer_scale"] == 0.5 and group["tag"] is tag
    assert given == before


@pytest.mark.parametrize(
    "own",
    [
        *({"lr": value} for value in (-1.0, "auto", "0.1", None)),
        *({"weight_decay": -0.1}, {"momentum": 1.0}, {"betas": [0.9]}, {"eps": float("nan")}, {"lr": 1e39}),
    ],
)
def test_a_groups_own_values_are_checked(own):
    model = GPT()
    ((key, _),) = own.items()
    given = [{"params": [model.wte.weight]}, {"params": model.h.parameters(), **own}]
    with pytest.raises(DSMuonConfigError, match=rf"^param_groups\[1\]\.{key}"):
        split(model, given)


@pytest.mark.parametrize("own", [{"lr": 3e38, "weight_decay": 2.0}, {"weight_decay": 3e38, "lr": 1.2}, {"lr": 3e38}])
def test_a_decay_that_is_infinite_in_fp32_is_refused(own):
    model = GPT()
    config = DSMuonConfig.parse({"weight_decay": 2.0})
    with pytest.raises(DSMuonConfigError, match=r"lr = .* and weight_decay = .* infinite in fp32"):
        split_param_groups(model, [{"params": model.parameters(), **own}], route(model), config)


def test_a_groups_own_momentum_is_refused_where_bf16_would_not_forget():
    model, config = GPT(), DSMuonConfig.parse({"momentum_dtype": "bfloat16"})
    given = [{"params": [model.wte.weight], "momentum": 0.999}, {"params": [*model.h.parameters()], "momentum": 0.99}]
    split_param_groups(model, given, route(model), config)  # an embedding has no momentum
    given[1]["momentum"] = 0.999
    with pytest.raises(
        DSMuonConfigError, match=r'^param_groups\[1\]\.momentum = 0\.999: .*"float32", or momentum to at'
    ):
        split_param_groups(model, given, route(model), config)


@pytest.mark.parametrize("key", ["adam_lr", "muon_lr", "ns_steps", "muon_params"])
def test_a_key_of_the_whole_optimizer_is_refused_in_a_group(key):
    model = GPT()
    with pytest.raises(RoutingError, match=rf"param group 0 has {key} = 1, .*optimizer\.params"):
        split(model, [{"params": model.parameters(), key: 1}])


def test_frozen_and_empty_tensors_are_in_no_group():
    model = Holder(body=linear(), frozen=linear(), empty=raw(0, 4), gain=raw(4))
    model.frozen.requires_grad_(False)
    groups = split(model, model.parameters())
    assert [names_of(model, group) for group in groups] == [["body.weight"], ["gain"]]


def test_a_group_of_frozen_tensors_disappears():
    model = Holder(body=linear(), frozen=linear(), gain=raw(4))
    model.frozen.requires_grad_(False)
    groups = split(model, [{"params": model.frozen.parameters()}, model.body.weight, {"params": [model.gain]}])
    assert [group["name"] for group in groups] == ["group1-muon", "group2-adamw"]


def test_a_model_may_have_no_adamw_parameter():
    model = nn.Sequential(linear(), linear())
    (only,) = split(model, model.parameters())
    assert only["use_muon"] and only["name"] == "muon" and len(only["params"]) == 2


def test_a_tied_weight_is_in_one_group_once():
    model = GPT(tied=True, head_first=True)
    muon, adamw = split(model, model.parameters())
    assert sum(param is model.wte.weight for param in adamw["params"]) == 1
    assert all(param is not model.wte.weight for param in muon["params"])


def test_parameters_that_were_not_given_are_not_trained():
    model = GPT()
    (only,) = split(model, [model.h[0].mlp.weight])
    assert names_of(model, only) == ["h.0.mlp.weight"]


@pytest.mark.parametrize("given", [lambda m: [m.wte.weight], lambda m: [], lambda m: [{"params": []}]])
def test_no_muon_matrix_among_the_given_is_refused(given):
    model = GPT()
    with pytest.raises(RoutingError, match=r"no trainable matrix for Muon; use AdamW, .*h\.0\.attn\.weight"):
        split(model, given(model))


def test_a_tensor_given_twice_is_refused():
    model = GPT()
    weight = model.h[0].mlp.weight
    with pytest.raises(RoutingError, match=r"h\.0\.mlp\.weight is given twice, again in param group 1"):
        split(model, [weight, {"params": [weight]}])
    with pytest.raises(RoutingError, match=r"given twice, again in param group 0"):
        split(model, [weight, weight])


def test_a_tensor_of_another_model_is_refused():
    model = GPT()
    with pytest.raises(RoutingError, match=r"param group 1 holds a tensor of shape \(2, 3\) that is not a parameter"):
        split(model, [{"params": model.parameters()}, {"params": [raw(2, 3)]}])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda m: m.named_parameters(), r"param group 0 holds tuples; pass parameters\(\)"),
        (lambda m: [{"params": ["h.0.mlp.weight"]}], "param group 0 holds 'h.0.mlp.weight', a str; pass"),
        (lambda m: [{"params": m.parameters()}, None], "param group 1 holds None, a NoneType"),
        (lambda m: [{"lr": 0.1}], r"param group 0 has the keys \['lr'\]; add \"params\""),
        (lambda m: [{"params": set(m.parameters())}], "param group 0 has a set as params"),
        (lambda m: {"params": m.parameters()}, "model_parameters is a dict; pass a list"),
        (lambda m: m.wte.weight, "model_parameters is a Parameter; pass a list"),
    ],
)
def test_malformed_groups_are_refused(given, message):
    model = GPT()
    with pytest.raises(RoutingError, match=message):
        split(model, given(model))


@pytest.mark.parametrize("name", ["group0", "", 3, None])
def test_group_names_are_strings_of_their_own(name):
    model = GPT()
    given = [{"params": [model.h[0].mlp.weight]}, {"params": [model.wte.weight], "name": name}]
    given.append({"params": [model.wpe.weight], "name": name})
    with pytest.raises(RoutingError, match="has the name"):
        split(model, given)


def test_a_groups_use_muon_may_agree_with_the_routing_but_not_contradict_it():
    model = GPT()
    body = [param for param in model.h.parameters() if param.ndim == 2]
    rest = [model.wte.weight, model.lm_head.weight]
    groups = split(model, [{"params": rest, "use_muon": False}, {"params": body, "use_muon": True}])
    assert [group["use_muon"] for group in groups] == [True, False]
    with pytest.raises(RoutingError, match=r"use_muon = True, but wte\.weight goes to adamw; .*muon_params"):
        split(model, [{"params": rest + body, "use_muon": True}])
    with pytest.raises(RoutingError, match=r"use_muon = False, but h\.0\.attn\.weight goes to muon"):
        split(model, [{"params": body, "use_muon": False}])


def undecayed(*patterns: str) -> DSMuonConfig:
    return DSMuonConfig.parse({"weight_decay": 0.1, "no_decay_params": list(patterns)})


def test_parameters_without_weight_decay_are_groups_of_their_own_in_either_half():
    model = GPT()
    config = undecayed("*.bias", "*.ln.*", "h.0.mlp.weight")
    groups = split_param_groups(model, model.parameters(), route(model), config)
    assert [(group["name"], group["weight_decay"], group["user_group"]) for group in groups] == [
        ("muon", 0.1, 0),
        ("muon-no_decay", 0.0, 0),
        ("adamw", 0.1, 0),
        ("adamw-no_decay", 0.0, 0),
    ]
    assert names_of(model, groups[1]) == ["h.0.mlp.weight"]
    assert names_of(model, groups[2]) == ["wte.weight", "wpe.weight", "lm_head.weight"]
    assert len(groups[3]["params"]) == 6
    assert (groups[3]["lr"], groups[3]["betas"], groups[3]["eps"]) == (0.02, (0.9, 0.95), 1e-8)


def test_groups_of_the_users_keep_their_rate_and_lose_the_decay_of_what_is_named():
    model = GPT()
    given = [{"params": model.wte.parameters(), "lr": 0.5}, {"params": model.h.parameters(), "weight_decay": 0.3}]
    groups = split_param_groups(model, given, route(model), undecayed("wte.*", "h.1.*"))
    assert [(group["name"], group["lr"], group["weight_decay"], group["user_group"]) for group in groups] == [
        ("group1-muon", 0.02, 0.3, 1),
        ("group1-muon-no_decay", 0.02, 0.0, 1),
        ("group0-adamw-no_decay", 0.5, 0.0, 0),
        ("group1-adamw", 0.02, 0.3, 1),
        ("group1-adamw-no_decay", 0.02, 0.0, 1),
    ]


def seeded_step(params: dict, folder: str) -> tuple[dict[str, torch.Tensor], list[tuple[str, int]]]:
    """Of an engine that has been saved, and what groups it has after loading what it saved."""
    torch.manual_seed(0)
    model = Block()
    config = ds_config({"lr": 0.02, "adam_lr": 0.01, **params})
    engine = start(model, config, model_parameters=[{"params": []}, {"params": list(model.parameters())}])
    tokens = torch.arange(12, device=engine.device).view(1, 12)
    train_step(engine, tokens, tokens)
    engine.save_checkpoint(folder)
    engine.optimizer.optimizer.param_groups[0]["user_group"] = 9  # as another run may call its own
    engine.load_checkpoint(folder)
    groups = [(group["name"], group["user_group"]) for group in engine.optimizer.optimizer.param_groups]
    return full_weights(engine), groups


@pytest.mark.ranks
def test_what_does_not_decay_moves_as_without_weight_decay(tmp_path):
    names = ["square.weight", "norm.weight", "tall.bias"]
    decayed, groups = run_ranks(2, seeded_step, {"weight_decay": 0.5, "no_decay_params": names}, str(tmp_path / "a"))[0]
    free, _ = run_ranks(2, seeded_step, {"weight_decay": 0.0}, str(tmp_path / "b"))[0]
    assert [name for name in free if torch.equal(free[name], decayed[name])] == sorted([*names, "norm.bias"])
    assert groups == [
        ("group1-muon", 9),
        ("group1-muon-no_decay", 1),
        ("group1-adamw", 1),
        ("group1-adamw-no_decay", 1),
    ]


def test_any_name_of_a_tied_weight_keeps_it_from_decaying():
    model = GPT(tied=True)
    groups = split_param_groups(model, model.parameters(), route(model), undecayed("lm_head.weight"))
    assert names_of(model, groups[-1]) == ["wte.weight"] and groups[-1]["weight_decay"] == 0.0


def test_a_pattern_without_weight_decay_and_without_a_match_names_near_ones():
    model = GPT()
    with pytest.raises(
        RoutingError, match=r"optimizer\.params\.no_decay_params: 'h\.0\.ln\.bais' matches no parameter"
    ):
        split_param_groups(model, model.parameters(), route(model), undecayed("h.0.ln.bais"))


def test_where_a_group_came_from_is_not_the_users_to_say():
    model = GPT()
    assert {group["user_group"] for group in split(model, [{"params": model.parameters(), "user_group": 7}])} == {0}


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_a_groups_use_muon_is_a_boolean(value):
    model = GPT()
    with pytest.raises(RoutingError, match="param group 0 has use_muon = "):
        split(model, [{"params": [model.h[0].mlp.weight], "use_muon": value}])


@pytest.mark.parametrize("key", ["amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused"])
def test_a_switch_of_adamw_alone_is_refused_in_a_group(key):
    model = GPT()
    with pytest.raises(RoutingError, match=rf"param group 0 has {key} = True.*AdamW half only"):
        split(model, [{"params": list(model.parameters()), key: True}])
    split(model, [{"params": list(model.parameters()), key: False}])


def test_adam_with_an_l2_penalty_is_refused_in_a_group():
    model = GPT()
    with pytest.raises(RoutingError, match="param group 0 has decoupled_weight_decay = False"):
        split(model, [{"params": list(model.parameters()), "decoupled_weight_decay": False}])
    split(model, [{"params": list(model.parameters()), "decoupled_weight_decay": True}])


def test_a_misspelt_setting_in_a_group_names_the_near_one():
    model = GPT()
    with pytest.raises(RoutingError, match=r"weigth_decay = 0\.1; did you mean 'weight_decay'"):
        split(model, [{"params": list(model.parameters()), "weigth_decay": 0.1}])
