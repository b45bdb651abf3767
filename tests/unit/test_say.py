"""A line for the user reaches them where it can, and raises nowhere."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from ds_muon.say import say


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def closed_pipe() -> Iterator[TextIO]:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        yield stream


def test_a_line_goes_to_stdout_behind_what_was_printed_before(capfd: pytest.CaptureFixture[str]) -> None:
    print("before", end=" ")
    say("Muon: 3 matrices")
    print("after")
    assert capfd.readouterr() == ("before [ds_muon] Muon: 3 matrices\nafter\n", "")


def test_rank_0_speaks_for_all_unless_every_rank_is_to(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    say("hidden")
    say("shown", every_rank=True)
    assert capfd.readouterr().out == "[ds_muon] shown\n"


def test_a_line_break_in_a_name_does_not_make_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    say("a\n[ds_muon] b\r\x1b\ud800 \u00fc")
    assert capfd.readouterr().out == "[ds_muon] a\\n[ds_muon] b\\r\\x1b\\ud800 \u00fc\n"


def test_a_stream_without_the_letter_gets_it_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        say("gr\u00f6\u00dfe")
    assert (tmp_path / "log").read_text() == "[ds_muon] gr\\xf6\\xdfe\n"


def test_a_replaced_stdout_gets_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stdout", notebook)
    say("one")
    assert notebook.getvalue() == "[ds_muon] one\n"
    copied: list[str] = []
    with (tmp_path / "log").open("w") as stream:
        stream.write = copied.append  # type: ignore[assignment,method-assign,arg-type]
        monkeypatch.setattr(sys, "stdout", stream)
        say("two")
    assert copied == ["[ds_muon] two\n"]


@pytest.mark.parametrize("kind", ["full", "closed pipe", "closed file", "none"])
def test_where_stdout_takes_nothing_stderr_does(
    kind: str, closed_pipe: TextIO, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full, open("/dev/null", "w") as closed:  # leaving raises where a line has stayed
        closed.close()
        stdout = {"full": full, "closed pipe": closed_pipe, "closed file": closed, "none": None}[kind]
        monkeypatch.setattr(sys, "stdout", stdout)
        say("Muon")
        assert capfd.readouterr().err == "[ds_muon] Muon\n"
        monkeypatch.setattr(sys, "stderr", stdout)
        say("nobody hears this")


def test_a_bad_rank_in_the_environment_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    say("hidden")
