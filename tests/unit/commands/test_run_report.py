"""``ds-muon report``: what a run has logged, on one page."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from ds_muon import cli
from ds_muon.report_command import PANELS, draw, panels_of, sentence_of
from ds_muon.run_log import RunLog, read_log

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")

CSV = {
    "Train_loss": "step,loss\n8,5.5\n16,4.5\n24,nan\n32,4.0\n",
    "DSMuon_lr_muon": "step,muon\n8,0.01\n16,0.02\n",
    "DSMuon_lr_adamw": "step,adamw\n8,1e-4\n16,2e-4\n",
    "DSMuon_grad_norm_adamw": "step,adamw\n8,inf\n16,1.5\n",
    "DSMuon_grad_norm_muon": "step,muon\n8,2.5\n16,1.5\n",
    "DSMuon_u_norm_h.<i>&.weight": "step,x\n8,2.5\n16,1.5\n",
    "DSMuon_skipped_bad_updates": "step,bad_updates\n8,0\n16,3\n",
    "DSMuon_verify_excess": "step,verify_excess\n8,0.5\n16,2.5\n",
    "Train_Samples_loss_scale": "step,loss_scale\n8,65536\n",
    # A run that was killed in a line, and resumed from before that.
    "DSMuon_balance": "step,balance\n8,1.0\n16,1.5\n24,1.\nstep,balance\n16,1.25\n32,1",
    "Train_other": "step,other\n8,7\n",
    "empty": "",
}
HISTORY: list[dict[str, Any]] = [
    {"loss": 2.5, "grad_norm": 1.5, "learning_rate": 1e-3, "epoch": 0.5, "step": 10, "DSMuon/grad_norm/muon": 0.5},
    {"eval_loss": float("nan"), "note": "text", "flag": True, "huge": 10**400, "step": 20},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in CSV.items():
        (tmp_path / f"{name}.csv").write_text(text)
    return tmp_path


def test_the_monitors_folder_is_read_over_interruptions(folder: Path) -> None:
    log = read_log(folder)
    assert log.along == "samples" and set(log.series) == set(CSV) - {"empty"}
    assert log.series["DSMuon_balance"] == {8: 1.0, 16: 1.25, 24: 1.0, 32: 1.0}
    assert str(log.series["Train_loss"]) == "{8.0: 5.5, 16.0: 4.5, 24.0: nan, 32.0: 4.0}"


@pytest.mark.parametrize("place", ["trainer_state.json", "checkpoint-9/trainer_state.json"])
def test_trainers_log_is_read_from_its_folder_its_last_checkpoint_or_its_file(tmp_path: Path, place: str) -> None:
    state = tmp_path / place
    state.parent.mkdir(exist_ok=True)
    state.write_text(json.dumps({"log_history": HISTORY}))
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / state.name).write_text("{}")
    log = read_log(tmp_path)
    assert log.along == "steps" and log.series == {**read_log(state).series, "eval_loss": log.series["eval_loss"]}
    assert log.series["DSMuon_grad_norm_muon"] == {10: 0.5} and log.series["loss"] == {10: 2.5}
    assert not {"note", "flag", "huge"} & set(log.series)


def test_every_panel_is_drawn_of_what_belongs_to_it(folder: Path) -> None:
    log = read_log(folder)
    panels = panels_of(log)
    assert {title: list(series) for title, series in panels.items()} == {
        "Loss": ["Train_loss"],
        "Learning rate": ["muon", "adamw"],
        "Norm of the gradients": ["muon", "adamw"],
        "Norm of what Newton-Schulz gets": ["h.<i>&.weight"],
        "Steps skipped so far": ["bad_updates"],
        "Largest error of a check, over its tolerance": ["verify"],
        "Newton-Schulz of the busiest rank, over the mean": ["balance"],
        "Loss scale": ["Train_Samples_loss_scale"],
    }
    figure = draw(log, panels)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(panels)
    loss = figure.axes[0].get_lines()[0]
    assert (list(loss.get_xdata()), list(loss.get_ydata())) == ([8, 16, 32], [5.5, 4.5, 4.0])
    assert loss.get_label() == "Train_loss (not shown: 1 not finite)"
    assert figure.axes[2].get_yscale() == "log" and figure.axes[0].get_yscale() == "linear"
    assert sentence_of(log) == (
        "32 samples; Train_loss 4; 3 skipped for bad updates; WRONG: 1 check of an update beyond tolerance"
    )


def test_what_deepspeed_and_trainer_log_of_the_rates_gives_way_to_the_rates_of_the_halves() -> None:
    others: dict[str, dict[float, float]] = {"Train_Samples_lr": {1: 0.1}, "learning_rate": {1: 0.1}}
    halves: dict[str, dict[float, float]] = {"DSMuon_lr_muon": {1: 0.1}}
    grad_norm: dict[str, dict[float, float]] = {"grad_norm": {1: 2.0}, "DSMuon_grad_norm_muon": {1: 1.0}}
    assert list(panels_of(RunLog("run", "steps", others))["Learning rate"]) == list(others)
    panels = panels_of(RunLog("run", "steps", others | halves | grad_norm))
    assert panels["Learning rate"] == {"muon": {1: 0.1}} and set(panels["Norm of the gradients"]) == {
        "muon",
        "grad_norm",
    }


@pytest.mark.parametrize("least", [1e-5, 7.0, 65536.0])
@pytest.mark.parametrize("times", [1, 1.0001, 1.5, 4, 9, 101, 1e9])
@pytest.mark.parametrize("name", ["DSMuon_lr_muon", "loss"])
def test_an_axis_has_numbers_to_read_off(name: str, least: float, times: float) -> None:
    axes = drawn({1e7: least, 3e7: least * times}, name)
    for axis, (bottom, top) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        numbers = {label.get_position()[axis is axes.yaxis]: label.get_text() for label in axis.get_ticklabels()}
        assert 2 <= sum(bottom <= at <= top for at in numbers) <= 10
        for at, text in numbers.items():
            assert float(text.replace("\N{MINUS SIGN}", "-")) == pytest.approx(at, rel=1e-6)
    assert axes.get_yscale() == ("linear" if name == "loss" else "log")


def test_what_a_logarithmic_axis_cannot_show_is_a_gap_and_said() -> None:
    axes = drawn({1: 0.0, 2: 1e-3, 3: 0.0, 4: 2e-3, 5: float("nan")}, "DSMuon_lr_muon")
    (line,) = axes.get_lines()
    assert [math.isfinite(y) for _, y in axes.transData.transform(line.get_xydata())] == [False, True, False, True]
    assert line.get_label() == "muon (not shown: 1 not finite, 2 at 0)"
    axes = drawn({1: 0.0, 2: 0.0}, "DSMuon_lr_muon")
    assert axes.get_yscale() == "linear" and axes.get_lines()[0].get_label() == "muon"


def drawn(values: dict[float, float], name: str) -> Any:
    """The axes of a series."""
    log = RunLog("run", "steps", {name: values})
    (axes,) = draw(log, panels_of(log)).axes
    return axes


def test_names_of_telemetry_have_a_panel() -> None:
    from ds_muon import telemetry

    source = Path(telemetry.__file__).read_text()
    kinds = set(re.findall(r'"(\w+)/\{', source)) - {"update", "weight"}
    assert kinds >= {"grad_norm", "u_norm", "stable_rank", "off_orthogonal", "skipped", "lr"}
    for kind in kinds:
        assert any(re.fullmatch(pattern, f"DSMuon_{kind}_muon") for pattern in PANELS.values()), kind


def test_the_page_is_whole_and_escaped_in_both_modes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "<b>&.csv").write_text("step,x\n8,1\n")
    evil = '</text></svg><script>"alert(1)"</script>$\\frac$ \x1b[2J'
    (strange := folder / "<i>&\"'").mkdir()
    entry = {"step": 1, "loss": "<script>1</script>", f"{evil}_loss": "1e3", "lr": "nan", "DSMuon/u_norm/" + evil: 2}
    (strange / "trainer_state.json").write_text(json.dumps({"log_history": [entry, {"step": "<b>1", "loss": 1}]}))
    out = folder / "page.html"
    assert cli.main(["report", str(folder), str(strange), "--out", str(out)]) == 0
    assert f"report: {out}" in capsys.readouterr().out
    page = out.read_text()
    assert page.count("&lt;script&gt;") >= 3 and "\x1b" not in page
    assert "prefers-color-scheme: dark" in page and "<i>&" not in page and "<b>&" not in page
    assert not re.search(r"(fill|stroke): #", page.partition("<svg")[2]) and "<script" not in page
    assert not re.search('(?<!xmlns=")(?<!xmlns:xlink=")https?:', page)
    rows = {
        unescape(cells[0]): cells[1:]
        for row in re.findall("<tr><td>.*?</tr>", page)
        if (cells := re.findall("<td[^>]*>(.*?)</td>", row))
    }
    assert rows["Train_loss"] == ["4", "5.5", "4", "4", "5.5"] and rows["Train_other"] == ["1", *["7"] * 4]
    assert "<b>&" in rows


def test_what_verify_wrote_becomes_the_map_of_the_partitions(folder: Path) -> None:
    from ds_muon.verify.outcome import save
    from tests.unit.support.records import sample

    check, out = folder / "verify.json", folder / "page.html"
    save([sample((500, 900), names=["cut\n.weight"], adamw=(100,))], check, as_list=False)
    assert cli.main(["report", str(folder), str(check), "--out", str(out)]) == 0
    page = out.read_text()
    assert "Muon: param group 0" in page and r"cut\n.weight" in page and ">RIGHT<" in page and "Train_loss" in page


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run", None, "No such file or directory"),
        ("x" * 5000, None, "File name too long"),
        ("state.json", b"{", "neither Trainer's trainer_state.json nor what ds-muon verify"),
        ("state.json", b'{"log_history": [1]}', "neither Trainer's trainer_state.json nor what ds-muon verify"),
        ("state.json", b'{"log_history": []}', "there is no number in it"),
        ("state.json", b"\xff\x00", "neither Trainer's trainer_state.json"),
        ("state.json", b"[" * 100_000, "neither Trainer's trainer_state.json"),
        ("a/loss.csv", b'step,loss\n\x00\xff,\n"1,2\n', "there is no number in it"),
        ("a/other.txt", b"", "neither the folder of a csv_monitor nor one of Trainer"),
    ],
)
def test_what_is_no_run_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, words: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    run = path.parent if path.suffix in (".csv", ".txt") else path
    assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 2
    err = capsys.readouterr().err
    assert words in err and str(run) in err and len(err.splitlines()) == 1
    assert not (tmp_path / "page.html").exists()
