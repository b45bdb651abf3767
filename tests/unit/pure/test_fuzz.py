"""Whatever stands in a config, and whatever a command is given, is answered in words: no traceback."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_muon.cli import main
from ds_muon.config import DSMuonConfig
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
