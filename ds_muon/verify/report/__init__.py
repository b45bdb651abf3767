"""The report of `ds-muon verify --report`: where ZeRO cut the model, and how exact each update was."""

from __future__ import annotations

from pathlib import Path

from ds_muon.extras import how_to_install
from ds_muon.files import write_text
from ds_muon.verify.record import VerifyResult
from ds_muon.verify.report.page import html_page
from ds_muon.verify.report.picture import figure_of, svg_of, write_png
from ds_muon.verify.report.rows import rows_of, selected_rows, with_printable_names

__all__ = ["FILES", "write_report"]

FILES = ("updates.png", "updates.svg", "index.html")
ROWS_IN_PNG = 60


def write_report(result: VerifyResult, folder: Path) -> tuple[Path, Path, Path]:
    """Write ``updates.png``, ``updates.svg`` and ``index.html`` into ``folder``, which is made if need be.

    The PNG file shows at most ``ROWS_IN_PNG`` parameters, and all that are wrong or cut; the others show all.

    Returns:
        The three paths.

    Raises:
        ImportError: matplotlib or jinja2 is missing.
    """
    result = with_printable_names(result)
    rows = rows_of(result)
    selected = selected_rows(rows, ROWS_IN_PNG)
    try:
        figure = figure_of(result, rows, rows)
        svg = svg_of(figure)
        page = html_page(result, rows, svg)
    except ImportError as error:
        raise ImportError(f"the report needs matplotlib and jinja2: {how_to_install('plot')}") from error
    paths = folder / FILES[0], folder / FILES[1], folder / FILES[2]
    write_png(figure if selected == rows else figure_of(result, rows, selected), paths[0])
    write_text(paths[1], svg)
    write_text(paths[2], page)
    return paths
