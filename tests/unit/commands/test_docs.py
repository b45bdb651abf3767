"""What the README and the pages of docs/ name is there, and the figures they show are those that were measured."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_muon import DSMuonConfig, cli
from ds_muon.verify.inject import FAULTS
from ds_muon.version import VERSION

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
TEXTS = {path: path.read_text() for path in (README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))}
# Code blocks hold comments, which look like headings.
PROSE = {path: re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE) for path, text in TEXTS.items()}
MEASURED = ROOT / "docs" / "measured"

# What the pages say of others: files that the user writes, options of launchers, keys of DeepSpeed's config.
FILES_OF_USERS = {"train.py", "train_hf.py", "train_accelerate.py"}
OPTIONS_OF_OTHERS = {
    *("--num_accelerators", "--local_rank", "--nproc-per-node", "--module", "--allow-run-as-root"),
    *("--use_deepspeed", "--num_processes", "--index-url"),
    "--inject_missing_state",
}
KEYS_OF_DEEPSPEED = {
    *("type", "reduce_scatter", "gradient_clipping", "overlap_comm", "grad_accum_dtype"),
    *("compute_grad_norm", "device", "pin_memory", "torch_adam"),
}


def page(name: str) -> Path:
    return ROOT / "docs" / f"{name}.md"


def section(path: Path, title: str) -> str:
    """What stands under a heading, up to the next one."""
    _, found, rest = PROSE[path].partition(f"# {title}\n")
    assert found, title
    return re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> str:
    return "\n".join(re.findall(r"^\| (.*?) \|", text, flags=re.MULTILINE))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def inline(path: Path) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", PROSE[path])]


# ---- links ----------------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """As GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", PROSE[path], flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", PROSE[path]):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_reached_from_the_readme() -> None:
    links = re.findall(r"\]\(docs/([\w-]+\.md)[^)]*\)", PROSE[README])
    assert set(links) == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_what_the_readme_links_to_is_in_the_source_distribution() -> None:
    tomllib = pytest.importorskip("tomllib")
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    links = re.findall(r"\]\(([^#:)]+)\)", PROSE[README])
    assert links and {link.partition("/")[0] for link in links} <= set(included["include"])


def test_the_version_stands_in_one_place_and_has_its_changes() -> None:
    tomllib = pytest.importorskip("tomllib")
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in package["project"]["dynamic"]
    file, pattern = ROOT / package["tool"]["hatch"]["version"]["path"], package["tool"]["hatch"]["version"]["pattern"]
    found = re.search(pattern, file.read_text())
    assert found and found["version"] == VERSION
    assert re.search(rf"^## .*{re.escape(VERSION)}", TEXTS[ROOT / "CHANGELOG.md"], flags=re.MULTILINE)
    assert VERSION not in (ROOT / "CITATION.cff").read_text().replace("cff-version: 1.2.0", "")
    # What the workflow of releases reads the version by.
    (command,) = re.findall(r"sed -n '([^']+)'", (ROOT / ".github" / "workflows" / "release.yml").read_text())
    read = subprocess.run(["sed", "-n", command, str(file)], capture_output=True, text=True, check=True)
    assert read.stdout.strip() == VERSION


def test_the_readme_can_be_read_in_one_sitting() -> None:
    assert len(TEXTS[README].splitlines()) <= 220


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_places_in_the_code_are_named_by_function_because_lines_move(path: Path) -> None:
    assert not re.findall(r"\w+\.py:\d+|\w+\.py\b[^.;|]{0,20}\blines? \d+|\.py#L\d+", TEXTS[path])
    for function, file in re.findall(r"\bat\s+(\w+)\s+\((\w+\.py):\.\.\.\)", TEXTS[path]):
        (found,) = (ROOT / "ds_muon").rglob(file)
        assert re.search(rf"^ *def {function}\(", found.read_text(), flags=re.MULTILINE), (function, file)


# ---- keys, extras, faults -------------------------------------------------------------------------------------------


def test_every_key_is_in_the_table_of_keys() -> None:
    listed = re.findall(r"`(\w+)`", first_cells(section(page("options"), "Keys of `optimizer.params`")))
    assert sorted(listed) == sorted(DSMuonConfig.model_fields)


def test_every_extra_is_in_the_table_of_extras() -> None:
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert re.findall(r"`(\w+)`", first_cells(section(README, "Install"))) == list(extras)


def test_every_fault_that_can_be_injected_is_listed() -> None:
    text = section(page("verify"), "Planted faults")
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", text, flags=re.MULTILINE) == list(FAULTS)


def as_filled_in(params: dict[str, Any]) -> dict[str, Any]:
    """A trainer fills in these."""
    return {key: 0.1 if value == "auto" and key in ("lr", "weight_decay") else value for key, value in params.items()}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_settings_that_are_shown_are_valid(path: Path) -> None:
    for block in blocks(TEXTS[path], "json"):
        if "optimizer" in (config := json.loads(block)):
            DSMuonConfig.parse(as_filled_in(config["optimizer"]["params"]))
    for code in inline(path):
        if re.match(r'"\w+": ', code):
            ((key, value),) = json.loads(f"{{{code}}}").items()
            assert key in KEYS_OF_DEEPSPEED or DSMuonConfig.parse(as_filled_in({key: value}))
        elif code.startswith('{"*'):
            DSMuonConfig.parse({"muon_blocks": json.loads(code)})
        elif found := re.match(r"(\w+): ", code):
            assert found[1] in KEYS_OF_DEEPSPEED | DSMuonConfig.model_fields.keys(), code


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_files_modules_and_variables_that_are_named_exist(path: Path) -> None:
    for code in inline(path):
        if re.fullmatch(r"(ds_muon|tests|scripts|docs|ds_configs)/[\w./-]+", code):
            assert (ROOT / code).exists(), code
    for name in re.findall(r"(?<![/\w])ds_muon((?:\.\w+)+)", TEXTS[path]):
        found: Any = importlib.import_module("ds_muon")
        for part in name[1:].split("."):
            found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")
    sources = [*(ROOT / "ds_muon").rglob("*.py"), *(ROOT / "scripts").iterdir(), *(ROOT / "tests").rglob("*.py")]
    code = "\n".join(source.read_text() for source in sources if source.is_file() and source != Path(__file__))
    assert all(name in code for name in re.findall(r"DS_MUON_\w+", TEXTS[path]))


def commands(path: Path) -> Iterator[list[str]]:
    """Those of code blocks, and those in the text that begin with ours."""
    lines = [line for block in blocks(TEXTS[path], "bash") for line in block.splitlines()]
    lines += [code for code in inline(path) if re.match(r"(ds-muon|scripts/|python|deepspeed|mpirun|torchrun) ", code)]
    for line in lines:
        for command in " ".join(shlex.quote(word) for word in shlex.split(line, comments=True)).split(" '&&' "):
            words = shlex.split(command)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What ``ds-muon`` says of a command, whose words it has read."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--help"])
    printed = capsys.readouterr()
    assert end.value.code == 0, f"ds-muon {shlex.join(words)}: {printed.err}"
    return printed.out


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_commands_that_are_shown_are_understood(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(path):
        known = ""
        if words[0] == "ds-muon":
            known = help_of(words[1:], capsys)
        for word in words:
            if re.fullmatch(r"(\./)?scripts/[\w./-]+", word):
                known += (ROOT / word).read_text()
            elif word.endswith(".py"):
                assert word in FILES_OF_USERS, words
            elif re.fullmatch(r"ds_muon[\w.]*", word):
                module = importlib.import_module(f"{word}.__main__")
                known += Path(str(module.__file__)).read_text() + help_of(word.split(".")[1:], capsys)
        for option in (word for word in words if word.startswith("--")):
            assert option.partition("=")[0] in OPTIONS_OF_OTHERS or option in known, shlex.join(words)


def test_options_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    ours = [
        ["verify"],
        ["replay"],
        ["plan"],
        ["doctor"],
        ["config"],
        ["to-universal"],
        ["migrate"],
        ["bench", "step"],
        ["bench", "newton-schulz"],
    ]
    known = "".join(help_of(words, capsys) for words in ours)
    known += "".join(path.read_text() for path in (ROOT / "scripts").iterdir() if path.is_file())
    for path in TEXTS:
        for code in inline(path):
            if code.startswith("--"):
                option = re.split(r"[ =]", code)[0]
                assert option in known or option in OPTIONS_OF_OTHERS, code


# ---- figures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "render_measured.py"))


def test_the_tables_are_those_of_the_measurements(script: dict[str, Any]) -> None:
    text = TEXTS[page("measured")]
    assert script["render"](text) == text, "run python scripts/render_measured.py"
    shown = re.findall(r"^<!-- measured: ([\w-]+) -->$", text, flags=re.MULTILINE)
    assert sorted(shown) == sorted(path.stem for path in MEASURED.iterdir())


@pytest.mark.parametrize("path", sorted(MEASURED.iterdir()), ids=lambda path: path.stem)
def test_every_measurement_says_where_and_of_what_it_is(path: Path) -> None:
    measured = json.loads(path.read_text())
    assert all(measured[key] for key in ("device", "commit", "recorded", "versions", "columns", "rows"))
    assert all(len(row) == len(measured["columns"]) for row in measured["rows"])
    assert measured["commit"].startswith("unknown") or re.match(r"[0-9a-f]{7,40}\b", measured["commit"])


def test_the_readme_shows_what_was_measured(script: dict[str, Any]) -> None:
    """Each row links to the measurement that has its figures."""
    rows = re.findall(r"^\|([^|]*\|.*)\[([\w-]+)\]\(docs/measured/\2\.json\) \|$", PROSE[README], flags=re.MULTILINE)
    assert len(rows) >= 4
    for row, name in rows:
        measured = script["table"](script["load"](name))
        # The first cell names what is measured.
        figures = re.findall(r"[\d.]+(?:e[-+]\d+)?", row.partition("|")[2])
        assert figures and not set(figures) - set(re.findall(r"[\d.]+(?:e[-+]\d+)?", measured)), row


def test_the_picture_shows_what_was_measured(script: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script["draw"](tmp_path / "iteration.svg")
    drawn, committed = (
        re.findall(r">([^<]+)</text>", path.read_text())
        for path in (tmp_path / "iteration.svg", ROOT / "docs" / "iteration.svg")
    )
    assert drawn == committed and "102.5" in drawn, "run python scripts/render_measured.py"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_are_legible_on_a_dark_page(path: Path) -> None:
    colours = re.findall(r"(?:fill|stroke): #(\w{6})", path.read_text())
    assert colours and not {"ffffff", "000000"} & set(colours)


@pytest.mark.parametrize(
    ("title", "model", "options"),
    [
        ("Llama-3-8B: 224 matrices, one param group", "llama-3-8b", []),
        ("Nodes", "llama-3-8b", ["--ranks-per-node", "8"]),
        ("Nodes", "llama-3-70b", ["--ranks-per-node", "8"]),
    ],
)
def test_the_page_on_the_plan_shows_what_the_plan_says(
    title: str, model: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = re.findall(rf"^\| (?:{model} \| )?(\d+) \| (.*)$", section(page("plan"), title), re.M)
    assert rows
    assert cli.main(["plan", model, "--world-size", *(ranks for ranks, _ in rows), *options]) == 0
    printed = capsys.readouterr().out
    for ranks, row in rows:
        of_ranks = " ".join(re.findall(rf"^ *{ranks} .*$", printed, flags=re.MULTILINE))
        assert not set(re.findall(r"[\d.]+", row)) - set(of_ranks.split()), ranks
