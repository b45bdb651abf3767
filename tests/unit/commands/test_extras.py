"""What messages say to install is what pyproject.toml calls it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from ds_muon.extras import OLDEST_TRITON, Extra, how_to_install

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("extra", get_args(Extra))
def test_what_is_to_be_installed_is_an_extra_of_this_package(extra: Extra) -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]
    command = how_to_install(extra)
    assert shlex.split(command) == ["pip", "install", f"{project['name']}[{extra}]"]
    assert f"'{project['name']}[{extra}]'" in command  # zsh takes bare brackets for a pattern


def test_the_oldest_triton_is_the_same_everywhere() -> None:
    version = ".".join(map(str, OLDEST_TRITON))
    assert set(re.findall(r"triton>=([\d.]+)", (ROOT / "pyproject.toml").read_text())) == {version}
    assert set(re.findall(r"Triton \(?([\d.]+) or newer", (ROOT / "README.md").read_text())) == {version}


def test_no_other_module_spells_it_out() -> None:
    spelled_out = [path.name for path in (ROOT / "ds_muon").rglob("*.py") if "ds-muon[" in path.read_text()]
    assert spelled_out == ["extras.py"]
