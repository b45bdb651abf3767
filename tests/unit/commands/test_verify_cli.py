"""``ds-muon verify``: what it takes and prints, and whole runs on two ranks."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import pytest

import ds_muon
from ds_muon import cli, ranks
from ds_muon.ranks import FAILED
from ds_muon.verify import command as verify_command
from ds_muon.verify import outcome, rank, table
from ds_muon.verify.__main__ import missing_launcher
from ds_muon.verify.engine_view import CannotVerify
from ds_muon.verify.inject import FAULTS
from ds_muon.verify.rank import DEFAULT_CONFIG, Task, read_config
from ds_muon.verify.rank import run as run_task
from ds_muon.verify.record import VerifyResult
from tests.unit.support.processes import marked, processes_with, within
from tests.unit.support.ranks import run_ranks
from tests.unit.support.records import planted, record, result, wrong

ROOT = Path(__file__).parents[3]


# ---- options and configs ---------------------------------------------------------------------------------------------


def test_options_have_defaults_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    verify_command.add_options(parser)
    options = parser.parse_args([])
    assert (options.steps, options.world_size, options.seed, options.inject) == (3, None, 0, None)
    task = verify_command.check_options(parser.parse_args(["--inject", "all", "--steps", "2"]))
    assert (task.inject, task.steps, task.config) == ("all", 2, DEFAULT_CONFIG)
    for arguments in (["--steps", "0"], ["--world-size", "-1"], ["--inject", "gremlin"]):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(arguments)
        assert ended.value.code == 2
    capsys.readouterr()


def test_a_fault_that_takes_more_steps_to_show_says_so() -> None:
    for fault in (fault for fault in FAULTS.values() if fault.steps > 1):
        task = Task({"optimizer": {"type": "DSMuon"}}, fault.steps - 1, None, 0, fault.name)
        with pytest.raises(CannotVerify, match=f"{fault.name} takes {fault.steps} steps to show"):
            run_task(task)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"ds-muon {ds_muon.__version__}\n"


def test_what_cannot_work_is_said_before_ranks_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for arguments, message in (
        (["--config", str(tmp_path / "none.json")], "No such file"),
        (["--config", str(tmp_path / "bad.json")], "not valid JSON"),
        (["--config", str(tmp_path / "list.json")], "must be a JSON object"),
        (["--model", "train"], "write it as module:factory"),
        (["--json", str(tmp_path)], f"--json: {tmp_path} cannot be written: Is a directory"),
        (["--json", str(tmp_path / ("n" * 256))], "cannot be written: File name too long"),
        (["--json", str(tmp_path / "bad.json" / "r.json")], "cannot be written: Not a directory"),
        (["--report", str(tmp_path / "bad.json")], "updates.png cannot be written: Not a directory"),
        (["--report", "/proc/new", "--inject", "all"], "cannot be written: "),
    ):
        assert cli.main(["verify", *arguments]) == 2
        said = capsys.readouterr().err
        assert message in said and "starting" not in said


@pytest.fixture
def taking_nothing(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    """A stdout that is full, or that nobody reads."""
    if request.param == "full":
        with open("/dev/full", "w") as stream:
            yield stream
        return
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        yield stream


@pytest.mark.parametrize("taking_nothing", ["full", "closed pipe"], indirect=True)
@pytest.mark.parametrize(("error", "code", "word"), [(1e-6, 0, "RIGHT"), (0.5, 1, "WRONG")])
def test_the_verdict_and_the_exit_code_depend_on_nothing_that_can_be_written(
    taking_nothing: TextIO,
    error: float,
    code: int,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The ranks are done; the disk is full by now, and so may stdout be."""
    parser = argparse.ArgumentParser()
    verify_command.add_options(parser)
    (tmp_path / "report").touch()
    options = parser.parse_args(["--json", str(tmp_path), "--report", str(tmp_path / "report")])
    found = [result(record(error=error, diagnosis="clipped update"))]
    assert verify_command.present(found, options) == code
    out, said = capsys.readouterr()
    assert out.splitlines()[-1].startswith(word)
    assert f"numbers: {tmp_path} could not be written" in said and "report: " in said
    monkeypatch.setattr(sys, "stdout", taking_nothing)
    assert verify_command.present(found, options) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(word)


def test_a_name_cannot_fake_a_line() -> None:
    name = "w\nRIGHT: 1 step\x1b[2J"
    shown = r"w\nRIGHT: 1 step\x1b[2J"
    planted_fault = planted("clipped-update", record(name))
    for text in (
        table.parameter_table(result(record(name))),
        table.verdict(result(record(name))),
        table.verdict(result(wrong(name))),
        table.fault_verdict(planted_fault),
        table.fault_verdict(planted("clipped-update", wrong(name))),
        table.fault_table([planted_fault]),
    ):
        assert shown in text and not any(line.startswith("RIGHT: 1 step\x1b") for line in text.splitlines())


def test_blanks_for_a_trainer_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    blank = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
    path.write_text(json.dumps({**blank, "optimizer": {"params": {"ns_dtype": "auto"}}}))
    with pytest.raises(
        CannotVerify, match=r'train_batch_size, bf16.enabled are "auto", a blank that a trainer fills in'
    ):
        read_config(path)
    path.write_text(json.dumps({"optimizer": {"params": {"ns_dtype": "auto"}}}))
    assert read_config(path)["optimizer"] == {"params": {"ns_dtype": "auto"}}


def test_everything_that_is_wrong_with_a_config_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    params = {"lr": "auto", "momentum": 2, "ns_dtype": "auto", "a\nb\ud800": 1}
    wrong = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "dsmuon", "params": params},
        "zero_optimization": {"stage": 2, "overlap_comm": "auto"},
        "tensor_parallel": {"autotp_size": 2},
    }
    path.write_text(json.dumps(wrong))
    with pytest.raises(CannotVerify) as refused:
        read_config(path)
    first, *lines = str(refused.value).splitlines()
    beginnings = (
        'train_batch_size, bf16.enabled, zero_optimization.overlap_comm are "auto"',
        "zero_optimization.reduce_scatter = true (DeepSpeed's default when the key is absent)",
        "tensor_parallel.autotp_size = 2",
        'optimizer.params.lr = "auto"',
        "optimizer.params.momentum = 2",
        "optimizer.params.a\\nb\\ud800 = 1",
    )
    assert first == f"--config {path}:" and len(lines) == len(beginnings)
    assert all(line.startswith(beginning) for line, beginning in zip(lines, beginnings, strict=True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"a": ' * 900 + "1" + "}" * 900, "nested too deep"),
        (f'{{"train_batch_size": {"9" * 5000}}}', "not valid JSON"),
        ("\xff", "not valid JSON"),
        ('{"\\ud800": "auto"}', '\\ud800 is "auto"'),
        ('{"optimizer": {"type": "DSMuon", "params": [1]}}', "optimizer.params = [1]: is not a JSON object"),
        ('{"optimizer": {"type": "Muon", "params": {"lr": "auto"}}}', 'optimizer.params.lr is "auto"'),
    ],
)
def test_a_config_file_that_nothing_can_read_is_refused_in_words(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config\udcff.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CannotVerify) as refused:
        read_config(path)
    assert said in str(refused.value) and str(refused.value).encode()


@pytest.mark.parametrize("config", [{}, {"optimizer": None}, {"optimizer": {"params": {}}}, {"optimizer": {"type": 1}}])
def test_a_config_without_an_optimizer_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["verify", "--config", str(tmp_path / "config.json")]) == 2
    said = capsys.readouterr().err
    assert "has no optimizer.type" in said and "starting" not in said
    with pytest.raises(CannotVerify, match=r"has no optimizer\.type"):
        rank.run(Task(config, 1, None, 0, None))


def test_the_default_config_cannot_be_changed_by_its_user() -> None:
    read_config(None)["optimizer"]["type"] = "other"
    assert read_config(None)["optimizer"]["type"] == "DSMuon"


def test_a_process_that_is_no_rank_says_what_to_use() -> None:
    assert "ds-muon verify" in (missing_launcher({}) or "")
    assert missing_launcher({"RANK": "0"}) is None
    assert (missing_launcher({"PMI_RANK": "0"}) is None) == (find_spec("mpi4py") is not None)


# ---- whole runs -----------------------------------------------------------------------------------------------------

# Three matrices of which the middle one straddles two ranks; `one_bad` fails on rank 1 in the second step.
MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 16)])

    def forward(self, x, y):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return {"loss": nn.functional.mse_loss(self.layers[-1](x), y)}


def make(rank, world_size):
    data = torch.Generator().manual_seed(rank)
    x, y = (torch.randn(2, 64, 16, generator=data) for _ in range(2))
    return Net(), [{"x": x[i], "y": y[i]} for i in range(2)]


def one_bad(rank, world_size):
    model, batches = make(rank, world_size)
    if rank == 1:
        batches[1]["x"] = batches[1]["x"][:, :3]
    return model, batches
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODEL)
    return tmp_path


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env={**environment(), **variables}, capture_output=True, text=True, timeout=240
    )


@contextmanager
def ended_after(seconds: int) -> Iterator[None]:
    """What hangs fails instead."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"{seconds} s are over")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def verify(folder: Path, *options: str, port: int | None = None) -> subprocess.CompletedProcess[str]:
    """The command in this process: importing DeepSpeed once more would take longer than many a run."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr), ended_after(240):
        patch.chdir(folder)
        for name, value in environment().items():
            patch.setenv(name, value)
        if port is not None:
            patch.setattr(ranks, "held_port", lambda: nullcontext(port))
        code = cli.main(["verify", *options])
    return subprocess.CompletedProcess(options, code, stdout.getvalue(), stderr.getvalue())


def config(folder: Path, **zero: Any) -> str:
    path = folder / "ds_config.json"
    path.write_text(json.dumps({**DEFAULT_CONFIG, "zero_optimization": zero}))
    return str(path)


@pytest.fixture
def port() -> Any:
    with ranks.held_port() as number:
        yield str(number)
    for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{number}_*"):
        leftover.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_built_in_model_is_right_and_cut_across_ranks(tmp_path: Path, port: str) -> None:
    done = verify(tmp_path, "--steps", "1", "--json", "out/r.json", "--report", "report", port=int(port))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("RIGHT: 1 step of 27 parameters on 2 ranks (cpu)")
    assert "starting 2 ranks on the CPU" in done.stderr
    (found,) = outcome.load(tmp_path / "out" / "r.json")
    assert isinstance(found, VerifyResult) and found.ok and found.config == DEFAULT_CONFIG
    muon = [r for r in found.records if r.half == "muon"]
    assert {r.shape[0] > r.shape[1] for r in muon} == {True, False} and any(r.shape[0] == r.shape[1] for r in muon)
    assert any(r.straddles for r in muon)
    assert {path.suffix for path in (tmp_path / "report").iterdir()} == {".png", ".svg", ".html"}
    assert not list(Path("/dev/shm").glob(f"*_{port}_*"))


def run_in(folder: str, task: Task) -> tuple[list[outcome.Outcome], list[str]]:
    """What a rank finds in that folder, and the progress that it tells."""
    said: list[str] = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        with mock.patch.object(rank, "say_progress", said.append):
            return run_task(task), said
    finally:
        os.chdir(before)
        sys.modules.pop("mine", None)  # ranks live on from test to test


@pytest.mark.full
@pytest.mark.ranks
def test_every_planted_fault_is_found_in_one_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, but for the launch."""
    said: list[str] = []

    def by_workers(module: str, arguments: list[str], world_size: int, *_: object) -> list[outcome.Outcome]:
        parser = argparse.ArgumentParser()
        verify_command.add_options(parser)
        task = verify_command.check_options(parser.parse_args(arguments))
        (outcomes, progress), _ = run_ranks(world_size, run_in, str(folder), task)
        said.extend(progress)
        return outcomes

    monkeypatch.setattr(verify_command, "run_ranks", by_workers)
    done = verify(folder, "--model", "mine:make", "--steps", "2", "--inject", "all", "--json", "r.json")
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = outcome.load(folder / "r.json")
    assert {o.fault for o in outcomes} == set(FAULTS)
    assert done.stdout.splitlines()[-1].startswith("FOUND: ")
    assert said == [f"fault {number} of {len(FAULTS)}: {fault}" for number, fault in enumerate(FAULTS, 1)]


def test_a_refused_config_is_not_run(folder: Path) -> None:
    done = verify(folder, "--config", config(folder, stage=2), "--model", "mine:make")
    assert done.returncode == 2
    assert "reduce_scatter = true" in done.stderr and "set it to false" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.ranks
def test_an_error_on_one_rank_ends_all_and_is_shown(folder: Path) -> None:
    done = verify(folder, "--model", "mine:one_bad")
    assert done.returncode == 2
    assert done.stderr.splitlines()[1].startswith(f"{FAILED} 1: RuntimeError: mat1 and mat2")
    log = re.search(r"the whole log: (.*)\)", done.stderr)
    assert log is not None and "mine.py" in Path(log[1]).read_text()
    shutil.rmtree(Path(log[1]).parent)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.ranks
def test_it_runs_under_the_deepspeed_launcher(folder: Path, port: str) -> None:
    launcher = ["deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", port]
    options = ["--config", config(folder, stage=1, reduce_scatter=False), "--model", "mine:make", "--json", "r.json"]
    done = run(folder, sys.executable, "-m", *launcher, "--module", "ds_muon.verify", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RIGHT: 3 steps of 6 parameters on 2 ranks" in done.stdout and (folder / "r.json").exists()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("mpirun") is None or find_spec("mpi4py") is None, reason="needs mpirun and mpi4py")
def test_it_runs_under_mpirun(folder: Path, port: str) -> None:
    launcher = ["mpirun", *(["--allow-run-as-root"] if os.getuid() == 0 else []), "--oversubscribe", "-np", "2"]
    command = [*launcher, sys.executable, "-m", "ds_muon.verify", "--model", "mine:make", "--world-size", "2"]
    done = run(folder, *command, MASTER_PORT=port)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RIGHT: 3 steps of 6 parameters on 2 ranks" in done.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_the_ranks_end_with_a_command_that_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = str(folder)
    for name, value in marked({}, mark).items():
        monkeypatch.setenv(name, value)
    command = os.fork()
    if command == 0:
        try:
            verify(folder, "--steps", "1000", "--model", "mine:make")
        finally:
            os._exit(1)
    try:
        # Its leash, two of the launcher, two ranks.
        assert within(120, lambda: len(processes_with(mark)) == 5)
    finally:
        os.kill(command, signal.SIGKILL)
        os.waitpid(command, 0)
    assert within(60, lambda: processes_with(mark) == [])
