"""Compiles the shipped tiles for Ampere and Hopper, without a GPU: registers, spills and shared memory.

Shared memory decides how many programs live on a multiprocessor; one buffer too many halves that in silence. And what
is compiled ahead of a first step is what that step launches.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import itertools
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

from tests.unit.support.cases import full

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
    """What the compiler made of it. ``stack`` holds spilled registers; bytes per thread. ``fused``: multiply-adds."""

    registers: int
    stack: int
    shared: int
    wgmma: bool
    tensor_cores: bool
    tma_stores: int
    fused: bool


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
# The others are compiled with ``--all``: each takes seconds. Of each tile a symmetric result with a C, which takes most
# registers, and a product; where a tile is for both architectures, each on one of them, in fp32 the other way round.
FEW: dict[Any, Case] = {}
for _case in sorted(CASES, key=lambda case: (case.transposed != (False, False), case.has_c != case.symmetric)):
    if _case.tile not in ("POINTERS", "POINTERS_FP32") or (_case.arch == 80) == (
        _case.symmetric == (_case.tile == "POINTERS")
    ):
        FEW.setdefault((_case.tile, _case.arch, _case.symmetric), _case)


@dataclass(frozen=True)
class NormalizationCase:
    """One kernel of the normalization, of matrices that are cut into the most parts."""

    kernel: str
    arch: int
    dtype: str
    aligned: bool
    dense: bool

    def __str__(self) -> str:
        aligned, dense = "-aligned" if self.aligned else "", "-dense" if self.dense else ""
        return f"{self.kernel}-sm{self.arch}-{self.dtype}{aligned}{dense}"


NORMALIZATION = [NormalizationCase("combine", arch, "fp32", True, True) for arch in (80, 90)]
NORMALIZATION += [
    NormalizationCase("measure", arch, "fp32", aligned, True) for arch in (80, 90) for aligned in (True, False)
]
NORMALIZATION += [
    NormalizationCase("scale", arch, dtype, aligned, dense)
    for arch in (80, 90)
    for dtype in ("fp16", "bf16", "fp32")
    for aligned, dense in ((True, True), (True, False), (False, False))
]
FEW_NORMALIZATION = [
    NormalizationCase("combine", 80, "fp32", True, True),
    NormalizationCase("measure", 80, "fp32", True, True),
    NormalizationCase("measure", 90, "fp32", False, True),
    NormalizationCase("scale", 80, "fp32", True, True),
    NormalizationCase("scale", 90, "fp16", True, True),
    NormalizationCase("scale", 90, "bf16", False, False),
]
# Of combine, which is launched with Triton's own number; the others are launched with as many.
NORMALIZATION_WARPS = 4


def compile_normalization(case: NormalizationCase) -> Usage:
    from ds_muon.kernels import products
    from ds_muon.orthogonalize import triton_backend

    kernel = getattr(products, case.kernel)
    constants: dict[str, Any] = {"PARTS": triton_backend._PARTS}
    if case.kernel != "combine":
        constants = {"BLOCK": triton_backend._BLOCK, "ALIGNED": case.aligned}
    if case.kernel == "scale":
        constants |= {"DENSE": case.dense}
    pointers = {"pointers": "*i64", "squares": "*fp64", "largest": "*fp32", "factors": "*fp32", "out": f"*{case.dtype}"}
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names} | {"eps": "fp32"}
    aligned = {"measure": (), "combine": ("largest", "squares"), "scale": ("out",)}[case.kernel]
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in aligned}
    return compile_kernel(kernel, signature, constants, attributes, case.arch, NORMALIZATION_WARPS, 3)


AFFINE = list(itertools.product((80, 90), ("fp16", "bf16", "fp32"), (True, False)))
FEW_AFFINE = [(80, "fp32", False), (90, "fp16", True)]
ALL = [*CASES, *NORMALIZATION, *AFFINE]
FEW_OF_ALL = [*FEW.values(), *FEW_NORMALIZATION, *FEW_AFFINE]


def compile_affine(case: tuple[int, str, bool]) -> Usage:
    """By architecture, dtype, and whether sizes and strides are multiples of 16."""
    from ds_muon.kernels import products
    from ds_muon.orthogonalize import triton_backend

    (arch, dtype, even), kernel = case, products.affine
    rows, cols = triton_backend._AFFINE_BLOCK
    constants = {"ROWS": rows, "COLS": cols, "r_col": 1}
    signature = {"r": f"*{dtype}", "out": f"*{dtype}", "beta": "fp32", "identity": "fp32"}
    free = {"beta", "identity", "tiles", *constants}
    aligned = [name not in free and (even or name in ("r", "out")) for name in kernel.arg_names]
    attributes = {(i,): [["tt.divisibility", 16]] for i, found in enumerate(aligned) if found}
    return compile_kernel(kernel, signature, constants, attributes, arch, 4, 3, enable_fp_fusion=False)


def compile_case(case: Case) -> Usage:
    from ds_muon.kernels import products
    from ds_muon.orthogonalize import tiles

    tile = getattr(tiles, case.tile)
    constants: dict[str, Any] = {"DEPTH": tile.depth, "GROUP": 8, "HAS_C": case.has_c}
    a_transposed, b_transposed = case.transposed
    signature: dict[str, str] = {"alpha": "fp32", "beta": "fp32", "identity": "fp32"}
    attributes = {}
    if tile.descriptors:
        kernel = products.matmul_quarters if tile.quarters else products.matmul_descriptors
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
        kernel = products.matmul_pointers
        constants |= {"ROWS": tile.rows, "COLS": tile.cols, "SYMMETRIC": case.symmetric}
        # A stride of one is a constant, sizes and other strides are multiples of 16.
        constants |= {"a_row" if a_transposed else "a_col": 1, "b_row" if b_transposed else "b_col": 1}
        signature |= {name: f"*{case.dtype}" for name in ("a", "b", "c", "out")}
        attributes = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if name not in {"alpha", "beta", "identity", "tiles", *constants}
        }
    return compile_kernel(kernel, signature, constants, attributes, case.arch, tile.warps, tile.stages)


def compile_kernel(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    attributes: dict[Any, Any],
    arch: int,
    warps: int,
    stages: int,
    **options: Any,
) -> Usage:
    """``signature``: types of arguments, i32 unless given."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else signature.get(name, "i32") for name in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": warps, "num_stages": stages, **options},
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
        fused="fma.rn.f32" in ptx,
    )


class Hopper:
    """Stands for Triton's driver: an H100 on which nothing is launched."""

    class launcher_cls:
        def __init__(self, *of: Any) -> None:
            pass

        def __call__(self, *arguments: Any) -> None:
            pass

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": SHARED[90]}

        @staticmethod
        def load_binary(*of: Any) -> tuple[int, ...]:
            return 1, 1, 0, 0, 1024

    @staticmethod
    def get_current_target() -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    @staticmethod
    def get_current_device() -> int:
        return 0

    @staticmethod
    def get_current_stream(device: int) -> int:
        return 0


SHAPES = [(64, 160), (1000, 72), (200, 99)]


def entries_of_the_cache() -> dict[str, list[str]]:
    """Which entries of Triton's cache are filled or read ahead of a first step, and which by it, with their kernels."""
    import torch
    import triton

    from ds_muon.kernels import ahead, elementwise, products
    from ds_muon.layout import Piece
    from ds_muon.orthogonalize import triton_backend
    from ds_muon.passes import Held, Moves, Segments, triton_passes

    found: list[str] = []
    triton.runtime.driver.set_active(Hopper())
    triton.knobs.compilation.listener = lambda src, metadata, **rest: found.append(f"{src.name} {metadata['hash']}")
    ahead._threads = lambda: 2  # type: ignore[assignment]  # also on one core
    cpu, fp16 = torch.device("cpu"), torch.float16
    triton_backend.compile_ahead(SHAPES, cpu, fp16)
    settings: dict[str, Any] = {"momentum": 0.95, "nesterov": True}
    triton_passes.compile_ahead(cpu, **settings, momentum_dtype=torch.float32, result_dtype=fp16, weight_decay=0.1)
    compiled_ahead = sorted(set(found))

    found.clear()
    for kernel in (*vars(products).values(), *vars(elementwise).values()):
        if isinstance(kernel, triton.JITFunction):
            kernel.device_caches.clear()  # what this process has in hand already
    for rows, cols in SHAPES:
        layout = triton_backend._layout(3, rows, cols, fp16, 2)
        out, _, _, _, *sums = layout.tensors(torch.empty(layout.nbytes, dtype=torch.uint8))
        addresses = torch.zeros(3, dtype=torch.int64)
        for part in (slice(0, 1), slice(1, 3)):  # as the parts of a batch lie in its memory
            triton_backend.normalize(addresses[part], out[part], 0.0, [of[part] for of in sums], aligned=True)
    flat, buffer = torch.zeros(2, 3 * 512 * 128).unbind()
    held = [Held(Piece((), 0, 512, 128), 0, i * 512 * 128, 512 * 128) for i in range(3)]
    moves = Moves(Segments.of(held, len(flat), cpu), torch.ones(3, dtype=torch.bool))
    triton_passes.sum_of_squares(flat)
    triton_passes.sum_of_squares(flat, moves.segments)
    triton_passes.advance_momentum_(flat, buffer, **settings, moves=moves)
    triton_passes.store_updates(torch.zeros(3, 512, 128, dtype=fp16), list(flat.view(3, 512, 128)), scale=0.2)
    triton_passes.apply_update_(flat, buffer, lr=0.02, weight_decay=0.1, moves=moves)
    return {"ahead": compiled_ahead, "first step": sorted(set(found))}


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Compiled in a process of its own: the interpreter may have taken over Triton in this one."""
    chosen = ALL if request.config.getoption("--all") else FEW_OF_ALL
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    numbers = [str(ALL.index(case)) for case in chosen]
    run = subprocess.run([sys.executable, __file__, *numbers], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-5000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    usages = {case: Usage(**usage) for case, usage in zip(chosen, found["usages"], strict=True)}
    return {**found, "usages": usages}


@pytest.fixture(scope="module")
def usages(compiled: dict[str, Any]) -> dict[Any, Usage]:
    found: dict[Any, Usage] = compiled["usages"]
    return found


def few_first(cases: list[Any]) -> list[Any]:
    """Those that are compiled by default, and the others with ``--all``."""
    return [case if case in FEW_OF_ALL else full(case) for case in cases]


@pytest.mark.parametrize("case", few_first(CASES), ids=str)
def test_a_tile_fits_where_it_is_meant_to_live(case: Case, usages: dict[Case, Usage]) -> None:
    from ds_muon.orthogonalize import tiles

    tile, usage = getattr(tiles, case.tile), usages[case]
    programs = max(1, tile.programs_per_sm)
    # ptxas may put two registers on the stack to stay at 128 of them, with which more warps fit.
    assert usage.stack <= (0 if tile.descriptors else 8)
    assert programs * usage.registers * 32 * tile.warps <= REGISTERS
    assert programs * (usage.shared + RESERVED) <= SHARED[case.arch]
    # The buffers of the pipeline are there, all stages of them.
    width = 4 if case.dtype == "fp32" else 2
    assert usage.shared >= (tile.stages - 1) * (tile.rows + tile.cols) * tile.depth * width


@pytest.mark.parametrize("case", few_first(CASES), ids=str)
def test_half_precision_runs_on_tensor_cores_and_fp32_does_not(case: Case, usages: dict[Case, Usage]) -> None:
    usage = usages[case]
    assert usage.tensor_cores == (case.dtype != "fp32")
    assert usage.wgmma == (case.dtype != "fp32" and case.arch == 90)
    assert (usage.tma_stores > 0) == (case.tile in ("SMALL", "WIDE", "QUARTERS"))


@pytest.mark.parametrize("case", few_first(NORMALIZATION), ids=str)
def test_the_normalization_fits_beside_two_programs_of_the_small_tile(
    case: NormalizationCase, usages: dict[Any, Usage]
) -> None:
    from ds_muon.orthogonalize.tiles import SMALL

    usage = usages[case]
    assert usage.stack == 0
    # One half of a batch is normalized while the other multiplies. On Ampere no tile of 128 registers leaves room.
    if case.arch == 90 and case.dtype != ("fp32" if case.kernel == "scale" else None):
        # Of products with a C training has R R only; and the offsets of padded rows leave no room beside those.
        padded = case.kernel == "scale" and not case.dense
        small = [
            usages[other]
            for other in CASES
            if other in usages
            and other.tile == "SMALL"
            and (not other.has_c or (other.transposed == (False, False) and not padded))
        ]
        registers = [2 * allocated(other.registers, SMALL.warps) for other in small]
        assert max(registers) + allocated(usage.registers, NORMALIZATION_WARPS) <= REGISTERS
        shared = 2 * (max(other.shared for other in small) + RESERVED)
        assert shared + usage.shared + RESERVED <= SHARED[90]


@pytest.mark.parametrize("case", few_first(AFFINE), ids=str)
def test_the_polynomial_without_a_product_rounds_its_product_before_the_sum(
    case: tuple[int, str, bool], usages: dict[Any, Usage]
) -> None:
    # As torch's operations do, bit for bit.
    assert usages[case].stack == 0 and not usages[case].fused


def test_what_is_compiled_ahead_is_what_a_first_step_launches(compiled: dict[str, Any]) -> None:
    entries = compiled["entries"]
    assert entries["ahead"] == entries["first step"]
    # Of three shapes: one kernel per number of parts, and whatever the sizes are multiples of.
    kernels = [entry.split()[0] for entry in entries["ahead"]]
    assert {name: kernels.count(name) for name in ("measure", "combine", "scale")} == {
        "measure": 2,
        "combine": 3,
        "scale": 3,
    }


def allocated(registers: int, warps: int) -> int:
    """Registers that a program takes: threads get multiples of eight."""
    return -(-registers // 8) * 8 * 32 * warps


if __name__ == "__main__":
    compilers = {Case: compile_case, NormalizationCase: compile_normalization, tuple: compile_affine}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        chosen = [ALL[int(number)] for number in sys.argv[1:]]
        found = [asdict(usage) for usage in pool.map(lambda case: compilers[type(case)](case), chosen)]
    print(json.dumps({"usages": found, "entries": entries_of_the_cache()}))
