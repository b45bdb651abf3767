"""One rank of a check: ``deepspeed --module ds_muon.verify`` or ``mpirun python -m ds_muon.verify``.

The options are those of ``ds-muon verify``, which starts ranks of its own with this module. Rank 0 prints and writes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import NoReturn

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_muon.config import DSMuonConfigError
from ds_muon.extras import how_to_install
from ds_muon.options import Paragraphs
from ds_muon.ranks import OF_MPI, finish, say_why
from ds_muon.refusals import DSMuonRefusal
from ds_muon.routing import RoutingError
from ds_muon.say import tell
from ds_muon.verify.command import add_options, check_options, check_outputs, present
from ds_muon.verify.engine_view import CannotVerify
from ds_muon.verify.outcome import COULD_NOT_RUN, exit_code
from ds_muon.verify.rank import run

# Their messages say all there is to say: no traceback.
_SAID_IN_WORDS = (CannotVerify, DSMuonConfigError, DSMuonRefusal, RoutingError)


def main() -> NoReturn:
    """Run this rank's part and end the process with the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ds_muon.verify", formatter_class=Paragraphs)
    add_options(parser)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher's
    options = parser.parse_args()
    if problem := missing_launcher(os.environ):
        tell(f"python -m ds_muon.verify: {problem}", to=sys.stderr)
        sys.exit(COULD_NOT_RUN)
    try:
        code = _run_rank(options)
    except BaseException as error:
        say_why(error, in_words=isinstance(error, _SAID_IN_WORDS))
        # At once: the other ranks may be waiting in a collective, and the launcher ends them when this one has failed.
        os._exit(COULD_NOT_RUN)
    finish(code)


def missing_launcher(environment: Mapping[str, str]) -> str | None:
    """What is missing for this process to be one of several ranks; None if nothing is."""
    if "RANK" in environment:
        return None
    if not any(name in environment for name in OF_MPI):
        return "nothing started this as a rank (no RANK in the environment): use `ds-muon verify`, which starts ranks"
    if find_spec("mpi4py") is None:
        return f"DeepSpeed needs mpi4py to find its rank under mpirun: {how_to_install('mpi')}"
    return None


def _run_rank(options: argparse.Namespace) -> int:
    task = check_options(options)
    # Under mpirun, DeepSpeed takes the port from here, and everything else from MPI.
    deepspeed.init_distributed(distributed_port=int(os.environ.get("MASTER_PORT", "29500")))
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # collectives before the first engine need it
    if options.world_size not in (None, dist.get_world_size()):
        raise CannotVerify(
            f"--world-size is {options.world_size}, but {dist.get_world_size()} ranks were started: leave it out"
        )
    if dist.get_rank() == 0:  # the others would find its attempts
        check_outputs(options)
    if options.determinism is not None:
        from ds_muon.verify import determinism

        found = determinism.runs(task, once=options.determinism == "once")
        show, code = partial(determinism.present, found, options), determinism.exit_code(found)
    else:
        outcomes = run(task)
        show, code = partial(present, outcomes, options), exit_code(outcomes)
    if dist.get_rank() == 0:
        show()
    # The launcher ends everything when the first rank exits with another code than 0.
    dist.barrier()
    return code


if __name__ == "__main__":
    main()
