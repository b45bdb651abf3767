"""Render what was measured: the tables of docs/measured.md and the picture of the README, from docs/measured/*.json.

    python scripts/render_measured.py

A file of docs/measured is one table of one measurement:

    device      where it ran
    commit      of the code that was measured, or "unknown"
    recorded    the commit with which the figures came here
    versions    of the packages that matter
    commands    that print the figures again (may be absent)
    notes       how it was measured, and figures beside the table (may be absent)
    columns     a name, and how its numbers are written: a format of Python's
    rows        one cell per column: a number, a text, or null where nothing was measured

In docs/measured.md the lines between `<!-- measured: NAME -->` and `<!-- end -->` are rendered from NAME.json; all
others are written by hand. The picture is docs/iteration.svg.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, PICTURE = DOCS / "measured.md", DOCS / "iteration.svg"
_TABLE = re.compile(r"(<!-- measured: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# What the picture compares: the name of the optimizer in the tables, and its colour.
BARS = {"AdamW, FusedAdam": "#8c959f", "DeepSpeed `Muon`": "#e69f00", "`DSMuon`": "#0072b2"}
PANELS = {"step-one-h200": "one H200", "step-two-h200": "two H200s"}
# Legible on white and on black.
_INK = "#768390"


def load(name: str) -> dict[str, Any]:
    """One measurement."""
    measured: dict[str, Any] = json.loads((DOCS / "measured" / f"{name}.json").read_text())
    return measured


def render(page: str) -> str:
    """The text of docs/measured.md with every table as its JSON has it."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{table(load(found[2]))}\n{found[3]}", page)


def table(measured: dict[str, Any]) -> str:
    """One measurement in Markdown: where and with what, the table, notes, commands."""
    columns = measured["columns"]
    lines = [[column["name"] for column in columns], ["---"] * len(columns)]
    lines += [[_cell(value, column) for value, column in zip(row, columns, strict=True)] for row in measured["rows"]]
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    parts = [
        f"*{measured['device']}. Commit {measured['commit']}, recorded in {measured['recorded']}; {versions}.*",
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
        *measured.get("notes", ()),
    ]
    if commands := measured.get("commands"):
        parts.append("\n".join(["```bash", *commands, "```"]))
    return "\n\n".join(parts) + "\n"


def _cell(value: Any, column: dict[str, str]) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, column["format"])


def draw(path: Path) -> None:
    """Times of one iteration as bars: a panel for each number of GPUs, a group for each model. Writes ``path``."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text: small, and in the reader's font. The same numbers make the same file.
    style = {"svg.fonttype": "none", "svg.hashsalt": "ds_muon", "font.family": "sans-serif", "font.size": 10}
    ink = {name: _INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    with rc_context({**style, **ink}):
        figure = Figure(figsize=(9, 2.6), layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
        for axes, (name, title) in zip(panels, PANELS.items(), strict=True):
            times = {(row[0], row[1]): row[2] for row in load(name)["rows"]}
            models = list(dict.fromkeys(model for model, _ in times))
            for place, (optimizer, colour) in enumerate(BARS.items()):
                values = [times[model, optimizer] for model in models]
                heights = [group + 0.26 * (place - 1) for group in range(len(models))]
                bars = axes.barh(heights, values, 0.22, color=colour, label=optimizer.replace("`", ""))
                axes.bar_label(bars, fmt="%.1f", padding=3)
            axes.set_yticks(range(len(models)), [f"{model} GPT" for model in models])
            axes.set_title(f"ms per iteration, {title}", fontsize=10, loc="left")
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
            axes.xaxis.set_visible(False)
        panels[0].invert_yaxis()
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    PAGE.write_text(render(PAGE.read_text()))
    draw(PICTURE)


if __name__ == "__main__":
    main()
