"""Whatever stands in a config, and whatever a command is given, is answered in words: no traceback."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_muon.cli import main
from ds_muon.config import DSMuonConfig
from ds_muon.doctor import command
from ds_muon.doctor.examine import examine

FEW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(["auto", "DSMuon"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*DSMuonConfig.model_fields]) | st.text(max_size=8)
SECTIONS = st.sampled_from(["optimizer", "zero_optimization", "bf16", "fp16", "scheduler", "gradient_clipping", "x"])
CONFIGS = st.dictionaries(
    SECTIONS, JSON | st.fixed_dictionaries({"type": st.just("DSMuon"), "params": st.dictionaries(KEYS, JSON)})
)
WORDS = st.sampled_from(
    [
        *(
            "--config",
            "--model",
            "--world-size",
            "--steps",
            "--json",
            "--seed",
            "--stage",
            "--batch",
            "--fix",
            "--list",
        ),
        *("", "-1", "0", "2", "1e9", "nan", "a:b", "/nowhere/x.json", ".", "zero2_bf16", "--help"),
    ]
)


@FEW
@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_whatever_a_section_holds_is_a_config_or_problems_in_words(params: dict[str, Any]) -> None:
    _, problems = DSMuonConfig.read(params)
    assert all(line.isprintable() for line in problems)


def answer(arguments: list[str]) -> None:
    """Run a command, which must end in order."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            assert main(arguments) in (0, 1, 2)
        except SystemExit as end:
            assert end.code in (0, 2)
    assert "Traceback" not in said.getvalue(), (arguments, said.getvalue())


@FEW
@given(CONFIGS)
def test_doctor_has_findings_on_any_config(config: dict[str, Any]) -> None:
    assert all(finding.text for finding in examine(json.loads(json.dumps(config))))


@FEW
@given(
    command=st.sampled_from(["plan", "config", "replay", "to-universal", "migrate", "report"]),
    words=st.lists(WORDS, max_size=4),
)
def test_commands_answer_to_any_arguments(
    command: str, words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.getbasetemp())
        answer([command, *words])


here = cache(command.look)  # takes a second

# What others have made: the keys that are looked for, and anything else.
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(["auto", "1.5"])
)
NAMES = st.text(max_size=4) | st.sampled_from(
    [
        *("log_history", "loss", "step", "DSMuon/u_norm/a", "verdict", "records", "plan", "versions", "model_type"),
        *("input", "output", "settings", "ns_steps", "name", "config", "optimizer", "params", "zero_optimization"),
        *("module", "param_shapes", "optimizer_state_dict", "base_optimizer_state", "param_groups", "state", "layout"),
    ]
)
CONTENTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)
LOGS = st.lists(
    st.dictionaries(st.sampled_from(["loss", "step", "learning_rate", "DSMuon/u_norm/a"]), LEAVES), max_size=4
)
LINES = st.lists(st.text(alphabet="0123456789,.-naif \n", max_size=12), max_size=4)


def folder_with(root: Path, content: Any, log: Any, lines: list[str]) -> Path:
    """The same content in every file that a command reads."""
    tag = root / "run" / "step1"
    tag.mkdir(parents=True, exist_ok=True)
    (root / "x.json").write_text(json.dumps(content))
    (root / "run" / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    (root / "run" / "DSMuon_grad_norm_muon.csv").write_text("\n".join(["step,DSMuon/grad_norm/muon", *lines]))
    (root / "run" / "latest").write_text("step1")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save(content, tag / name)
    return root


@FEW
@given(content=CONTENTS, log=LOGS, lines=LINES)
def test_commands_answer_to_files_of_any_content(
    content: Any, log: Any, lines: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = folder_with(tmp_path_factory.getbasetemp() / "fuzzed", content, log, lines)
    out, run, file = (str(root / name) for name in ("out", "run", "x.json"))
    for words in (["report", file], ["report", run], ["report", run, file]):
        answer([*words, "--out", f"{out}.html"])
    answer(["replay", f"{run}/step1/mp_rank_00_model_states.pt"])
    answer(["to-universal", run, out])
    answer(["migrate", run, out])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "look", here)
        answer(["doctor", "--config", file, "--fix", f"{out}.json", "--overwrite"])
