"""``ds_muon.report``: the picture and the page say what the records say, whatever the records hold."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ds_muon import report
from ds_muon.report import layout
from ds_muon.report import page as page_module
from ds_muon.verify.inject import FAULTS
from ds_muon.verify.record import Comparison, UpdateRecord, VerifyResult

nan, inf = math.nan, math.inf
VOID = {"meta", "br"}


def sample(
    elements: Sequence[int] = (600, 600, 800, 400),
    *,
    world_size: int = 2,
    names: Sequence[str] = (),
    adamw: Sequence[int] = (100, 60),
    partition_size: int | None = None,
    **of_result: Any,
) -> VerifyResult:
    """A right result of two steps: matrices of so many ``elements``, one after another, then the AdamW half."""
    records: list[UpdateRecord] = []
    sizes = []
    for group, (half, numels) in enumerate((("muon", elements), ("adamw", adamw))):
        size = partition_size or max(1, -(-sum(numels) // world_size))
        sizes.append(size)
        start = 0
        for i, numel in enumerate(numels):
            end = start + numel
            holders = range(start // size, (end - 1) // size + 1) if numel else ()
            cuts = tuple((rank, min(end, (rank + 1) * size) - max(start, rank * size)) for rank in holders)
            name = names[i] if half == "muon" and i < len(names) else f"{half}.{i}.weight"
            shape = (numel // 20, 20) if half == "muon" else (numel,)
            owner = cuts[-1][0] if half == "muon" and cuts else None
            records.append(record(name, shape=shape, half=half, group=group, cuts=cuts, owner=owner))
            start = end
    result = VerifyResult(
        optimizer="DSMuon",
        device="cpu",
        world_size=world_size,
        precision="fp32 model, fp32 sums, standard in fp32, fp32 momentum",
        steps=2,
        skipped_steps=0,
        partition_sizes=tuple(sizes),
        config={"optimizer": {"type": "DSMuon"}, "note": "<config & more>"},
        versions={"ds_muon": "0.1.0", "deepspeed": "0.19.8", "torch": "2.9.1"},
        records=tuple(replace(r, step=step) for step in (1, 2) for r in records),
    )
    return replace(result, **of_result)


def record(name: str, **values: Any) -> UpdateRecord:
    defaults: dict[str, Any] = {
        "step": 1,
        "shape": (30, 20),
        "half": "muon",
        "group": 0,
        "cuts": ((0, 600),),
        "owner": 0,
        "against_fp64": Comparison(2e-6, 1e-5),
        "cosine": 1.0,
        "against_same_dtype": Comparison(1e-8, 1e-6),
        "gradient": Comparison(1e-8, 1e-7),
        "state": None,
    }
    return UpdateRecord(name=name, **{**defaults, **values})


def changed(result: VerifyResult, name: str, *, step: int | None = None, **values: Any) -> VerifyResult:
    """``result`` with other values in the records of one parameter, of one step or of all."""
    assert any(r.name == name for r in result.records)
    records = (replace(r, **values) if r.name == name and step in (None, r.step) else r for r in result.records)
    return replace(result, records=tuple(records))


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    title: str = ""
    inside: set[str] = field(default_factory=set)

    def number(self, name: str) -> float:
        return float(self.attributes[name] or "nan")


class Page(HTMLParser):
    """Every element of a page with its text; asserts that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.open: list[Element] = []
        self.feed(text)
        self.close()
        assert not self.open, [element.tag for element in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), inside={parent.tag for parent in self.open})
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs), inside={parent.tag for parent in self.open}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1].tag == "title" and len(self.open) > 1:
            self.open[-2].title += data
        elif self.open:
            self.open[-1].text += data

    def of(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    def texts(self, pattern: str) -> list[str]:
        """Of the picture."""
        return [e.text for e in self.of("text") if re.search(pattern, e.text)]

    def pieces(self, name: str) -> tuple[list[Element], list[Element]]:
        """The boxes of a parameter: in the strip, and in its row."""
        boxes = [e for e in self.of("rect") if e.title.startswith(f"{name}: ")]
        half = len(boxes) // 2
        return boxes[:half], boxes[half:]

    def mark(self, name: str, reference: str = "fp64") -> Element:
        (found,) = (e for e in self.elements if e.title.startswith(f"{name} against {reference}: "))
        return found


def page(result: VerifyResult) -> Page:
    return Page(report.html_page(result))


def table_column(result: VerifyResult, column: int) -> list[str]:
    """The cells of one column, as text; rows that hold a diagnosis left out."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", report.html_page(result), flags=re.S)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.S) for row in rows]
    return [unescape(re.sub(r"<.*?>", "", row[column])) for row in cells if len(row) > 1]


def pixels_by_colour(path: Path) -> dict[str, int]:
    """How many pixels of a PNG file have each of the colours that the report knows."""
    image = pytest.importorskip("matplotlib.image").imread(path)
    packed = (image[..., :3] * 255).round().astype("uint32") @ [1 << 16, 1 << 8, 1]
    return {name: int((packed == int(light[1:], 16)).sum()) for name, (light, _) in layout.COLOURS.items()}


# ---- files ----------------------------------------------------------------------------------------------------------


def test_report_writes_a_picture_and_a_page_into_a_new_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, html = report.write_report(sample(), tmp_path / "new" / "folder")
    assert (picture, html) == (tmp_path / "new/folder/updates.png", tmp_path / "new/folder/index.html")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert html.read_text(encoding="utf-8") == report.html_page(sample())


@pytest.mark.parametrize("world_size", range(1, 9))
def test_picture_has_the_colour_of_every_rank_and_of_no_other(tmp_path: Path, world_size: int) -> None:
    report_of = sample([800] * world_size, world_size=world_size)
    pytest.importorskip("matplotlib")
    report.draw_updates(report_of, tmp_path / "updates.png")
    pixels = pixels_by_colour(tmp_path / "updates.png")
    for rank in range(8):
        assert (pixels[f"rank{rank}"] > 1000) == (rank < world_size), rank


def test_only_a_wrong_parameter_brings_the_alarm_into_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    right = sample()
    wrong = changed(right, "muon.1.weight", against_fp64=Comparison(0.5, 1e-5), diagnosis="wrong transpose")
    pixels = {}
    for name, result in (("right", right), ("wrong", wrong)):
        report.draw_updates(result, tmp_path / name)
        pixels[name] = pixels_by_colour(tmp_path / name)
    assert pixels["right"]["wash"] == 0 and pixels["wrong"]["wash"] > 1000
    assert pixels["wrong"]["alarm"] > pixels["right"]["alarm"] + 1000  # the key has a mark in it
    assert pixels["right"]["good"] > 100 and pixels["wrong"]["good"] == 0


def test_missing_matplotlib_says_what_to_install_and_leaves_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'ds-muon[plot]'")):
        report.write_report(sample(), tmp_path)
    assert "muon.0.weight" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not (tmp_path / "updates.png").exists()


def test_a_style_of_the_user_neither_breaks_nor_changes_the_picture(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    report.draw_updates(sample(), tmp_path / "plain.png")
    with matplotlib.rc_context({"text.usetex": True, "savefig.bbox": "tight", "savefig.dpi": 30, "lines.linewidth": 9}):
        report.draw_updates(sample(), tmp_path / "styled.png")
    assert (tmp_path / "styled.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


# ---- the page -------------------------------------------------------------------------------------------------------


def test_page_is_well_formed_and_needs_nothing_else() -> None:
    text = report.html_page(sample())
    assert {e.tag for e in page(sample()).elements} >= {"html", "svg", "table", "details", "pre", "style"}
    for outside in ("<script", "<link", "<img", "<iframe", "src=", "href=", "http", "@import"):
        assert outside not in text
    assert re.findall(r"url\((.*?)\)", text) == ["#hatch"]


def test_page_follows_light_and_dark_mode_with_every_colour() -> None:
    css = page(sample()).of("style")[0].text
    light, dark = css.split("@media (prefers-color-scheme: dark)", 1)
    for name, shades in layout.COLOURS.items():
        assert f"--{name}: {shades[0]};" in light
        assert f"--{name}: {shades[1]};" in dark
    used = {c for e in page(sample()).elements if "svg" in e.inside for c in (e.attributes.get("class") or "").split()}
    assert used <= {*layout.COLOURS, "padding", "bold", "mono"}


def test_text_is_escaped_in_picture_and_table() -> None:
    name, diagnosis = "a<b&c.weight", "no <known> fault & more"
    result = changed(sample(names=[name]), name, against_fp64=Comparison(1.0, 1e-5), diagnosis=diagnosis)
    result = replace(result, device='<"cpu">', precision="<p>&", versions={"<v>": "&1"}, optimizer="<Opt>")
    text, parsed = report.html_page(result), page(result)
    for raw in (name, diagnosis, '<"cpu">', "<p>&", "<v>", "<Opt>", "<config"):
        assert raw not in text
    assert parsed.texts("weight")[0] == name
    assert [e.text for e in parsed.of("td") if e.text.startswith("a<")] == [name]
    assert sum(diagnosis in e.text for e in parsed.elements) == 2
    assert "<config & more>" in parsed.of("pre")[0].text


def test_every_parameter_stands_in_the_picture_in_flat_order_and_in_the_table_worst_first() -> None:
    result = changed(sample(), "muon.2.weight", against_fp64=Comparison(9e-6, 1e-5))
    result = changed(result, "adamw.1.weight", step=2, against_fp64=Comparison(8e-6, 1e-5))
    assert page(result).texts("weight$") == [r.name for r in result.records[:6]]
    assert table_column(result, 0) == [r.name for r in result.worst()]
    assert table_column(result, 0)[:2] == ["muon.2.weight", "adamw.1.weight"]


def test_table_tells_holders_owner_and_comparisons() -> None:
    result = changed(
        sample(), "muon.1.weight", state=Comparison(2e-3, 1e-6), cosine=0.25, stale_ranks=(0, 1), diagnosis="stale rank"
    )
    result = changed(result, "muon.1.weight", cuts=((0, 400), (1, 200)), owner=1)
    columns = [title for title, _ in page_module.COLUMNS]
    first = {title: table_column(result, i)[0] for i, title in enumerate(columns)}
    assert first == {
        "parameter": "muon.1.weight",
        "shape": "30 \N{MULTIPLICATION SIGN} 20",
        "half": "Muon",
        "holders": "rank 0 400rank 1 200",
        "owner": "1",
        "straddles": "yes",
        "step": "1",
        "against fp64": "2.0e-06 / 1.0e-05",
        "cosine": "0.250000",
        "same dtype": "1.0e-08 / 1.0e-06",
        "gradient": "1.0e-08 / 1.0e-07",
        "state": "2.0e-03 / 1.0e-06",
        "stale ranks": "0, 1",
    }
    assert [e.text for e in page(result).of("span") if e.attributes["class"] == "off"] == ["2.0e-03"]


def test_versions_and_facts_are_told() -> None:
    entries = [e.text for e in page(sample(skipped_steps=3)).of("dd")]
    assert {"0.1.0", "0.19.8", "2.9.1", "DSMuon", "2 ranks on cpu"} <= set(entries)
    assert "2 steps checked (3 skipped by the engine)" in entries


# ---- cuts -----------------------------------------------------------------------------------------------------------


def test_pieces_are_as_long_as_their_share_in_strip_and_row() -> None:
    parsed = page(sample((500, 1000, 900)))
    strip, row = parsed.pieces("muon.1.weight")
    width, bar = layout.RIGHT - layout.LEFT, layout.BAR_END - layout.BAR
    assert [box.number("width") for box in strip] == pytest.approx([width * 700 / 2400, width * 300 / 2400], abs=0.01)
    assert strip[0].number("x") == pytest.approx(layout.LEFT + width * 500 / 2400, abs=0.01)
    assert [box.number("width") for box in row] == pytest.approx([bar * 0.7, bar * 0.3], abs=0.01)
    assert [box.attributes["class"] for box in strip] == [box.attributes["class"] for box in row] == ["rank0", "rank1"]
    assert [box.title for box in row] == [f"muon.1.weight: {n} elements on rank {i}" for i, n in ((0, 700), (1, 300))]


def test_padding_is_what_no_parameter_covers() -> None:
    parsed = page(sample((500, 400), partition_size=600, adamw=()))
    assert parsed.texts("padding") == [
        "2 parameters in a flat buffer of 2 \N{MULTIPLICATION SIGN} 600 elements, of them 300 padding",
        "0 parameters in a flat buffer of 2 \N{MULTIPLICATION SIGN} 600 elements, of them 1,200 padding",
    ]
    hatched = next(e for e in parsed.of("rect") if e.attributes["class"] == "padding")
    (_, last), _ = parsed.pieces("muon.1.weight")
    covered = last.number("x") + last.number("width") - hatched.number("x")
    assert covered / hatched.number("width") == pytest.approx(900 / 1200, abs=1e-4)


def test_a_straddling_parameter_meets_its_boundary_though_padding_lies_before_it() -> None:
    result = sample((500, 400), partition_size=600, adamw=())
    result = changed(result, "muon.1.weight", cuts=((0, 60), (1, 340)))  # 40 elements of alignment before it
    (first, second), _ = page(result).pieces("muon.1.weight")
    middle = (layout.LEFT + layout.RIGHT) / 2
    assert second.number("x") == pytest.approx(middle, abs=0.01)
    assert first.number("width") == pytest.approx((layout.RIGHT - layout.LEFT) * 60 / 1200, abs=0.01)


def test_only_straddling_matrices_are_marked_with_their_owner() -> None:
    parsed = page(sample((500, 1000, 900)))
    assert parsed.texts("^owner:") == ["owner: rank 1"]
    assert parsed.texts("^cut") == ["cut, elementwise"]  # of the AdamW half
    untold = changed(sample((500, 1000, 900)), "muon.1.weight", owner=None)
    assert page(untold).texts("^owner:") == []
    assert page(untold).texts("^cut") == ["cut, owner not told", "cut, elementwise"]


def test_a_whole_matrix_is_marked_with_an_owner_that_does_not_hold_it() -> None:
    whole = next(r for r in sample().records if r.half == "muon" and not r.straddles)
    other = 1 - whole.holders[0]
    assert not whole.travels and replace(whole, owner=other).travels and not replace(whole, owner=None).travels
    before = page(sample()).texts("^owner:")
    after = page(changed(sample(), whole.name, owner=other)).texts("^owner:")
    assert sorted(after) == sorted([*before, f"owner: rank {other}"])


def test_one_rank_cuts_nothing(tmp_path: Path) -> None:
    result = sample(world_size=1)
    parsed = page(result)
    assert parsed.texts("^(owner|cut)") == []
    assert parsed.texts("^rank ") == ["rank 0", "rank 0"]
    pytest.importorskip("matplotlib")
    report.draw_updates(result, tmp_path / "updates.png")


def test_more_ranks_than_colours_start_over_and_stay_labelled() -> None:
    parsed = page(sample([800] * 20, world_size=20))
    classes = [parsed.pieces(f"muon.{i}.weight")[1][0].attributes["class"] for i in range(20)]
    assert classes[:8] == [f"rank{i}" for i in range(8)] and classes[8:16] == classes[:8]
    assert len(parsed.texts(r"^(rank )?\d+$")) >= 2 * 20


def test_labels_of_narrow_partitions_do_not_run_into_each_other() -> None:
    parsed = page(sample([800] * 256, world_size=256, adamw=()))
    places = [e.number("x") for e in parsed.of("text") if re.fullmatch(r"rank 0|\d{1,3}", e.text) and e.text != "0"]
    first = places[: len(places) // 2]
    assert len(first) > 10
    assert min(b - a for a, b in pairwise(first)) >= 26


def test_ranks_have_eight_different_colours_in_each_mode() -> None:
    for mode in (0, 1):
        ranks = {shades[mode] for name, shades in layout.COLOURS.items() if name.startswith("rank")}
        assert len(ranks) == 8
        assert layout.COLOURS["alarm"][mode] not in ranks


def test_empty_parameters_are_drawn_with_no_length(tmp_path: Path) -> None:
    result = sample((500, 0, 900))
    result = changed(result, "adamw.0.weight", cuts=((0, 0),), shape=(0,))
    parsed = page(result)
    assert parsed.pieces("muon.1.weight") == ([], [])
    assert [box.number("width") for box in parsed.pieces("adamw.0.weight")[1]] == [0]
    pytest.importorskip("matplotlib")
    report.draw_updates(result, tmp_path / "updates.png")


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_marks_stand_at_the_logarithm_of_their_error() -> None:
    result = sample((600,) * 4)
    for i, error in enumerate((1e-6, 1e-5, 1e-4, 1e-3)):
        result = changed(result, f"muon.{i}.weight", against_fp64=Comparison(error, 1e-2))
    places = [page(result).mark(f"muon.{i}.weight").number("cx") for i in range(4)]
    steps = [b - a for a, b in pairwise(places)]
    assert steps[0] > 10
    assert steps == pytest.approx([steps[0]] * 3, abs=0.02)


def test_the_worst_step_is_drawn() -> None:
    result = changed(sample(), "muon.0.weight", step=2, against_fp64=Comparison(7e-6, 2e-5))
    result = changed(result, "muon.0.weight", step=1, against_same_dtype=Comparison(3e-7, 1e-6))
    parsed = page(result)
    assert parsed.mark("muon.0.weight").title == "muon.0.weight against fp64: 7.0e-06, tolerance 2.0e-05"
    assert "3.0e-07" in parsed.mark("muon.0.weight", "the same dtype").title


@pytest.mark.parametrize("error", [nan, inf, 0.0, 1e300, 5e-324])
@pytest.mark.parametrize("tolerance", [1e-5, 0.0, nan, inf])
def test_any_error_and_tolerance_is_drawn_inside_the_picture(tmp_path: Path, error: float, tolerance: float) -> None:
    comparison = Comparison(error, tolerance)
    result = changed(sample(), "muon.0.weight", against_fp64=comparison, against_same_dtype=comparison)
    for parsed in (page(result), page(sample((600,), adamw=(), records=result.records[:1]))):
        xs = [e.number(k) for e in parsed.elements for k in ("x", "x1", "x2", "cx") if k in e.attributes]
        assert all(0 <= x <= layout.WIDTH for x in xs)
    pytest.importorskip("matplotlib")
    report.draw_updates(result, tmp_path / "updates.png")


def test_zero_and_not_finite_errors_stand_at_their_edges_with_a_label() -> None:
    result = changed(sample(), "muon.0.weight", against_fp64=Comparison(0.0, 1e-5))
    result = changed(result, "muon.1.weight", against_fp64=Comparison(nan, 1e-5))
    result = changed(result, "muon.2.weight", against_fp64=Comparison(inf, 1e-5))
    parsed = page(result)
    zero, a_nan, infinite, usual = (parsed.mark(f"muon.{i}.weight") for i in range(4))
    assert zero.number("cx") < usual.number("cx") < a_nan.number("cx") == infinite.number("cx")
    (label,) = (e for e in parsed.of("text") if e.text == "0" and e.number("x") == zero.number("cx"))
    assert label.attributes["text-anchor"] == "middle"
    for mark, word in ((a_nan, "nan"), (infinite, "inf")):
        (label,) = (e for e in parsed.of("text") if e.text == word)
        assert abs(label.number("y") - mark.number("cy")) < 6


def test_one_enormous_error_does_not_squeeze_the_others() -> None:
    usual = changed(sample(), "muon.0.weight", against_fp64=Comparison(inf, 1e-5))
    enormous = changed(sample(), "muon.0.weight", against_fp64=Comparison(1e30, 1e-5))
    places = [page(result).mark("muon.1.weight").number("cx") for result in (usual, enormous)]
    assert places[0] == places[1]
    assert page(enormous).texts(r"^1\.0e\+30$") == ["1.0e+30"]


def test_halves_are_told_apart_by_mark_and_title() -> None:
    parsed = page(sample())
    assert parsed.mark("muon.0.weight").tag == "circle"
    assert parsed.mark("adamw.0.weight").tag == "polygon"
    assert parsed.texts("param group") == ["Muon: param group 0", "AdamW: param group 1"] * 2


def test_a_wrong_comparison_that_is_not_drawn_still_alarms() -> None:
    result = changed(sample(), "muon.1.weight", gradient=Comparison(0.3, 1e-7), diagnosis="gradient not averaged")
    parsed = page(result)
    assert parsed.texts("gradient not averaged")
    (name,) = (e for e in parsed.of("text") if e.text == "muon.1.weight")
    assert "alarm" in (name.attributes["class"] or "").split()
    assert parsed.mark("muon.1.weight").attributes["class"] == "ink"
    assert parsed.of("h1")[0].text == "WRONG"


# ---- verdict --------------------------------------------------------------------------------------------------------


def test_verdict_of_a_plain_run() -> None:
    def heading(result: VerifyResult) -> tuple[str, str]:
        parsed = page(result)
        return parsed.of("h1")[0].text, parsed.of("p")[0].text

    assert heading(sample()) == ("RIGHT", "all updates of 6 parameters within tolerance")
    wrong = changed(sample(), "muon.1.weight", step=2, against_fp64=Comparison(1.0, 1e-5))
    assert heading(wrong) == ("WRONG", "1 of 6 parameters wrong")
    assert heading(sample(records=())) == ("NOTHING CHECKED", "no update was compared")


def test_verdict_on_a_planted_fault() -> None:
    def heading(result: VerifyResult) -> str:
        return page(result).of("h1")[0].text

    planted = sample(fault="slice")
    wrong = changed(planted, "muon.1.weight", against_fp64=Comparison(1.0, 1e-5), diagnosis="something else")
    assert heading(planted) == "MISSED the planted fault slice"
    assert heading(wrong) == "NOT NAMED the planted fault slice"
    named = changed(wrong, "muon.1.weight", diagnosis=FAULTS["slice"].diagnosis)
    assert heading(named) == "FOUND the planted fault slice"


# ---- many parameters ------------------------------------------------------------------------------------------------


def hundred() -> VerifyResult:
    """100 matrices, two of them cut, one wrong, and one that is the worst of the right ones."""
    result = sample([600] * 100, world_size=3, adamw=())
    result = changed(result, "muon.7.weight", against_same_dtype=Comparison(1.0, 1e-6), diagnosis="wrong transpose")
    return changed(result, "muon.99.weight", against_fp64=Comparison(9e-6, 1e-5))


def test_of_many_parameters_the_picture_keeps_wrong_straddling_and_worst_ones_in_flat_order() -> None:
    rows = layout.rows_of(hundred())
    shown = layout.selected_rows(rows, 60)
    names = [row.placed.name for row in shown]
    straddling = [row.placed.name for row in rows if row.placed.straddles]
    assert len(names) == 60 and len(straddling) == 2
    assert {"muon.7.weight", "muon.99.weight", *straddling} <= set(names)
    assert shown == [row for row in rows if row.placed.name in names]
    picture = layout.picture_of(hundred(), rows, shown, heading=True)
    text = [shape.text for shape in picture.shapes if isinstance(shape, layout.Words)]
    assert sum(t.startswith("muon.") for t in text) == 60
    assert any(t.startswith("40 more") for t in text)


def test_no_wrong_parameter_is_left_out_however_many() -> None:
    result = sample([600] * 100, adamw=())
    wrong = replace(result, records=tuple(replace(r, stale_ranks=(1,)) for r in result.records))
    assert len(layout.selected_rows(layout.rows_of(wrong), 60)) == 100


def test_page_shows_all_of_many_parameters_and_the_picture_can_be_drawn(tmp_path: Path) -> None:
    names = [f"muon.{i}.weight" for i in range(100)]
    parsed = page(hundred())
    assert parsed.texts("weight$") == names
    assert sorted(table_column(hundred(), 0)) == sorted(names)
    assert parsed.texts("more, all right") == []
    pytest.importorskip("matplotlib")
    report.draw_updates(hundred(), tmp_path / "updates.png")


def test_long_names_keep_their_end_and_dollars_are_no_formula(tmp_path: Path) -> None:
    long = "model." + "very_long_module_name." * 5 + "attn.q.weight"
    result = sample(names=[long, r"a$\frac$b"])
    shown = page(result).texts("weight$")[0]
    assert shown.endswith("attn.q.weight") and len(shown) == layout.NAME_CHARACTERS
    assert long in table_column(result, 0)
    pytest.importorskip("matplotlib")
    report.draw_updates(result, tmp_path / "updates.png")
