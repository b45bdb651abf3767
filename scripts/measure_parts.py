"""Newton-Schulz of a batch in parts on parallel streams, one GPU: cut evenly, unevenly, in three, or not at all.

    scripts/measure_parts.py [--rounds 30]

Every number is a median in ms, over the time that the operations would take at the rate of a large product, measured
just after. At last two batches of other shapes, one after the other and side by side.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor

from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.orthogonalize.triton_backend import TritonBackend

SHAPES = [(24, 1024, 1024), (24, 1024, 4096), (12, 2048, 2048)]
INNER = 6
_SPLIT = torch.Tensor.tensor_split


def runner(matrices: Sequence[Tensor], settings: NewtonSchulz, cuts: Sequence[int]) -> Callable[[], object]:
    """Runs a batch in parts that begin at these matrices."""
    backend, iteration = TritonBackend(), settings.iteration(matrices[0].shape[0], matrices[0].shape[1])

    def run() -> None:
        with mock.patch.object(torch.Tensor, "tensor_split", lambda tensor, _: _SPLIT(tensor, list(cuts))):
            backend.run(matrices, iteration)

    return run


def timed(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Medians in ms; the runs take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(4 + rounds):
        for name, run in runs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for _ in range(INNER):
                run()
            end.record()
            torch.cuda.synchronize()
            if index >= 4:
                times[name].append(begin.elapsed_time(end) / INNER)
    return {name: statistics.median(of_run) for name, of_run in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    device = torch.device("cuda")
    settings = NewtonSchulz.resolve(device)
    large = torch.randn(8192, 8192, device=device, dtype=settings.dtype)

    def batch(count: int, rows: int, cols: int) -> list[Tensor]:
        return [torch.randn(rows, cols, device=device) for _ in range(count)]

    for count, rows, cols in SHAPES:
        matrices, half, third = batch(count, rows, cols), count // 2, count // 3
        cuts = {"one": [], "halves": [half], "2/3 and 1/3": [2 * third], "3/4 and 1/4": [3 * count // 4]}
        cuts |= {"7/8 and 1/8": [7 * count // 8], "thirds": [third, 2 * third]}
        cuts |= {"1/4, 1/2, 1/4": [count // 4, 3 * count // 4]}
        found = timed({name: runner(matrices, settings, cut) for name, cut in cuts.items()}, rounds)
        product = timed({"large": lambda: large @ large}, 5)["large"]
        floor = count * settings.cost(rows, cols) / (2 * 8192**3) * product
        print(f"{count} x {rows} x {cols}, floor {floor:.3f}:", flush=True)
        for name, ms in found.items():
            print(f"    {name:16}{ms:8.3f}{ms / floor:7.2f}", flush=True)
    first, second = (batch(*shape) for shape in SHAPES[:2])
    alone = [runner(first, settings, [12]), runner(second, settings, [12])]
    beside = [runner(first, settings, [12]), runner(second, settings, [12])]
    other = torch.cuda.Stream()

    def side_by_side() -> None:
        other.wait_stream(torch.cuda.current_stream())
        beside[0]()
        with torch.cuda.stream(other):
            beside[1]()
        torch.cuda.current_stream().wait_stream(other)

    def in_turn() -> None:
        for run in alone:
            run()

    print("both batches of 24:", timed({"in turn": in_turn, "side by side": side_by_side}, rounds))


if __name__ == "__main__":
    with torch.no_grad():
        main()
