"""``ds-muon replay``: which backend is at fault, by a captured input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_muon import cli
from ds_muon.capture import NanCapture
from ds_muon.orthogonalize import BACKENDS, COEFFICIENTS, NewtonSchulz, Triple, orthogonalize
from ds_muon.replay import Capture, attempts, orthogonality_error
from tests.unit.support.batches import cut_into
from tests.unit.support.faulty import Faulty, sick
from tests.unit.support.spectra import dominated, gaussian, log_uniform

CPU = torch.device("cpu")


def capture_of(matrix: Tensor, settings: NewtonSchulz) -> Capture:
    output = torch.full_like(matrix, torch.nan)
    return Capture(matrix, output, "layer.weight", 3, 1, 9, settings, "cpu", {"torch": "2"})


def saved(folder: Path, monkeypatch: pytest.MonkeyPatch, matrix: Tensor, settings: NewtonSchulz) -> Path:
    monkeypatch.setenv("DS_MUON_NAN_CAPTURE", "1")
    monkeypatch.setenv("DS_MUON_NAN_CAPTURE_DIR", str(folder))
    capture = NanCapture(rank=1)
    capture.start_step(9, torch.tensor(True))
    output = torch.full_like(matrix, torch.nan)[None]
    capture.save_nonfinite(["layer.weight"], capture.keep([matrix]), output, settings)
    return capture.saved[0]


class BadFromTheThird(Faulty):
    """Bad from its third iteration on, in whatever form."""

    def __init__(self) -> None:
        self._iterations = 0

    def step(self, r: Tensor, triple: Triple, x: Tensor, out: Tensor | None = None) -> Tensor:
        self._iterations += 1
        return super().step(r, triple, x, out) * (torch.nan if self._iterations == 3 else 1)


# ---- attempts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "count"), [((24, 24), 3), ((20, 40), 5), ((40, 20), 5)])
def test_every_dtype_and_form_is_tried_once_and_the_captured_one_last(shape: tuple[int, int], count: int) -> None:
    settings = NewtonSchulz.resolve(CPU, ns_dtype="bfloat16")
    found = list(attempts(capture_of(gaussian(*shape), settings), CPU))
    assert len(found) == len({(a.backend, a.dtype, a.form) for a in found}) == count
    assert {a.backend for a in found} == {"torch"}  # the others need a GPU
    assert [a.as_captured for a in found] == [False] * (len(found) - 1) + [True]
    assert (found[-1].dtype, found[-1].form) == ("bfloat16", "standard" if shape == (24, 24) else "gram")


SPECTRA = {
    "gaussian": lambda r, c: gaussian(r, c),
    "condition 1e4": lambda r, c: log_uniform(r, c, 1e4),
    "condition 1e7": lambda r, c: log_uniform(r, c, 1e7),
    "one direction": lambda r, c: dominated(r, c, 1e-3, 0),
    "rank one": lambda r, c: dominated(r, c, 0.0, 0),
    "tiny": lambda r, c: gaussian(r, c) * 1e-25,
    "zero": lambda r, c: torch.zeros(r, c),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("coefficients", ["quintic", "you", "cubic"])
@pytest.mark.parametrize("shape", [(2, 3), (8, 64), (33, 33), (64, 20), (100, 130)])
def test_healthy_backends_are_right_on_any_spectrum(spectrum: str, coefficients: str, shape: tuple[int, int]) -> None:
    settings = NewtonSchulz.resolve(CPU, ns_coefficients=coefficients)
    found = list(attempts(capture_of(SPECTRA[spectrum](*shape), settings), CPU))
    assert all(a.ok and a.first_bad is None for a in found), [a for a in found if not a.ok]


def test_the_backend_at_fault_is_named_with_its_first_bad_iteration() -> None:
    with mock.patch.dict(BACKENDS, {"bad": BadFromTheThird}):
        settings = NewtonSchulz.resolve(CPU, ns_backend="bad", ns_method="standard")
        found = list(attempts(capture_of(gaussian(20, 40), settings), CPU))
    assert not found[-1].ok and found[-1].first_bad == 3 and found[-1].result == "not finite"
    assert all(a.ok for a in found if a.backend != "bad")


def test_a_backend_that_is_not_here_is_said_not_to_be() -> None:
    settings = replace(NewtonSchulz.resolve(CPU), backend="gone")
    found = list(attempts(capture_of(gaussian(20, 40), settings), CPU))
    assert found[-1].result == "cannot run here: there is no such backend here" and all(a.ok for a in found[:-1])


@pytest.mark.parametrize(
    ("error", "reason"), [(RuntimeError("needs a GPU\nand more"), "needs a GPU"), (AssertionError(), "AssertionError")]
)
def test_a_backend_that_fails_here_says_why(error: Exception, reason: str) -> None:
    class Failing(Faulty):
        def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
            raise error

    with mock.patch.dict(BACKENDS, {"failing": Failing}):
        settings = NewtonSchulz.resolve(CPU, ns_backend="failing")
        (*_, last) = attempts(capture_of(gaussian(20, 40), settings), CPU)
    assert last.result == f"cannot run here: {reason}"


class BadInABatch(Faulty):
    """Right for a matrix alone; in a batch the last one is spoiled."""

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        r = super().symmetric(a, b)
        r[1:, 0, 0] = torch.nan
        return r


def test_a_fault_that_needs_a_batch_is_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "batch", BadInABatch)
    for user in ("orthogonalize", "replay"):
        monkeypatch.setattr(f"ds_muon.{user}.batches", cut_into(8))
    settings = NewtonSchulz.resolve(CPU, ns_backend="batch")
    (*others, last) = attempts(capture_of(gaussian(20, 40), settings), CPU)
    assert last.result == "not finite" and all(attempt.ok for attempt in others)


def test_more_copies_than_a_device_takes_at_once_are_not_run() -> None:
    """On a CPU a matrix is a batch of its own: a thousand of them would take a thousand times as long."""
    settings = NewtonSchulz.resolve(CPU)
    capture = replace(capture_of(gaussian(20, 40), settings), batch=1000)
    with mock.patch("ds_muon.replay.orthogonalize", wraps=orthogonalize) as ran:
        found = list(attempts(capture, CPU))
    assert found[-1].ok and {len(call.args[0]) for call in ran.call_args_list} == {1}


def test_orthogonality_error_is_zero_for_orthogonal_rows_or_columns() -> None:
    q, _ = torch.linalg.qr(gaussian(9, 9).double())
    for matrix in (q, q[:4], q[:, :4]):
        assert orthogonality_error(matrix) < 1e-14
    assert orthogonality_error(2 * q[:4]) == pytest.approx(3.0)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_finds_the_backend_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BACKENDS, "faulty", Faulty)
    settings = NewtonSchulz.resolve(CPU, ns_backend="faulty", ns_dtype="float16")
    path = saved(tmp_path, monkeypatch, gaussian(20, 40), settings)
    with sick((20, 40)):
        assert cli.main(["replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert "layer.weight (20 x 40), rank 1, step 9: the output was not finite" in out
    assert "AT FAULT: the faulty backend in float16, gram form (*), not finite from iteration 1 on" in out


def test_what_is_right_here_was_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, monkeypatch, gaussian(20, 40), NewtonSchulz.resolve(CPU))
    assert cli.main(["replay", str(path), str(path)]) == 0
    gone = saved(tmp_path, monkeypatch, gaussian(20, 40), replace(NewtonSchulz.resolve(CPU), backend="gone"))
    assert cli.main(["replay", str(gone)]) == 2
    out = capsys.readouterr().out
    assert out.count("NOT REPRODUCED: the torch backend in float32, standard form (*)") == 2
    assert (
        "NOT REPLAYED: the gone backend in float32, standard form cannot run here (*); 5 of 5 others are right" in out
    )


def test_an_input_that_is_not_finite_and_coefficients_that_diverge_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sick_input = gaussian(20, 40)
    sick_input[3] = torch.inf
    path = saved(tmp_path, monkeypatch, sick_input, NewtonSchulz.resolve(CPU))
    assert cli.main(["replay", str(path)]) == 1
    assert "INPUT: of its 800 elements 40 are not finite" in capsys.readouterr().out
    wild = NewtonSchulz.resolve(CPU, ns_coefficients=[[50.0, -10.0, 30.0]], ns_steps=30)
    path = saved(tmp_path, monkeypatch, gaussian(20, 40), wild)
    assert cli.main(["replay", str(path)]) == 1
    assert "COEFFICIENTS: in fp64 as well" in capsys.readouterr().out
    # Too large for fp16 only.
    large = NewtonSchulz.resolve(CPU, ns_coefficients=[[4.0, 3.0, 2.0]], ns_steps=3, ns_dtype="float16")
    assert cli.main(["replay", str(saved(tmp_path, monkeypatch, gaussian(20, 40), large))]) == 1
    assert "leave the range of float16" in capsys.readouterr().out


def test_what_a_file_says_of_itself_begins_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, monkeypatch, gaussian(8, 8), NewtonSchulz.resolve(CPU))
    content = torch.load(path, weights_only=True)
    fake = "x\nAT FAULT: \x1b[2J"
    content |= {"name": fake, "device": fake, "versions": {fake: fake}}
    content["settings"]["backend"] = fake
    torch.save(content, path)
    assert cli.main(["replay", str(path)]) == 2
    out = "".join(capsys.readouterr())
    assert "\x1b" not in out and not any(line.startswith("AT FAULT") for line in out.splitlines())


def test_a_file_that_cannot_be_read_is_told_and_the_others_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = saved(tmp_path, monkeypatch, gaussian(8, 8), NewtonSchulz.resolve(CPU))
    (tmp_path / "bad.pt").write_text("hello")
    assert cli.main(["replay", str(tmp_path / "bad.pt"), str(good)]) == 2
    out, error = capsys.readouterr()
    assert "bad.pt is damaged, or no capture of ds_muon" in error and "NOT REPRODUCED" in out


@pytest.mark.parametrize("table", COEFFICIENTS)
def test_captures_of_every_table_survive_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], table: str
) -> None:
    settings = NewtonSchulz.resolve(CPU, ns_coefficients=table, ns_steps=8, ns_dtype="bfloat16", ns_method="standard")
    path = saved(tmp_path, monkeypatch, gaussian(20, 40), settings)
    cli.main(["replay", str(path)])
    assert "torch backend, bfloat16, standard form, 8 steps" in capsys.readouterr().out
