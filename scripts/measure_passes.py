"""How long the elementwise passes of a step take on this GPU: each kernel beside the torch operations it replaces.

    python scripts/measure_passes.py                # 155M elements, of which matrices of 1024 x 1024
    python scripts/measure_passes.py --elements 604000000 --side 2048

Each is timed right behind a large matmul, as a step finds the device at work, and the two take turns: medians. A pass
can be no faster than its bytes, each input read once and each output written once: beside the time stands the rate at
which the kernel moves them, and that over the rate of a copy on the same device.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch

from ds_muon.bench.clock import Yardstick
from ds_muon.passes import torch_passes

Pass = tuple[str, int, int, Callable[[ModuleType], object]]


def passes(elements: int, side: int, device: torch.device) -> Iterator[Pass]:
    """Title, elements, bytes of each, and the pass by the functions of a module."""
    flat = partial(torch.randn, elements, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        gradient, momentum = flat(), flat().to(dtype)
        yield (
            f"momentum, {str(dtype).removeprefix('torch.')}",
            elements,
            8 + 2 * dtype.itemsize,
            lambda module, g=gradient, m=momentum: module.advance_momentum_(g, m, momentum=0.95, nesterov=True),
        )
    outputs = torch.randn(elements // side**2, side, side, device=device, dtype=torch.float16)
    targets = list(torch.empty(outputs.shape, device=device).unbind())
    yield "update, fp16 to fp32", outputs.numel(), 6, lambda module: module.store_updates(outputs, targets, scale=0.2)
    weight, update = flat(), flat()
    # A rate of 1 leaves the update as large as it is.
    yield "apply", elements, 12, lambda module: module.apply_update_(weight, update, lr=1.0, weight_decay=0.1)
    yield "sum of squares", elements, 4, lambda module: module.sum_of_squares(weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=155_000_000, help="of the flat tensors (default: %(default)s)")
    parser.add_argument("--side", type=int, default=1024, help="of the square matrices (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    options = parser.parse_args()
    if options.rounds < 1 or options.side < 1 or options.elements < options.side**2:
        parser.error("--rounds and --side must be at least 1, and --elements those of one matrix")
    if not torch.cuda.is_available():
        parser.exit(2, "there is no GPU here, and elsewhere the passes are torch's operations\n")
    from ds_muon.passes import triton_passes

    device = torch.device("cuda", torch.cuda.current_device())
    yardstick = Yardstick(device)

    def medians(*calls: Callable[[], object]) -> list[float]:
        times = [[yardstick.before(call)[1] for call in calls] for _ in range(3 + options.rounds)]
        return [statistics.median(of_call) for of_call in zip(*times[3:], strict=True)]

    source = torch.randn(options.elements, device=device)
    (copy_ms,) = medians(partial(torch.empty_like(source).copy_, source))
    copy_rate = 8e-6 * options.elements / copy_ms
    print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {options.elements:,} elements, matrices of"
    )
    print(f"{options.side} x {options.side}; a copy moves {copy_rate:,.0f} GB/s\n")
    print(f"{'':24}{'torch, ms':>12}{'kernel, ms':>12}{'times as fast':>15}{'GB/s':>8}{'of a copy':>11}")
    for title, elements, size, call in passes(options.elements, options.side, device):
        in_torch, in_kernel = medians(partial(call, torch_passes), partial(call, triton_passes))
        rate = 1e-6 * size * elements / in_kernel
        ratio = in_torch / in_kernel
        print(f"{title:24}{in_torch:12.3f}{in_kernel:12.3f}{ratio:15.2f}{rate:8,.0f}{rate / copy_rate:11.2f}")


if __name__ == "__main__":
    main()
