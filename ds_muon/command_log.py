"""Imported first: in the command ``ds-muon`` stdout is for what was asked for, and DeepSpeed's log goes to stderr.

The log keeps the stdout that it finds when DeepSpeed is imported. Else the first line of a config that goes to a file
would be DeepSpeed's, on a machine without a GPU.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

# An embedded interpreter may have no argument. Until a module that is run has been found, "-m" stands for its name.
_name = Path(*sys.argv[:1]).stem
if _name == "ds-muon" or (_name == "-m" and "ds_muon.cli" in sys.orig_argv):
    with redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401
