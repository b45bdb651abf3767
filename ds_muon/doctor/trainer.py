"""What Hugging Face Trainer makes of "auto" in a DeepSpeed config, without Trainer.

Read in transformers 5.24 (integrations/deepspeed.py) and accelerate 1.15 (``deepspeed_config_process``), whose error it
is if an "auto" is left over. Accelerate alone fills in fewer: ``lr``, ``weight_decay`` and the scheduler's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_muon.ds_config import ABSENT, Place, autos, changed, value_at

# A model's, where Trainer goes by the model. Nothing that is refused or warned about depends on it.
_HIDDEN_SIZE = 1024
_STEPS = 1000

_LR: Place = ("optimizer", "params", "lr")
_TOP_OF_WARMUP: Place = ("scheduler", "params", "warmup_max_lr")

# Of each key the argument that Trainer takes it from, if there is one, and what that is unless it is given.
FILLED_IN: Mapping[Place, tuple[str, Any]] = {
    ("train_micro_batch_size_per_gpu",): ("per_device_train_batch_size", 8),
    ("gradient_accumulation_steps",): ("gradient_accumulation_steps", 1),
    ("train_batch_size",): ("", 8),
    ("gradient_clipping",): ("max_grad_norm", 1.0),
    ("fp16", "enabled"): ("fp16", False),
    ("bf16", "enabled"): ("bf16", False),
    _LR: ("learning_rate", 5e-5),
    ("optimizer", "params", "betas"): ("adam_beta1, adam_beta2", [0.9, 0.999]),
    ("optimizer", "params", "eps"): ("adam_epsilon", 1e-8),
    ("optimizer", "params", "weight_decay"): ("weight_decay", 0.0),
    ("scheduler", "params", "warmup_min_lr"): ("", 0),
    _TOP_OF_WARMUP: ("learning_rate", 5e-5),
    ("scheduler", "params", "warmup_num_steps"): ("warmup_steps", 1),
    ("scheduler", "params", "total_num_steps"): ("", _STEPS),
    ("zero_optimization", "reduce_bucket_size"): ("", _HIDDEN_SIZE**2),
    ("zero_optimization", "stage3_prefetch_bucket_size"): ("", int(0.9 * _HIDDEN_SIZE**2)),
    ("zero_optimization", "stage3_param_persistence_threshold"): ("", 10 * _HIDDEN_SIZE),
}


@dataclass(frozen=True)
class Filled:
    """A config as DeepSpeed gets it.

    Attributes:
        config: with Trainer's own values in place of "auto", and without what is left over.
        places: what was filled in; none in a config that no trainer reads.
        blanks: every other "auto", but those of DSMuon that are a choice where no trainer takes them for blanks.
    """

    config: dict[str, Any]
    places: tuple[Place, ...]
    blanks: tuple[Place, ...]

    @property
    def rate_is_given_elsewhere(self) -> bool:
        return _LR in self.places


def fill(config: dict[str, Any], choices: tuple[str, ...]) -> Filled:
    """Fill in what Trainer does, with its own defaults.

    Args:
        config: as it stands in the file; not modified.
        choices: keys of ``optimizer.params`` for which "auto" is a value.
    """
    found = list(autos(config))
    places = tuple(place for place in found if place in FILLED_IN)
    chosen = {("optimizer", "params", key) for key in choices}
    blanks = tuple(place for place in found if place not in FILLED_IN and (places or place not in chosen))
    values = {**{place: FILLED_IN[place][1] for place in places}, **dict.fromkeys(blanks, ABSENT)}
    # A rate that stands in the file has to be learning_rate, or Trainer stops.
    stated = value_at(config, _LR)
    if isinstance(stated, int | float) and _TOP_OF_WARMUP in places:
        values[_TOP_OF_WARMUP] = stated
    return Filled(changed(config, values), places, blanks)
