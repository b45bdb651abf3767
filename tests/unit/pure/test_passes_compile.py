"""Compiles the passes for Ampere and Hopper, without a GPU: the arithmetic, the width of memory accesses, spills."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.unit.support.cases import full

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

# Types of the arguments of each kernel, as they are at launch.
_WHERE = {"where": "*i1", "bounds": "*i64", "of_block": "*i32", "table": "*i64", "labels": "*i32"}
_MOMENTUM = {**_WHERE, "numel": "i64", "momentum": "fp32", "rest": "fp32"}
# Matrices without strips, a scalar flag, and none.
_WHOLE = dict.fromkeys(("table", "labels"))
_SCALAR = dict.fromkeys(("bounds", "of_block", *_WHOLE))
_NONE = dict.fromkeys(_WHERE)
_STRIDES = ("batch_stride", "row_stride", "col_stride")
_STORE = {"targets": "*i64", **dict.fromkeys(("tiles", "tile_cols", "rows", "cols", *_STRIDES), "i32"), "scale": "fp32"}
# What each case makes constant, beside the sizes of blocks.
KERNELS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    f"advance_momentum-{dtype}-{'near' if near else 'far'}{'-nesterov' if nesterov else ''}": (
        "advance_momentum",
        {"gradient": "*fp32", "momentum_buffer": f"*{dtype}", **_MOMENTUM},
        {"NEAR_GRADIENT": near, "NESTEROV": nesterov, **_WHOLE},
    )
    for dtype in ("fp32", "bf16")
    for near in (False, True)
    for nesterov in (False, True)
}
KERNELS |= {
    "advance_momentum-bf16-far-nesterov-scalar": (
        "advance_momentum",
        {"gradient": "*fp32", "momentum_buffer": "*bf16", **_MOMENTUM},
        {"NEAR_GRADIENT": False, "NESTEROV": True, **_SCALAR},
    ),
    "advance_momentum-bf16-far-nesterov-strips": (
        "advance_momentum",
        {"gradient": "*fp32", "momentum_buffer": "*bf16", **_MOMENTUM},
        {"NEAR_GRADIENT": False, "NESTEROV": True},
    ),
}
KERNELS |= {
    f"apply_update{name}": (
        "apply_update",
        {"weight": "*fp32", "update": "*fp32", **_WHERE, "numel": "i64", "lr": "fp32", "decay": "fp32"},
        constants,
    )
    for name, constants in {
        "": {"DECAYS": False, **_NONE},
        "-decays": {"DECAYS": True, **_NONE},
        "-decays-where": {"DECAYS": True, **_WHOLE},
        "-decays-strips": {"DECAYS": True},
    }.items()
}
KERNELS |= {
    f"store_updates-{dtype}-{'tall' if unit == 'row_stride' else 'wide'}{factors}": (
        "store_updates",
        {"outputs": f"*{dtype}", "factors": "*fp32", **_STORE},
        {unit: 1, "ALIGNED": True, "OF_ROWS": factors != "-columns", **({} if factors else {"factors": None})},
    )
    for dtype in ("fp16", "bf16", "fp32")
    for unit in ("row_stride", "col_stride")
    for factors in ("", "-rows", *(("-columns",) if dtype == "fp16" else ()))
}
_SUMS = {"x": "*fp32", "pieces": "*i64", "sums": "*fp64", "numel": "i64"}
KERNELS["sums_of_squares"] = ("sums_of_squares", _SUMS, {"pieces": None})
KERNELS["sums_of_squares-segments"] = ("sums_of_squares", _SUMS, {})
CASES = [(case, arch) for case in KERNELS for arch in (80, 90)]
# The rest is compiled with ``--all``: of each kernel what differs in its arithmetic, on one architecture or the other.
FEW = [
    ("advance_momentum-fp32-near-nesterov", 80),
    ("advance_momentum-fp32-far", 90),
    ("advance_momentum-bf16-far-nesterov", 90),
    ("advance_momentum-bf16-far-nesterov-scalar", 80),
    ("advance_momentum-bf16-far-nesterov-strips", 90),
    ("apply_update", 80),
    ("apply_update-decays-where", 90),
    ("store_updates-fp16-tall-columns", 80),
    ("store_updates-bf16-wide", 90),
    ("store_updates-fp32-wide-rows", 80),
    ("sums_of_squares", 80),
    ("sums_of_squares-segments", 90),
]


def compile_case(case: str, arch: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ds_muon.kernels import elementwise
    from ds_muon.passes import triton_passes

    name, types, constants = KERNELS[case]
    kernel = getattr(elementwise, name)
    sizes = {"BLOCK": triton_passes.BLOCK, "SIDE": triton_passes.SIDE, "SPAN": triton_passes.SPAN}
    options: dict[str, Any] = triton_passes.EXACT
    if name == "sums_of_squares":
        sizes["BLOCK"] = triton_passes.SUMMED
        options = {"num_warps": 4}
    constants = constants | {size: value for size, value in sizes.items() if size in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    # Addresses, and sides and strides of common matrices, are multiples of 16; the length of a partition may be any.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or (name in ("rows", "cols", *_STRIDES) and name not in constants)
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", arch, 32), options=options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [cuobjdump, "-res-usage", "-sass", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", report)
    assert found is not None, report
    return {"ptx": compiled.asm["ptx"], "sass": report, "stack": int(found[1])}


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[tuple[str, int], dict[str, Any]]:
    """Compiled in a process of its own: the interpreter may have taken over Triton in this one."""
    chosen = CASES if request.config.getoption("--all") else FEW
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    numbers = [str(CASES.index(case)) for case in chosen]
    run = subprocess.run([sys.executable, __file__, *numbers], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-5000:]
    return dict(zip(chosen, json.loads(run.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(
    "case", [case if case in FEW else full(case) for case in CASES], ids=lambda case: f"{case[0]}-sm{case[1]}"
)
def test_every_operation_rounds_once_and_memory_is_reached_16_bytes_at_a_time(
    case: tuple[str, int], compiled: dict[tuple[str, int], dict[str, Any]]
) -> None:
    code = compiled[case]
    assert code["stack"] == 0
    # No product and sum in one, neither by Triton nor by the assembler, and no denormal taken for zero.
    assert not re.search(r"\bfma\.\S*f32|\bmad\.\S*f32|\.ftz", code["ptx"])
    assert not re.search(r"\bFFMA\b|\bF(ADD|MUL)\S*\.FTZ\b", code["sass"])
    assert "ld.global.v4" in code["ptx"]
    assert "st.global.v4" in code["ptx"] or case[0].startswith("sums_of_squares")
    # To the nearest, ties to even.
    assert bool(re.search(r"\bcvt\.rn\.bf16(x2)?\.f32", code["ptx"])) == case[0].startswith("advance_momentum-bf16")


if __name__ == "__main__":
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        chosen = [CASES[int(number)] for number in sys.argv[1:]]
        print(json.dumps(list(pool.map(lambda case: compile_case(*case), chosen))))
