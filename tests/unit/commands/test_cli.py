"""What ``ds-muon`` says of itself, and of a command that it cannot run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ds_muon
from ds_muon import cli

COMMANDS = [[name] for name in cli.COMMANDS] + [["bench", "step"], ["bench", "newton-schulz"]]


def test_alone_it_says_which_commands_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, error = capsys.readouterr()
    assert not out and all(f"\n    {name}" in error for name in cli.COMMANDS)


def test_help_of_the_package_names_all_that_is_public() -> None:
    assert ds_muon.__doc__ and all(re.search(rf"\b{name}\b", ds_muon.__doc__) for name in ds_muon.__all__)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_a_narrow_terminal(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    description = capsys.readouterr().out.partition("\n\n")[2].partition("\noptions:")[0]
    assert max(map(len, description.splitlines()), default=0) <= 80


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "missing"],
        ["plan", "--model", "json:missing"],
        ["plan"],
        ["doctor", "--config", "missing"],
        ["doctor", "--fix", "out.json"],
        ["report", "missing"],
        ["report", "empty"],
        ["replay", "missing"],
        ["migrate", "missing", "out"],
        ["migrate", "empty", "out"],
        ["to-universal", "empty", "out"],
        ["verify", "--config", "missing"],
        ["verify", "--config", "empty.json"],
    ],
    ids=" ".join,
)
def test_what_a_command_cannot_take_is_one_sentence_that_names_it(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.json").touch()
    assert cli.main(arguments) == 2
    out, error = capsys.readouterr()
    (line,) = error.splitlines()
    assert not out and line.startswith(f"ds-muon {arguments[0]}: ")
    wrong = [word for word in arguments[1:] if re.match(r"missing|empty|json:|--fix", word)]
    assert all(word in line for word in wrong) and line.count("json:") < 2
