"""What the README lists is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_muon import DSMuonConfig
from ds_muon.verify.inject import FAULTS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
# Code blocks hold comments, which look like headings.
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    """What stands under a heading, up to the next one."""
    _, found, rest = PROSE.partition(f"# {title}\n")
    assert found, title
    return re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> str:
    return "\n".join(re.findall(r"^\| (.*?) \|", text, flags=re.MULTILINE))


def test_links_within_the_page_lead_to_headings() -> None:
    headings = re.findall(r"^#+ (.*)$", PROSE, flags=re.MULTILINE)
    # As GitHub makes them.
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(#([^)]*)\)", PROSE)
    assert links and not set(links) - anchors


def test_links_to_files_lead_to_files() -> None:
    links = re.findall(r"\]\(([^#:)]+)\)", PROSE)
    assert links and all((ROOT / link).exists() for link in links)


def test_every_key_is_in_the_table_of_keys() -> None:
    listed = re.findall(r"`(\w+)`", first_cells(section("Keys of `optimizer.params`")))
    assert sorted(listed) == sorted(DSMuonConfig.model_fields)


def test_every_extra_is_in_the_table_of_extras() -> None:
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert re.findall(r"`(\w+)`", first_cells(section("Versions and extras"))) == list(extras)


def test_every_fault_that_can_be_injected_is_listed() -> None:
    text = section("Check your own training: `ds-muon verify`")
    # Those of other tables in the section are not one word in backticks.
    assert re.findall(r"^\| `([a-z-]+)` \|", text, flags=re.MULTILINE) == list(FAULTS)
