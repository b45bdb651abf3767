"""Compiles the shipped tiles for Ampere and Hopper, without a GPU: registers, spills and shared memory.

Shared memory decides how many programs live on a multiprocessor; one buffer too many halves that in silence.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

# Per multiprocessor, and what the system keeps of it for each program.
REGISTERS = 65536
SHARED = {80: 164 * 1024, 90: 228 * 1024}
RESERVED = 1024


@dataclass(frozen=True)
class Case:
    """One kernel as it is specialized at launch."""

    tile: str
    arch: int
    dtype: str
    symmetric: bool
    has_c: bool
    transposed: tuple[bool, bool]

    def __str__(self) -> str:
        operands = "".join("t" if transposed else "n" for transposed in self.transposed)
        kind = "symmetric" if self.symmetric else "product"
        return f"{self.tile}-sm{self.arch}-{self.dtype}-{kind}{'_plus' if self.has_c else ''}-{operands}"


@dataclass(frozen=True)
class Usage:
    """What the compiler made of it. ``stack`` holds spilled registers; bytes per thread."""

    registers: int
    stack: int
    shared: int
    wgmma: bool
    tensor_cores: bool
    tma_stores: int


def cases() -> Iterator[Case]:
    # X X^T and R R, of wide and tall matrices; R X and, for tall ones, X^T R.
    operands = {True: [(False, True), (True, False), (False, False)], False: [(False, False), (True, False)]}
    for symmetric, has_c in ((True, True), (True, False), (False, False)):
        descriptors = ("SMALL", "WIDE", "QUARTERS") if symmetric else ("SMALL", "WIDE")
        for transposed in operands[symmetric]:
            for tile in descriptors:
                yield Case(tile, 90, "fp16", symmetric, has_c, transposed)
            yield Case("POINTERS", 80, "fp16", symmetric, has_c, transposed)
            yield Case("POINTERS_FP32", 80, "fp32", symmetric, has_c, transposed)
        for tile in (*descriptors, "POINTERS"):
            yield Case(tile, 90, "bf16", symmetric, has_c, operands[symmetric][-1])
        yield Case("POINTERS_FP32", 90, "fp32", symmetric, has_c, operands[symmetric][-1])


CASES = list(cases())


def compile_case(case: Case) -> Usage:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ds_muon.orthogonalize import triton_backend, triton_kernels

    tile = getattr(triton_backend, case.tile)
    constants: dict[str, Any] = {"DEPTH": tile.depth, "GROUP": 8, "HAS_C": case.has_c}
    a_transposed, b_transposed = case.transposed
    signature: dict[str, str] = {"alpha": "fp32", "beta": "fp32", "identity": "fp32"}
    attributes = {}
    if tile.descriptors:
        kernel = triton_kernels.matmul_quarters if tile.quarters else triton_kernels.matmul_descriptors
        constants |= {"PIECES": tile.pieces, "A_TRANSPOSED": a_transposed, "B_TRANSPOSED": b_transposed}
        half, piece = tile.rows // 2, tile.rows // tile.pieces
        blocks = {"c": (tile.rows, tile.rows), "out": (tile.rows, piece), "mirror": (piece, tile.rows)}
        blocks |= {"c_half": (half, half), "out_half": (half, half)}
        for name, side in (("a", tile.rows), ("a_half", half)):
            blocks[name] = (tile.depth, side) if a_transposed else (side, tile.depth)
        for name, side in (("b", tile.cols), ("b_half", half)):
            blocks[name] = (side, tile.depth) if b_transposed else (tile.depth, side)
        if tile.quarters:
            constants |= {"SIDE": tile.rows}
        else:
            constants |= {"ROWS": tile.rows, "COLS": tile.cols, "SYMMETRIC": case.symmetric}
            constants |= {"FLATTEN": tile.flatten}
        signature |= {name: f"tensordesc<{case.dtype}[1, {rows}, {cols}]>" for name, (rows, cols) in blocks.items()}
    else:
        kernel = triton_kernels.matmul_pointers
        constants |= {"ROWS": tile.rows, "COLS": tile.cols, "SYMMETRIC": case.symmetric}
        # A stride of one is a constant, sizes and other strides are multiples of 16.
        constants |= {"a_row" if a_transposed else "a_col": 1, "b_row" if b_transposed else "b_col": 1}
        signature |= {name: f"*{case.dtype}" for name in ("a", "b", "c", "out")}
        attributes = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if name not in {"alpha", "beta", "identity", "tiles", *constants}
        }
    signature = {name: "constexpr" if name in constants else signature.get(name, "i32") for name in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", case.arch, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run(
            [cuobjdump, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    ptx = compiled.asm["ptx"]
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    return Usage(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=compiled.metadata.shared,
        wgmma="wgmma.mma_async" in ptx,
        tensor_cores="mma" in ptx,
        tma_stores=ptx.count("cp.async.bulk.tensor.3d.global.shared"),
    )


@pytest.fixture(scope="module")
def usages() -> dict[Case, Usage]:
    """Compiled in a process of its own: the interpreter may have taken over Triton in this one."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-5000:]
    return {case: Usage(**usage) for case, usage in zip(CASES, json.loads(run.stdout.splitlines()[-1]), strict=True)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tile_fits_where_it_is_meant_to_live(case: Case, usages: dict[Case, Usage]) -> None:
    from ds_muon.orthogonalize import triton_backend

    tile, usage = getattr(triton_backend, case.tile), usages[case]
    programs = max(1, tile.programs_per_sm)
    # ptxas may put two registers on the stack to stay at 128 of them, with which more warps fit.
    assert usage.stack <= (0 if tile.descriptors else 8)
    assert programs * usage.registers * 32 * tile.warps <= REGISTERS
    assert programs * (usage.shared + RESERVED) <= SHARED[case.arch]
    # The buffers of the pipeline are there, all stages of them.
    width = 4 if case.dtype == "fp32" else 2
    assert usage.shared >= (tile.stages - 1) * (tile.rows + tile.cols) * tile.depth * width


@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_precision_runs_on_tensor_cores_and_fp32_does_not(case: Case, usages: dict[Case, Usage]) -> None:
    usage = usages[case]
    assert usage.tensor_cores == (case.dtype != "fp32")
    assert usage.wgmma == (case.dtype != "fp32" and case.arch == 90)
    assert (usage.tma_stores > 0) == (case.tile in ("SMALL", "WIDE", "QUARTERS"))


if __name__ == "__main__":
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        print(json.dumps([asdict(usage) for usage in pool.map(compile_case, CASES)]))
