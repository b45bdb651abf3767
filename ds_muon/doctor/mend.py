"""The config that works: what has to change in one that does not, each change with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ds_muon import ds_config
from ds_muon.config import AUTO_IS_A_CHOICE, UNKNOWN_KEY_HINTS, DSMuonConfig
from ds_muon.doctor.examine import refused_keys
from ds_muon.doctor.json_edit import edited
from ds_muon.doctor.switch import Change, adamws_own_rate, one_rate_for_both, switch
from ds_muon.doctor.trainer import fill
from ds_muon.ds_config import ABSENT, Place
from ds_muon.learning_rates import HIGHEST_FOR_ADAMW, LOWEST_FOR_ORIGINAL

_ZERO: Place = ("zero_optimization",)
_PARAMS: Place = ("optimizer", "params")
_OFFLOAD: Place = (*_ZERO, "offload_optimizer")

_MEMORY = (
    "fp32 weights and state stay on the accelerator: 8 bytes for each of Muon's elements and 12 for each of AdamW's, "
    "divided by the ranks; where that is too much, take more ranks, or momentum_dtype bfloat16 (2 bytes less)"
)

# Of each key that ``config_refusals`` names: what may help, best first. The first that is not refused is taken.
REMEDIES: dict[str, tuple[Change, ...]] = {
    "zero_optimization.stage": (
        Change((*_ZERO, "stage"), 2, "the stage next to it; ZeRO-3's parameters are whole on every rank then"),
    ),
    "zero_optimization.reduce_scatter": (
        Change((*_ZERO, "reduce_scatter"), False, "a whole gradient for each matrix, for no more bytes"),
    ),
    "torch_autocast.dtype": (
        Change(("torch_autocast", "dtype"), "bfloat16", "the gradient scaler of fp16 steps one group after another"),
    ),
    "zero_optimization.offload_optimizer.device": (
        Change((*_OFFLOAD, "device"), "cpu", "the offload that DSMuon has"),
        Change(_OFFLOAD, ABSENT, _MEMORY),
    ),
    "zero_optimization.offload_optimizer.super_offload": (
        Change((*_OFFLOAD, "super_offload"), ABSENT, "it replaces the optimizer of ZeRO-3"),
    ),
    "zero_optimization.compute_grad_norm": (
        Change((*_ZERO, "compute_grad_norm"), ABSENT, "DeepSpeed does not take it with offload"),
    ),
    "zero_optimization.zenflow": (
        Change((*_ZERO, "zenflow"), ABSENT, "it replaces the ZeRO optimizer that DSMuon extends"),
    ),
    "zero_optimization.elastic_checkpoint": (
        Change((*_ZERO, "elastic_checkpoint"), False, "ordinary checkpoints load at any number of ranks"),
    ),
    "tensor_parallel.autotp_size": (
        Change(("tensor_parallel", "autotp_size"), 1, "a rank needs whole matrices; their memory is not divided then"),
    ),
    "compile.deepcompile": (
        Change(("compile", "deepcompile"), False, "it replaces ZeRO's gradient reduction; torch.compile is fine"),
    ),
    **{
        f"{dtype}.{dtype}_master_weights_and_grads": (
            Change((dtype, f"{dtype}_master_weights_and_grads"), False, "master weights are fp32"),
        )
        for dtype in ("fp16", "bf16")
    },
}


def mend(config: dict[str, Any]) -> tuple[list[Change], dict[str, Any]]:
    """The changes, in order, and the config with them.

    Args:
        config: as it stands in the file; not modified. What nobody but its writer can know, such as what a misspelt
            key was meant to be, stays as it is.
    """
    changes: list[Change] = []
    for find in (switch, _refused, _blanks, _needless, _open_rates):
        while found := list(find(config)):
            changes += found
            config = _with(config, found)
    return changes, config


def mended_text(text: str, changes: Sequence[Change]) -> str:
    """The text of the config with the changes, and otherwise as it was."""
    for change in changes:
        text = edited(text, change.place, change.value)
    return text


def _with(config: dict[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    for change in changes:
        config = ds_config.changed(config, {change.place: change.value})
    return config


def _refused(config: dict[str, Any]) -> list[Change]:
    """For the first key that is refused and can be helped."""
    for key in refused_keys(config):
        for remedy in REMEDIES.get(key, ()):
            changes = [remedy, *_of_zero_3(config)] if remedy.place == (*_ZERO, "stage") else [remedy]
            if key not in refused_keys(_with(config, changes)):
                return changes
    return []


def _of_zero_3(config: dict[str, Any]) -> Iterator[Change]:
    section = ds_config.value_at(config, _ZERO)
    for key in section if isinstance(section, dict) else ():
        if key.startswith("stage3_") or key in ("offload_param", "sub_group_size"):
            yield Change((*_ZERO, key), ABSENT, "of ZeRO-3 only")


def _blanks(config: dict[str, Any]) -> Iterator[Change]:
    for place in fill(config, AUTO_IS_A_CHOICE).blanks:
        yield Change(place, ABSENT, "no trainer fills it in: the default")


def _needless(config: dict[str, Any]) -> Iterator[Change]:
    """Of the keys that DSMuon has not, those whose absence changes nothing."""
    params = ds_config.value_at(config, _PARAMS)
    for key in params if isinstance(params, dict) else ():
        if key in UNKNOWN_KEY_HINTS and key != "backend":
            yield Change((*_PARAMS, key), ABSENT, UNKNOWN_KEY_HINTS[key])
            if key == "max_grad_norm" and "gradient_clipping" not in config:
                yield Change(("gradient_clipping",), params[key], "where DeepSpeed has it")


def _open_rates(config: dict[str, Any]) -> Iterator[Change]:
    """Of a rate that is far off what the config leaves open; what it says is meant."""
    params = ds_config.value_at(config, _PARAMS)
    params = params if isinstance(params, dict) else {}
    filled = ds_config.value_at(fill(config, AUTO_IS_A_CHOICE).config, _PARAMS)
    read, _ = DSMuonConfig.read(filled if isinstance(filled, dict) else {})
    if "adam_lr" in params or "muon_lr" in params:
        return
    if "adjust_lr_fn" not in params and 0 < read.lr < LOWEST_FOR_ORIGINAL:
        yield one_rate_for_both("lr is a rate of AdamW, and serves both halves with it")
    elif read.lr > HIGHEST_FOR_ADAMW:
        yield adamws_own_rate("AdamW's rate: it would be lr, which is Muon's")
