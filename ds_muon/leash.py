"""Run a command, and end it and all that it has started when the process that holds this one's stdin ends.

    python leash.py PORT FOLDER COMMAND...

``ds-muon`` starts its ranks by this script, with a pipe for stdin. Killed, it can end nothing itself; but however it
ends, the system closes its end of the pipe. The ranks are none of its children, may be importing for minutes, and need
not listen: this process, which leads their process group, ends them.

Imports the standard library only, to be there at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from glob import glob
from typing import NoReturn


def remove_buffers(port: int) -> None:
    """DeepSpeed's CPU ranks leave 64 MiB each in shared memory, named by user, address, port and rank."""
    for buffer in glob(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        try:
            os.unlink(buffer)
        except FileNotFoundError:
            continue


def main() -> NoReturn:
    """Does not return before the command has ended."""
    port, folder, *command = sys.argv[1:]
    # For the group: the command decides what to do about it. Not ignored, for the command would inherit that.
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end_with_the_holder() -> None:
        os.read(0, 1)  # nothing is ever written
        remove_buffers(int(port))
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_the_holder, daemon=True).start()
    process.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
