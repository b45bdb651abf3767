"""Measure CPU offload of the optimizer on one GPU: time of an iteration and of its step, bytes on GPU and host.

    python scripts/measure_offload.py --model gpt-1.2b --json offload.json
    python scripts/measure_offload.py --model gpt-1.2b --only dsmuon-offload --trace trace.json
    python scripts/measure_offload.py --layers 40 --width 4096 --only dsmuon dsmuon-offload    # what fits

DSMuon with and without offload, AdamW offloaded (DeepSpeedCPUAdam) and DeepSpeed's Muon offloaded; each in a process of
its own, which is given up after ``--limit`` seconds, and all of them ``--passes`` times in turn. The host's threads are
those of the process: ``OMP_NUM_THREADS`` is set to all cores unless it is given.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ds_muon.plan_cost import GPTS

RATES = {"lr": 0.02, "adam_lr": 3e-4}
ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
CANDIDATES: dict[str, dict[str, Any]] = {
    "dsmuon": {"optimizer": {"type": "DSMuon", "params": RATES}, "zero": {}},
    "dsmuon-offload": {"optimizer": {"type": "DSMuon", "params": RATES}, "zero": ON_HOST},
    "adamw-offload": {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, "zero": ON_HOST},
    "muon-offload": {
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "muon_lr": 0.02, "adam_lr": 3e-4}},
        "zero": ON_HOST,
    },
}
WARMUP = 3


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One candidate, in this process."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from ds_muon.sample.gpt import GPT, GPTConfig

    candidate = CANDIDATES[options.candidate]
    deepspeed.init_distributed()
    device = torch.device(get_accelerator().current_device_name())
    on_gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else (lambda: None)
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(GPTConfig(options.layers, options.width // 64, options.width, block_size=options.sequence))
    parameters = sum(p.numel() for p in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_clipping": 0.0,
        "optimizer": candidate["optimizer"],
        "zero_optimization": {"stage": 2, "reduce_scatter": False, **candidate["zero"]},
        "bf16": {"enabled": on_gpu},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    del model
    generator = torch.Generator().manual_seed(0)

    def iterate() -> tuple[float, float, float]:
        """Milliseconds of the iteration and of its step, and the loss."""
        tokens = torch.randint(256, (options.micro_batch, options.sequence + 1), generator=generator).to(device)
        synchronize()
        start = time.perf_counter()
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        synchronize()
        before = time.perf_counter()
        engine.step()
        synchronize()
        end = time.perf_counter()
        return 1e3 * (end - start), 1e3 * (end - before), float(loss.detach())

    for _ in range(WARMUP):
        iterate()
    resident = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    times = [iterate() for _ in range(options.rounds)]
    found = {
        "parameters": parameters,
        "iteration_ms": [iteration for iteration, _, _ in times],
        "step_ms": [step for _, step, _ in times],
        "loss": times[-1][2],
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "resident_bytes": resident,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else 0,
        "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "threads": torch.get_num_threads(),
    }
    if options.trace is not None:
        with torch.profiler.profile() as profiler:
            iterate()
        profiler.export_chrome_trace(str(options.trace))
        print(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=30), file=sys.stderr)
    return found


def in_a_process(name: str, options: argparse.Namespace, port: int) -> dict[str, Any]:
    """What ``measure`` finds, or {"problem": why not}."""
    environment = {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        **os.environ,
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    command = [sys.executable, __file__, "--candidate", name]
    for key in ("layers", "width", "micro_batch", "sequence", "rounds"):
        command += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
    if options.trace is not None:
        command += ["--trace", str(options.trace)]
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=options.limit, text=True)
    except subprocess.TimeoutExpired:
        return {"problem": f"not finished in {options.limit:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"problem": f"exit code {done.returncode}, see above"}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=GPTS, default="gpt-1.2b")
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--width", type=int, help="in place of the model's, a multiple of 64")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10, help="iterations of a candidate in each pass")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a candidate in each pass")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=[*CANDIDATES])
    parser.add_argument("--trace", type=Path, help="write a trace of one iteration of the last candidate")
    parser.add_argument("--json", type=Path, help="write all numbers")
    parser.add_argument("--candidate", choices=CANDIDATES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    layers, width = GPTS[options.model]
    options.layers, options.width = options.layers or layers, options.width or width
    if options.candidate:
        print(json.dumps(measure(options)), flush=True)
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    for number in range(options.passes):
        for place, name in enumerate(options.only):
            if any("problem" in run for run in found[name]):
                continue
            found[name].append(in_a_process(name, options, 29600 + 10 * number + place))
            print(f"pass {number + 1}: {name}: {found[name][-1].get('problem', 'done')}", file=sys.stderr, flush=True)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"options": {**vars(options), "json": None, "trace": None}, **found}, indent=1)
        )
    print(f"{'':16} {'iteration, ms':>20} {'step, ms':>20} {'GPU, GB':>8} {'peak':>6} {'host peak, GB':>14}")
    print(f"{'':16} {'median':>12} {'least':>7} {'median':>12} {'least':>7}")
    for name, runs in found.items():
        if problems := [run["problem"] for run in runs if "problem" in run]:
            print(f"{name:16} {problems[0]}")
            continue
        iteration, step = ([ms for run in runs for ms in run[key]] for key in ("iteration_ms", "step_ms"))
        resident, peak, host = (
            max(run[key] for run in runs) / 1e9 for key in ("resident_bytes", "peak_bytes", "host_peak_bytes")
        )
        print(
            f"{name:16} {statistics.median(iteration):12.1f} {min(iteration):7.1f} {statistics.median(step):12.1f} "
            f"{min(step):7.1f} {resident:8.2f} {peak:6.2f} {host:14.2f}"
        )


if __name__ == "__main__":
    main()
