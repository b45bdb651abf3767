"""Measure CPU offload of the optimizer on one GPU: time of an iteration and of its step, bytes on GPU and host.

    python scripts/measure_offload.py --models gpt-303m gpt-1.2b --json offload.json --trace trace.json
    python scripts/measure_offload.py --models gpt-3b --only dsmuon-offload adamw-offload
    python scripts/measure_offload.py --largest            # the largest GPT that trains with offload and without
    python scripts/measure_offload.py --loops              # the host's loops alone, by bytes of a slot

DSMuon with and without offload, AdamW offloaded (DeepSpeedCPUAdam) and DeepSpeed's Muon offloaded; each in a process of
its own, all of them ``--passes`` times in turn. No process takes longer than ``--limit`` seconds, and none begins after
``--budget`` seconds. A candidate stops after ``--rounds`` iterations or ``--seconds``. The bus is measured by plain
copies of pinned memory, 4 bytes per parameter up and 2 down.

The host's threads are those of the process: ``OMP_NUM_THREADS`` is set to all cores unless it is given. A step of
DSMuon is also shown by its phases, from torch's profiler; ``--trace`` writes one, for the last of the models.
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
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ds_muon.plan_cost import GPTS
from ds_muon.ranks import held_port

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
PASSED_ON = ("candidate", "layers", "width", "micro_batch", "sequence", "rounds", "seconds")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One candidate and one size, in this process."""
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
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    with torch.device(device):
        model = GPT(GPTConfig(options.layers, options.width // 64, options.width, block_size=options.sequence))
    torch.set_default_dtype(torch.float32)
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

    begun = time.perf_counter()

    def in_time() -> bool:
        return time.perf_counter() - begun < options.seconds

    for _ in range(3):
        iterate()
        if not in_time():
            break
    resident = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    times = [iterate()]
    while len(times) < options.rounds and in_time():
        times.append(iterate())
    zero = engine.optimizer
    flats = [*zero.single_partition_of_fp32_groups, *getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", [])]
    states = [value for state in zero.optimizer.state.values() for value in state.values()]
    tensors = [*flats, *(flat.grad for flat in flats), *states]
    of_host = [t for t in tensors if torch.is_tensor(t) and (t.device.type == "cpu" or not on_gpu)]
    found = {
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "iteration_ms": [iteration for iteration, _, _ in times],
        "step_ms": [step for _, step, _ in times],
        "loss": times[-1][2],
        "resident_bytes": resident,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else 0,
        "host_bytes": sum(tensor.nbytes for tensor in of_host),
        "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "threads": torch.get_num_threads(),
    }
    if options.candidate.startswith("dsmuon") and options.rounds > 2:
        with torch.profiler.profile() as profiler:
            iterate()
        phases: dict[str, float] = {}
        copies: dict[str, float] = {}
        for e in profiler.events():  # on the accelerator, a phase has events of its own
            if e.name.startswith("ds_muon::") and str(e.device_type).endswith("CPU"):
                phases[e.name] = phases.get(e.name, 0.0) + e.cpu_time_total / 1e3
            if e.name.startswith("Memcpy"):
                copies[e.name] = copies.get(e.name, 0.0) + e.self_device_time_total / 1e3
        found |= {"phases_ms": phases, "busy_ms": copies}
        if options.trace is not None:
            profiler.export_chrome_trace(str(options.trace))
    return found


def bus(parameters: int) -> dict[str, float]:
    """Milliseconds of the bus for the bytes of a step of so many elements: up, down, and both at once. And the host's.

    ``host_gb_s`` is how fast all threads copy within the host's memory, reading and writing together.
    """
    import torch

    chunk = 1 << 26
    pinned = [torch.zeros(chunk, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for _ in range(2)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = [torch.zeros(chunk, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if device.type == "cuda" else []

    def timed(up: int, down: int) -> float:
        best = float("inf")
        for _ in range(3):
            if streams:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for number in range(max(up, down)):
                for wanted, direction in ((up, 0), (down, 1)):
                    if number < wanted:
                        goal, source = (there[0], pinned[0]) if direction == 0 else (pinned[1], there[1])
                        if streams:
                            with torch.cuda.stream(streams[direction]):
                                goal.copy_(source, non_blocking=True)
                        else:
                            goal.copy_(source)
            if streams:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return 1e3 * best

    up, down = 4 * parameters // chunk, 2 * parameters // chunk
    left, right = torch.zeros(1 << 28), torch.zeros(1 << 28)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        left.copy_(right)
        seconds.append(time.perf_counter() - start)
    host = (left.nbytes + right.nbytes) / min(seconds) / 1e9
    return {"up": timed(up, 0), "down": timed(0, down), "both": timed(up, down), "host_gb_s": host}


def loops(elements: int, rounds: int = 4) -> dict[str, float]:
    """Least milliseconds of the host's loops over so many elements, alone; those that lift by MiB of a slot."""
    import torch

    from ds_muon.passes import host_passes, lift

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    g, m, v, w = (torch.zeros(elements, pin_memory=on_gpu) for _ in range(4))
    o = torch.zeros(elements, dtype=torch.float16, pin_memory=on_gpu)
    u, rounded = (torch.zeros(elements, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16))
    found: dict[str, float] = {}

    def timed(name: str, bytes_each: int, run: Callable[[], object]) -> None:
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        found[name] = 1e3 * min(seconds)
        rate = bytes_each * elements / min(seconds) / 1e9
        print(f"{name:28} {found[name]:8.1f} ms, {bytes_each} bytes an element: {rate:6.1f} GB/s", flush=True)

    timed("copy", 8, lambda: v.copy_(g))
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    print(f"{torch.get_num_threads()} threads of", *(file for file in files if "omp" in Path(file).name))
    timed("squares", 4, lambda: host_passes.sum_of_squares(g))
    moments: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    timed("adamw", 28, lambda: host_passes.adamw_(w, g, m, v, step=1, **moments))
    momentum: dict[str, Any] = {"momentum": 0.95, "nesterov": True}
    move: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "scale": 2.0}
    timed("advance, in place", 16, lambda: host_passes.advance_momentum_(g, m, **momentum))
    timed("apply", 10, lambda: host_passes.apply_update_(w, o, **move))
    for kib in (512, 1024, 2048, 4096, 8192, 16384):
        lift.SLOT_BYTES = kib << 10
        by = lift.Lift(device, pinned=on_gpu)
        runs: tuple[tuple[str, int, Callable[..., object], dict[str, Any]], ...] = (
            ("advance", 12, partial(host_passes.advance_momentum_, g, m, **momentum), {"into": lift.Goal(u, by)}),
            ("apply", 10, partial(host_passes.apply_update_, w, o, **move), {"rounded": lift.Goal(rounded, by)}),
        )
        for name, bytes_each, run, goal in runs:
            timed(f"{name}, slots of {kib} KiB", bytes_each, partial(run, **goal))
    return found


def in_a_process(options: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """What ``measure`` finds, or {"problem": why not}."""
    environment = {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        **os.environ,
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
    }
    settings = {**vars(options), **changes}
    command = [sys.executable, __file__]
    for key in PASSED_ON:
        command += [f"--{key.replace('_', '-')}", str(settings[key])]
    if settings["trace"] is not None:
        command += ["--trace", str(settings["trace"])]
    try:
        with held_port() as port:
            environment["MASTER_PORT"] = str(port)
            done = subprocess.run(
                command, env=environment, capture_output=True, timeout=options.limit, text=True, check=False
            )
    except subprocess.TimeoutExpired:
        return {"problem": f"not finished in {options.limit:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(done.stderr[-3000:], file=sys.stderr, flush=True)
        said = [line for line in done.stderr.splitlines() if "Error" in line] or ["see above"]
        return {"problem": f"exit code {done.returncode}: {said[-1][:100]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def compare(options: argparse.Namespace, begun: float) -> dict[str, Any]:
    """All candidates at all sizes, in turn."""
    found: dict[str, Any] = {}
    for number in range(options.passes):
        for model in options.models:
            layers, width = options.layers or GPTS[model][0], options.width or GPTS[model][1]
            of_model = found.setdefault(model, {name: [] for name in options.only})
            for name in options.only:
                elapsed = time.perf_counter() - begun
                if any("problem" in run for run in of_model[name]) or elapsed > options.budget:
                    continue
                last = number == 0 and model == options.models[-1] and name == "dsmuon-offload"
                trace = options.trace if last else None
                run = in_a_process(options, candidate=name, layers=layers, width=width, trace=trace)
                of_model[name].append(run)
                took = time.perf_counter() - begun - elapsed
                print(f"{model}: {name}: {run.get('problem', 'done')}, {took:.0f} s", file=sys.stderr, flush=True)
            if number == 0 and (runs := [run for of in of_model.values() for run in of if "problem" not in run]):
                of_model["bus"] = bus(runs[0]["parameters"])
    return found


def show(found: dict[str, Any]) -> None:
    """The figures as tables."""
    for model, of_model in found.items():
        times = of_model.pop("bus", {})
        print(f"\n{model:16} {'iteration, ms':>17} {'step, ms':>17} {'rounds':>6} {'GPU, GB':>8} {'peak':>6} ", end="")
        print(f"{'host, GB':>8}\n{'':16} {'median':>9} {'least':>7} {'median':>9} {'least':>7}")
        for name, runs in of_model.items():
            if problems := [run["problem"] for run in runs if "problem" in run] or ["not measured"] * (not runs):
                print(f"{name:16} {problems[0]}")
                continue
            iteration, step = ([ms for run in runs for ms in run[key]] for key in ("iteration_ms", "step_ms"))
            sizes = [max(r[key] for r in runs) / 1e9 for key in ("resident_bytes", "peak_bytes", "host_bytes")]
            print(
                f"{name:16} {statistics.median(iteration):9.1f} {min(iteration):7.1f} {statistics.median(step):9.1f} "
                f"{min(step):7.1f} {len(step):6} {sizes[0]:8.2f} {sizes[1]:6.2f} {sizes[2]:8.2f}"
            )
        print("bus, ms:", {key: round(value, 1) for key, value in times.items()})
        of_model["bus"] = times
        for name, runs in of_model.items():
            for key in ("phases_ms", "busy_ms"):
                if runs and key in (last := runs[-1] if isinstance(runs, list) else {}):
                    print(f"{name}: {key}:", {of: round(ms, 2) for of, ms in last[key].items()})


def host_bytes() -> int:
    """The host's memory: what this process is limited to, or else all, which on some machines grows with use."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # not there, or "max"
            if (limit := int(Path(path).read_text())) < 1 << 50:
                return limit
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def largest(options: argparse.Namespace, begun: float) -> dict[str, Any]:
    """For DSMuon with offload and without, the most billions of parameters that train; by steps from an estimate.

    Estimates of 16.1 bytes of the GPU per parameter without offload and 4.2 with: weights and gradients in half
    precision, and without also fp32 weights, momentum and gradients. With offload these are on the host, which is not
    asked for more than it has: it may end more than the process.
    """
    import torch

    width, sequence = 4096, 256
    per_billion = round(1e9 / (12 * width**2))  # layers
    gpu = torch.cuda.get_device_properties(0).total_memory
    host = options.host or host_bytes() / 1e9

    def host_gb(billions: int) -> float:
        """Weights and momentum; gradients, pinned, which torch rounds up to a power of two, and DeepSpeed does not."""
        nbytes = 4 * billions * per_billion * 12 * width**2
        exact = os.environ.get("DS_PIN_MEMORY_BACKEND") == "native"
        return (2 * nbytes + (nbytes if exact else 1 << (nbytes - 1).bit_length())) / 1e9 + 8

    fit = [billions for billions in range(1, 200) if host_gb(billions) <= host and 4.2 * billions <= gpu / 1e9]
    guesses = {"dsmuon": int(gpu / 16.1e9), "dsmuon-offload": max(fit, default=1)}
    found: dict[str, Any] = {"gpu_bytes": gpu, "host_gb": host}
    for name, guess in guesses.items():
        tried: dict[int, str] = {}
        billions = max(1, guess) if name in options.only else 0
        while billions not in tried and billions and time.perf_counter() - begun < options.budget:
            if "offload" in name and host_gb(billions) > host:
                tried[billions] = f"not tried: needs {host_gb(billions):.0f} GB of the host's {host:.0f}"
                break
            run = in_a_process(
                options, candidate=name, layers=billions * per_billion, width=width, sequence=sequence,
                micro_batch=1, rounds=2, seconds=5.0, trace=None,
            )  # fmt: skip
            tried[billions] = run.get("problem", f"{statistics.median(run.get('iteration_ms', [0])):.0f} ms")
            sizes = {key: f"{run.get(key, 0) / 1e9:.1f} GB" for key in ("peak_bytes", "host_bytes", "host_peak_bytes")}
            took = time.perf_counter() - begun
            print(f"{name}: {billions}B: {tried[billions]}, {sizes}; {took:.0f} s", file=sys.stderr, flush=True)
            billions += -1 if "problem" in run else 1
        fits = [size for size, said in tried.items() if said.endswith(" ms")]
        found[name] = {"largest, billions": max(fits, default=None), "tried": tried}
        print(f"{name}: the largest that trains: {max(fits, default=0)}B of {tried}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=GPTS, default=["gpt-303m", "gpt-1.2b"])
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10, help="iterations of a candidate in each pass")
    parser.add_argument("--seconds", type=float, default=20.0, help="for these, and for those that warm up")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for a process")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which no process begins")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=[*CANDIDATES])
    parser.add_argument("--largest", action="store_true", help="in place of the comparison")
    parser.add_argument("--host", type=float, help="GB of the host's memory, for --largest; by default its limit")
    parser.add_argument("--loops", action="store_true", help="in place of the comparison: the host's loops alone")
    parser.add_argument("--trace", type=Path, help="write a trace of one iteration with offload, of the last model")
    parser.add_argument("--json", type=Path, help="write all numbers")
    for hidden, kind in {"candidate": str, "layers": int, "width": int}.items():
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.candidate:
        print(json.dumps(measure(options)), flush=True)
        return
    begun = time.perf_counter()
    if options.loops:
        found: dict[str, Any] = loops(300_000_000)
    else:
        found = largest(options, begun) if options.largest else compare(options, begun)
        if not options.largest:
            show(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
