"""Captured inputs: what is saved, when, under which name; and what happens where it cannot be."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_muon.capture import NanCapture
from ds_muon.guard import NonFiniteUpdate
from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.replay import CaptureError, read_capture
from tests.unit.support.faulty import faulty_backend, sick
from tests.unit.support.models import PrescribedGradients, ds_config, start, train_step
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import exact_gradients

SHAPES = [(30, 20), (8, 8), (5,)]
SETTINGS = NewtonSchulz.resolve(torch.device("cpu"))
MAY_MOVE = torch.tensor(True)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"DS_MUON_NAN_CAPTURE": "1", "DS_MUON_NAN_CAPTURE_DIR": str(folder), **more}


def matrices(count: int = 1) -> Tensor:
    return torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(0))


def with_nan(batch: Tensor) -> Tensor:
    batch = batch.clone()
    batch[:, 1, 2] = torch.nan
    return batch


def capture_one(monkeypatch: pytest.MonkeyPatch, folder: Path, **more: str) -> NanCapture:
    for key, value in environment(folder, **more).items():
        monkeypatch.setenv(key, value)
    capture = NanCapture(rank=3)
    capture.start_step(7, MAY_MOVE)
    kept = capture.keep(list(matrices()))
    capture.save_nonfinite(["layer.weight"], kept, with_nan(matrices()), SETTINGS)
    return capture


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


# ---- in a step ------------------------------------------------------------------------------------------------------


def captured_step(config: dict[str, Any], env: dict[str, str], overwrite: bool = False) -> dict[str, Any]:
    """One step in which the (30, 20) matrix comes out with a NaN."""
    from ds_muon import muon_group

    engine = start(PrescribedGradients(SHAPES), config)
    gradients = exact_gradients(SHAPES, 0, engine.device)
    original = muon_group.orthogonalize_batch

    def overwriting(inputs: list[Tensor], settings: NewtonSchulz) -> Tensor:
        outputs = original(inputs, settings)
        for matrix in inputs:
            matrix.fill_(torch.nan)
        return outputs

    batch = overwriting if overwrite else original
    raised = None
    with (
        faulty_backend(engine),
        sick((30, 20)),
        mock.patch.dict(os.environ, env),
        mock.patch.object(muon_group, "orthogonalize_batch", batch),
    ):
        try:
            train_step(engine, gradients)
        except NonFiniteUpdate as error:
            raised = str(error)
    # Nesterov's blend, from zero momentum: (1 - m) G + m (1 - m) G.
    torch.distributed.all_reduce(gradients[0])
    blend = gradients[0] / torch.distributed.get_world_size() * (0.05 + 0.95 * 0.05)
    owner = next(m.owner for m in engine.optimizer.plan.matrices if m.name == "p0")
    torch.distributed.barrier()
    return {"raised": raised, "skipped": engine.skipped_steps, "blend": blend.cpu(), "owner": owner}


@pytest.mark.ranks
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_owner_saves_the_whole_input_as_it_was_before_the_kernel(
    tmp_path: Path, world_size: int, overwrite: bool
) -> None:
    env = environment(tmp_path, DS_MUON_NAN_CAPTURE_RAISE="0")
    config = ds_config({"nan_guard": "skip"})
    ranks = run_ranks(world_size, captured_step, config, env, overwrite)
    (path,) = tmp_path.iterdir()
    capture = read_capture(path)
    assert capture.name == "p0" and capture.rank == ranks[0]["owner"] and capture.step == 1
    assert (capture.input - ranks[0]["blend"]).norm() <= 1e-6 * ranks[0]["blend"].norm()
    assert not capture.output.isfinite().all() and capture.settings.backend == "faulty"
    assert all(found["raised"] is None and found["skipped"] == 1 for found in ranks)


@pytest.mark.ranks
@pytest.mark.parametrize("guard", ["skip", "raise"])
def test_a_capture_stops_all_ranks_with_one_error_that_names_the_file(tmp_path: Path, guard: str) -> None:
    ranks = run_ranks(2, captured_step, ds_config({"nan_guard": guard}), environment(tmp_path))
    (path,) = tmp_path.iterdir()
    (text,) = {found["raised"] for found in ranks}
    assert "p0 (30 x 20) is not finite" in text and f"ds-muon replay {path}" in text


def captured_on_one_rank(config: dict[str, Any], env: dict[str, str], rank: int) -> dict[str, Any]:
    return captured_step(config, env if torch.distributed.get_rank() == rank else {})


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_say_the_same_where_only_one_captures(tmp_path: Path, rank: int) -> None:
    ranks = run_ranks(2, captured_on_one_rank, ds_config({"nan_guard": "raise"}), environment(tmp_path), rank)
    (text,) = {found["raised"] for found in ranks}
    assert "With DS_MUON_NAN_CAPTURE_RAISE=0, nan_guard" in text
    # The owner saves its input, if it is that rank.
    assert len(list(tmp_path.iterdir())) == (rank == ranks[0]["owner"])


def steps_after_a_capture(config: dict[str, Any], env: dict[str, str]) -> list[str | None]:
    """What each of three steps raises; the first one comes out with a NaN. Then one more, without the capture."""
    engine = start(PrescribedGradients(SHAPES), config)
    raised: list[str | None] = []
    with faulty_backend(engine):
        for step in range(3):
            switched_on = {} if step == 2 else env
            with sick((30, 20) if step == 0 else None), mock.patch.dict(os.environ, switched_on):
                try:
                    train_step(engine, exact_gradients(SHAPES, step, engine.device))
                    raised.append(None)
                except NonFiniteUpdate as error:
                    raised.append(str(error))
    return raised


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_without_the_guard_all_ranks_stop_together_in_the_next_step(tmp_path: Path, world_size: int) -> None:
    ranks = run_ranks(world_size, steps_after_a_capture, ds_config(), environment(tmp_path), timeout=60.0)
    (path,) = tmp_path.iterdir()
    assert len({tuple(raised) for raised in ranks}) == 1
    first, second, third = ranks[0]
    assert first is None and third is None
    assert second is not None and f"ds-muon replay {path}" in second
    assert "the update of p0 was not finite and, with nan_guard off, has been applied: load a checkpoint" in second


@pytest.mark.ranks
def test_without_the_guard_a_run_goes_on_if_told_to(tmp_path: Path) -> None:
    env = environment(tmp_path, DS_MUON_NAN_CAPTURE_RAISE="0")
    assert run_ranks(2, steps_after_a_capture, ds_config(), env, timeout=60.0) == [[None, None, None]] * 2


@pytest.mark.ranks
def test_a_command_to_paste_works_from_any_folder_and_with_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "my captures; rm x"
    env = environment(folder)
    ranks = run_ranks(2, captured_step, ds_config({"nan_guard": "raise"}), env)
    (path,) = folder.iterdir()
    assert all(f"ds-muon replay {shlex.quote(str(path))}" in found["raised"] for found in ranks)


def test_the_warning_of_a_rank_names_the_file_as_a_shell_takes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with mock.patch("ds_muon.capture.log") as warning:
        (path,) = capture_one(monkeypatch, Path("my captures")).saved
    assert path.is_absolute() and path.exists()
    assert warning.call_args.args[0].endswith(f"ds-muon replay '{path}'")


@pytest.mark.ranks
def test_a_folder_that_cannot_be_written_to_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ranks = run_ranks(2, captured_step, ds_config({"nan_guard": "skip"}), environment(tmp_path / "file"))
    assert all(found["raised"] is None and found["skipped"] == 1 for found in ranks)
