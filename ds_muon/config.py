"""The optimizer section of ``ds_config.json`` as one validated, frozen model.

Nothing is coerced: a string is not a number, an explicit 0 stays 0, and a key that has no effect is refused instead of
ignored. ``DSMuonConfig.parse`` reports every problem of a section at once, whatever is in it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from ds_muon.blocks import Rule, read_rules
from ds_muon.dtypes import LARGEST
from ds_muon.orthogonalize import COEFFICIENTS, NewtonSchulz
from ds_muon.orthogonalize.defaults import NS_BACKEND, NS_COEFFICIENTS, NS_DTYPE, NS_EPS, NS_METHOD, NS_STEPS
from ds_muon.say import printable

OPTIMIZER_TYPE = "DSMuon"
"""``optimizer.type``; DeepSpeed reads it in lower case."""

# bf16 has 8 significant bits: where (1 - momentum) times an element is less than half of its last one, the buffer no
# longer forgets. That is so from 1 - 2**-8 = 0.9961 on; what rounding adds below is small up to here, by measurement.
LARGEST_BF16_MOMENTUM = 0.995

# "auto" is a choice of the user's here; anywhere else it is a blank that a trainer was to fill in.
AUTO_IS_A_CHOICE = ("ns_dtype", "ns_backend")

_ADAM_KEY = "belongs to DeepSpeed's Adam; the AdamW half is always decoupled AdamW with fp32 state; remove the key"
UNKNOWN_KEY_HINTS = {
    "max_grad_norm": 'is not an optimizer key; remove it and set "gradient_clipping" at the top level of the config',
    "adam_w_mode": _ADAM_KEY,
    "torch_adam": _ADAM_KEY,
    "fp32_optimizer_states": _ADAM_KEY,
    "fused": "is not a key of DSMuon: torch's AdamW is fused wherever torch can; remove the key",
    "param_order": "is gone: matrices lie in the model's order; remove the key",
    "backend": 'is not a key of DSMuon; for the Newton-Schulz backend set "ns_backend"',
}

# What is wrong, by pydantic's type of error. What to set instead is the description of the field.
PROBLEMS = {
    "bool_type": "is not true or false",
    "finite_number": "is not finite",
    "float_type": "is not a number",
    "greater_than": "is out of range",
    "greater_than_equal": "is out of range",
    "int_type": "is not an integer",
    "less_than": "is out of range",
    "less_than_equal": "is out of range",
    "literal_error": "is not one of the choices",
    "string_too_short": "is empty",
    "string_type": "is not a string",
    "string_unicode": "holds half of a surrogate pair, which is no text",
    "tuple_type": "is not a list",
}

Fraction = Annotated[float, Field(ge=0, lt=1)]
Pattern = Annotated[str, Field(min_length=1)]
_PATTERNS = 'a list of glob patterns on parameter names, such as ["*.router.weight"]'
_RATE = "a number >= 0, such as "
_LIKE_SHARED = ", or leave the key out to use the shared value"
# Numbers are used in fp32. What is positive and less than this is 0 there.
_LEAST = 2.0**-149
# By the one check on two keys.
_CHECKED_TOGETHER = ("ns_steps", "ns_coefficients")
_MOST_STEPS = 100
_LONGEST_VALUE = 500
# The type of an error that holds a line for each of its problems.
_SEVERAL = "ds_muon_several"


class DSMuonConfigError(ValueError):
    """Every problem of one section, one line each."""


class DSMuonConfig(BaseModel):
    """All keys of ``optimizer.params``, made by ``parse``; see docs/options.md for their meaning.

    A field's description completes the sentence "set ..." of an error message.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    lr: float = Field(0.02, ge=0, description=_RATE + "0.02")
    muon_lr: float | None = Field(None, ge=0, description=_RATE + "0.02" + _LIKE_SHARED)
    adam_lr: float | None = Field(None, ge=0, description=_RATE + "3e-4" + _LIKE_SHARED)
    weight_decay: float = Field(0.0, ge=0, description=_RATE + "0.1")
    muon_weight_decay: float | None = Field(None, ge=0, description=_RATE + "0.1" + _LIKE_SHARED)
    adam_weight_decay: float | None = Field(None, ge=0, description=_RATE + "0.1" + _LIKE_SHARED)
    momentum: Fraction = Field(0.95, description="a number from 0 to below 1, such as 0.95")
    nesterov: bool = Field(True, description="true or false")
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.95), description="a pair of numbers from 0 to below 1, such as [0.9, 0.95]"
    )
    eps: float = Field(1e-8, ge=0, description=_RATE + "1e-8")
    variant: Literal["muon", "normuon"] = Field("muon", description='"muon" or "normuon"')
    beta2: Fraction = Field(0.95, description="a number from 0 to below 1, such as 0.95")
    adjust_lr_fn: Literal["original", "match_rms_adamw", "none"] = Field(
        "original", description='"original", "match_rms_adamw" or "none"'
    )
    ns_method: Literal["gram", "standard"] = Field(NS_METHOD, description='"gram" or "standard"')
    ns_steps: int | None = Field(
        NS_STEPS,
        ge=1,
        le=_MOST_STEPS,
        description=f"an integer from 1 to {_MOST_STEPS}, such as 5, or leave the key out for the table's own number",
    )
    ns_coefficients: str | tuple[tuple[float, float, float], ...] = Field(
        NS_COEFFICIENTS,
        description=f"one of {', '.join(map(json.dumps, COEFFICIENTS))}, or a list of triples [a, b, c]",
    )
    ns_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        NS_DTYPE, description='"auto", "bfloat16", "float16" or "float32"'
    )
    ns_backend: Literal["auto", "torch", "triton"] = Field(NS_BACKEND, description='"auto", "torch" or "triton"')
    ns_eps: Fraction = Field(NS_EPS, description="a number from 0 to below 1, such as 1e-15")
    momentum_dtype: Literal["float32", "bfloat16"] = Field("float32", description='"float32" or "bfloat16"')
    muon_params: tuple[Pattern, ...] = Field((), description=_PATTERNS)
    adamw_params: tuple[Pattern, ...] = Field((), description=_PATTERNS)
    no_decay_params: tuple[Pattern, ...] = Field((), description=_PATTERNS)
    muon_blocks: tuple[tuple[str, Rule], ...] = Field((), description="an object from glob patterns to rules")
    per_head_muon: bool = Field(False, description="true or false")
    nan_guard: Literal["off", "skip", "raise"] = Field("off", description='"off", "skip" or "raise"')
    grad_norm_skip_threshold: float | None = Field(None, gt=0, description="a number > 0, or null")
    clip_norm_scope: Literal["adamw", "all"] = Field("adamw", description='"adamw" or "all"')
    verify_every: int = Field(0, ge=0, description="an integer >= 0, such as 100, or 0 for never")
    verify_bits: bool = Field(False, description="true or false")
    telemetry_every: int | None = Field(None, ge=0, description="an integer >= 0, such as 100, or 0 for never")

    @classmethod
    def parse(cls, params: Mapping[str, Any], *, where: str = "optimizer.params") -> DSMuonConfig:
        """Validate one section.

        Args:
            params: the section as read from JSON; not modified.
            where: what to call the section in messages.

        Raises:
            DSMuonConfigError: one line "WHERE.KEY = VALUE: what is wrong; what to set instead" per problem.
        """
        config, problems = cls.read(params, where=where)
        if problems:
            raise DSMuonConfigError("\n".join(problems))
        return config

    @classmethod
    def read(cls, params: Any, *, where: str = "optimizer.params") -> tuple[DSMuonConfig, list[str]]:
        """The config of the keys that are right, and the lines of ``parse`` for the others.

        Args:
            params: as for ``parse``, but anything; not modified.
            where: as for ``parse``.
        """
        if not isinstance(params, Mapping):
            return cls.model_validate({}), [f"{where} = {show(params)}: is not a JSON object; set one, such as {{}}"]
        known = {key: value for key, value in params.items() if isinstance(key, str) and key in cls.model_fields}
        # Not by pydantic, which cannot name a key with half of a surrogate pair.
        unknown = [
            f"{where}.{printable(str(key))} = {show(value)}: {_explain_unknown(str(key))}"
            for key, value in params.items()
            if key not in known
        ]
        problems: list[str] = []
        while True:
            try:
                return cls.model_validate(known), problems + unknown
            except ValidationError as error:
                # What is wrong only because of a key that was left out is not the user's mistake.
                problems = problems or [line for details in error.errors() for line in _lines(where, details)]
                wrong = {key for details in error.errors() for key in details["loc"][:1] or _CHECKED_TOGETHER}
                known = {key: value for key, value in known.items() if key not in wrong}

    @property
    def resolved_muon_lr(self) -> float:
        return self.lr if self.muon_lr is None else self.muon_lr

    @property
    def resolved_adam_lr(self) -> float:
        return self.lr if self.adam_lr is None else self.adam_lr

    @property
    def resolved_muon_weight_decay(self) -> float:
        return self.weight_decay if self.muon_weight_decay is None else self.muon_weight_decay

    @property
    def resolved_adam_weight_decay(self) -> float:
        return self.weight_decay if self.adam_weight_decay is None else self.adam_weight_decay

    def newton_schulz(self, device: torch.device) -> NewtonSchulz:
        """The settings of the iteration, resolved for a device.

        Raises:
            ValueError: the backend cannot run on it.
        """
        return NewtonSchulz.resolve(
            device,
            ns_steps=self.ns_steps,
            ns_method=self.ns_method,
            ns_coefficients=self.ns_coefficients,
            ns_dtype=self.ns_dtype,
            ns_eps=self.ns_eps,
            ns_backend=self.ns_backend,
        )

    def momentum_problem(self, momentum: float) -> str | None:
        """Why a Muon group of this optimizer cannot run at ``momentum``, and what to set instead; None if it can."""
        if self.momentum_dtype == "float32" or momentum <= LARGEST_BF16_MOMENTUM:
            return None
        return f'momentum_dtype = "bfloat16" {_too_coarse(momentum)}'

    @field_validator("betas", "muon_params", "adamw_params", "no_decay_params", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and info.field_name != "betas":
            raise _problem(f"is a string, not a list; set [{show(value)}]")
        value = tuple(value) if isinstance(value, list) else value
        if info.field_name == "betas" and isinstance(value, tuple) and len(value) != 2:
            raise _problem(f"has {len(value)} entries; {_remedy('betas')}")
        return value

    @field_validator("muon_blocks", mode="before")
    @classmethod
    def _rules(cls, value: Any) -> Any:
        rules, problems = read_rules(value, show)
        if problems:
            raise PydanticCustomError(_SEVERAL, "{text}", {"text": "; ".join(problems), "lines": problems})
        return rules

    @field_validator("ns_coefficients", mode="before")
    @classmethod
    def _known_name_or_triples(cls, value: Any) -> Any:
        # Checked by hand: of a union, pydantic reports the errors of every member.
        if isinstance(value, str):
            if value in COEFFICIENTS:
                return value
            problem = "is not a table that DSMuon knows"
        elif not isinstance(value, list | tuple):
            problem = "is neither a name nor a list"
        elif not value:
            problem = "is empty"
        elif len(value) > _MOST_STEPS:
            problem = f"has {len(value)} triples, more than the {_MOST_STEPS} steps there may be"
        elif not all(isinstance(triple, list | tuple) and len(triple) == 3 for triple in value):
            problem = "has an entry that is not a triple"
        elif not all(_is_finite_number(number) for triple in value for number in triple):
            problem = "has an entry that is not a finite number"
        else:
            return tuple(tuple(triple) for triple in value)
        raise _problem(f"{problem}; {_remedy('ns_coefficients')}")

    # Below the other "before" validators, because pydantic runs the lowest one first.
    @field_validator("*", mode="before")
    @classmethod
    def _auto_is_filled_in(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and value == "auto" and info.field_name not in AUTO_IS_A_CHOICE:
            raise _problem(
                "is a blank that no trainer filled in (Hugging Face Trainer fills lr, weight_decay, betas and eps); "
                + _remedy(str(info.field_name))
            )
        return value

    @field_validator("*")
    @classmethod
    def _is_what_it_is_in_fp32(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, float) and (value > LARGEST or 0 < value < _LEAST):
            becomes = "infinite" if value > LARGEST else "0"
            raise _problem(f"is {becomes} in fp32, in which it is used; {_remedy(str(info.field_name))}")
        return value

    @field_validator("beta2")
    @classmethod
    def _beta2_means_something(cls, value: float, info: ValidationInfo) -> float:
        # Runs for a given value only. Of a variant that is not valid, another line speaks.
        if info.data.get("variant") == "muon":
            raise _problem('has no effect with variant "muon"; remove the key, or set "variant": "normuon"')
        return value

    @field_validator("verify_bits")
    @classmethod
    def _verify_bits_has_steps(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("verify_every") == 0:
            raise _problem("has no effect without verify_every; set verify_every, such as 100, or remove the key")
        return value

    @field_validator("momentum_dtype")
    @classmethod
    def _momentum_dtype_forgets(cls, value: str, info: ValidationInfo) -> str:
        # Runs for a given value only; the default has room for any momentum.
        momentum = info.data.get("momentum", 0.0)
        if value == "bfloat16" and momentum > LARGEST_BF16_MOMENTUM:
            raise _problem(_too_coarse(momentum))
        return value

    @model_validator(mode="after")
    def _uses_every_triple(self) -> DSMuonConfig:
        given = len(self.ns_coefficients)
        if not isinstance(self.ns_coefficients, str) and self.ns_steps is not None and given > self.ns_steps:
            raise _problem(f"is less than the {given} triples of ns_coefficients; set {given}, or list fewer triples")
        return self


def _too_coarse(momentum: float) -> str:
    return (
        f"is too coarse for a momentum of {momentum:g}: what a step adds or takes is lost in rounding; set "
        f'momentum_dtype to "float32", or momentum to at most {LARGEST_BF16_MOMENTUM:g}'
    )


def _is_finite_number(value: Any) -> bool:
    # As fp32, in which they are used. NaN compares false.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _problem(text: str) -> PydanticCustomError:
    """An error whose text says both what is wrong and what to set instead."""
    return PydanticCustomError("ds_muon", "{text}", {"text": text})


def _remedy(key: str) -> str:
    return f"set {DSMuonConfig.model_fields[key].description}"


def _lines(where: str, details: ErrorDetails) -> list[str]:
    location, value = details["loc"], details["input"]
    if details["type"] == _SEVERAL:
        return [f"{where}.{location[0]}{line}" for line in details["ctx"]["lines"]]
    if not location:
        location, value = ("ns_steps",), value["ns_steps"]
    key = str(location[0]) + "".join(f"[{index}]" for index in location[1:])
    return [f"{where}.{key} = {show(value)}: {_explain(str(location[0]), details)}"]


def _explain(key: str, details: ErrorDetails) -> str:
    kind, value = details["type"], details["input"]
    if kind == "ds_muon":
        return details["msg"]
    if kind in ("float_type", "int_type") and isinstance(value, str) and len(value) < 40 and _reads_as_number(value):
        return f"is a string, not a number; set {value.strip()} without quotes"
    problem = PROBLEMS.get(kind, details["msg"])
    if value is None:
        problem += " (leave the key out for the default)"
    return f"{problem}; {_remedy(key)}"


def _explain_unknown(key: str) -> str:
    if key in UNKNOWN_KEY_HINTS:
        return UNKNOWN_KEY_HINTS[key]
    near = difflib.get_close_matches(key.lower(), DSMuonConfig.model_fields, n=2, cutoff=0.6)
    if near:
        return f"is not a key of DSMuon; did you mean {' or '.join(map(json.dumps, near))}?"
    return f"is not a key of DSMuon; remove it, or use one of {', '.join(DSMuonConfig.model_fields)}"


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def show(value: Any) -> str:
    """As it stands in the JSON file, where it can, on one line that anything can print; what is long is cut."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        try:
            text = printable(repr(value))
        except Exception:  # nested too deep, an integer of more digits than Python writes, or an object's own
            text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
