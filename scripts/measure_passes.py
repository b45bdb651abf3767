"""How long the elementwise passes of a step take on this GPU: each kernel beside the torch operations it replaces.

    python scripts/measure_passes.py                                              # 148 matrices of 1024 x 1024
    python scripts/measure_passes.py --shapes 72x2048x2048 48x2048x8192           # those of a model of 1.2B parameters
    python scripts/measure_passes.py --shapes 9216x1024x512 --rounds 7

The flat tensors hold the matrices end to end. A pass that decides, or sums up, for each matrix by itself is timed
beside the same kernel on the tensor as one: what that costs is the column "over as one". Each is timed right behind a
large matmul, as a step finds the device at work, and they take turns: medians. A pass can be no faster than its bytes,
each input read once and each output written once: beside the time stands the rate at which the kernel moves them, and
that over the rate of a copy on the same device.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from ds_muon.bench.clock import Yardstick
from ds_muon.layout import Piece
from ds_muon.passes import Held, Moves, Segments, torch_passes

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Pass:
    """A pass by the functions of a module, for each matrix and, where there is a difference, on the tensor as one.

    ``size`` is the number of bytes that have to be moved.
    """

    title: str
    size: int
    by_matrix: Callable[[ModuleType], object]
    as_one: Callable[[ModuleType], object] | None = None


def passes(shapes: Sequence[Shape], first: Tensor, second: Tensor) -> Iterator[Pass]:
    """All of them on two flat fp32 tensors, which are overwritten."""
    sizes = [rows * cols for count, rows, cols in shapes for _ in range(count)]
    elements, device = first.numel(), first.device
    held = [
        Held(Piece((), 0, 1, size), 0, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]
    segments = Segments.of(held, elements, device)
    moves = Moves(segments, torch.ones(len(sizes), dtype=torch.bool, device=device))
    together = torch.ones((), dtype=torch.bool, device=device)

    for dtype in (torch.float32, torch.bfloat16):

        def momentum(flags: Tensor | Moves, buffer: Tensor, module: ModuleType) -> None:
            module.advance_momentum_(first, buffer, momentum=0.95, nesterov=True, moves=flags)

        title, size = f"momentum, {str(dtype).removeprefix('torch.')}", elements * (8 + 2 * dtype.itemsize)
        buffer = second.to(dtype)
        yield Pass(title, size, partial(momentum, moves, buffer), partial(momentum, together, buffer))
        del buffer

    def store(outputs: Tensor, targets: Sequence[Tensor], module: ModuleType) -> None:
        module.store_updates(outputs, targets, scale=0.2)

    count, rows, cols = shapes[0]
    outputs = torch.randn(count, rows, cols, device=device, dtype=torch.float16)
    targets = first[: outputs.numel()].view(outputs.shape).unbind()
    yield Pass("update, fp16 to fp32", 6 * outputs.numel(), partial(store, outputs, targets))
    del outputs, targets

    def apply(flags: Moves | None, module: ModuleType) -> None:
        # A rate of 1 leaves the update as large as it is.
        module.apply_update_(first, second, lr=1.0, weight_decay=0.1, moves=flags)

    yield Pass("decay and apply", 12 * elements, partial(apply, moves), partial(apply, None))

    def squares(cut: Segments | None, module: ModuleType) -> None:
        module.sum_of_squares(first, cut)

    yield Pass("sum of squares", 4 * elements, partial(squares, segments), partial(squares, None))


def parse_shape(text: str) -> Shape:
    try:
        count, rows, cols = (int(part) for part in text.split("x"))
        if min(count, rows, cols) < 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write COUNTxROWSxCOLS, such as 72x2048x2048") from None
    return count, rows, cols


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", type=parse_shape, nargs="+", default=[(148, 1024, 1024)], metavar="COUNTxROWSxCOLS",
        help="of the matrices (default: 148x1024x1024)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not torch.cuda.is_available():
        parser.exit(2, "there is no GPU here, and elsewhere the passes are torch's operations\n")
    from ds_muon.passes import triton_passes

    device = torch.device("cuda", torch.cuda.current_device())
    yardstick = Yardstick(device)

    def medians(*calls: Callable[[], object]) -> list[float]:
        times = [[yardstick.before(call)[1] for call in calls] for _ in range(3 + options.rounds)]
        return [statistics.median(of_call) for of_call in zip(*times[3:], strict=True)]

    elements = sum(math.prod(shape) for shape in options.shapes)
    first, second = (torch.randn(elements, device=device) for _ in range(2))
    (copy_ms,) = medians(partial(second.copy_, first))
    copy_rate = 8e-6 * elements / copy_ms
    matrices = ", ".join("x".join(map(str, shape)) for shape in options.shapes)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {matrices}: {elements:,} elements")
    print(f"a copy moves {copy_rate:,.0f} GB/s\n")
    heads = ("torch, ms", "kernel, ms", "as one, ms", "over as one", "GB/s", "of a copy")
    print(" " * 24 + "".join(f"{head:>{width}}" for head, width in zip(heads, (12, 12, 12, 13, 8, 11), strict=True)))
    for one in passes(options.shapes, first, second):
        calls = [partial(one.by_matrix, torch_passes), partial(one.by_matrix, triton_passes)]
        in_torch, in_kernel, *as_one = medians(*calls, *([partial(one.as_one, triton_passes)] if one.as_one else []))
        beside = "".join(f"{ms:12.3f}{in_kernel / ms:13.3f}" for ms in as_one) or " " * 25
        rate = 1e-6 * one.size / in_kernel
        print(f"{one.title:24}{in_torch:12.3f}{in_kernel:12.3f}{beside}{rate:8,.0f}{rate / copy_rate:11.2f}")


if __name__ == "__main__":
    main()
