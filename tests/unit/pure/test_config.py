"""The config accepts what it should, refuses the rest in words that help, and coerces nothing."""

from __future__ import annotations

import json

import pytest
import torch

from ds_muon.config import DSMuonConfig, DSMuonConfigError
from ds_muon.orthogonalize.coefficients import COEFFICIENTS

DEFAULTS = {
    "lr": 0.02,
    "muon_lr": None,
    "adam_lr": None,
    "weight_decay": 0.0,
    "muon_weight_decay": None,
    "adam_weight_decay": None,
    "momentum": 0.95,
    "nesterov": True,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "variant": "muon",
    "beta2": 0.95,
    "adjust_lr_fn": "original",
    "ns_method": "gram",
    "ns_steps": None,
    "ns_coefficients": "quintic",
    "ns_dtype": "auto",
    "ns_backend": "auto",
    "ns_eps": 1e-15,
    "momentum_dtype": "float32",
    "muon_params": (),
    "adamw_params": (),
    "no_decay_params": (),
    "muon_blocks": (),
    "per_head_muon": False,
    "nan_guard": "off",
    "grad_norm_skip_threshold": None,
    "clip_norm_scope": "adamw",
    "verify_every": 0,
    "verify_bits": False,
    "telemetry_every": None,
}
NUMBERS = ["lr", "muon_lr", "adam_lr", "weight_decay", "muon_weight_decay", "adam_weight_decay", "momentum", "eps"]
NUMBERS += ["beta2", "ns_eps", "grad_norm_skip_threshold"]
NOT_NEGATIVE = ["lr", "muon_lr", "adam_lr", "weight_decay", "muon_weight_decay", "adam_weight_decay", "eps"]


def problems(**params: object) -> list[str]:
    with pytest.raises(DSMuonConfigError) as caught:
        DSMuonConfig.parse(params)
    return str(caught.value).splitlines()


def problem(**params: object) -> str:
    (line,) = problems(**params)
    return line


def test_an_empty_section_gives_the_documented_defaults():
    assert DSMuonConfig.parse({}).model_dump() == DEFAULTS


def test_the_model_is_frozen_and_the_input_is_left_alone():
    params = {"betas": [0.9, 0.99], "muon_params": ["a.*"]}
    config = DSMuonConfig.parse(params)
    assert params == {"betas": [0.9, 0.99], "muon_params": ["a.*"]}
    assert config.betas == (0.9, 0.99) and config.muon_params == ("a.*",)
    with pytest.raises(ValueError, match="frozen"):
        config.lr = 1.0  # type: ignore[misc]
    hash(config)


def test_an_explicit_zero_is_kept():
    config = DSMuonConfig.parse({"lr": 0.1, "weight_decay": 0.3, "muon_lr": 0.0, "adam_lr": 0, "momentum": 0})
    assert (config.muon_lr, config.adam_lr, config.momentum) == (0.0, 0.0, 0.0)
    assert (config.resolved_muon_lr, config.resolved_adam_lr) == (0.0, 0.0)
    config = DSMuonConfig.parse({"weight_decay": 0.3, "muon_weight_decay": 0, "adam_weight_decay": 0.0})
    assert (config.resolved_muon_weight_decay, config.resolved_adam_weight_decay) == (0.0, 0.0)
    config = DSMuonConfig.parse({"lr": 0, "weight_decay": 0, "eps": 0, "ns_eps": 0, "nesterov": False})
    assert (config.lr, config.weight_decay, config.eps, config.ns_eps, config.nesterov) == (0, 0, 0, 0, False)


def test_halves_fall_back_on_the_shared_value():
    config = DSMuonConfig.parse({"lr": 0.1, "weight_decay": 0.3})
    assert (config.resolved_muon_lr, config.resolved_adam_lr) == (0.1, 0.1)
    assert (config.resolved_muon_weight_decay, config.resolved_adam_weight_decay) == (0.3, 0.3)


def test_halves_may_have_their_own_values():
    own = {"muon_lr": 0.02, "adam_lr": 3e-4, "muon_weight_decay": 0.1, "adam_weight_decay": 0.2}
    config = DSMuonConfig.parse({"lr": 1.0, "weight_decay": 1.0, **own})
    assert (config.resolved_muon_lr, config.resolved_adam_lr) == (0.02, 3e-4)
    assert (config.resolved_muon_weight_decay, config.resolved_adam_weight_decay) == (0.1, 0.2)


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", ["3e-4", "high", True, [0.1], {}, float("nan"), float("inf"), 10**400])
def test_numbers_are_numbers(key, value):
    line = problem(**{key: value})
    assert line.startswith(f"optimizer.params.{key} = ")
    assert "number" in line or "finite" in line


@pytest.mark.parametrize("key", ["lr", "muon_lr", "momentum"])
def test_a_number_in_quotes_is_refused_with_a_hint(key):
    assert problem(**{key: "3e-4"}) == (
        f'optimizer.params.{key} = "3e-4": is a string, not a number; set 3e-4 without quotes'
    )


@pytest.mark.parametrize("key", NOT_NEGATIVE)
def test_rates_and_decays_start_at_zero(key):
    assert getattr(DSMuonConfig.parse({key: 0}), key) == 0
    assert getattr(DSMuonConfig.parse({key: 7.5}), key) == 7.5
    assert f"optimizer.params.{key} = -1e-09: is out of range; set a number >= 0" in problem(**{key: -1e-9})


@pytest.mark.parametrize("key", ["momentum", "ns_eps"])
def test_fractions_are_below_one(key):
    assert getattr(DSMuonConfig.parse({key: 0}), key) == 0
    assert getattr(DSMuonConfig.parse({key: 0.999}), key) == 0.999
    assert "is out of range; set a number from 0 to below 1" in problem(**{key: 1})
    assert "is out of range; set a number from 0 to below 1" in problem(**{key: -0.1})


def test_verify_bits_needs_verify_every():
    assert "set verify_every, such as 100" in problem(verify_bits=True)
    assert DSMuonConfig.parse({"verify_bits": True, "verify_every": 3}).verify_bits
    assert not DSMuonConfig.parse({"verify_bits": False}).verify_bits


def test_beta2_and_threshold_and_verify_every_have_ranges():
    assert all("out of range" in problem(beta2=value) for value in (-0.1, 1.0))
    assert all("out of range" in problem(grad_norm_skip_threshold=value) for value in (-1.0, 0))
    assert "out of range" in problem(verify_every=-1)
    assert all("not an integer" in problem(verify_every=value) for value in (1.0, False, None))


@pytest.mark.parametrize("value", [[0.0, 0.0], (0.9, 0.999), [0, 0.5]])
def test_betas_are_a_pair(value):
    assert DSMuonConfig.parse({"betas": value}).betas == tuple(value)


@pytest.mark.parametrize("value", [[], [0.9], [0.9, 0.95, 0.99]])
def test_betas_of_another_length_are_refused(value):
    assert f"has {len(value)} entries; set a pair of numbers" in problem(betas=value)


@pytest.mark.parametrize("entry", [1.0, -0.1, "0.9", True, None, float("nan")])
def test_a_bad_beta_is_named_by_its_place(entry):
    assert problem(betas=[0.9, entry]).startswith("optimizer.params.betas[1] = ")
    assert problem(betas=[entry, 0.9]).startswith("optimizer.params.betas[0] = ")


@pytest.mark.parametrize("value", [0.9, "0.9, 0.95", None, {"0": 0.9}])
def test_betas_that_are_no_list_are_refused(value):
    assert "optimizer.params.betas = " in problem(betas=value)


@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_nesterov_is_a_boolean(value):
    assert "is not true or false" in problem(nesterov=value)


def test_ns_steps_range():
    assert [DSMuonConfig.parse({"ns_steps": value}).ns_steps for value in (1, 100)] == [1, 100]
    assert all("is out of range; set an integer from 1 to 100" in problem(ns_steps=value) for value in (0, -1, 101))
    assert all("is not an integer" in problem(ns_steps=value) for value in (5.0, True))
    assert "5 without quotes" in problem(ns_steps="5")


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_named_coefficient_tables(name):
    assert DSMuonConfig.parse({"ns_coefficients": name}).ns_coefficients == name


@pytest.mark.parametrize(
    ("params", "steps"),
    [
        ({}, 5),
        ({"ns_coefficients": "minimax"}, 4),
        ({"ns_coefficients": "minimax", "ns_steps": 6}, 6),
        ({"ns_coefficients": "minimax", "ns_steps": None}, 4),
        ({"ns_coefficients": [[2, -1, 0]] * 7}, 7),
    ],
)
def test_without_ns_steps_the_coefficients_say_how_many(params, steps):
    assert len(DSMuonConfig.parse(params).newton_schulz(torch.device("cpu")).triples) == steps


def test_triples_are_accepted_as_lists_and_tuples():
    triples = [[3.4445, -4.7750, 2.0315], (2, -1, 0)]
    config = DSMuonConfig.parse({"ns_coefficients": triples})
    assert config.ns_coefficients == ((3.4445, -4.7750, 2.0315), (2.0, -1.0, 0.0))
    hash(config)


@pytest.mark.parametrize(
    "value",
    [
        "Quintic",
        [],
        [1.0, 2.0, 3.0],
        [[1.0, 2.0]],
        [[1.0, 2.0, 3.0, 4.0]],
        [[1.0, 2.0, float("nan")]],
        [[1.0, 2.0, 10**400]],
        [[1e39, -4.0, 2.0]],
        [[1.0, 2.0, True]],
        [[1.0, 2.0, "3"]],
        ["abc"],
        None,
        5,
    ],
)
def test_other_coefficients_are_refused_with_the_choices(value):
    line = problem(ns_coefficients=value)
    assert line.startswith("optimizer.params.ns_coefficients = ")
    assert '"quintic", "polar_express"' in line and "triples" in line


def test_more_triples_than_steps_are_refused():
    triple = [3.0, -3.0, 1.0]
    DSMuonConfig.parse({"ns_coefficients": [triple] * 5})
    DSMuonConfig.parse({"ns_coefficients": [triple] * 2, "ns_steps": 2})
    assert problem(ns_coefficients=[triple] * 3, ns_steps=2) == (
        "optimizer.params.ns_steps = 2: is less than the 3 triples of ns_coefficients; set 3, or list fewer triples"
    )
    assert "has 101 triples, more than the 100 steps there may be; set" in problem(ns_coefficients=[triple] * 101)


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("variant", ["muon"]),
        ("adjust_lr_fn", ["original", "match_rms_adamw", "none"]),
        ("ns_method", ["gram", "standard"]),
        ("ns_dtype", ["auto", "bfloat16", "float16", "float32"]),
        ("ns_backend", ["auto", "torch"]),
        ("momentum_dtype", ["float32", "bfloat16"]),
        ("nan_guard", ["off"]),
        ("clip_norm_scope", ["adamw", "all"]),
    ],
)
def test_choices(key, choices):
    for choice in choices:
        assert getattr(DSMuonConfig.parse({key: choice}), key) == choice
    for value in ("nonsense", choices[0].upper(), None, 1, True, []):
        line = problem(**{key: value})
        assert line.startswith(f"optimizer.params.{key} = ")
        assert all(f'"{choice}"' in line for choice in choices)


@pytest.mark.parametrize("order", [1, -1])
def test_bf16_momentum_is_refused_where_it_would_not_forget(order):
    def given(momentum: float) -> dict[str, object]:
        return dict([("momentum", momentum), ("momentum_dtype", "bfloat16")][::order])

    assert DSMuonConfig.parse(given(0.995)).momentum_dtype == "bfloat16"
    assert DSMuonConfig.parse({"momentum": 0.999}).momentum == 0.999
    line = problem(**given(0.996))
    assert line.startswith('optimizer.params.momentum_dtype = "bfloat16": is too coarse for a momentum of 0.996')
    assert line.endswith('set momentum_dtype to "float32", or momentum to at most 0.995')


@pytest.mark.parametrize("key", ["muon_params", "adamw_params", "no_decay_params"])
def test_patterns_are_a_list_of_strings(key):
    assert getattr(DSMuonConfig.parse({key: ["a.*", "b"]}), key) == ("a.*", "b")
    assert getattr(DSMuonConfig.parse({key: []}), key) == ()
    assert problem(**{key: "head.*"}) == f'optimizer.params.{key} = "head.*": is a string, not a list; set ["head.*"]'
    assert f"optimizer.params.{key}[1] = " in problem(**{key: ["a", ""]})
    assert f"optimizer.params.{key}[0] = 3: is not a string" in problem(**{key: [3]})
    assert "is not a list" in problem(**{key: None})


@pytest.mark.parametrize("key", sorted(set(DEFAULTS) - {"ns_dtype", "ns_backend"}))
def test_auto_that_no_trainer_filled_in_is_refused(key):
    line = problem(**{key: "auto"})
    assert line.startswith(f'optimizer.params.{key} = "auto": is a blank that no trainer filled in')
    assert "; set " in line or "; remove" in line


def test_auto_is_a_choice_for_dtype_and_backend():
    DSMuonConfig.parse({"ns_dtype": "auto", "ns_backend": "auto"})


@pytest.mark.parametrize("params", [{"beta2": 0.9}, {"beta2": 0}, {"variant": "muon", "beta2": 0.95}])
def test_beta2_without_normuon_is_refused(params):
    assert problem(**params) == (
        f'optimizer.params.beta2 = {json.dumps(params["beta2"])}: has no effect with variant "muon"; '
        'remove the key, or set "variant": "normuon"'
    )


@pytest.mark.parametrize("order", [1, -1])
def test_beta2_with_normuon_is_taken_whatever_comes_first(order):
    params = dict([("variant", "normuon"), ("beta2", 0.9)][::order])
    assert DSMuonConfig.parse(params).beta2 == 0.9


def test_beta2_with_an_unknown_variant_is_one_problem():
    assert problem(variant="nor", beta2=0.9).startswith('optimizer.params.variant = "nor"')


@pytest.mark.parametrize(
    ("key", "near"), [("ns_step", "ns_steps"), ("LR", "lr"), ("weight_deacy", "weight_decay"), ("beta", "betas")]
)
def test_an_unknown_key_lists_near_matches(key, near):
    line = problem(**{key: 1})
    assert line.startswith(f"optimizer.params.{key} = 1: is not a key of DSMuon; did you mean ")
    assert f'"{near}"' in line


def test_an_unknown_key_without_a_near_match_lists_all_keys():
    line = problem(zzzz=1)
    assert all(key in line for key in DEFAULTS)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("param_order", "is gone"),
        ("max_grad_norm", "gradient_clipping"),
        ("adam_w_mode", "always decoupled AdamW"),
        ("torch_adam", "remove the key"),
        ("fp32_optimizer_states", "fp32 state"),
        ("fused", "remove the key"),
        ("backend", "ns_backend"),
    ],
)
def test_keys_of_other_optimizers_get_a_hint(key, hint):
    line = problem(**{key: True})
    assert line.startswith(f"optimizer.params.{key} = true: ") and hint in line


def test_all_problems_are_reported_at_once():
    lines = problems(lr="x", betas=[0.9], ns_backend="cuda", muon_lr="auto", ns_step=3)
    keys = [line.split(" = ")[0] for line in lines]
    assert sorted(keys) == sorted(f"optimizer.params.{k}" for k in ("lr", "betas", "ns_backend", "muon_lr", "ns_step"))


def nested(depth: int, key: str | None = None) -> object:
    value: object = []
    for _ in range(depth):
        value = [value] if key is None else {key: value}
    return value


ANYTHING = [
    *(nested(10_000), nested(10_000, "a"), [nested(10_000)], [[nested(10_000), 1, 2]], 10**5000, [10**5000, 0.5]),
    *("\ud800", ["\ud800"], {"\ud800": 1}, b"\xff", object(), float("nan"), [float("inf")], {1}, "1" * 10_000),
]


@pytest.mark.parametrize("key", [*DEFAULTS, "zzz"])
def test_whatever_a_key_holds_is_refused_in_words_that_can_be_printed(key):
    for value in ANYTHING:
        if key in ("verify_every", "telemetry_every") and value == 10**5000:
            continue  # an integer >= 0
        for line in problems(**{key: value}):
            assert line.startswith(f"optimizer.params.{key}") and len(line.encode()) < 2000 and line.isprintable()


@pytest.mark.parametrize("key", ["a\nb", "\ud800", "", " ", "é\x1b[31m", 1, None, ("a",)])
def test_whatever_is_a_key_is_refused_in_words_that_can_be_printed(key):
    with pytest.raises(DSMuonConfigError) as caught:
        DSMuonConfig.parse({key: 1})
    assert str(caught.value).isprintable() and str(caught.value).encode()
    assert "is not a key of DSMuon" in str(caught.value)


@pytest.mark.parametrize("key", [*NOT_NEGATIVE, "grad_norm_skip_threshold"])
def test_numbers_are_what_they_are_in_fp32(key):
    for value in (3.4e38, 1.5e-45):
        assert getattr(DSMuonConfig.parse({key: value}), key) == value
    for value in (1e39, 10**39):
        assert f"optimizer.params.{key} = " in problem(**{key: value})
        assert "is infinite in fp32, in which it is used; set a number" in problem(**{key: value})
    assert "is 0 in fp32, in which it is used; set a number" in problem(**{key: 1e-46})


def test_what_is_right_can_be_had_beside_the_problems():
    config, lines = DSMuonConfig.read({"lr": "x", "momentum": 0.5, "zzz": 1, "muon_params": ["a"], "beta2": 0.9})
    assert (config.lr, config.momentum, config.muon_params, config.beta2) == (0.02, 0.5, ("a",), 0.95)
    assert config.model_fields_set == {"momentum", "muon_params"}
    assert [line.split(" ")[0].rsplit(".")[-1] for line in lines] == ["lr", "beta2", "zzz"]
    config, lines = DSMuonConfig.read(
        {"variant": "nor", "beta2": 0.9, "ns_coefficients": [[1, 1, 1]] * 6, "ns_steps": 5}
    )
    assert config.variant == "muon" and config.ns_coefficients == "quintic"
    assert [line.split(" ")[0].rsplit(".")[-1] for line in lines] == ["variant"]


def test_a_section_that_is_no_object_is_refused():
    with pytest.raises(DSMuonConfigError, match=r"optimizer.params = \[1\]: is not a JSON object"):
        DSMuonConfig.parse([1])  # type: ignore[arg-type]


def test_the_section_may_be_called_otherwise():
    with pytest.raises(DSMuonConfigError, match=r"^param_groups\[2\]\.lr = -1: "):
        DSMuonConfig.parse({"lr": -1}, where="param_groups[2]")
