"""The report as one HTML page: the picture as SVG, the facts, and every number in a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape

from ds_muon.report.layout import (
    COLOURS,
    WIDTH,
    Line,
    Mark,
    Picture,
    Shape,
    Words,
    facts_of,
    half_name,
    number_text,
    picture_of,
    rank_colour,
    rows_of,
    shape_text,
    verdict_of,
)
from ds_muon.verify.record import Comparison, UpdateRecord, VerifyResult


def _svg(picture: Picture) -> str:
    hatch = (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" class="faint"/><rect width="1.2" height="6" class="muted"/></pattern></defs>'
    )
    size = f'viewBox="0 0 {WIDTH:g} {picture.height:g}" width="{WIDTH:g}" height="{picture.height:g}"'
    label = "Flat buffers cut into partitions, and the error of every parameter's update"
    shapes = "\n".join(map(_element, picture.shapes))
    return f'<svg {size} role="img" aria-label="{escape(label)}">\n{hatch}\n{shapes}\n</svg>'


def _element(shape: Shape) -> str:
    if isinstance(shape, Line):
        ends = f'x1="{shape.x1:.2f}" y1="{shape.y1:.2f}" x2="{shape.x2:.2f}" y2="{shape.y2:.2f}"'
        return f'<line {ends} stroke-width="{shape.width:g}" class="{shape.colour}"/>'
    title = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
    if isinstance(shape, Words):
        classes = " ".join([shape.colour, *(["bold"] if shape.bold else []), *(["mono"] if shape.mono else [])])
        place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" text-anchor="{shape.anchor}"'
        return f'<text {place} class="{classes}">{escape(shape.text)}{title}</text>'
    if isinstance(shape, Mark):
        if shape.half == "muon":
            place = f'cx="{shape.x:.2f}" cy="{shape.y:.2f}" r="{shape.radius:g}"'
            return f'<circle {place} class="{shape.colour}">{title}</circle>'
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.diamond)
        return f'<polygon points="{points}" class="{shape.colour}">{title}</polygon>'
    place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
    return f'<rect {place} class="{shape.colour}">{title}</rect>'


# ---- the page -------------------------------------------------------------------------------------------------------

_CSS = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.75rem 4rem; max-width: 82rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; letter-spacing: -.01em; }
h2 { margin: 3rem 0 .4rem; font-size: 1.1rem; }
p { margin: .3rem 0; max-width: 52rem; }
.note { color: var(--muted); }
.alarm-text { color: var(--alarm); } .good-text { color: var(--good); }
.scroll { overflow-x: auto; margin: 1rem 0; }
svg { display: block; font-family: inherit; }
.mono, code, pre, td.name { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
svg .bold { font-weight: 600; }
rect { shape-rendering: crispEdges; }
.padding { fill: url(#hatch); }
table { border-collapse: collapse; width: 100%; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th { padding: .35rem .45rem; border-bottom: 1.5px solid var(--muted); color: var(--muted); font-weight: 500;
  text-align: left; vertical-align: bottom; }
td { padding: .3rem .45rem; border-top: 1px solid var(--faint); vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { padding-left: .5rem; }
th.number, td.number { text-align: right; }
td.name { font-size: 12px; }
td small { color: var(--muted); font-size: inherit; }
tr.wrong td { background: var(--wash); }
tr.wrong td.name, td .off, td.diagnosis { color: var(--alarm); }
tr.wrong td.name, td .off { font-weight: 600; }
td.diagnosis { border-top: 0; padding-top: 0; white-space: normal; }
.swatch { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .35em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.5rem; margin: 1rem 0; }
dt { color: var(--muted); } dd { margin: 0; }
details { margin: .8rem 0; } summary { cursor: pointer; }
pre { padding: 1rem; border: 1px solid var(--faint); border-radius: 6px; font-size: 12.5px; overflow-x: auto; }
"""


def html_page(result: VerifyResult) -> str:
    """One HTML page that needs nothing else: no script, no other file."""
    rows = rows_of(result)
    word, sentence, colour = verdict_of(result, rows)
    picture = _svg(picture_of(result, rows, rows, heading=False))
    versions = {name: str(version) for name, version in result.versions.items()}
    config = json.dumps(result.config, indent=2, default=str)
    facts = dict(zip(("optimizer", "ranks", "precision", "steps"), facts_of(result), strict=True))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(f"{word} · {result.optimizer} · ds-muon verify")}</title>
<style>{_colour_css()}{_CSS}</style>
</head>
<body>
<header>
<h1 class="{colour}-text">{escape(word)}</h1>
<p>{escape(sentence)}</p>
{_definitions(facts | versions)}
</header>
<section>
<h2>Where ZeRO cut the model, and how exact the updates were</h2>
<p class="note">Each strip is the flat buffer of a param group, cut into one partition per rank. A stroke above it marks
a parameter that lies across a boundary. The errors below are those of the worst step: relative, on a logarithmic axis,
each to be left of the tick of its tolerance. What is wrong is red, with its diagnosis below.</p>
<div class="scroll">
{picture}
</div>
</section>
<section>
<h2>Every parameter in its worst step, worst first</h2>
<p class="note">Errors are relative, each beside its tolerance.</p>
<div class="scroll">
{_table(result)}
</div>
</section>
<section>
<h2>DeepSpeed config</h2>
<details>
<summary>Show</summary>
<pre>{escape(config)}</pre>
</details>
</section>
</body>
</html>
"""


def _colour_css() -> str:
    """Variables for both modes, and for each colour a class that fills shapes and strokes lines with it."""
    light, dark = ("".join(f" --{name}: {shades[mode]};" for name, shades in COLOURS.items()) for mode in range(2))
    classes = "\n".join(
        f"svg .{name} {{ fill: var(--{name}); }} line.{name} {{ stroke: var(--{name}); }} "
        f".swatch.{name} {{ background: var(--{name}); }}"
        for name in COLOURS
    )
    return f"\n:root {{{light} }}\n@media (prefers-color-scheme: dark) {{ :root {{{dark} }} }}\n{classes}"


def _definitions(entries: Mapping[str, str]) -> str:
    lines = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries.items())
    return f"<dl>\n{lines}\n</dl>"


# Titles of the table, and whether their cells are numbers.
COLUMNS = (
    ("parameter", False),
    ("shape", False),
    ("half", False),
    ("holders", False),
    ("owner", False),
    ("straddles", False),
    ("step", True),
    ("against fp64", True),
    ("cosine", True),
    ("same dtype", True),
    ("gradient", True),
    ("state", True),
    ("stale ranks", False),
)


def _table(result: VerifyResult) -> str:
    titles = "".join(f'<th scope="col"{_class(number)}>{title}</th>' for title, number in COLUMNS)
    body = "\n".join(_table_rows(record) for record in result.worst())
    return f"<table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _table_rows(record: UpdateRecord) -> str:
    """A row of the table and, if it is wrong, one more for the diagnosis."""
    name, *others = _cells(record)
    cells = "".join(f"<td{_class(number)}>{cell}</td>" for cell, (_, number) in zip(others, COLUMNS[1:], strict=True))
    row = f'<td class="name">{name}</td>{cells}'
    if record.ok:
        return f"<tr>{row}</tr>"
    diagnosis = escape(f"← {record.diagnosis or 'no diagnosis'}")
    return (
        f'<tr class="wrong">{row}</tr>\n'
        f'<tr class="wrong"><td class="diagnosis" colspan="{len(COLUMNS)}">{diagnosis}</td></tr>'
    )


def _class(number: bool) -> str:
    return ' class="number"' if number else ""


def _cells(record: UpdateRecord) -> list[str]:
    """HTML of every column of the table."""
    return [
        escape(record.name),
        shape_text(record),
        escape(half_name(record)),
        "<br>".join(
            f'<span class="swatch {rank_colour(rank)}"></span>rank {rank} <small>{elements:,}</small>'
            for rank, elements in record.cuts
        ),
        "-" if record.owner is None else str(record.owner),
        "yes" if record.straddles else "no",
        str(record.step),
        _compared(record.against_fp64),
        f"{record.cosine:.6f}",
        _compared(record.against_same_dtype),
        _compared(record.gradient),
        _compared(record.state),
        ", ".join(map(str, record.stale_ranks)) or "-",
    ]


def _compared(comparison: Comparison | None) -> str:
    if comparison is None:
        return "-"
    error = number_text(comparison.error)
    error = error if comparison.ok else f'<span class="off">{error}</span>'
    return f"{error} <small>/ {number_text(comparison.tolerance)}</small>"
