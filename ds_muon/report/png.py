"""The report's picture as a PNG file, painted by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_muon.extras import how_to_install
from ds_muon.files import writing
from ds_muon.report.layout import (
    COLOURS,
    PADDING,
    ROWS_IN_PNG,
    WIDTH,
    Line,
    Mark,
    Shape,
    Words,
    picture_of,
    rows_of,
    selected_rows,
)
from ds_muon.verify.record import VerifyResult

_DPI = 180
_MOST_PIXELS = 30_000  # of height; matplotlib refuses 2**16


def draw_updates(result: VerifyResult, path: Path) -> None:
    """Write the picture as a PNG file; of many parameters, those that ``selected_rows`` names.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"the picture needs matplotlib: {how_to_install('plot')}") from error

    rows = rows_of(result)
    picture = picture_of(result, rows, selected_rows(rows, ROWS_IN_PNG), heading=True)
    # A style of the user's must not move anything. A Figure without pyplot draws by Agg and leaves no global state.
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(WIDTH / 100, picture.height / 100), facecolor=_light("paper"))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(picture.height, 0))
        axes.set_axis_off()
        for order, shape in enumerate(picture.shapes):
            _paint(axes, shape, order)
        with writing(path) as file:
            figure.savefig(file, format="png", dpi=min(_DPI, 100 * _MOST_PIXELS / picture.height))


def _light(colour: str) -> str:
    return COLOURS[colour][0]


def _paint(axes: Any, shape: Shape, order: int) -> None:
    """Paint a shape over those of lower ``order``, on axes whose unit is a pixel, a hundredth of an inch."""
    from matplotlib.patches import Circle, Polygon, Rectangle

    points = 72 / 100
    if isinstance(shape, Words):
        axes.text(
            shape.x,
            shape.y,
            shape.text,
            color=_light(shape.colour),
            fontsize=shape.size * points,
            fontweight="bold" if shape.bold else "normal",
            fontfamily="DejaVu Sans Mono" if shape.mono else "DejaVu Sans",
            horizontalalignment={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
            verticalalignment="baseline",
            zorder=order,
            parse_math=False,  # a name may hold a dollar
        )
    elif isinstance(shape, Line):
        style = {"color": _light(shape.colour), "linewidth": shape.width * points, "solid_capstyle": "butt"}
        axes.plot((shape.x1, shape.x2), (shape.y1, shape.y2), zorder=order, **style)
    elif isinstance(shape, Mark):
        colour: dict[str, Any] = {"facecolor": _light(shape.colour), "edgecolor": "none", "zorder": order}
        if shape.half == "muon":
            axes.add_patch(Circle((shape.x, shape.y), shape.radius, **colour))
        else:
            axes.add_patch(Polygon(shape.diamond, **colour))
    else:
        fill: dict[str, Any] = {"facecolor": _light("faint" if shape.colour == PADDING else shape.colour)}
        if shape.colour == PADDING:
            fill |= {"hatch": "////", "edgecolor": _light("muted")}
        # Antialiased, boxes side by side would let through a hairline of what is below.
        patch = Rectangle((shape.x, shape.y), shape.width, shape.height, linewidth=0, antialiased=False, **fill)
        axes.add_patch(patch).set_zorder(order)
