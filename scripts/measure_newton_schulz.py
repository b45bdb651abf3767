"""How accurate Newton-Schulz is on this machine's device, and whether a result depends on the batch it is in.

    python scripts/measure_newton_schulz.py                       # a GPU if there is one, else the CPU, small matrices
    python scripts/measure_newton_schulz.py --ns-backend torch    # "auto" unless given

First table: relative Frobenius error against fp64, per dtype and method, for Gaussian matrices and for matrices with
log-uniform singular values. "input" is what rounding the input to that dtype alone changes. Second table: how far the
result is from orthogonal, ||O O^T - I||_F / sqrt(m), beside the fp64 polynomial's own distance; what is far smaller
than that does not matter to training. Third table: the relative difference between a matrix orthogonalized alone and
in a batch of eight.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ds_muon.orthogonalize import COEFFICIENTS, NewtonSchulz, orthogonalize, reference_newton_schulz
from ds_muon.replay import orthogonality_error

DTYPES = ("float32", "float16", "bfloat16")
METHODS = [(dtype, method) for dtype in DTYPES for method in ("gram", "standard")]
CONDITIONS = (0.0, 1e2, 1e4, 1e7)


def matrix(rows: int, cols: int, condition: float, device: torch.device) -> Tensor:
    """(rows, cols) fp32: Gaussian for condition 0, else with log-uniform singular values from 1 to 1 / condition."""
    if not condition:
        return torch.randn(rows, cols, device=device)
    m = min(rows, cols)
    left, right = (
        torch.linalg.qr(torch.randn(side, m, dtype=torch.float64, device=device))[0] for side in (rows, cols)
    )
    values = torch.logspace(0, -math.log10(condition), m, dtype=torch.float64, device=device)
    return ((left * values) @ right.mT).float()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def cases(shapes: list[tuple[int, int]], device: torch.device) -> Iterator[tuple[str, Tensor, str, Tensor]]:
    """Title, matrix, coefficient table and exact result of every row."""
    for rows, cols in shapes:
        for condition in CONDITIONS:
            x = matrix(rows, cols, condition, device)
            for table in COEFFICIENTS:
                kind = f"{condition:.0e}" if condition else "Gaussian"
                title = f"{f'{rows}x{cols}':12}{kind:>10}  {table:14}"
                yield title, x, table, reference_newton_schulz(x, ns_coefficients=table)


def tables(shapes: list[tuple[int, int]], device: torch.device, backend: str) -> None:
    titles = "".join(f"{dtype + ' ' + method:>18}" for dtype, method in METHODS)
    rows = list(cases(shapes, device))

    def print_table(
        last: tuple[str, ...], value: Callable[[Tensor, Tensor], float], extra: Callable[..., list]
    ) -> None:
        print(f"{'shape':12}{'condition':>10}  {'coefficients':14}{titles}" + "".join(f"{name:>12}" for name in last))
        for title, x, table, expected in rows:
            print(title, end="")
            for dtype, method in METHODS:
                settings = NewtonSchulz.resolve(
                    device, ns_method=method, ns_coefficients=table, ns_dtype=dtype, ns_backend=backend
                )
                print(f"{value(orthogonalize([x], settings)[0], expected):18.1e}", end="")
            print("".join(f"{number:12.1e}" for number in extra(x, table, expected)), flush=True)

    def of_input(x: Tensor, table: str, expected: Tensor) -> list[float]:
        halves = [(x / x.abs().max()).to(dtype) for dtype in (torch.float16, torch.bfloat16)]
        return [relative(reference_newton_schulz(half, ns_coefficients=table), expected) for half in halves]

    print("relative error against fp64")
    print_table(("fp16 input", "bf16 input"), relative, of_input)
    print("\ndistance from orthogonal")
    print_table(("fp64",), lambda o, _: orthogonality_error(o), lambda x, table, o: [orthogonality_error(o)])


def batch_dependence(shapes: list[tuple[int, int]], device: torch.device, backend: str) -> None:
    print(f"\nalone, beside in a batch of eight\n{'shape':12}" + "".join(f"{dtype:>12}" for dtype in DTYPES))
    for shape in shapes:
        batch = [torch.randn(shape, device=device) for _ in range(8)]
        print(f"{f'{shape[0]}x{shape[1]}':12}", end="")
        for dtype in DTYPES:
            settings = NewtonSchulz.resolve(device, ns_dtype=dtype, ns_backend=backend)
            alone, together = orthogonalize(batch[:1], settings)[0], orthogonalize(batch, settings)[0]
            difference = "equal" if torch.equal(alone, together) else f"{relative(alone, together):.1e}"
            print(f"{difference:>12}", end="")
        print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ns-backend", default="auto", choices=("auto", "torch", "triton"))
    backend = parser.parse_args().ns_backend
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = ", ".join(f"{d}: {NewtonSchulz.resolve(device, ns_dtype=d, ns_backend=backend).backend}" for d in DTYPES)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}; {chosen}\n")
    torch.manual_seed(0)
    sides = [(1024, 1024), (1024, 4096), (4096, 1024)] if device.type == "cuda" else [(128, 128), (128, 512)]
    tables(sides, device, backend)
    small = [(64, 64), (64, 4096), (96, 100), (128, 4096), (256, 4096), (300, 776), (384, 1536), (9, 9), (40, 10)]
    large = [(512, 512), (512, 2048), (768, 768), (768, 3072), (1000, 3000), (1024, 1024), (1024, 4096)]
    larger = [(2048, 2048), (2048, 8192), (4096, 4096), (4096, 11008)]
    batch_dependence(small + large + larger if device.type == "cuda" else small[:3], device, backend)


if __name__ == "__main__":
    main()
