"""Ranks on this machine: where they run, what is seen of their progress, and what is told when they fail."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import BinaryIO

import pytest
from torch.distributed import TCPStore

from ds_muon import ranks
from ds_muon.ranks import (
    END_OF_FAILURE,
    FAILED,
    PROGRESS,
    RanksFailed,
    describe_failure,
    held_port,
    placement,
    run_ranks,
)
from tests.unit.support.processes import marked, processes_with, within


def test_ranks_share_the_cores_of_a_cpu() -> None:
    environment, devices = placement({"A": "b"}, 2, gpus=1)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert environment == {"A": "b", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    assert devices == ["--num_accelerators", "2"]
    environment, _ = placement({"OMP_NUM_THREADS": "7", "DS_ACCELERATOR": "cpu"}, 2, gpus=8)
    assert environment == {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "7"}


def test_ranks_take_gpus_where_there_are_enough_and_of_those_the_visible_ones() -> None:
    assert placement({}, 2, gpus=2) == ({"DS_ACCELERATOR": "cuda"}, ["--num_accelerators", "2"])
    some = placement({"CUDA_VISIBLE_DEVICES": "5,3,6"}, 2, gpus=3)
    assert some == ({"DS_ACCELERATOR": "cuda"}, ["--include", "localhost:5,3"])
    named = {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2", "DS_ACCELERATOR": "cuda"}
    assert placement(named, 2, gpus=2) == (named, ["--num_accelerators", "2"])


def test_ranks_that_have_no_gpu_each_are_not_started() -> None:
    for environment in ({"DS_ACCELERATOR": "cuda"}, {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "3"}):
        with pytest.raises(RanksFailed, match="2 ranks need as many GPUs, and torch sees 1"):
            placement(environment, 2, gpus=1)


@pytest.mark.parametrize(
    ("given", "read"), [("9.0a", "9.0"), ("8.0;9.0a", "8.0;9.0"), ("10.0f 9.0", "10.0 9.0"), ("9.0+PTX", "9.0+PTX")]
)
def test_architectures_that_deepspeed_cannot_read_lose_their_letter(given: str, read: str) -> None:
    environment, _ = placement({"TORCH_CUDA_ARCH_LIST": given}, 2, gpus=2)
    assert environment["TORCH_CUDA_ARCH_LIST"] == read


def test_a_failure_is_told_by_the_rank_that_failed_first() -> None:
    trace = "\n".join(["Traceback (most recent call last):", *(f"  line {i}" for i in range(100))])
    log = f"[2026-01-01] [INFO] hello\n{FAILED} 1: ValueError: first\n{trace}\n{END_OF_FAILURE}\n{FAILED} 0: second\n"
    lines = describe_failure(log).splitlines()
    assert lines[:3] == [f"{FAILED} 1: ValueError: first", "Traceback (most recent call last):", "  ..."]
    assert lines[-1] == "  line 99" and len(lines) <= 28
    assert describe_failure(f"noise\n{FAILED} 0: in words\n{END_OF_FAILURE}\nnoise\n") == f"{FAILED} 0: in words"


def test_a_crash_without_a_word_is_told_by_the_last_lines() -> None:
    noise = "[2026-01-01 00:00:00] [INFO] [launch.py:1:main] x\n/a/b.py:3: FutureWarning: old\n  warnings.warn(\n\n"
    text = describe_failure(noise + "Segmentation fault\n" + noise)
    assert text.splitlines()[1:] == ["Segmentation fault"]


@pytest.mark.ranks
def test_a_rank_that_a_signal_ended_is_told_of(tmp_path: Path) -> None:
    """Also where the ranks that it left behind have something to say."""
    lines = ["import os, time", "if os.environ['RANK'] == '1':", "    os.kill(os.getpid(), 9)", "time.sleep(600)"]
    (tmp_path / "ended.py").write_text("\n".join(lines))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    with pytest.raises(RanksFailed, match="a rank was ended by SIGKILL: as the system does when memory runs out"):
        run_ranks("ended", [], 2, lambda path: None, environment)
    log = f"{FAILED} 0: RuntimeError: Connection closed by peer\n{END_OF_FAILURE}\n[...] exits with return code = -11\n"
    assert describe_failure(log).splitlines()[1:] == ["a rank was ended by SIGSEGV"]


@pytest.mark.parametrize("number", [signal.SIGRTMIN + 3, 99])
def test_a_signal_without_a_name_is_told_by_its_number(number: int) -> None:
    assert describe_failure(f"[...] exits with return code = -{number}\n").endswith(f"ended by signal {number}")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_launched_ends_with_the_process_that_launched_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    """With its buffers in shared memory and its folder; also where SIGTERM alone would not end it."""
    lines = ["import os, signal, time", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "os.fork()", "time.sleep(600)"]
    monkeypatch.setattr(ranks, "_LAUNCHER", (sys.executable, "-c", "\n".join(lines)))
    monkeypatch.setattr(ranks, "_PATIENCE_SECONDS", 0.5)
    with ranks.held_port() as port:
        monkeypatch.setattr(ranks, "held_port", lambda: nullcontext(port))
    folder, mark = tmp_path / "run", str(tmp_path)
    folder.mkdir()
    buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_test_{port}_0")
    buffer.touch()
    child = os.fork()
    if child == 0:
        try:
            ranks._launch([], marked(os.environ, mark), folder / "ranks.log")
        finally:
            os._exit(1)
    try:
        assert within(60, lambda: len(processes_with(mark)) == 3)  # the leash, and what it holds
        os.kill(child, signum)
        os.waitpid(child, 0)
        assert within(60, lambda: processes_with(mark) == [])
        assert not buffer.exists() and folder.exists() == (signum == signal.SIGTERM)
    finally:
        buffer.unlink(missing_ok=True)
        for process in processes_with(mark):
            os.kill(process, signal.SIGKILL)


def test_a_port_is_for_the_ranks_alone() -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(held_port()) for _ in range(9)]
        assert len(set(held)) == 9
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", held[0]))
        store = TCPStore("127.0.0.1", held[0], is_master=True, wait_for_workers=False)
        store.set("word", "heard")
        assert TCPStore("127.0.0.1", held[0]).get("word") == b"heard"


def test_what_was_launched_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LAUNCHER", (sys.executable, "-c", "print('done')"))
    ranks._launch([], dict(os.environ), tmp_path / "ranks.log")
    assert (tmp_path / "ranks.log").read_text() == "done\n"


def test_progress_is_shown_once_and_only_in_whole_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    with log.open("wb", buffering=0) as written, log.open("rb") as read:
        for text, shown in (
            (f"noise\n{PROGRESS}one\n{PROGRESS}", "one ...\n"),
            ("t", ""),
            ("wo\nnoise\n", "two ...\n"),
            ("", ""),
            (f"not at the start {PROGRESS}three\n", ""),
            (f"{PROGRESS}\udcff\x1b[2J\n", "\ufffd\\x1b[2J ...\n"),
        ):
            written.write(text.encode(errors="surrogateescape"))
            ranks._show_progress(read)
            assert capsys.readouterr().err == shown


def test_progress_is_shown_while_the_ranks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was launched goes on only when it has been seen."""
    seen = tmp_path / "seen"
    lines = [
        "import pathlib, time",
        f"print({PROGRESS + 'rank 0'!r}, flush=True)",
        "end = time.monotonic() + 120",
        f"while not pathlib.Path({str(seen)!r}).exists() and time.monotonic() < end: time.sleep(0.05)",
        "print(time.monotonic() < end)",
    ]
    show = ranks._show_progress

    def show_and_tell(log: BinaryIO) -> None:
        show(log)
        if "rank 0 ...\n" in capsys.readouterr().err:
            seen.touch()

    monkeypatch.setattr(ranks, "_show_progress", show_and_tell)
    monkeypatch.setattr(ranks, "_LAUNCHER", (sys.executable, "-c", "\n".join(lines)))
    ranks._launch([], dict(os.environ), tmp_path / "ranks.log")
    assert (tmp_path / "ranks.log").read_text().endswith("True\n")
