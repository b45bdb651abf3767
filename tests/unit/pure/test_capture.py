"""Captured inputs: what is saved, when, under which name; and what happens where it cannot be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ds_muon.capture import NanCapture
from ds_muon.replay import CaptureError, read_capture
from tests.unit.support.captures import MAY_MOVE, SETTINGS, capture_one, environment, matrices, with_nan


def test_a_file_holds_input_output_settings_and_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (path,) = capture_one(monkeypatch, tmp_path).saved
    content = torch.load(path, weights_only=True)
    assert content["versions"]["torch"] == torch.__version__
    capture = read_capture(path)
    assert torch.equal(capture.input, matrices()[0])
    assert torch.allclose(capture.output, with_nan(matrices())[0], rtol=0, atol=0, equal_nan=True)
    assert (capture.name, capture.rank, capture.step, capture.settings) == ("layer.weight", 3, 7, SETTINGS)


def test_files_are_named_by_rank_shape_pid_and_time_and_never_overwritten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ds_muon.capture.time.time", lambda: 12.3456)
    paths = [capture_one(monkeypatch, tmp_path).saved[0] for _ in range(3)]
    pid = os.getpid()
    assert [path.name for path in paths] == [f"rank3_4x6_pid{pid}_{12345 + i}.pt" for i in range(3)]
    assert sorted(tmp_path.iterdir()) == paths  # and no unfinished one is left


def test_only_what_is_not_finite_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    capture = NanCapture(rank=0)
    capture.start_step(1, MAY_MOVE)
    batch = matrices(3)
    outputs = batch.clone()
    outputs[1, 0, 0] = -torch.inf
    capture.save_nonfinite(["a", "b", "c"], capture.keep(list(batch)), outputs, SETTINGS)
    (path,) = capture.saved
    found = read_capture(path)
    assert (found.name, found.batch) == ("b", 3) and torch.equal(found.input, batch[1])


def test_files_are_remembered_for_one_step_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    capture = capture_one(monkeypatch, tmp_path)
    assert len(capture.saved) == 1 and capture.stops_training
    capture.start_step(8, MAY_MOVE)
    assert len(capture.saved) == 1 and not capture.stops_training
    capture.save_nonfinite(["a"], capture.keep(list(matrices())), with_nan(matrices()), SETTINGS)
    assert len(capture.saved) == 2
    capture.start_step(9, MAY_MOVE)
    assert len(capture.saved) == 1
    capture.start_step(10, MAY_MOVE)
    assert capture.saved == []


def test_no_room_for_copies_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    capture = NanCapture(rank=0)
    capture.start_step(1, MAY_MOVE)
    matrix = mock.Mock(clone=mock.Mock(side_effect=torch.OutOfMemoryError("no room")))
    with mock.patch("ds_muon.capture.log") as warning:
        assert capture.keep([matrix]) == []
    assert "could not copy" in warning.call_args.args[0] and not capture.stops_training


@pytest.mark.parametrize("switch", [None, "0", ""])
def test_off_it_copies_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, switch: str | None) -> None:
    monkeypatch.setenv("DS_MUON_NAN_CAPTURE_DIR", str(tmp_path))
    monkeypatch.delenv("DS_MUON_NAN_CAPTURE", raising=False)
    if switch is not None:
        monkeypatch.setenv("DS_MUON_NAN_CAPTURE", switch)
    capture = NanCapture(rank=0)
    with mock.patch("ds_muon.capture.os.environ.get", wraps=os.environ.get) as look:
        capture.start_step(1, MAY_MOVE)
        assert capture.keep(list(matrices())) == []
        capture.save_nonfinite(["a"], [], with_nan(matrices()), SETTINGS)
        assert not capture.stops_training
    assert look.call_count == 1 and list(tmp_path.iterdir()) == []


def test_a_rank_leaves_ten_files_or_as_many_as_it_is_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with mock.patch("ds_muon.capture.log"):
        for _ in range(12):
            capture_one(monkeypatch, tmp_path)
        assert len(list(tmp_path.iterdir())) == 10
        capture_one(monkeypatch, tmp_path, DS_MUON_NAN_CAPTURE_MAX="11")
        assert len(list(tmp_path.iterdir())) == 11
    with mock.patch("ds_muon.capture.log") as warning:
        capture = capture_one(monkeypatch, tmp_path, DS_MUON_NAN_CAPTURE_MAX="11")
    assert capture.stops_training  # there is evidence of its like
    ((text,),) = [call.args for call in warning.call_args_list]
    assert "all of the 11 files that rank 3 may leave" in text and "DS_MUON_NAN_CAPTURE_MAX" in text


@pytest.mark.parametrize("obstacle", ["file in place of the folder", "full disk"])
def test_what_cannot_be_saved_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, obstacle: str) -> None:
    folder = tmp_path / "captures"
    if obstacle == "file in place of the folder":
        folder.write_text("")
    else:
        monkeypatch.setattr("ds_muon.capture.torch.save", mock.Mock(side_effect=RuntimeError("no space left")))
    with mock.patch("ds_muon.capture.log") as warning:
        capture = capture_one(monkeypatch, folder)
    assert capture.saved == [] and not capture.stops_training
    ((text,),) = [call.args for call in warning.call_args_list]
    assert "could not save the input of layer.weight" in text and "rank 3" in text
    assert not folder.is_dir() or list(folder.iterdir()) == []


def test_a_limit_that_is_no_number_is_warned_of_and_ten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with mock.patch("ds_muon.capture.log") as warning:
        assert len(capture_one(monkeypatch, tmp_path, DS_MUON_NAN_CAPTURE_MAX="many").saved) == 1
    assert 'DS_MUON_NAN_CAPTURE_MAX="many" is not a number; 10 files are saved' in warning.call_args_list[0].args[0]


def test_a_step_that_is_not_applied_anyway_is_not_captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    capture = NanCapture(rank=0)
    capture.start_step(1, torch.tensor(False))
    assert capture.keep(list(matrices())) == [] and not capture.is_on


def test_a_problem_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, value in environment(tmp_path / "file" / "folder").items():
        monkeypatch.setenv(key, value)
    (tmp_path / "file").write_text("")
    capture = NanCapture(rank=0)
    with mock.patch("ds_muon.capture.log") as warning:
        for step in range(3):
            capture.start_step(step, MAY_MOVE)
            capture.save_nonfinite(["a"], capture.keep(list(matrices())), with_nan(matrices()), SETTINGS)
    assert warning.call_count == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "damaged, or no capture of ds_muon"),
        (b"not a torch file", "damaged, or no capture of ds_muon"),
        ({"weights": 1}, "saved by something else"),
        ([1], "saved by something else"),
        ({"ds_muon_capture": 99}, "has format 99"),
        ({"ds_muon_capture": torch.ones(3)}, "has format tensor"),
        ({"ds_muon_capture": 1}, "damaged capture"),
        ({"ds_muon_capture": 1, "settings": {"dtype": "float31"}}, "damaged capture"),
    ],
)
def test_a_damaged_or_foreign_file_is_a_clear_error(tmp_path: Path, content: Any, problem: str) -> None:
    path = tmp_path / "file.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CaptureError, match=problem) as caught:
        read_capture(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        {"input": torch.zeros(4, 6, dtype=torch.int32)},
        {"input": torch.zeros(4, 6, dtype=torch.bfloat16)},
        {"input": torch.zeros(6, 4)},
        {"input": torch.zeros(0, 6), "output": torch.zeros(0, 6)},
        {"input": torch.zeros(1, 1).expand(200_000, 200_000), "output": torch.zeros(1, 1).expand(200_000, 200_000)},
        {"input": torch.zeros(4, 6).to_sparse()},
        {"input": None},
        {"versions": None},
        {"batch": "many"},
        {"triples": []},
        {"dtype": "nn"},
        {"method": "none"},
        {"eps": "small"},
        {"eps": float("nan")},
        {"eps": 2.0},
        {"triples": [[1.5, float("nan"), 0.0]]},
        {"triples": [[1e39, -4.0, 2.0]]},
        {"rank": float("inf")},
        {"batch": 300_000_000},
        {"triples": [[1.5, -0.5, 0.0]] * 101},
    ],
)
def test_a_file_with_one_wrong_part_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: dict[str, Any]
) -> None:
    (path,) = capture_one(monkeypatch, tmp_path).saved
    content = torch.load(path, weights_only=True)
    for key, value in damage.items():
        (content if key in content else content["settings"])[key] = value
    torch.save(content, path)
    with pytest.raises(CaptureError, match="damaged"):
        read_capture(path)


def test_a_switch_that_is_neither_on_nor_off_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_MUON_NAN_CAPTURE", "true")
    capture = NanCapture(rank=0)
    with mock.patch("ds_muon.capture.log") as warning:
        capture.start_step(1, MAY_MOVE)
        capture.start_step(2, MAY_MOVE)
    assert not capture.is_on and warning.call_count == 1
    assert "DS_MUON_NAN_CAPTURE=true is neither 1 nor 0" in warning.call_args.args[0]


def test_half_a_file_and_none_are_clear_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (path,) = capture_one(monkeypatch, tmp_path).saved
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(CaptureError, match="damaged, or no capture of ds_muon"):
        read_capture(path)
    with pytest.raises(CaptureError, match="No such file"):
        read_capture(tmp_path / "nothing.pt")
