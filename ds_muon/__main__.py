"""Run an unchanged training script with DSMuon registered.

python -m ds_muon train.py --deepspeed_config ds_config.json
deepspeed --module ds_muon train.py --deepspeed_config ds_config.json
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import ds_muon  # noqa: F401  registers DSMuon


def main() -> None:
    """Run ``sys.argv``'s script as ``__main__`` with the arguments that follow it.

    The ``deepspeed`` launcher puts ``--local_rank=N`` before the script's name; it is the script's argument.
    """
    position = next((i for i, argument in enumerate(sys.argv) if i > 0 and not argument.startswith("-")), None)
    if position is None:
        sys.exit("usage: python -m ds_muon SCRIPT [ARGUMENTS of the script]")
    script = sys.argv[position]
    sys.argv = [script, *sys.argv[1:position], *sys.argv[position + 1 :]]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
