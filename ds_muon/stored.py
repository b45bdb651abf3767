"""How modules store the matrices that they multiply by: rows are outputs, or inputs."""

from __future__ import annotations

from torch import nn

from ds_muon.layout import Layout
from ds_muon.roles import NamedTensor, is_conv1d, is_linear

# Classes of transformers that hold stacks of experts and do not say themselves how they store them, as those with
# ``is_transposed`` do. Read from their forward, and checked against it in tests/unit/pure/test_stored.py.
_STACKS: dict[str, Layout] = {
    "InklingSharedExperts": "out_in",
    "JetMoeParallelExperts": "out_in",
    "Llama4TextExperts": "in_out",
    "LongcatFlashExperts": "out_in",
    "Step3p7Experts": "out_in",
}


def stored(tensor: NamedTensor) -> tuple[Layout, str]:
    """How the matrix, or each of the stack, is stored, and the class that tells; "" if none does, for the usual layout.

    Of a tied tensor the module of its first name tells.
    """
    owner = tensor.places[0].owner
    name = type(owner).__name__
    if tensor.param.ndim == 2:
        return ("in_out", name) if is_conv1d(owner) else ("out_in", name if is_linear(owner) else "")
    if layout := _of_stack(owner):
        return layout, name
    return "out_in", ""


def _of_stack(owner: nn.Module) -> Layout | None:
    # transformers' classes that run on its interface for experts say whether they multiply from the other side.
    transposed = getattr(owner, "is_transposed", None)
    if isinstance(transposed, bool):
        return "in_out" if transposed else "out_in"
    classes = [a.__name__ for a in type(owner).__mro__ if a.__module__.partition(".")[0] == "transformers"]
    return next((_STACKS[name] for name in classes if name in _STACKS), None)
