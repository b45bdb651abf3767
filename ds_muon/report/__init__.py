"""The report of `ds-muon verify --report`: where ZeRO cut the model, and how exact each update was.

One layout serves both files: ``png`` paints it with matplotlib, ``page`` writes it as SVG.
"""

from __future__ import annotations

from pathlib import Path

from ds_muon.files import write_text
from ds_muon.report.page import html_page
from ds_muon.report.png import draw_updates
from ds_muon.verify.record import VerifyResult

__all__ = ["FILES", "draw_updates", "html_page", "write_report"]

FILES = ("updates.png", "index.html")


def write_report(result: VerifyResult, folder: Path) -> tuple[Path, Path]:
    """Write ``updates.png`` and ``index.html`` into ``folder``, which is made if need be; returns their paths.

    Raises:
        ImportError: matplotlib is missing. The page has been written by then.
    """
    picture, page = (folder / name for name in FILES)
    write_text(page, html_page(result))
    draw_updates(result, picture)
    return picture, page
