"""Compute the triples of the coefficient table "minimax", and where they take singular values.

    python scripts/minimax_coefficients.py
    python scripts/minimax_coefficients.py --least 1e-3 --steps 5

Each step is the odd polynomial of degree 5 that is nearest to 1, in its largest error, on the interval where the steps
before it leave the singular values from ``--least`` to 1: no composition of as many such polynomials has a smaller
largest error (Amsel et al., The Polar Express, 2025, arXiv:2505.16932). The table leaves one percent of room for
roundings on top, ``p(x / 1.01)``, since the first polynomial grows without bound just above 1.
"""

from __future__ import annotations

import argparse
import math

import torch

LEAST, STEPS = 2.1e-3, 4

Triple = tuple[float, float, float]


def nearest_to_one(low: float, high: float) -> tuple[Triple, float]:
    """``(a, b, c)`` of the polynomial nearest to 1 on [low, high], and its largest error there: Remez's algorithm.

    The error ``1 - p(x)`` takes its largest magnitude at both ends and at the two extremes of p between them, with
    alternating signs. Each round solves for p and the error at the points found so far, and moves them to the extremes.
    """
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    inner = (low + 0.3 * (high - low), low + 0.8 * (high - low))
    while True:
        x = torch.tensor([low, *inner, high], dtype=torch.float64)
        equations = torch.stack([x, x**3, x**5, signs], dim=1)
        a, b, c, error = torch.linalg.solve(equations, torch.ones_like(x)).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        extremes = (math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c)))
        if math.dist(inner, extremes) < 1e-14:
            return (a, b, c), error
        inner = extremes


def composition(least: float = LEAST, steps: int = STEPS) -> tuple[tuple[Triple, ...], float]:
    """The triples of all steps for singular values from ``least`` to 1, and the largest error of their result."""
    low, high = least, 1.0
    triples: list[Triple] = []
    for _ in range(steps):
        triple, error = nearest_to_one(low, high)
        triples.append(triple)
        low, high = 1 - error, 1 + error
    return tuple(triples), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least", type=float, default=LEAST, help="smallest singular value that is to end near 1")
    parser.add_argument("--steps", type=int, default=STEPS, help="how many polynomials are composed")
    arguments = parser.parse_args()
    triples, error = composition(arguments.least, arguments.steps)
    for triple in triples:
        print("({:.14f}, {:.14f}, {:.14f})".format(*triple))
    print(f"singular values from {arguments.least:g} to 1 end in 1 +- {error:.4f}")


if __name__ == "__main__":
    main()
