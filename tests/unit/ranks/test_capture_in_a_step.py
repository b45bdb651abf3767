"""Captured inputs of a step: by the rank that owns the matrix, and all ranks stop together."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ds_muon.replay import read_capture
from ds_muon.skipped import NonFiniteUpdate
from tests.unit.support.captures import SHAPES, capture_one, captured_step, environment
from tests.unit.support.faulty import faulty_backend, sick
from tests.unit.support.models import PrescribedGradients, ds_config, start, train_step
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import exact_gradients

# ---- in a step ------------------------------------------------------------------------------------------------------


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
    ranks = run_ranks(world_size, steps_after_a_capture, ds_config(), environment(tmp_path))
    (path,) = tmp_path.iterdir()
    assert len({tuple(raised) for raised in ranks}) == 1
    first, second, third = ranks[0]
    assert first is None and third is None
    assert second is not None and f"ds-muon replay {path}" in second
    assert "the update of p0 was not finite and, with nan_guard off, has been applied: load a checkpoint" in second


@pytest.mark.ranks
def test_without_the_guard_a_run_goes_on_if_told_to(tmp_path: Path) -> None:
    env = environment(tmp_path, DS_MUON_NAN_CAPTURE_RAISE="0")
    assert run_ranks(2, steps_after_a_capture, ds_config(), env) == [[None, None, None]] * 2


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
