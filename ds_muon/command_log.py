"""Imported first: in the command ``ds-muon`` stdout is for what was asked for, and DeepSpeed's log goes to stderr.

The log keeps the stdout that it finds when DeepSpeed is imported. Else the first line of a config that goes to a file
would be DeepSpeed's, on a machine without a GPU.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

if Path(sys.argv[0]).stem == "ds-muon" or sys.orig_argv[1:3] == ["-m", "ds_muon.cli"]:
    with redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401
