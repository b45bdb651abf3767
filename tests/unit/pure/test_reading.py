"""Files of checkpoints are read without running code in them, and name no place outside of a folder."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections import OrderedDict
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import UUID

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from ds_muon.checkpoints import reading
from ds_muon.checkpoints.reading import below, read_file, refused
from ds_muon.checkpoints.universal import file_of
from tests.unit.support.checkpoints import Code


@pytest.mark.parametrize("as_zip", [True, False])
def test_code_in_a_file_is_named_and_not_run_unless_it_is_trusted(tmp_path: Path, as_zip: bool) -> None:
    path, made = tmp_path / "shard.pt", tmp_path / "made"
    torch.save({"a": torch.ones(3), "b": [Code(made)]}, path, _use_new_zipfile_serialization=as_zip)
    with pytest.raises(ValueError, match=r"shard\.pt holds a posix\.mkdir, and .*add_safe_globals"):
        read_file(path)
    assert not made.exists()
    assert read_file(path, trusted=True)["a"].tolist() == [1, 1, 1] and made.is_dir()


def test_what_checkpoints_hold_is_read(tmp_path: Path) -> None:
    scaler = DynamicLossScaler(2.0**8, 2.0, 100, 1.0, 2)
    contents = {"t": torch.ones(2), "o": OrderedDict(a=torch.Size([2])), "d": torch.bfloat16, "lr": np.float64(0.5)}
    torch.save({**contents, "s": {1, 2}, "scaler": scaler}, tmp_path / "shard.pt")
    found = read_file(tmp_path / "shard.pt")
    assert torch.equal(found.pop("t"), contents.pop("t")) and found.pop("scaler").cur_scale == 2.0**8
    assert found == {**contents, "s": {1, 2}}


@pytest.mark.parametrize(
    "value",
    [
        np.float64(1) < 2, np.array([True, False]), np.complex64(1j), np.array(["a", "bc"]), np.array([b"a"]),
        np.datetime64("2026-01-01"), Namespace(out=Path("a/b"), steps=3), Path("/a"), frozenset([1]), range(3),
        slice(2), Fraction(1, 3), UUID(int=7), torch.__version__,
        date(2026, 1, 1), datetime(2026, 1, 1, 12, tzinfo=timezone.utc), time(12), timedelta(1), SimpleNamespace(a=1),
    ],
)  # fmt: skip
def test_what_scripts_keep_is_read_and_nothing_is_said_of_it(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "x.pt"
    torch.save({"kept": value}, path)
    assert not refused(path) and np.all(read_file(path)["kept"] == value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Decimal(1), "decimal.Decimal"), (np.array([1, "a"], dtype=object), "numpy.dtypes.ObjectDType"),
        (np.zeros(2, dtype=[("a", "i4")]), "numpy.dtypes.VoidDType"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_as_it_is_saved_and_as_it_is_read(tmp_path: Path, value: Any, name: str) -> None:
    path = tmp_path / "x.pt"
    torch.save({"kept": value}, path)
    assert refused(path).endswith(f": {name}")
    with pytest.raises(ValueError, match=f"holds a {re.escape(name)}, and .*add_safe_globals"):
        read_file(path)


def test_what_a_script_has_allowed_it_may_read_afterwards_as_well(tmp_path: Path) -> None:
    path, others = tmp_path / "shard.pt", torch.serialization.get_safe_globals()
    torch.save({"scaler": LossScaler(1.0)}, path)
    with torch.serialization.safe_globals([LossScaler]):
        read_file(path)
        assert torch.load(path, weights_only=True)["scaler"].cur_scale == 1
    assert set(torch.serialization.get_safe_globals()) == set(others)
    read_file(path)
    assert set(torch.serialization.get_safe_globals()) == set(others)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"), (b"garbage" * 9, "damaged, none of torch's"), (None, "No such file"),
        ([1], "no file of a checkpoint, but holds a list"),
        ({"args": Decimal(1)}, r"holds a decimal\.Decimal"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_without_the_advice_to_read_it_unsafely(
    tmp_path: Path, content: Any, words: str
) -> None:
    path = tmp_path / "x.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=words) as error:
        read_file(path)
    assert "weights_only" not in str(error.value)


@pytest.mark.parametrize("of", [Decimal(1), np.zeros(1, dtype=object), 1 << 4000, np.bool_(True)], ids=str)
def test_what_loading_will_refuse_is_known_when_it_has_been_written(tmp_path: Path, of: Any) -> None:
    path = tmp_path / "x.pt"
    torch.save({"args": of}, path)
    why = refused(path)
    try:
        read_file(path)
    except ValueError as error:
        assert why and (why in str(error) or why.rpartition(": ")[2] in str(error))
    else:
        assert why == ""


def test_a_file_of_plain_values_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "get_unsafe_globals_in_checkpoint", None)
    torch.save({"t": torch.ones(2), "args": {"steps": 3}}, tmp_path / "x.pt")
    loads = mock.Mock(wraps=torch.load)
    monkeypatch.setattr(torch, "load", loads)
    assert refused(tmp_path / "x.pt") == "" and loads.call_count == 1


def test_a_type_in_a_file_gets_no_escapes_into_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Red\x1b[31m"
    monkeypatch.setattr(sys.modules[__name__], name, type(name, (), {"__module__": __name__}), raising=False)
    torch.save({"a": getattr(sys.modules[__name__], name)()}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="Red") as error:
        read_file(tmp_path / "x.pt")
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "/x", "", ".", "a\0b"])
def test_no_name_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="leads out of"):
        below(tmp_path, name)
    with pytest.raises(ValueError, match="leads out of"):
        file_of(tmp_path, name, "fp32")


def test_other_names_stay_as_they_are(tmp_path: Path) -> None:
    for name in ("a.weight", "a/b", "...", "a\n\x1b[2J", "ü"):
        assert below(tmp_path, name) == tmp_path / name
