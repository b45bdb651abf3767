"""Two nodes on one machine: what crosses between them, and what is said without the rights to make them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import emulate_nodes

ROOT = Path(__file__).parents[3]


def may_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


def test_without_the_rights_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["emulate_nodes.py"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="needs root"):
        emulate_nodes.main()


@pytest.mark.full  # four processes import everything, twice
@pytest.mark.skipif(not may_make_namespaces(), reason="needs the right to make network namespaces")
def test_what_crosses_between_two_nodes_is_what_the_plan_says(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "emulate_nodes.py"), "--steps", "2"]
    run = subprocess.run([*command, "--json", str(tmp_path / "found.json")], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found = dict(json.loads((tmp_path / "found.json").read_text())["rows"])
    planned = found["the same by `ds-muon plan`"]
    assert planned > 0 and found["DSMuon's exchange alone"] == pytest.approx(planned, rel=emulate_nodes.TOLERANCE)
    assert found["a step with DSMuon"] - found["a step with AdamW"] == pytest.approx(planned, rel=0.05)
