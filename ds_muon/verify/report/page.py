"""The report as one HTML page: the picture as SVG, the facts, and every number in a table."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from ds_muon.text import number
from ds_muon.verify.record import VerifyResult
from ds_muon.verify.report.picture import COLOURS, HEADING, rank_colour
from ds_muon.verify.report.rows import Row, facts_of, half_name, shape_text, verdict_of


def html_page(result: VerifyResult, rows: Sequence[Row], svg: str) -> str:
    """The page, from ``page.html.j2``; ``svg`` is the picture of all ``rows``.

    Raises:
        ImportError: jinja2 is missing.
    """
    word, sentence, colour = verdict_of(result, rows)
    return rendered(
        "page.html.j2",
        result=result,
        word=word,
        sentence=sentence,
        colour=colour,
        facts=facts_of(result) | result.versions,
        config=json.dumps(result.config, indent=2, default=str),
        svg=inline(svg, "Flat buffers cut into partitions, and the error of every parameter's update", HEADING - 8),
    )


def rendered(template: str, **values: object) -> str:
    """The page of a template in this folder, with ``values`` escaped.

    Raises:
        ImportError: jinja2 is missing.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("ds_muon.verify.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"number": number, "shape": shape_text, "half": half_name, "rank_colour": rank_colour}
    return templates.get_template(template).render(colours=COLOURS, **values)


def inline(svg: str, label: str, top: float = 0.0) -> str:
    """A picture as part of a page: in the colours of the reader's mode, and without what is above ``top``."""
    variables = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
    inside = svg[svg.index("<svg") :]
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', inside)
    assert size is not None
    width, height = map(float, size.groups())
    opening = f'<svg viewBox="0 {top:g} {width:g} {height - top:g}" role="img" aria-label="{label}">'
    inside = re.sub(
        r"(fill|stroke): (#\w{6})", lambda found: f"{found[1]}: {variables.get(found[2], found[2])}", inside
    )
    return re.sub(r"<svg .*?>", lambda _: opening, inside, count=1, flags=re.S)
