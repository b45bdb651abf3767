"""How accurate Newton-Schulz is on this machine's device, and whether a result depends on the batch it is in.

    python scripts/measure_newton_schulz.py            # a GPU if there is one, else the CPU with small matrices

First table: relative Frobenius error against fp64, per dtype and method, for Gaussian matrices and for matrices with
log-uniform singular values. "input" is what rounding the input to that dtype alone changes. Second table: the relative
difference between a matrix orthogonalized alone and in a batch of eight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_muon.orthogonalize import NewtonSchulz, orthogonalize, reference_newton_schulz

DTYPES = ("float32", "float16", "bfloat16")
TABLES = ("quintic", "polar_express", "you")


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


def accuracy(shapes: list[tuple[int, int]], device: torch.device) -> None:
    methods = [(dtype, method) for dtype in DTYPES for method in ("gram", "standard")]
    print(f"{'shape':12}{'condition':>10}  {'coefficients':14}", end="")
    print("".join(f"{dtype + ' ' + method:>18}" for dtype, method in methods), f"{'fp16 input':>12}{'bf16 input':>12}")
    for rows, cols in shapes:
        for condition in (0.0, 1e2, 1e4):
            x = matrix(rows, cols, condition, device)
            for table in TABLES:
                expected = reference_newton_schulz(x, ns_coefficients=table)
                kind = f"{condition:.0e}" if condition else "Gaussian"
                print(f"{f'{rows}x{cols}':12}{kind:>10}  {table:14}", end="")
                for dtype, method in methods:
                    settings = NewtonSchulz.resolve(device, ns_method=method, ns_coefficients=table, ns_dtype=dtype)
                    print(f"{relative(orthogonalize([x], settings)[0], expected):18.1e}", end="")
                for half in (torch.float16, torch.bfloat16):
                    rounded = reference_newton_schulz((x / x.abs().max()).to(half), ns_coefficients=table)
                    print(f"{relative(rounded, expected):12.1e}", end="")
                print(flush=True)


def batch_dependence(shapes: list[tuple[int, int]], device: torch.device) -> None:
    print(f"\n{'shape':12}" + "".join(f"{dtype:>12}" for dtype in DTYPES))
    for shape in shapes:
        batch = [torch.randn(shape, device=device) for _ in range(8)]
        print(f"{f'{shape[0]}x{shape[1]}':12}", end="")
        for dtype in DTYPES:
            settings = NewtonSchulz.resolve(device, ns_dtype=dtype)
            alone, together = orthogonalize(batch[:1], settings)[0], orthogonalize(batch, settings)[0]
            difference = "equal" if torch.equal(alone, together) else f"{relative(alone, together):.1e}"
            print(f"{difference:>12}", end="")
        print(flush=True)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}, torch {torch.__version__}\n")
    torch.manual_seed(0)
    sides = [(1024, 1024), (1024, 4096), (4096, 1024)] if device.type == "cuda" else [(128, 128), (128, 512)]
    accuracy(sides, device)
    small = [(64, 64), (64, 4096), (96, 100), (128, 4096), (256, 4096), (300, 776), (384, 1536)]
    large = [(512, 512), (512, 2048), (768, 768), (768, 3072), (1000, 3000), (1024, 1024), (1024, 4096)]
    larger = [(2048, 2048), (2048, 8192), (4096, 4096), (4096, 11008)]
    batch_dependence(small + large + larger if device.type == "cuda" else small[:3], device)


if __name__ == "__main__":
    main()
