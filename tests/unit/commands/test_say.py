"""What is said reaches the user where it can, and raises nowhere."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from ds_muon import config_command
from ds_muon import say as say_module
from ds_muon.say import log, say, tell


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
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data := io.BytesIO()))
    say("of bytes")
    assert data.getvalue() == b"[ds_muon] of bytes\n"
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


def test_lines_of_a_command_move_no_cursor(capfd: pytest.CaptureFixture[str]) -> None:
    tell("a\n  b\x1b[2J\r\u202ec \u00fc")
    assert capfd.readouterr().out == "a\n  b\\x1b[2J\\r\\u202ec \u00fc\n"


# ---- logs -----------------------------------------------------------------------------------------------------------


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no space left")


def test_a_log_that_takes_nothing_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("DeepSpeed")
    handler = Raising()
    logger.addHandler(handler)
    try:
        log("Muon")
    finally:
        logger.removeHandler(handler)
    with open("/dev/null", "w") as closed:
        closed.close()
        monkeypatch.setattr(sys, "stderr", closed)  # where a handler says that it has failed
        logger.addHandler(handler := logging.StreamHandler(closed))
        try:
            log("Muon")
        finally:
            logger.removeHandler(handler)


def test_a_log_has_one_line_of_letters_that_stdout_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open("/dev/null", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        log("gr\u00f6\u00dfe 100 %s\n[ds_muon] b", logger="ds_muon.test")
    (record,) = caplog.records
    assert record.getMessage() == "[ds_muon] gr\\xf6\\xdfe 100 %s\\n[ds_muon] b"
    assert record.levelno == logging.WARNING and record.filename == "test_say.py"


# ---- commands -------------------------------------------------------------------------------------------------------


def test_lines_of_a_command_are_written_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell("a\nb") and tell("c", to=sys.stderr)
    assert capsys.readouterr() == ("a\nb\n", "c\n")


def test_a_command_learns_that_nobody_takes_its_lines(closed_pipe: TextIO) -> None:
    with open("/dev/full", "w") as full:  # closing it raises if a line has stayed in its buffer
        assert not tell("Muon", to=full)
    assert not tell("Muon", to=closed_pipe)


def test_a_long_text_goes_through_a_pipe_whole() -> None:
    reading, writing = os.pipe()
    text = "\u00fc" * 200_000
    with os.fdopen(writing, "w", encoding="utf-8") as stream, os.fdopen(reading, encoding="utf-8") as source:
        read: list[str] = []
        thread = threading.Thread(target=lambda: read.append(source.readline()))
        thread.start()
        assert tell(text, to=stream)
        thread.join(10)
    assert read == [f"{text}\n"]


def test_nothing_is_said_in_another_way() -> None:
    """A print or a log of its own may raise on one rank of many, and leave the others waiting."""
    ways = (
        r"(?<![\w.])print\(",
        r"(?i:logger)\.(info|warning|error|exception|log)\(",
        r"\bwarnings\.warn\(",
        "log_dist",
    )
    other = re.compile("|".join(ways))
    package = Path(say_module.__file__).parent
    assert [path.name for path in package.rglob("*.py") if other.search(path.read_text())] == []


def test_a_config_that_goes_to_a_file_has_nothing_of_deepspeeds_log_in_it() -> None:
    # With no GPU in sight DeepSpeed says that it takes the CPU, and it says so on stdout.
    environment = {key: of for key, of in os.environ.items() if key != "DS_ACCELERATOR"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "default", "-m", "ds_muon.cli", "config", "zero2_bf16"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    assert run.stdout == (config_command.folder() / "zero2_bf16.json").read_text()
    assert "Setting accelerator to CPU" in run.stderr
