"""Coefficients of the Newton-Schulz polynomials, as data.

One step applies the odd polynomial ``p(x) = a x + b x^3 + c x^5`` to every singular value. A table lists the triple
``(a, b, c)`` of each step; when more steps are asked for than a table has, its last triple repeats. Where a comment
says where singular values end, it means after the table's own number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_muon.dtypes import LARGEST

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class CoefficientTable:
    """A named schedule of triples.

    Attributes:
        triples: of the steps, the last one for all further steps.
        source: where it was published, or what computes it.
        steps: its own number of steps, for where ``ns_steps`` is absent.
    """

    triples: tuple[Triple, ...]
    source: str
    steps: int = 5


def _with_safety(triples: Sequence[Triple], factor: float) -> tuple[Triple, ...]:
    """``p(x / factor)``: leaves room for rounding errors that push a singular value above 1."""
    return tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in triples)


_QUINTIC = (3.4445, -4.7750, 2.0315)

COEFFICIENTS: dict[str, CoefficientTable] = {
    # Chosen for its slope at zero, not for convergence: singular values from 0.007 on end anywhere between 0.68 and
    # 1.14, and smaller ones at up to 1.20, the maximum of p, at 0.5545.
    "quintic": CoefficientTable(
        triples=(_QUINTIC,),
        source="Keller Jordan, Muon (2024), https://kellerjordan.github.io/posts/muon/",
    ),
    "polar_express": CoefficientTable(
        triples=(
            *_with_safety(
                (
                    (8.28721201814563, -23.595886519098837, 17.300387312530933),
                    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
                    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
                    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
                    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
                    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
                    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
                ),
                1.01,
            ),
            (1.875, -1.25, 0.375),
        ),
        source="Amsel et al., The Polar Express (2025), arXiv:2505.16932, Algorithm 1, safety factor 1.01",
    ),
    "you": CoefficientTable(
        triples=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        source="Jiacheng You (2025), five triples tuned together, https://x.com/YouJiacheng/status/1905861218138804534",
    ),
    # The fewest steps: those from 2.1e-3 on end between 0.67 and 1.31. More steps keep them there.
    "minimax": CoefficientTable(
        triples=_with_safety(
            (
                (8.42245726983300, -24.9190345321767, 18.4788903328515),
                (4.10469420663154, -3.05427564757869, 0.574400056781506),
                (3.69208428535190, -2.76195834260441, 0.541099646328797),
                (2.74556702194015, -2.04566963304963, 0.460237420850370),
            ),
            1.01,
        ),
        source="scripts/minimax_coefficients.py, as Amsel et al. (2025), arXiv:2505.16932, safety factor 1.01",
        steps=4,
    ),
    # No R^2 in any step. Those from 7e-3 on end between 0.74 and 1.30, and more steps keep them there. As published,
    # the first polynomial is negative from 1.0035 on, where roundings reach; hence the safety factor.
    "cubic5": CoefficientTable(
        triples=_with_safety(
            (
                (3.3656576, -3.3420992, 0.0),
                (2.5744352, -1.4957376, 0.0),
                (2.5368962, -1.4312570, 0.0),
                (2.4418906, -1.2764040, 0.0),
                (2.2230472, -0.9630650, 0.0),
            ),
            1.01,
        ),
        source="Huang, How Much Orthogonalization Does Muon Need? (2026), arXiv:2606.00371, safety factor 1.01",
    ),
    # Eight steps for the slope at zero, two that converge.
    "deepseekv4": CoefficientTable(
        triples=(_QUINTIC,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        source="DeepSeek-V4 (2026), https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro/resolve/main/DeepSeek_V4.pdf",
        steps=10,
    ),
    "cubic": CoefficientTable(
        triples=((1.5, -0.5, 0.0),),
        source="Bjorck and Bowie, SIAM J. Numer. Anal. 8(2), 1971: the classical Newton-Schulz iteration",
    ),
}


def schedule(coefficients: str | Sequence[Sequence[float]], steps: int | None = None) -> tuple[Triple, ...]:
    """The triple of each step.

    Args:
        coefficients: the name of a table in ``COEFFICIENTS``, or a list of triples ``(a, b, c)``.
        steps: number of polynomial steps, at least 1; by default the table's own number, or the length of the list.

    Raises:
        ValueError: an unknown name, an empty list, an entry that is not a triple of finite fp32 numbers, or ``steps``
            below 1.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"ns_steps = {steps}: at least one Newton-Schulz step is needed")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"ns_coefficients = {coefficients!r}: choose one of {sorted(COEFFICIENTS)} or give triples"
            )
        table, own = COEFFICIENTS[coefficients].triples, COEFFICIENTS[coefficients].steps
    else:
        try:
            table = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
        except (OverflowError, TypeError, ValueError):
            table = ()
        if not table or not all(abs(number) <= LARGEST for triple in table for number in triple):
            raise ValueError(
                f"ns_coefficients = {coefficients!r}: give a non-empty list of triples [a, b, c] of finite numbers"
            )
        own = len(table)
    return tuple(table[min(step, len(table) - 1)] for step in range(own if steps is None else steps))
