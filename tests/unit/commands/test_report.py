"""``ds_muon.verify.report``: the picture and the page say what the records say, whatever the records hold."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ds_muon.verify import report
from ds_muon.verify.inject import FAULTS
from ds_muon.verify.record import Comparison, VerifyResult
from ds_muon.verify.report import picture, rows
from ds_muon.verify.report.rows import rows_of, selected_rows
from tests.unit.support.records import sample

pytest.importorskip("matplotlib")

nan, inf = math.nan, math.inf
TIMES = "\N{MULTIPLICATION SIGN}"
ODD = r'a$\frac$b<i>&"#ffffff".weight'
CUT, SHOWN = "cut\n\x1b\udcff.weight", r"cut\n\x1b\udcff.weight"


def changed(result: VerifyResult, name: str, *, step: int | None = None, **values: Any) -> VerifyResult:
    """``result`` with other values in the records of one parameter, of one step or of all."""
    assert any(r.name == name for r in result.records)
    records = (replace(r, **values) if r.name == name and step in (None, r.step) else r for r in result.records)
    return replace(result, records=tuple(records))


def figure(result: VerifyResult) -> Any:
    of_result = rows_of(result)
    return picture.figure_of(result, of_result, selected_rows(of_result, report.ROWS_IN_PNG))


def words(drawn: Any, pattern: str) -> list[str]:
    """All in a figure that match."""
    texts = [text.get_text() for axes in drawn.axes for text in axes.texts]
    return [text for text in texts if re.search(pattern, text)]


def boxes(drawn: Any, group: int = 0) -> list[tuple[float, float, str]]:
    """(first element, elements, colour) of what is painted in the strip of a group, over its padding."""
    from matplotlib.colors import to_hex

    parts = {light: part for part, (light, _) in picture.COLOURS.items()}
    painted = [patch for patch in drawn.axes[1 + group].patches if patch.get_gid() is None]
    return [(box.get_x(), box.get_width(), parts[to_hex(box.get_facecolor())]) for box in painted]


# ---- the three files ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wrong() -> VerifyResult:
    """A wrong parameter whose name would be markup, a formula and a colour; one that is cut, of no printable name."""
    result = sample((500, 900), names=[ODD, CUT], adamw=(100,), skipped_steps=3)
    result = replace(result, device='<"cpu">', precision="<p>&", versions={"<v>": "&1", "torch": "2.9.1"})
    result = changed(result, ODD, step=2, stale_ranks=(0, 1), state=Comparison(2e-3, 1e-6), cosine=0.25)
    return changed(result, ODD, step=2, against_fp64=Comparison(0.5, 1e-5), diagnosis="no <known> fault & more")


@pytest.fixture(scope="module")
def files(wrong: VerifyResult, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is written of it, without a display, under a style of the user's; the text of each file by its suffix."""
    import matplotlib

    folder = tmp_path_factory.mktemp("report") / "new" / "folder"
    styles = {"text.usetex": True, "savefig.bbox": "tight", "svg.fonttype": "path", "lines.linewidth": 9}
    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context(styles):
        patch.delenv("DISPLAY", raising=False)
        patch.setitem(sys.modules, "matplotlib.pyplot", None)
        paths = report.write_report(wrong, folder)
    assert paths == tuple(folder / name for name in ("updates.png", "updates.svg", "index.html"))
    png, *texts = paths
    assert png.read_bytes().startswith(b"\x89PNG")
    return {path.suffix: path.read_text(encoding="utf-8") for path in texts}


def cells(page: str) -> list[list[str]]:
    """The table's rows as texts; those that hold a diagnosis have one cell."""
    found = [
        re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.S) for row in re.findall(r"<tr.*?</tr>", page, flags=re.S)
    ]
    return [[" ".join(unescape(re.sub(r"<.*?>", " ", cell)).split()) for cell in row] for row in found]


def test_the_table_holds_every_number_worst_parameter_first(files: dict[str, str], wrong: VerifyResult) -> None:
    titles, first, diagnosis, second, third = cells(files[".html"].replace("<th", "<td").replace("</th>", "</td>"))
    assert dict(zip(titles, first, strict=True)) == {
        "parameter": ODD,
        "shape": f"25 {TIMES} 20",
        "half": "Muon",
        "holders": "rank 0 500",
        "owner": "0",
        "straddles": "no",
        "step": "2",
        "against fp64": "5.0e-01 / 1.0e-05",
        "cosine": "0.250000",
        "same dtype": "1.0e-08 / 1.0e-06",
        "gradient": "1.0e-08 / 1.0e-07",
        "state": "2.0e-03 / 1.0e-06",
        "stale ranks": "0, 1",
    }
    assert diagnosis == ["← no <known> fault & more"]
    assert [row[0] for row in (first, second, third)] == [r.name.replace(CUT, SHOWN) for r in wrong.worst()]
    assert second[3:6] == ["rank 0 200 rank 1 700", "1", "yes"]
    assert re.findall('class="off">([^<]*)<', files[".html"]) == ["5.0e-01", "2.0e-03"]


def test_the_page_tells_verdict_facts_versions_and_config(files: dict[str, str]) -> None:
    page = files[".html"]
    assert re.findall(r'<h1 style="color: var\(--alarm\)">(.*?)</h1>\n<p>(.*?)</p>', page) == [
        ("WRONG", "1 of 3 parameters wrong")
    ]
    facts = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert facts.pop("precision") == "&lt;p&gt;&amp;"
    assert facts == {
        "optimizer": "DSMuon",
        "ranks": "2 ranks on &lt;&#34;cpu&#34;&gt;",
        "steps": "2 steps checked (3 skipped by the engine)",
        "&lt;v&gt;": "&amp;1",
        "torch": "2.9.1",
    }
    assert "&lt;config &amp; more&gt;" in page


def test_the_picture_is_text_that_can_be_found_and_tells_all_of_a_row_under_the_pointer(files: dict[str, str]) -> None:
    svg = ElementTree.fromstring(files[".svg"])
    texts = ["".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {ODD, SHOWN, "adamw.0.weight", "← no <known> fault & more", "owner: rank 1"} <= set(texts)
    titles = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}title")]
    tip = "against fp64: 5.0e-01, tolerance 1.0e-05; against the same dtype: 1.0e-08, tolerance 1.0e-06"
    assert f"{ODD}: 500 elements on rank 0; {tip}; no <known> fault & more" in titles
    assert f"{SHOWN}: 200 elements on rank 0, 700 elements on rank 1" in titles
    assert files[".svg"].rindex("</text>") < files[".svg"].index("against fp64: 5.0e-01")  # nothing lies above it


def test_text_is_escaped_and_the_page_needs_nothing_else(files: dict[str, str]) -> None:
    page = files[".html"]
    for raw in ("<i>", "<known>", "<p>&", "<v>", "<config", '<"cpu">'):
        assert raw not in page
    for outside in ("<script", "<link", "<img", "<iframe", "<image", "src=", ' href="', "@import"):
        assert outside not in page
    assert all(place[0] == "#" for place in re.findall(r'(?:url\(|xlink:href=")([^")]*)', page))
    assert not re.search('(?<!xmlns=")(?<!xmlns:xlink=")https?:', page)


def test_the_page_follows_light_and_dark_mode_with_every_colour(files: dict[str, str]) -> None:
    light, dark = files[".html"].partition("</style>")[0].split("@media (prefers-color-scheme: dark)")
    for name, shades in picture.COLOURS.items():
        assert f"--{name}: {shades[0]};" in light and f"--{name}: {shades[1]};" in dark
    inside = files[".html"].partition("<svg")[2].partition("</svg>")[0]
    assert set(re.findall(r"var\(--(\w+)\)", inside)) >= {"paper", "ink", "alarm", "wash", "rank0", "rank1"}
    assert not re.search(r"(fill|stroke): #", inside)


def test_ranks_have_eight_different_colours_in_each_mode_and_none_is_another_part() -> None:
    for shades in zip(*picture.COLOURS.values(), strict=True):
        assert len(set(shades)) == len(picture.COLOURS)


def test_only_what_is_wrong_is_red(files: dict[str, str]) -> None:
    right = picture.svg_of(figure(sample((500, 900), adamw=(100,))))
    alarm, wash = (picture.COLOURS[part][0] for part in ("alarm", "wash"))
    for svg, red in ((right, False), (files[".svg"], True)):
        below_legend = svg.partition("out of tolerance")[2]
        assert (alarm in below_legend, wash in below_legend) == (red, red)
    assert "RIGHT: all updates of 3 parameters within tolerance" in right


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=re.escape("pip install 'ds-muon[plot]'")):
        report.write_report(sample(()), tmp_path)


# ---- cuts -----------------------------------------------------------------------------------------------------------


def test_the_strip_is_painted_as_zero_cut_it_over_padding() -> None:
    result = sample((500, 400), partition_size=600, adamw=())
    drawn = figure(result)
    assert boxes(drawn) == [(0, 1200, "faint"), (0, 600, "rank0"), (600, 300, "rank1")]
    assert boxes(drawn, 1) == [(0, 1200, "faint")]
    assert words(drawn, "padding") == [
        f"2 parameters in a flat buffer of 2 {TIMES} 600 elements, of them 300 padding",
        f"0 parameters in a flat buffer of 2 {TIMES} 600 elements, of them 1,200 padding",
    ]
    # 40 elements of alignment before the second one
    aligned = figure(changed(result, "muon.1.weight", cuts=((0, 60), (1, 340))))
    assert boxes(aligned)[2:] == [(540, 60, "rank0"), (600, 340, "rank1")]


def test_more_ranks_than_colours_start_over_and_labels_do_not_run_into_each_other() -> None:
    drawn = figure(sample([800] * 64, world_size=64, adamw=()))
    assert [colour for *_, colour in boxes(drawn)[1:10]] == [*(f"rank{i}" for i in range(8)), "rank0"]
    labels = [text.get_text() for text in drawn.axes[1].texts if text.get_ha() == "center"]
    assert labels == ["rank 0", *map(str, range(2, 64, 2))]


def test_what_travels_has_its_owner_and_what_is_cut_says_so() -> None:
    result = sample((300, 500, 700, 1500), world_size=3)
    result = changed(changed(result, "muon.0.weight", owner=2), "muon.2.weight", owner=None)
    said = words(figure(result), "weight$|^owner|^cut")
    assert said == [
        *("muon.0.weight", "owner: rank 2"),
        "muon.1.weight",
        *("muon.2.weight", "cut, owner not told"),
        *("muon.3.weight", "owner: rank 2"),
        *("adamw.0.weight", "cut, elementwise"),
        *("adamw.1.weight", "cut, elementwise"),
    ]


def test_empty_parameters_are_drawn_with_no_length() -> None:
    result = changed(sample((500, 0, 900)), "adamw.0.weight", cuts=((0, 0),), shape=(0,))
    drawn = figure(result)
    assert words(drawn, "weight$") == [r.name for r in result.records[:5]]
    assert boxes(drawn, 1)[1] == (0, 0, "rank0")


# ---- errors ---------------------------------------------------------------------------------------------------------


def places(result: VerifyResult) -> dict[str, float]:
    """Where the marks against fp64 stand, in decades."""
    scale = picture._LogAxis.over(rows_of(result))
    return {row.placed.name: scale.place(row.against_fp64.error) for row in rows_of(result)}


def test_marks_stand_at_the_logarithm_of_their_worst_error() -> None:
    result = changed(sample((600, 600), adamw=()), "muon.0.weight", step=2, against_fp64=Comparison(1e-6, 1e-6))
    assert places(result) == pytest.approx({"muon.0.weight": -6, "muon.1.weight": math.log10(2e-6)})
    axes = figure(result).axes[-2]
    against_fp64, same_dtype = (marks.get_offsets() for marks in axes.collections if len(marks.get_offsets()) == 2)
    assert list(against_fp64[:, 0]) == pytest.approx(list(places(result).values()))
    assert list(same_dtype[:, 0]) == pytest.approx([-8, -8])
    assert {"0", "10⁻⁸", "10⁻⁵"} <= {text.get_text() for text in axes.texts}


def test_zero_and_not_finite_errors_stand_at_their_edges() -> None:
    result = sample()
    for i, error in enumerate((0.0, nan, inf)):
        result = changed(result, f"muon.{i}.weight", against_fp64=Comparison(error, 1e-5))
    zero, a_nan, infinite, usual, *_ = places(result).values()
    assert zero < usual < a_nan == infinite
    assert words(figure(result), "nan|inf") == ["nan", "inf"]


def test_one_enormous_error_does_not_squeeze_the_others() -> None:
    usual, enormous = (changed(sample(), "muon.0.weight", against_fp64=Comparison(e, 1e-5)) for e in (inf, 1e30))
    assert places(usual)["muon.1.weight"] == places(enormous)["muon.1.weight"]


@pytest.mark.parametrize("error", [nan, inf, 0.0, 1e300, 5e-324])
@pytest.mark.parametrize("tolerance", [1e-5, 0.0, nan, inf])
def test_any_error_and_tolerance_has_a_place(error: float, tolerance: float) -> None:
    comparison = Comparison(error, tolerance)
    scale = picture._LogAxis.over(rows_of(changed(sample(), "muon.0.weight", against_fp64=comparison)))
    assert all(scale.zero <= scale.place(value) <= scale.beyond for value in (error, tolerance))
    assert 2 <= len(scale.ticks()) <= 10


def test_a_wrong_comparison_that_is_not_drawn_still_alarms() -> None:
    result = changed(sample(), "muon.1.weight", gradient=Comparison(0.3, 1e-7), diagnosis="gradient not averaged")
    said = words(figure(result), "gradient not averaged|WRONG")
    assert said == ["WRONG: 1 of 6 parameters wrong", "← gradient not averaged"]


# ---- verdict --------------------------------------------------------------------------------------------------------


def test_verdicts() -> None:
    def verdict(result: VerifyResult) -> tuple[str, str, str]:
        return rows.verdict_of(result, rows_of(result))

    assert verdict(sample()) == ("RIGHT", "all updates of 6 parameters within tolerance", "good")
    wrong = changed(sample(), "muon.1.weight", step=2, against_fp64=Comparison(1.0, 1e-5), diagnosis="something else")
    assert verdict(wrong) == ("WRONG", "1 of 6 parameters wrong", "alarm")
    assert verdict(sample(records=())) == ("NOTHING CHECKED", "no update was compared", "alarm")
    named = changed(wrong, "muon.1.weight", step=2, diagnosis=FAULTS["slice"].diagnosis)
    planted = [verdict(replace(result, fault="slice")) for result in (sample(), wrong, named)]
    assert [(word.partition(" the planted")[0], colour) for word, _, colour in planted] == [
        ("MISSED", "alarm"),
        ("NOT NAMED", "alarm"),
        ("FOUND", "good"),
    ]


# ---- many parameters ------------------------------------------------------------------------------------------------


def test_of_many_parameters_the_png_keeps_wrong_straddling_and_worst_ones_in_flat_order() -> None:
    result = sample([600] * 100, world_size=3, adamw=())
    result = changed(result, "muon.7.weight", against_same_dtype=Comparison(1.0, 1e-6), diagnosis="wrong transpose")
    result = changed(result, "muon.99.weight", against_fp64=Comparison(9e-6, 1e-5))
    drawn = figure(result)
    names = words(drawn, "^muon")
    straddling = [row.placed.name for row in rows_of(result) if row.placed.straddles]
    assert len(names) == 60 and len(straddling) == 2
    assert {"muon.7.weight", "muon.99.weight", *straddling} <= set(names)
    assert names == sorted(names, key=lambda name: int(name.split(".")[1]))
    (note,) = words(drawn, "more, all right")
    assert note == "40 more, all right and each held by one rank, are not drawn; index.html shows them."
    wrong = replace(result, records=tuple(replace(r, stale_ranks=(1,)) for r in result.records))
    assert len(selected_rows(rows_of(wrong), 60)) == 100


def test_long_names_keep_their_end() -> None:
    name = "model." + "very_long_module_name." * 5 + "attn.q.weight"
    (shown,) = words(figure(sample((600,), names=[name], adamw=())), "weight$")
    assert shown.endswith("attn.q.weight") and len(shown) == 44
