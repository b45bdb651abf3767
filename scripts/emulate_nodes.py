"""Two nodes of two CPU ranks on one machine, and what crosses between them: network namespaces, and a slow link.

    sudo env PATH="$PATH" python scripts/emulate_nodes.py --json docs/measured/two-nodes.json

Each node is a network namespace with an address of its own; a pair of virtual Ethernet devices joins them, at
``--mbit`` where the kernel can slow it down. The `deepspeed` launcher starts each node's ranks from one hostfile, by
``--no_ssh``, and ranks talk over gloo. The sample GPT is trained under ZeRO-2 with AdamW, and with DSMuon, whose
updates are then checked as ``verify_every`` does. The devices count the bytes: of whole steps, and of DSMuon's exchange
alone, which must be what ``ds-muon plan --ranks-per-node 2`` says. A matrix must be owned by a node that holds of it.

It needs root, for the namespaces; nothing of the machine's own network is touched, and all is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NODES, RANKS = 2, 2
DEVICE, PORT = "eth0", 29477
# Of a packet: Ethernet, IP, and TCP with its time stamps. The kernel counts it once for all that goes out in one piece.
HEADERS = 14 + 20 + 32
EXCHANGES = 10
TOLERANCE = 0.002  # a packet may be sent again


def factory(rank: int, world_size: int) -> tuple[Any, list[Any]]:
    """The model, as ``ds-muon plan --model`` takes it: with batches, which a plan does not look at."""
    import torch

    from ds_muon.sample.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=1, n_head=4, n_embd=128, block_size=32)), []


# ---- the rank's side ------------------------------------------------------------------------------------------------


def sent() -> int:
    """Bytes that this node has sent to the other, without headers."""
    counted = Path("/sys/class/net", DEVICE, "statistics")
    size, packets = (int((counted / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return size - HEADERS * packets


def counted(do: Callable[[], object], beside: Callable[[], object] = lambda: None) -> int:
    """What all nodes send each other while every rank does it; less what another thing takes, and both to begin."""
    import torch
    import torch.distributed as dist

    totals = []
    for what in (beside, do):
        dist.barrier()
        before = sent()
        dist.barrier()
        what()
        dist.barrier()
        # One rank of each node looks.
        mine = torch.tensor(sent() - before if dist.get_rank() % RANKS == 0 else 0)
        dist.all_reduce(mine)
        totals.append(int(mine))
    return totals[1] - totals[0]


def train(optimizer: str, steps: int) -> dict[str, Any]:
    """On every rank: train, count, and check."""
    import deepspeed
    import torch
    import torch.distributed as dist

    import ds_muon  # noqa: F401  registers DSMuon

    muon = optimizer == "DSMuon"
    # Results travel in two bytes, as on a GPU.
    params = {"lr": 0.02, "adam_lr": 1e-3, "ns_dtype": "float16"} if muon else {"lr": 1e-3, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": 2, "reduce_scatter": False},
    }
    model, _ = factory(0, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []

    def step() -> None:
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())

    step()  # makes what groups of ranks need
    found: dict[str, Any] = {"step": counted(lambda: [step() for _ in range(steps)]) // steps}
    if muon:
        from ds_muon.exchange import element_bytes

        zero = engine.optimizer
        size = element_bytes(zero.newton_schulz, normuon=False)

        def exchange() -> None:
            for group in zero.muon_groups * EXCHANGES:
                group.exchange.take_part(back=False, dtype=torch.float32, device=engine.device)
                group.exchange.take_part(back=True, dtype=zero.newton_schulz.dtype, device=engine.device)

        def of_nothing() -> None:
            """As many collectives: gloo says to every rank what comes, if it is nothing."""
            none, counts = torch.empty(0), [0] * dist.get_world_size()
            for _ in range(2 * EXCHANGES * len(zero.muon_groups)):
                dist.all_to_all_single(none, none, counts, counts)

        found["exchange"] = counted(exchange, of_nothing) // EXCHANGES
        found["planned"] = sum(zero.plan.moved_by_rank(RANKS)) // 2 * size
        found["busiest"] = max(zero.plan.moved_by_rank(RANKS)) * size
        found["planned in all"] = sum(zero.plan.moved_by_rank()) // 2 * size
        found["travels"] = [
            (unit.name, [part.rank for part in unit.slices], unit.owner)
            for group in zero.plan.groups
            for unit in group.travellers
        ]
        found["checked"] = check(engine, step, len(zero.plan.matrices))
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    found["losses"] = (mean / dist.get_world_size()).tolist()
    return found


def check(engine: Any, step: Any, steps: int) -> int:
    """Check a matrix in each step; how many were right."""
    import torch
    import torch.distributed as dist

    from ds_muon.verify.in_training import TrainingCheck

    zero = engine.optimizer
    zero.training_check = TrainingCheck(zero, engine.module, 1)
    right = torch.zeros(())
    for _ in range(steps):
        before = zero.training_check.last
        step()
        record = zero.training_check.last
        right += record is not before and record is not None and record.ok
    zero.training_check = None
    dist.all_reduce(right)
    return int(right)


# ---- the nodes ------------------------------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def nodes(mbit: float) -> Iterator[tuple[list[str], bool]]:
    """The names of the namespaces, each with a device of the same name; and whether the link is slow."""
    names = [f"ds-muon-{os.getpid()}-{node}" for node in range(NODES)]
    slow = False
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for node, name in enumerate(names):
            ip("-n", name, "address", "add", f"{address(node)}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
            rate = ["tbf", "rate", f"{mbit:g}mbit", "burst", "128kb", "latency", "100ms"]
            shape = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", DEVICE, "root", *rate]
            slow = bool(mbit) and subprocess.run(shape, capture_output=True).returncode == 0
        yield names, slow
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def path(*folders: Path) -> str:
    """Where processes find modules: this tree, and what this process was told."""
    return os.pathsep.join(filter(None, [str(ROOT), *map(str, folders), os.environ.get("PYTHONPATH")]))


def launch(names: list[str], optimizer: str, steps: int, folder: Path) -> dict[str, Any]:
    """Start every node's ranks by the launcher, wait for them, and read what rank 0 found."""
    from ds_muon import leash

    hostfile, result = folder / "hostfile", folder / f"{optimizer}.json"
    hostfile.write_text("".join(f"{address(node)} slots={RANKS}\n" for node in range(NODES)))
    threads = str(max(1, (os.cpu_count() or 1) // (NODES * RANKS)))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads}
    environment["PYTHONPATH"] = path()
    running, logs = [], []
    try:
        for node, name in enumerate(names):
            launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--no_ssh"]
            launcher += ["--node_rank", str(node), "--master_addr", address(0), "--master_port", str(PORT)]
            command = [*launcher, __file__, "--rank", optimizer, "--steps", str(steps), "--json", str(result)]
            logs.append(folder / f"{optimizer}-{node}.log")
            running.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command],
                    env=environment, stdout=logs[-1].open("wb"), stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip
        codes = [process.wait(600) for process in running]
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        leash.remove_buffers(PORT)
    if any(codes) or not result.exists():
        raise SystemExit("\n".join(log.read_text(errors="replace")[-3000:] for log in logs))
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def planned_by_command(folder: Path) -> int:
    """The busiest rank's bytes between nodes, as ``ds-muon plan`` says."""
    out = folder / "plan.json"
    ranks = ["--world-size", str(NODES * RANKS), "--ranks-per-node", str(RANKS)]
    command = [sys.executable, "-m", "ds_muon.cli", "plan", "--model", "emulate_nodes:factory", *ranks]
    environment = {**os.environ, "PYTHONPATH": path(ROOT / "scripts")}
    subprocess.run([*command, "--json", str(out)], check=True, env=environment, capture_output=True)
    (costs,) = (value for key, value in json.loads(out.read_text()).items() if key != "routing")
    return int(costs[0]["links"]["busiest_between_nodes"])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as kept, nodes(options.mbit) as (names, slow):
        folder = Path(kept)
        said = planned_by_command(folder)
        of = {name: launch(names, name, options.steps, folder) for name in ("AdamW", "DSMuon")}
    muon = of["DSMuon"]
    print(f"two nodes of two ranks, {f'{options.mbit:g} Mbit/s' if slow else 'as fast as the kernel'} between them")
    print(f"a step sends between nodes: AdamW {of['AdamW']['step']:,} bytes, DSMuon {muon['step']:,}")
    print(f"DSMuon's exchange alone: {muon['exchange']:,}; by the plan {muon['planned']:,}")
    print(f"of all {muon['planned in all']:,} that travel; holders and owner: {muon['travels']}")
    assert said == muon["busiest"], f"ds-muon plan says {said}, the engine plans {muon['busiest']}"
    assert abs(muon["exchange"] / muon["planned"] - 1) < TOLERANCE, "the exchange is not what was planned"
    for name, holders, owner in muon["travels"]:
        of_nodes = {holder // RANKS for holder in holders}
        assert owner // RANKS in of_nodes, f"{name} is owned by a node that holds nothing of it"
    for name, found in of.items():
        assert found["losses"][-1] < found["losses"][0], f"{name} does not learn: {found['losses']}"
    matrices = 6
    assert muon["checked"] == matrices, f"of {matrices} updates {muon['checked']} were right"
    return published(of, options, slow)


def published(of: dict[str, dict[str, Any]], options: argparse.Namespace, slow: bool) -> dict[str, Any]:
    """A table for docs/measured."""
    import torch

    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=ROOT).stdout.strip() or "unknown"
    muon, adamw = of["DSMuon"], of["AdamW"]
    rate = f"at {options.mbit:g} Mbit/s" if slow else "as fast as the kernel makes it"
    return {
        "device": f"two network namespaces of two CPU ranks each, gloo, a link {rate}",
        "commit": commit,
        "recorded": commit,
        "versions": {"deepspeed": version("deepspeed"), "torch": str(torch.__version__)},
        "commands": [f"python scripts/emulate_nodes.py --steps {options.steps} --mbit {options.mbit:g}"],
        "notes": [
            "The sample GPT, one layer of width 128, fp32, ZeRO-2, `reduce_scatter: false`. Bytes both ways, as "
            "the devices count them, without the headers of packets; of the exchange alone also without what gloo "
            "sends where nothing is exchanged. All of DSMuon's updates were checked afterwards over the same link: "
            f"{muon['checked']} of {muon['checked']} right.",
        ],
        "columns": [{"name": "between the nodes"}, {"name": "bytes", "format": ",d"}],
        "rows": [
            ["a step with AdamW", adamw["step"]],
            ["a step with DSMuon", muon["step"]],
            ["DSMuon's exchange alone", muon["exchange"]],
            ["the same by `ds-muon plan`", muon["planned"]],
            ["by the plan, what stays in a node", muon["planned in all"] - muon["planned"]],
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="to count (default: %(default)s)")
    parser.add_argument("--mbit", type=float, default=200.0, help="of the link, 0 for any (default: %(default)g)")
    parser.add_argument("--json", type=Path, help="write the table there, as docs/measured has it")
    parser.add_argument("--rank", choices=("AdamW", "DSMuon"), help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        found = train(options.rank, options.steps)
        if os.environ["RANK"] == "0":
            options.json.write_text(json.dumps(found))
        print(end="", flush=True)
        os._exit(0)  # see demo_train.py
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise SystemExit("emulate_nodes makes network namespaces: it needs root, and the command `ip`")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what it has made is removed
    found = measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
