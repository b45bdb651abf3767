"""``ds-muon doctor``: what it says of a machine and of a config, and the config that it writes."""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_muon import cli
from ds_muon.config import AUTO_IS_A_CHOICE
from ds_muon.doctor import command, examine, machine, mend
from ds_muon.doctor.json_edit import edited
from ds_muon.doctor.trainer import fill
from ds_muon.ds_config import ABSENT, Place, changed
from ds_muon.orthogonalize import NewtonSchulz
from tests.unit.support.models import ds_config

ROOT = Path(__file__).parents[3]
STOCK = sorted((ROOT / "tests" / "unit" / "support" / "stock_configs").glob("*.json"))
here = cache(machine.look)


def said(config: dict[str, Any], kind: str) -> list[str]:
    return [finding.text for finding in examine.examine(config) if finding.kind == kind]


def test_offload_of_a_part_is_refused_and_keys_of_other_devices_are_not() -> None:
    keys = {"buffer_count": 3, "pipeline_read": True, "nvme_path": "/nowhere", "fast_init": True, "ratio": 1.0}
    for ratio, refused in ((1.0, 0), (0.5, 1)):
        config = ds_config(zero={"offload_optimizer": {"device": "cpu", **keys, "ratio": ratio}})
        lines = said(config, "refused")
        assert len(lines) == refused and all("Partial offloading" in line for line in lines)


def changes(config: dict[str, Any]) -> dict[str, Any]:
    """What is changed, by key; None for what is removed."""
    before = copy.deepcopy(config)
    made, after = mend.mend(config)
    assert config == before and not mend.mend(after)[0]
    return {".".join(change.place): None if change.value is ABSENT else change.value for change in made}


# ---- the machine ----------------------------------------------------------------------------------------------------


def test_what_auto_takes_here_and_why() -> None:
    found = here()
    expected = NewtonSchulz.resolve(torch.device("cpu"))
    assert (found.backend, found.dtype) == (expected.backend, "float32") and found.ok
    assert "Triton needs a GPU, and this is cpu" in found.why and "fp32" in found.why
    assert len(found.checks) == 3 and all(0 < check.error <= check.allowed == 1e-5 for check in found.checks)
    assert {package.name for package in found.packages} >= {"ds_muon", "deepspeed", "torch", "triton", "accelerate"}


def test_a_newton_schulz_that_is_wrong_is_said_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "_SHAPES", ((64, 64),))
    right = machine.orthogonalize
    monkeypatch.setattr(machine, "orthogonalize", lambda *given: [1.001 * each for each in right(*given)])
    assert cli.main(["doctor"]) == 1
    assert re.search(r"1\.0e-03 from fp64, 1e-05 allowed: WRONG", capsys.readouterr().out)

    def fails(*_: Any) -> None:
        raise RuntimeError("no kernel\nimage")

    monkeypatch.setattr(machine, "orthogonalize", fails)
    assert cli.main(["doctor"]) == 1
    assert "Newton-Schulz does not run here: no kernel\\nimage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "version", "remark", "ok"),
    [
        ("torch", "2.5.1+cu121", "is too old: 2.6 or newer", False),
        ("torch", "2.10.0", "2.6 or newer", True),
        ("triton", "3.2.0", "is too old to be used: 3.4 or newer", True),
        ("triton", None, "not needed", True),
        ("deepspeed", "0.19.8", "tested", True),
        ("deepspeed", "0.19.10", "has the parts needed; tested is 0.19.8", True),
    ],
)
def test_versions_that_are_supported(name: str, version: str | None, remark: str, ok: bool) -> None:
    assert machine._package(name, version) == machine.Package(name, version, remark, ok)


def test_the_oldest_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, oldest in machine.OLDEST.items():
        assert set(re.findall(rf'"{name}>=([\d.]+)', text)) == {".".join(map(str, oldest))}


# ---- "auto" ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*STOCK, ROOT / "ds_configs" / "hf_auto.json"], ids=lambda path: path.stem)
def test_auto_is_filled_in_as_trainer_does(path: Path) -> None:
    hf = pytest.importorskip("transformers.integrations.deepspeed")
    arguments: Any = SimpleNamespace(
        **{"learning_rate": 5e-5, "weight_decay": 0.0, "max_grad_norm": 1.0, "get_warmup_steps": lambda total: 0},
        **{"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "save_on_each_node": False},
        **{"world_size": 1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        **dict.fromkeys(("fp16", "fp16_full_eval", "bf16", "bf16_full_eval"), False),
    )
    model: Any = SimpleNamespace(config=SimpleNamespace(hidden_size=1024))
    for config in (json.loads(path.read_text()), mend.mend(json.loads(path.read_text()))[1]):
        filled = hf.HfTrainerDeepSpeedConfig(copy.deepcopy(config))
        filled.trainer_config_process(arguments)
        filled.trainer_config_finalize(arguments, model, 1000)
        hf.unset_hf_deepspeed_config()
        ours = fill(config, AUTO_IS_A_CHOICE)
        assert ours.config == filled.config and not ours.blanks


def test_what_is_left_blank_is_said_and_removed() -> None:
    config = ds_config({"ns_dtype": "auto", "momentum": "auto"}, train_micro_batch_size_per_gpu=1)
    assert [line.partition(":")[0] for line in said(config, "refused")] == ['optimizer.params.momentum = "auto"']
    # Accelerate takes any "auto" that it does not know for a blank.
    config["bf16"] = {"enabled": "auto"}
    first, second = said(config, "refused")
    assert first.startswith('optimizer.params.ns_dtype = "auto"') and "Accelerate" in first
    assert second.startswith('optimizer.params.momentum = "auto"')
    assert changes(config) == {"optimizer.params.ns_dtype": None, "optimizer.params.momentum": None}
    assert said(ds_config(zero={"overlap_comm": "auto"}), "refused")


def test_a_rate_that_trainer_gives_is_named() -> None:
    config = ds_config()
    config["optimizer"]["params"] = {"lr": "auto"}
    (warning,) = said(config, "warning")
    assert "Muon's learning rate is 5e-05" in warning and '"auto" takes yours' in warning
    assert any("optimizer.params.lr from learning_rate" in note for note in said(config, "note"))
    assert changes(config) == {"optimizer.params.adjust_lr_fn": "match_rms_adamw"}


def test_the_blanks_of_the_file_are_listed_by_their_whole_keys_and_no_others() -> None:
    auto = {"enabled": "auto"}
    config = ds_config(optimizer=None, zero={"reduce_bucket_size": "auto"}, fp16=auto, bf16=auto)
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    _, _, listed = said(config, "note")[0].partition("fill in: ")
    assert set(listed.split(", ")) == {
        "zero_optimization.reduce_bucket_size", "fp16.enabled from fp16", "bf16.enabled from bf16",
        "train_micro_batch_size_per_gpu from per_device_train_batch_size", "gradient_accumulation_steps",
    }  # fmt: skip


def test_a_rate_in_the_file_is_the_one_that_the_schedule_gets() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    assert not said(ds_config({"lr": 0.02}, scheduler=scheduler), "warning")
    low = ds_config({"lr": 1e-4, "adam_lr": 1e-4}, scheduler=scheduler)
    (warning,) = said(low, "warning")
    assert "Muon's learning rate is 0.0001" in warning and "Trainer" not in warning


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "made"),
    [
        (ds_config(zero={"reduce_scatter": True}), {"zero_optimization.reduce_scatter": False}),
        (ds_config(stage=0), {"zero_optimization.stage": 2}),
        (ds_config(torch_autocast={"enabled": True, "dtype": "float16"}), {"torch_autocast.dtype": "bfloat16"}),
        (ds_config(zero={"elastic_checkpoint": True}), {"zero_optimization.elastic_checkpoint": False}),
        (
            ds_config(zero={"compute_grad_norm": False, "offload_optimizer": {"device": "cpu", "super_offload": True}}),
            {
                "zero_optimization.compute_grad_norm": None,
                "zero_optimization.offload_optimizer.super_offload": None,
            },
        ),
        (ds_config(tensor_parallel={"autotp_size": 2}), {"tensor_parallel.autotp_size": 1}),
        (ds_config(compile={"deepcompile": True}), {"compile.deepcompile": False}),
        (
            ds_config(fp16={"enabled": True, "fp16_master_weights_and_grads": True}),
            {"fp16.fp16_master_weights_and_grads": False},
        ),
        (
            ds_config(bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
            {"bf16.bf16_master_weights_and_grads": False},
        ),
        (ds_config({"torch_adam": True}), {"optimizer.params.torch_adam": None}),
        (
            ds_config({"max_grad_norm": 0.5}, gradient_clipping=None),
            {"optimizer.params.max_grad_norm": None, "gradient_clipping": 0.5},
        ),
    ],
    ids=lambda each: next(iter(each)) if len(each) < 3 else "",
)
def test_what_is_refused_is_mended_and_nothing_else_is(config: dict[str, Any], made: dict[str, Any]) -> None:
    assert said(config, "refused") and not said(mend.mend(config)[1], "refused")
    assert changes(config) == made


def test_every_remedy_is_for_a_key_that_is_refused_by_its_name() -> None:
    from ds_muon import refusals

    source = Path(refusals.__file__).read_text()
    assert all(re.search(rf'"?{re.escape(key)}\b', source) for key in mend.REMEDIES)


def test_offload_goes_only_as_far_as_it_is_refused() -> None:
    config = ds_config(zero={"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}})
    assert changes(config) == {"zero_optimization.offload_optimizer.device": "cpu"}
    config["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    assert changes(config) == {}


def test_what_only_its_writer_can_know_is_left() -> None:
    config = ds_config({"momentumm": 0.9}, sequence_parallel_size=2, data_parallel_size=1)
    left = said(mend.mend(config)[1], "refused")
    assert not changes(config) and len(left) == 2
    assert left[0].startswith("sequence_parallel_size = 2") and 'did you mean "momentum"' in left[1]


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"stage": "two"}},
        {"zero_optimization": 2},
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"optimizer": {"type": 3}},
        {"optimizer": {"type": "DSMuon", "params": [1]}, "zero_optimization": {"stage": 2, "reduce_scatter": False}},
        {"optimizer": "DSMuon"},
        {"optimizer": {"type": "DSMuon"}, "scheduler": {"type": "Nothing"}},
        {"optimizer": {"type": "DSMuon"}, "scheduler": {"type": "WarmupLR"}},
        {"optimizer": {"type": "DSMuon"}, "scheduler": {"type": 7, "params": {}}},
        {"optimizer": {"type": "DSMuon"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 7}}},
        {"optimizer": {"type": "DSMuon", "params": {"lr": 1e30, "weight_decay": 1e30}}},
    ],
)
def test_no_config_is_too_wrong_to_be_looked_at(config: dict[str, Any]) -> None:
    lines = said(config, "refused")
    assert lines and all(line and "\n" not in line for line in lines)
    changes(config)


def test_a_schedule_is_refused_as_an_engine_does_and_its_highest_rate_counts() -> None:
    config = ds_config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}})
    config["optimizer"]["params"] = {"muon_lr": 0.02, "adam_lr": 3e-4}
    (line,) = said(config, "refused")
    assert line.startswith("scheduler WarmupLR: warmup_max_lr = 0.5 is one number for two rates")
    config["optimizer"]["params"]["lr"] = 0.02
    assert not said(config, "refused")
    (warning,) = said(config, "warning")  # 0.5 for Muon, 0.0075 for AdamW
    assert warning.startswith("AdamW's learning rate is 0.0075")


@pytest.mark.parametrize(
    ("monitor", "module", "package"),
    [
        ("tensorboard", "tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("comet", "comet_ml", "'comet_ml>=3.41.0'"),
    ],
)
def test_a_monitor_that_deepspeed_cannot_import_is_said_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], monitor: str, module: str, package: str
) -> None:
    config = ds_config(**{monitor: {"enabled": True}})
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not there
    (line,) = said(config, "refused")
    assert line.startswith(f"{monitor}.enabled = true: ") and module in line
    assert line.endswith(f"; pip install {package}") and not capsys.readouterr().out
    assert not changes(config) and not said(ds_config(**{monitor: {"enabled": False}}), "refused")
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(__version__="3.41.0"))
    assert not said(config, "refused")


def test_the_version_that_a_monitor_needs_is_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(__version__="3.40.9"))
    (line,) = said(ds_config(comet={"enabled": True}), "refused")
    assert "at least version 3.41.0" in line and line.endswith("; pip install 'comet_ml>=3.41.0'")


# ---- other optimizers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "made"),
    [
        ({"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.99]}}, {"adjust_lr_fn": "match_rms_adamw"}),
        (
            {"type": "Adam", "params": {"adam_w_mode": True}},
            {"adjust_lr_fn": "match_rms_adamw", "lr": 1e-3, "adam_w_mode": None},
        ),
        ({"type": "AdamW"}, {"adjust_lr_fn": "match_rms_adamw", "lr": 1e-3}),
        ({"type": "SGD", "params": {"lr": 0.1, "dampening": 0}},
         {"adjust_lr_fn": "match_rms_adamw", "lr": 3e-4, "dampening": None}),
        ({"type": "Muon", "params": {"lr": 0.02, "torch_adam": True}}, {"adam_lr": 3e-4, "torch_adam": None}),
        ({"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}}, {}),
        ({"type": "Muon", "params": {}}, {"adam_lr": 3e-4}),
        ({"type": "Muon", "params": {"lr": "auto"}}, {"adjust_lr_fn": "match_rms_adamw"}),
    ],
)  # fmt: skip
def test_another_optimizer_becomes_dsmuon_and_keeps_its_rate(optimizer: dict[str, Any], made: dict[str, Any]) -> None:
    config = ds_config(optimizer=optimizer)
    assert said(config, "refused")[0].startswith(f'optimizer.type = "{optimizer["type"]}": is not DSMuon')
    expected = {"optimizer.type": "DSMuon", **{f"optimizer.params.{key}": value for key, value in made.items()}}
    assert changes(config) == expected
    after = mend.mend(config)[1]
    assert not said(after, "refused") and not said(after, "warning")


def test_a_config_without_an_optimizer_gets_one() -> None:
    config = ds_config(optimizer=None)
    assert said(config, "refused")[0].startswith("optimizer is absent")
    assert changes(config)["optimizer"]["params"] == {"lr": 0.02, "adam_lr": 3e-4, "weight_decay": 0.1}
    config["train_micro_batch_size_per_gpu"] = "auto"
    assert changes(config)["optimizer"]["params"]["lr"] == "auto"


def test_rates_that_a_config_states_are_not_touched() -> None:
    stated = {"lr": 1e-4, "muon_lr": 1e-4, "adam_lr": 0.1}
    assert len(said(ds_config(stated), "warning")) == 2 and changes(ds_config(stated)) == {}
    config = ds_config()
    for params, made in (({"lr": 0.02}, {"adam_lr": 3e-4}), ({"lr": 1e-4}, {"adjust_lr_fn": "match_rms_adamw"})):
        config["optimizer"]["params"] = params
        assert said(config, "warning")
        assert changes(config) == {f"optimizer.params.{key}": value for key, value in made.items()}


# ---- the text -------------------------------------------------------------------------------------------------------

TEXTS = {
    "lines": '{\n    "a": 1,\n\n    "b": {\n        "c": 5e8,\n        "d": [1,\n 2]\n    }\n}\n',
    "tabs": '{\n\t"a": 1,\n\t"b": {"c": 5e8, "d": [1, 2]}\n}',
    "one-line": '{"a": 1, "b": {"c": 5e8, "d": [1, 2]}}',
    "odd": '\n{ "a" :1\n  ,"b"\n:{"c":5e8 , "d" :[1,2]} }',
}
EDITS: list[tuple[Place, Any]] = [
    (("a",), 2),
    (("a",), ABSENT),
    (("b",), ABSENT),
    (("b", "c"), False),
    (("b", "c"), ABSENT),
    (("b", "d"), ABSENT),
    (("b", "e"), {"f": 1, "g": {"h": "é\n"}}),
    (("x", "y", "z"), 1),
    (("a", "y"), 1),
    (("x", "y"), ABSENT),
    (("b", "x"), ABSENT),
    (("b",), {"c": {}}),
]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_an_edited_text_says_what_the_changed_config_does(text: str) -> None:
    for first in EDITS:
        for second in EDITS:
            config = json.loads(text)
            assert json.loads(edited(edited(text, *first), *second)) == changed(
                changed(config, dict([first])), dict([second])
            )


def test_a_text_keeps_its_form() -> None:
    text = TEXTS["lines"]
    assert edited(text, ("b", "c"), 6) == text.replace("5e8", "6")
    assert edited(text, ("b", "e"), {"f": 1}) == text.replace(
        " 2]\n", ' 2],\n        "e": {\n            "f": 1\n        }\n'
    )
    assert edited(text, ("a",), ABSENT) == text.replace('"a": 1,\n\n    ', "")
    assert edited(TEXTS["tabs"], ("e",), {"f": {"g": 1}}) == TEXTS["tabs"].replace(
        "}\n}", '},\n\t"e": {\n\t\t"f": {"g": 1}\n\t}\n}'
    )
    assert edited(TEXTS["one-line"], ("b", "e"), {"f": 1}) == TEXTS["one-line"].replace("2]", '2], "e": {"f": 1}')


@pytest.mark.parametrize("path", STOCK, ids=lambda path: path.stem)
def test_a_mended_file_differs_in_what_has_changed_only(path: Path) -> None:
    text = path.read_text()
    made, after = mend.mend(json.loads(text))
    mended = mend.mended_text(text, made)
    assert json.loads(mended) == after
    kept = [line.rstrip(",") for line in mended.splitlines()]
    lost = [line for line in text.splitlines() if line.rstrip(",") not in kept]
    names = {part for change in made for part in change.place} | {"device", "pin_memory", "AdamW"}
    assert all(any(f'"{name}"' in line for name in names) for line in lost)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def as_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "look", here)


@pytest.mark.usefixtures("as_here")
def test_the_command_says_all_and_writes_the_config_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good, found = tmp_path / "bad.json", tmp_path / "good.json", tmp_path / "found.json"
    bad.write_text(json.dumps(ds_config({"torch_adam": True}, zero={"reduce_scatter": True})))
    assert cli.main(["doctor", "--config", str(bad)]) == 1
    out = capsys.readouterr().out
    assert f"{bad}: 2 refused, 0 warnings" in out and "what --fix OUT would change:" in out
    assert out.endswith("UNFIT: DSMuon refuses this config; --fix OUT writes the one that works\n")
    assert cli.main(["doctor", "--config", str(bad), "--fix", str(good), "--json", str(found)]) == 0
    out = capsys.readouterr().out
    assert "zero_optimization.reduce_scatter was true, is false: " in out
    assert "optimizer.params.torch_adam was true, is removed: " in out
    assert out.endswith("FIT: DSMuon can train here with this config\n")
    listed = json.loads(found.read_text())
    assert listed["ok"] and len(listed["findings"]) == 2 and listed["machine"]["backend"] == "torch"
    assert {change["key"]: change["after"] for change in listed["changes"]}["zero_optimization.reduce_scatter"] is False

    assert cli.main(["doctor", "--config", str(good)]) == 0
    assert "0 refused, 0 warnings" in capsys.readouterr().out
    before = good.read_text()
    assert cli.main(["doctor", "--config", str(bad), "--fix", str(good)]) == 2
    assert "is there already: give --overwrite" in capsys.readouterr().err and good.read_text() == before
    assert cli.main(["doctor", "--config", str(bad), "--fix", str(bad), "--overwrite"]) == 0
    assert json.loads(bad.read_text()) == json.loads(before)


@pytest.mark.usefixtures("as_here")
def test_what_is_left_fails_also_in_the_config_that_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(ds_config({"momentumm": 0.9}, zero={"reduce_scatter": True})))
    assert cli.main(["doctor", "--config", str(tmp_path / "bad.json"), "--fix", str(tmp_path / "out.json")]) == 1
    out = capsys.readouterr().out
    assert "with that: 1 refused" in out and out.endswith("UNFIT: what is refused is left to you\n")
    assert json.loads((tmp_path / "out.json").read_text())["zero_optimization"]["reduce_scatter"] is False


@pytest.mark.usefixtures("as_here")
@pytest.mark.parametrize(
    ("text", "words"), [(None, "No such file"), ("{", "is not valid JSON"), ("[1]", "must be a JSON object")]
)
def test_a_file_that_is_no_config_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    assert cli.main(["doctor", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err
    assert cli.main(["doctor", "--fix", str(tmp_path / "new.json")]) == 2
    assert "give a FILE" in capsys.readouterr().err


@pytest.mark.usefixtures("as_here")
def test_a_machine_that_is_not_fit_fails_with_any_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "look", lambda: replace(here(), problem="no driver"))
    (tmp_path / "c.json").write_text(json.dumps(ds_config()))
    assert cli.main(["doctor", "--config", str(tmp_path / "c.json")]) == 1
    assert capsys.readouterr().out.endswith("UNFIT: this machine is not, see above\n")
