"""``ds-muon bench``: it measures what is there, says what is not, and writes what it is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ds_muon import cli, options
from ds_muon.bench import clock, newton_schulz, peers
from ds_muon.bench.newton_schulz import Row, Timing, floor_flops, measure
from ds_muon.orthogonalize import NewtonSchulz, reference_newton_schulz, schedule
from tests.unit.support.cases import first_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_yardstick_and_known_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> object:
        raise ImportError("No module named 'absent'")

    def failing() -> object:
        def run(matrices: list[Tensor]) -> object:
            raise RuntimeError("not for this shape\nand more")

        return run

    known = {"a copy": lambda: lambda matrices: [m.clone() for m in matrices], "absent": absent, "failing": failing}
    known["a batch"] = lambda: peers.Stacked(torch.clone)
    monkeypatch.setattr(newton_schulz, "PEERS", known)
    monkeypatch.setitem(clock.YARDSTICK, "cpu", (32, torch.float32))


def test_what_is_there_is_measured_and_what_is_not_is_said() -> None:
    (row,) = measure([(2, 8, 24)], CPU, "float32", rounds=3)
    found = {timing.name: timing for timing in row.timings}
    assert list(found)[:2] == ["ds_muon torch", "torch, one by one"]
    for name in ("ds_muon torch", "torch, one by one"):
        assert found[name].ms > 0 and found[name].error < 1e-5
    assert found["a copy"].error > 0.1  # which is why the error is shown
    assert found["absent"].problem == "No module named 'absent'" and found["absent"].ms is None
    assert found["failing"].problem == "not for this shape"
    assert "needs a GPU" in found["ds_muon triton"].problem
    ours = found["ds_muon torch"]
    work = 2 * floor_flops(8, 24)
    assert ours.tflops == pytest.approx(work / ours.ms / 1e9)
    assert ours.over_floor > 0 and ours.call_ms > 0


def test_peers_that_take_a_batch_are_shown_what_stacking_took_of_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = measure([(2, 8, 24)], CPU, "float32", rounds=3)
    stacking = {timing.name: timing.stack_ms for timing in row.timings}
    assert stacking.pop("a batch") > 0 and set(stacking.values()) == {None}
    (line,) = [line for line in newton_schulz._lines(row) if "of it stacking" in line]
    assert line.split()[:2] == ["a", "batch"]
    (row,) = measure([(2, 8, 24)], CPU, "float32", rounds=1, only=["copy"])
    assert [(timing.name, timing.stack_ms) for timing in row.timings] == [("a copy", None)]
    with pytest.raises(SystemExit):
        cli.main(["bench", "newton-schulz", "--help"])
    assert "torch.stack alone" in capsys.readouterr().out


def _first_of(name: str, matrices: list[Tensor]) -> Tensor:
    return matrices[0].clone()


def test_candidates_take_turns_in_another_order_each_round_and_the_same_in_each_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def before(self: object, call: partial[object]) -> tuple[float, float]:
        order.append(call.args[0])
        return 1.0, 1.0

    monkeypatch.setattr(newton_schulz.Yardstick, "before", before)
    functions = {name: partial(_first_of, name) for name in ("p0", "p1", "p2", "p3")}
    monkeypatch.setattr(newton_schulz, "PEERS", {name: partial(functions.get, name) for name in functions})
    runs = []
    for _ in range(2):
        order.clear()
        list(measure([(2, 8, 24)], CPU, "float32", rounds=6, only=list(functions)))
        runs.append([tuple(order[start : start + 4]) for start in range(0, 24, 4)])
    assert runs[0] == runs[1] and len(set(runs[0])) > 1
    assert all(set(turn) == set(functions) for turn in runs[0])


@pytest.mark.parametrize("name", first_of(["DeepSpeed, gram", "DeepSpeed, standard"]))
def test_the_peers_in_deepspeed_load_and_run(name: str) -> None:
    import torch._dynamo.config as dynamo

    generator = torch.Generator().manual_seed(0)
    matrices = list(torch.randn(2, 32, 64, generator=generator).unbind())
    # Given back: what loading changes.
    changed = {name: getattr(dynamo, name) for name in ("automatic_dynamic_shapes", "recompile_limit")}
    with dynamo.patch(changed), torch.compiler.set_stance("force_eager"):
        outputs = peers.PEERS[name]()(matrices)
    for matrix, output in zip(matrices, outputs, strict=True):
        exact = reference_newton_schulz(matrix)
        assert (output.double() - exact).norm() <= 0.06 * exact.norm()


@pytest.mark.parametrize(("rows", "cols"), [(64, 64), (64, 256), (256, 64)])
def test_the_floor_is_what_the_iteration_of_fp16_does(rows: int, cols: int) -> None:
    assert floor_flops(rows, cols) == NewtonSchulz(schedule("quintic", 5), "gram", torch.float16, 0.0).cost(rows, cols)


def test_the_lead_is_over_the_best_peer() -> None:
    timings = (
        Timing("ds_muon torch", 4.0, 5.0),
        Timing("ds_muon triton", 2.0, 8.0),
        Timing("x", 5.0, 20.0),
        Timing("y", 3.0, 30.0),
    )
    assert Row(1, 2, 3, 1.0, timings).lead == 1.5
    assert Row(1, 2, 3, 1.0, timings).call_lead == 4.0
    assert Row(1, 2, 3, 1.0, timings[:2]).lead is None


def test_the_command_writes_numbers_and_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, chart = tmp_path / "out" / "numbers.json", tmp_path / "out" / "chart.png"
    arguments = ["--shapes", "2x8x24", "1x8x8", "--rounds", "2", "--json", str(numbers), "--chart", str(chart)]
    assert cli.main(["bench", "newton-schulz", *arguments]) == 0
    found = json.loads(numbers.read_text())
    assert [(row["batch"], row["rows"], row["cols"]) for row in found["rows"]] == [(2, 8, 24), (1, 8, 8)]
    for row in found["rows"]:
        assert row["lead"] > 0 and row["call_lead"] > 0
        assert all("stack_ms" in timing for timing in row["timings"])
    assert chart.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "2 x 8 x 24: matmul" in out and "x floor" in out and str(numbers) in out and str(chart) in out


@pytest.mark.parametrize("shape", ["8x8", "2x8x0", "axbxc", "1x2x3x4"])
def test_a_shape_that_is_none_is_refused(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "newton-schulz", "--shapes", shape])
    assert "--shapes" in capsys.readouterr().err


def test_the_floor_is_measured_at_the_rate_of_the_matmul_before(monkeypatch: pytest.MonkeyPatch) -> None:
    # A matmul of 2 ms, and 10 ms for everything else.
    monkeypatch.setattr(newton_schulz.Yardstick, "before", lambda self, call: (2.0, 10.0))
    (row,) = measure([(2, 8, 24)], CPU, "float32", rounds=3)
    ours = row.timings[0]
    assert ours.ms == 10.0
    assert ours.over_floor == pytest.approx(10.0 / 2.0 * 2 * 32**3 / (2 * floor_flops(8, 24)))
    assert row.matmul_tflops == pytest.approx(2 * 32**3 / 2e-3 / 1e12)


def test_only_the_candidates_that_are_named_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["bench", "newton-schulz", "--shapes", "2x8x24", "--rounds", "1", "--candidates", "ds_", "copy"]) == 0
    )
    out = capsys.readouterr().out
    assert "ds_muon torch" in out and "a copy" in out and "one by one" not in out and "failing" not in out


def test_tables_of_coefficients_stand_beside_each_other_and_are_judged_by_themselves() -> None:
    tables = ("quintic", "minimax", "deepseekv4")
    (row,) = measure([(2, 32, 32)], CPU, "float32", rounds=1, only=["ds_muon torch"], tables=tables)
    assert [t.name for t in row.timings] == ["ds_muon torch", "ds_muon torch, minimax", "ds_muon torch, deepseekv4"]
    assert all(t.error is not None and t.error < 1e-5 for t in row.timings)  # against the default's: 0.1 and more
    faster = [replace(t, ms=1.0) for t in row.timings[1:]]
    row = replace(row, timings=(replace(row.timings[0], ms=2.0), *faster, Timing("a peer", 4.0)))
    assert row.lead == 2.0  # other operations are no lead


def test_columns_stay_apart_on_tiny_shapes() -> None:
    timing = Timing("x", 0.7, 0.3, 2.15e-07, 78761.7, 4.6e-07)
    for peak, memory in ((None, ""), (3 << 20, "3 MiB ")):
        row = Row(1, 2, 2, 0.01, (replace(timing, peak_bytes=peak),))
        (line,) = list(newton_schulz._lines(row))[1:]
        expected = f"x 0.700 ms 2.15e-07 TFLOP/s 78761.70 x floor 0.300 ms a call {memory}error 4.6e-07"
        assert line.split() == expected.split()


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize("command", ["bench newton-schulz", "bench step", "plan gpt-124m"])
@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--json", ".", "Is a directory"),
        ("--json", "file/n.json", "cannot be written"),
        ("--json", "loop", "symbolic links"),
        ("--json", "n" * 256, "File name too long"),
        ("--chart", "loop/c.png", "cannot be written"),
        ("--chart", "c.mp4", "must end in one of"),
        ("--chart", "c", "must end in one of"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    command: str, option: str, name: str, said: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), option, str(files / name)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and option in error and said in error and "starting" not in error
    assert sorted(path.name for path in files.iterdir()) == ["file", "loop"]


def test_asking_whether_a_file_can_be_written_leaves_it_alone(files: Path) -> None:
    assert options.writable(str(files / "file")).read_text() == "kept"
    assert not options.writable(str(files / "new" / "n.json")).exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rounds", "1.5"], "argument --rounds: 1.5: it must be a whole number, at least 1"),
        (["--rounds", "0"], "argument --rounds: 0: it must be a whole number, at least 1"),
        (["--shapes", "axbxc"], "argument --shapes: a: it must be a whole number, at least 1"),
        (["--shapes", "4x4"], "argument --shapes: 4x4: give batch x rows x cols"),
    ],
)
def test_what_is_no_number_is_refused_in_words(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "newton-schulz", *arguments])
    assert problem in capsys.readouterr().err
