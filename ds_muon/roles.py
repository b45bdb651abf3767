"""What a parameter tensor is in its model: a matrix that maps one feature space onto another, or something else.

The modules that own a tensor decide first, by their types and the names of their classes. Names of parameters and of
modules decide second: whole segments of a path, and of a parameter's own name whole words between underscores. All
names of a tied tensor are looked at, so it gets the same answer whichever was registered first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ds_muon.layout import out_and_in

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_ATTENTION_AND_RECURRENT = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_LISTS = (nn.ParameterList, nn.ParameterDict)

# Names of classes, here and in those a class is derived from. Their own parameters count, not those of submodules.
_NORM_CLASS = re.compile(r"[Nn]orm(alization)?(Gated)?(\d[dDP])?$")
_LINEAR_CLASS = re.compile(r"Linear$")
_EMBEDDING_CLASS = re.compile(r"Embeddings?$")
_LOSS_CLASS = re.compile(r"Loss$")

# A layer with one of these names is an output head, and of a module with such a name its last layer.
HEAD_NAMES = frozenset(
    {
        # onto the vocabulary
        *("codec_head", "ctc_head", "ctc_proj", "embed_out", "generator_lm_head", "lm_head", "lm_heads", "lm_loss"),
        *("output_embeddings", "text_lm_head", "unembed", "unembedding", "vocab_projector"),
        # of classes for fine-tuning: labels, choices, spans, scores, boxes
        *("aggregation_classifier", "answer_head", "bbox_embed", "bbox_predictor", "box_head", "bpe_head", "char_head"),
        *("class_embed", "class_labels_classifier", "class_predictor", "classification_head", "classifier", "cls"),
        *("cls_classifier", "dist_head", "distillation_classifier", "enc_bbox_head", "enc_score_head"),
        *("initial_token_classifier", "itm_head", "logit_fc", "logits_proj", "prob_out", "qa_classifier"),
        *("qa_outputs", "rank_output", "reward_head", "score", "seq_relationship", "v_head", "value_head", "wp_head"),
    }
)
# These name other things too: such a layer is a head only if it maps onto the vocabulary, or onto the labels.
HEAD_WORDS = frozenset(
    {
        *("classifier_head", "decoder", "generator", "head", "logits", "mlm_head", "output", "output_head"),
        *("output_layer", "output_projection", "predictions", "proj_out", "to_logits"),
    }
)
# A list with one of these names holds the layers of one network; any other list of heads holds a head each.
_STACKS = frozenset({"decoder", "generator"})
# A classifier among these chooses an expert.
_ROUTERS = frozenset({"router", "routers"})

POSITION_WORDS = frozenset(
    {
        *("abs_pos_emb", "embed_positions", "pos_emb", "pos_embed", "pos_embedding", "pos_embeddings", "pos_encoding"),
        *("position_embedding", "position_embeddings", "position_encoding", "position_table", "positional_embedding"),
        *("positional_embeddings", "positional_encoding", "rel_embeddings", "rel_pos_emb", "relative_attention_bias"),
        *("relative_position_bias_table", "w_pos", "wpe"),
    }
)
EMBEDDING_WORDS = frozenset(
    {
        *("emb", "embed", "embed_in", "embed_tokens", "embedding", "embedding_table", "embeddings", "input_embeddings"),
        *("tok_emb", "tok_embed", "tok_embedding", "tok_embeddings", "token_emb", "token_embed", "token_embedding"),
        *("token_embeddings", "trainable_tokens_delta", "w_e", "word_embed", "word_embedding", "word_embeddings"),
        "wte",
    }
)

# Words of a raw parameter's own name.
_BIAS = re.compile(r"(^|_)bias(es)?(_table|_[a-z0-9])?$", re.IGNORECASE)
_BIAS_IN_SHORT = re.compile(r"b_[A-Za-z]+$")
_STATES = frozenset({"a_b_log", "a_imag", "a_log", "a_logs", "log_a", "log_a_real"})
_GATES = frozenset({"gate", "gates"})
_SCALES = frozenset({"gain", "gamma", "scale", "scales"})
_POSITIONS = frozenset({"ape", "pos", "position", "positional", "positions", "rpb", "rpe"})
_TABLES = frozenset({"emb", "embed", "embedding", "embeddings", "embeds"})
_ROWS = frozenset({"codebook", "codebooks", "codevectors", "latents", "prompt", "prompts", "table", "token", "tokens"})
# A name that ends in one of these is a map, whatever of.
_MAPS = frozenset({"kernel", "matrix", "proj", "projection", "weight"})

# Trainable and perhaps made of matrices, but not Muon's unless named.
FLAT_STACK, TENSOR_3D = "experts in one matrix", "3-D tensor"


@dataclass(frozen=True)
class Place:
    """One name of a parameter.

    Attributes:
        owner: the module that holds it. Of a parametrized weight it is the module that uses it.
        path: the owner's, in segments, lower-cased.
        own: the parameter's name in its owner.
    """

    owner: nn.Module
    path: tuple[str, ...]
    own: str

    @property
    def own_names(self) -> tuple[str, ...]:
        """In lists and dicts of parameters the name of the list is the telling one."""
        return (self.own, *self.path[-1:]) if isinstance(self.owner, _LISTS) else (self.own,)

    @property
    def segments(self) -> set[str]:
        """The parameter's and its owner's, lower-cased."""
        return {self.own.lower(), *self.path[-1:]}


@dataclass(frozen=True)
class NamedTensor:
    """A parameter with every name under which the model holds it."""

    param: nn.Parameter
    names: tuple[str, ...]
    places: tuple[Place, ...]

    @property
    def name(self) -> str:
        return self.names[0]


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """Every parameter of ``model``, in order of first appearance."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    return [
        NamedTensor(params[key], tuple(names[key]), tuple(_place(name, modules) for name in names[key]))
        for key in names
    ]


def _place(name: str, modules: dict[str, nn.Module]) -> Place:
    path, _, own = name.rpartition(".")
    # torch.nn.utils.parametrize moves a weight to MODULE.parametrizations.weight.original; MODULE still is its owner.
    path, parametrized, rest = path.partition(".parametrizations.")
    if parametrized and own.startswith("original"):
        own = rest.partition(".")[0]
    return Place(modules[path], tuple(path.lower().split(".")) if path else (), own)


def adamw_reason(tensor: NamedTensor, heads: frozenset[int]) -> str | None:
    """Why this trainable tensor is no matrix for Muon, in a few words; None if it is one, or a stack of experts.

    Args:
        heads: from ``output_heads``.
    """
    shape = tensor.param.shape
    if len(shape) < 2:
        return ("scalar", "vector")[len(shape)]
    if max(shape) == tensor.param.numel():
        return "a side of 1" if len(shape) == 2 else "vector"
    if reason := _by_owner(tensor):
        return reason
    if any(is_bias(own) for place in tensor.places for own in place.own_names):
        return "bias"
    if id(tensor.param) in heads:
        return "output head"
    if getattr(tensor.param, "_no_weight_decay", False):
        return "marked _no_weight_decay"
    raw = [place for place in tensor.places if not _multiplies(place.owner)]
    if reason := next(filter(None, map(_by_class, raw)), None) or next(filter(None, map(_by_name, raw)), None):
        return reason
    if len(shape) > 2:
        if len(shape) > 3 or not any("experts" in place.path for place in tensor.places):
            return f"{len(shape)}-D tensor"
        return "a side of 1" if min(shape[1:]) == 1 else None
    return FLAT_STACK if any(map(_holds_all_experts, raw)) else None


def is_raw(tensor: NamedTensor) -> bool:
    """Whether no layer that is known to multiply by it holds this matrix."""
    return not any(_multiplies(place.owner) for place in tensor.places)


def _multiplies(module: nn.Module) -> bool:
    """Whether its weights are matrices that multiply features."""
    return is_linear(module) or isinstance(module, _ATTENTION_AND_RECURRENT)


def is_linear(module: nn.Module) -> bool:
    """Whether it is a Linear, of torch, of transformers (Conv1D) or by the name of its class."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    # A wrapper, such as PEFT's Linear, may have the name and no weight.
    has_weights = bool(module._parameters) or hasattr(module, "parametrizations")
    return has_weights and _class_is_named(module, _LINEAR_CLASS)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, GPT-2's linear layer, whose weight is (in, out). Imports nothing."""
    ancestors = type(module).__mro__
    return any(a.__name__ == "Conv1D" and a.__module__.partition(".")[0] == "transformers" for a in ancestors)


def is_bias(own: str) -> bool:
    return bool(_BIAS.search(own) or _BIAS_IN_SHORT.match(own))


def _class_is_named(module: nn.Module, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(cls.__name__) for cls in type(module).__mro__)


def _by_owner(tensor: NamedTensor) -> str | None:
    owners = [place.owner for place in tensor.places]
    if any(isinstance(owner, _ConvNd) for owner in owners):
        return "convolution"
    if any(isinstance(owner, EMBEDDINGS) for owner in owners):
        return "embedding" if isinstance(owners[0], EMBEDDINGS) else "tied to an embedding"
    norm = any(
        isinstance(owner, _NORMS) or (_class_is_named(owner, _NORM_CLASS) and not is_linear(owner)) for owner in owners
    )
    return "normalization" if norm else None


def _by_class(place: Place) -> str | None:
    """Of a raw parameter, from the class that holds it."""
    if place.own.lower().split("_")[-1] in _MAPS - {"weight"}:
        return None
    if _class_is_named(place.owner, _EMBEDDING_CLASS):
        return "position table" if place.segments & POSITION_WORDS else "embedding"
    return "of a loss" if _class_is_named(place.owner, _LOSS_CLASS) else None


def _by_name(place: Place) -> str | None:
    """Of a raw parameter, from its own name and its owner's."""
    words = [own.lower().split("_") for own in place.own_names]
    last = {each[-1] for each in words}
    inside = {word for each in words if each[-1] not in _MAPS for word in each}
    if place.segments & POSITION_WORDS or inside & _POSITIONS:
        return "position table"
    if place.segments & EMBEDDING_WORDS or inside & _TABLES or last & _ROWS:
        return "embedding by name"
    if place.segments & HEAD_NAMES:
        return "output head by name"
    if {own.lower() for own in place.own_names} & _STATES:
        return "state matrix"
    return "gate" if last & _GATES else "scale" if last & _SCALES else None


def _holds_all_experts(place: Place) -> bool:
    """Whether this is a parameter of all experts together, and not of ``experts.3``."""
    below = place.path[place.path.index("experts") + 1 :] if "experts" in place.path else ("0",)
    return not any(segment.isdigit() for segment in below)


# ---- output heads ---------------------------------------------------------------------------------------------------


def output_heads(model: nn.Module, tensors: Sequence[NamedTensor]) -> frozenset[int]:
    """The ids of the weights of output heads: what ``get_output_embeddings()`` returns, and what names tell."""
    heads = {id(param) for module in model.modules() for param in _declared(module)}
    matrices = [(place, tensor) for tensor in tensors if tensor.param.ndim == 2 for place in tensor.places]
    weights: dict[int, list[nn.Parameter]] = {}
    for place, tensor in matrices:
        weights.setdefault(id(place.owner), []).append(tensor.param)
    alphabets = {tensor.param.shape[0] for place, tensor in matrices if _is_vocabulary(place)} | _labels(model)
    widths = {_sides(place.owner, tensor.param)[1] for place, tensor in matrices if _multiplies(place.owner)}

    for name, module in model.named_modules(remove_duplicate=False):
        path = tuple(name.lower().split("."))
        if path[-1] in HEAD_NAMES and not _ROUTERS.intersection(path):
            for _, layer in _last_layers(path, module):
                heads.update(map(id, weights.get(id(layer), [])))
        elif path[-1] in HEAD_WORDS and not (path[-1] in _STACKS and isinstance(module, nn.ModuleList)):
            for path_to_it, layer in _last_layers(path, module):
                for param in weights.get(id(layer), []):
                    rows = _sides(layer, param)[0]
                    # layers.3.attention.output of a byte-level model of width 256 is no head: inside numbered layers,
                    # where a vocabulary may be met by chance, a word is not enough.
                    numbered = any(segment.isdigit() for segment in path_to_it[:-1])
                    if rows in alphabets and not (numbered and rows in widths):
                        heads.add(id(param))
    return frozenset(heads)


def _declared(module: nn.Module) -> list[nn.Parameter]:
    try:
        # Any model may define the method, for any purpose; without an answer the names decide.
        head = module.get_output_embeddings()  # type: ignore[operator]
    except Exception:
        return []
    pieces = head if isinstance(head, list | tuple | nn.ModuleList) else [head]
    return [param for piece in pieces if isinstance(piece, nn.Module) for param in piece.parameters(recurse=False)]


def _labels(model: nn.Module) -> set[int]:
    """The number of classes that a model of transformers is to tell apart."""
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    return {labels} if isinstance(labels, int) else set()


def _is_vocabulary(place: Place) -> bool:
    """Whether the rows of this matrix are tokens, or another alphabet."""
    if isinstance(place.owner, EMBEDDINGS):
        return not place.segments & POSITION_WORDS
    return not _multiplies(place.owner) and (_by_class(place) or _by_name(place)) in ("embedding", "embedding by name")


def _sides(owner: nn.Module, matrix: nn.Parameter) -> tuple[int, int]:
    """Features that go out and that come in."""
    rows, cols = matrix.shape
    return out_and_in(rows, cols, "in_out" if is_conv1d(owner) else "out_in")


def _last_layers(
    path: tuple[str, ...], module: nn.Module, *, heads: bool = True
) -> list[tuple[tuple[str, ...], nn.Module]]:
    """The last layer in ``module``, with its path. Of a list of heads the last of each; of a dict, of each entry."""
    if is_linear(module) or isinstance(module, _ConvNd):
        return [(path, module)]
    found = [_last_layers((*path, name), child, heads=False) for name, child in module.named_children()]
    if isinstance(module, nn.ModuleDict) or (heads and isinstance(module, nn.ModuleList)):
        return [last for each in found for last in each]
    return next(filter(None, reversed(found)), [])
