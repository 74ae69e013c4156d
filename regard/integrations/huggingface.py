"""Hugging Face transformers: `attn_implementation="regard"`, so that its models run on `regard.attend`.

`register()` adds two functions to the registries of transformers. The mask function translates the mask of a model
(causal, sliding window, chunks, packed documents, padding) into a mask of regard, which is a rule instead of a matrix.
An N x N matrix is built only for a static cache in compiled code, and for a mask function that cannot be translated.
The attention function calls `attend` with the mask.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError, ShapeError
from regard.base.extras import import_optional
from regard.core.absolute_positions import Grid, Positions, whole_grid
from regard.core.attend import attend, attend_with_weights
from regard.core.masks.algebra import And, BoxVisibility, Full, Mask
from regard.core.masks.data import DataMask, DenseMask, can_read, format_data
from regard.core.masks.forms.causal import Causal
from regard.core.masks.forms.chunks import Chunks
from regard.core.masks.forms.documents import DocumentMask
from regard.core.masks.forms.key_padding import KeyPaddingMask
from regard.core.masks.mask_mod import (
    MaskModMask,
    SymbolicIndex,
    SymbolicMask,
    from_block_mask,
    from_mask_mod,
    read_mask_mod,
)
from regard.core.scores import Additive, ScoreTerm, Sink, Softcap
from regard.integrations.torchvision import can_import

NAME = "regard"


def register() -> None:
    """Register `attn_implementation="regard"` with Hugging Face transformers 5.

    Call this function once, before a model is built or loaded. Switch an existing model with
    `model.set_attn_implementation("regard")`.

    >>> regard.integrations.huggingface.register()
    >>> config = transformers.GPT2Config(n_embd=24, n_layer=1, n_head=3, attn_implementation="regard")
    >>> transformers.GPT2Model(config)(tokens).last_hidden_state.shape
    torch.Size([1, 19, 24])
    """
    transformers = import_optional("transformers", "huggingface", 'attn_implementation="regard"')
    try:
        transformers.AttentionInterface.register(NAME, attention_forward)
        transformers.AttentionMaskInterface.register(NAME, build_mask)
    except ModuleNotFoundError as error:  # transformers imports torchvision here
        if find_spec("torchvision") is None or can_import():
            raise
        raise ConfigError(
            f"transformers cannot be imported, because torchvision was built for another torch than "
            f"{torch.__version__}: reinstall torchvision from the source that torch came from, or call "
            "regard.integrations.torchvision.let_torchvision_load() first"
        ) from error
    _make_rules_readable(import_module("transformers.masking_utils"))
    _raise_for_models_without_the_interface(transformers.PreTrainedModel)


# functions of torch that may take the boolean matrix of a mask
_ON_BOOLEANS = {
    torch.cat,
    torch.where,
    torch.zeros_like,
    torch.ones_like,
    torch.logical_and,
    torch.logical_or,
    torch.logical_not,
    torch.nn.functional.pad,
    Tensor.masked_fill,
    Tensor.masked_fill_,
    Tensor.eq,
    Tensor.ne,
    Tensor.__and__,
    Tensor.__or__,
}


class ModelMask:
    """The `attention_mask` inside a transformers model: a mask of regard, with the positions of queries and keys.

    The model passes this object unchanged to its attention layers. Model code that indexes or concatenates the mask
    gets the boolean matrix (b, 1, i, j), True meaning visible, as with `attn_implementation="sdpa"`. Arithmetic with
    the mask raises an error, because adding booleans to scores would hide no key.
    """

    def __init__(
        self, mask: Mask, positions: Positions, batch: int, queries: int, keys: int, device: torch.device
    ) -> None:
        self.mask = mask
        self.positions = positions
        self.batch = batch
        self.seq_lengths = (queries, keys)
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, 1, *self.seq_lengths

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.bool

    @property
    def mask_mod(self) -> Callable[..., Tensor]:
        """The mask as a FlexAttention mask_mod: a function of four indices, True for a visible pair.

        The indices are those of the sequence (batch), head, query and key.
        """
        positions = self.positions

        def see(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return self.mask.see(Grid(b, h, q, kv, q + positions.queries, kv + positions.keys))

        return see

    def to_dense(self) -> Tensor:
        """Return the mask as a boolean matrix (b, 1, i, j); True means visible."""
        queries, keys = self.seq_lengths
        grid = whole_grid(self.positions, self.batch, 1, queries, keys, self.device)
        return self.mask.see(grid).expand(self.batch, 1, queries, keys)

    def __getitem__(self, index: Any) -> Tensor:
        return self.to_dense()[index]

    def contiguous(self) -> "ModelMask":
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mask as a dense matrix of another dtype. For a device or torch.bool, return the mask itself."""
        kinds = [*args, *kwargs.values()]
        if any(isinstance(kind, torch.dtype) and kind != torch.bool for kind in kinds):
            return self.to_dense().to(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"an attention mask of regard has no attribute {name!r}")
        return getattr(self.to_dense(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _ON_BOOLEANS:
            raise _arithmetic_error(getattr(function, "__name__", str(function)))

        def dense(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(dense(item) for item in value)
            return value.to_dense() if isinstance(value, ModelMask) else value

        return function(*dense(args), **{name: dense(value) for name, value in (kwargs or {}).items()})

    def _refuse(self, *_: object) -> Any:
        raise _arithmetic_error("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse

    def __invert__(self) -> Tensor:
        return ~self.to_dense()

    def __and__(self, other: Any) -> Tensor:
        return torch.logical_and(self.to_dense(), other)

    def __or__(self, other: Any) -> Tensor:
        return torch.logical_or(self.to_dense(), other)

    def __repr__(self) -> str:
        return f"ModelMask({self.mask!r}, {self.positions}, shape={self.shape})"


def _arithmetic_error(what: str) -> ConfigError:
    return ConfigError(
        f"this model applies {what} to its attention mask, which is a mask of regard (True means visible) and not a "
        "number to add to the scores: the model has attention code of its own; load it with "
        'attn_implementation="eager"'
    )


def build_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: "Tensor | ModelMask | None" = None,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: object,
) -> ModelMask | None:
    """Convert the mask of a transformers model to a `ModelMask`.

    transformers calls this function for `attn_implementation="regard"`. Returns None, which stands for no mask, if
    every pair is visible and `allow_is_bidirectional_skip` is True.

    mask_function   function of batch, head, query and key index that returns True for a visible pair, as in
                    `transformers.masking_utils`; None is causal
    attention_mask  (b, n), True where a token is not padding
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    device = torch.device(device)
    reach = kv_length + kv_offset
    rule: Mask = Causal() if mask_function is None else _read_rule(mask_function, batch_size, use_vmap)
    if attention_mask is not None:
        missing = reach - attention_mask.shape[1]
        real = torch.nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
        if not (can_read(real) and bool(real.all())):
            rule = KeyPaddingMask(real.bool()) if isinstance(rule, Full) else rule & KeyPaddingMask(real.bool())
    if isinstance(rule, Full) and allow_is_bidirectional_skip:
        return None
    if isinstance(q_offset, Tensor):
        if torch.compiler.is_compiling() or (q_length == 1 and q_offset.device.type != "cpu"):
            return _tensor_offset_mask(rule, batch_size, q_length, kv_length, q_offset, kv_offset, device)
        q_offset = int(q_offset)  # a static cache counts in a tensor
    return ModelMask(rule, Positions(q_offset, kv_offset), batch_size, q_length, kv_length, device)


def _tensor_offset_mask(
    rule: Mask, batch: int, queries: int, keys: int, offset: Tensor, kv_offset: int, device: Any
) -> ModelMask:
    """Build a `ModelMask` with a matrix, for queries whose offset, the position of the first query, is a tensor.

    The offset is not converted to a Python integer, because the CPU would have to wait for the GPU.
    """
    grid = whole_grid(Positions(0, kv_offset), batch, 1, queries, keys, device)
    grid = Grid(grid.batch, grid.head, grid.row, grid.column, grid.i + offset, grid.j)
    seen = rule.see(grid)
    matrix = DenseMask(seen.expand(*seen.shape[:-2], queries, keys))
    return ModelMask(matrix, Positions(0, kv_offset), batch, queries, keys, device)


def _read_rule(function: Callable[..., Any], batch: int, custom: bool) -> Mask:
    """Convert a mask function of transformers to a mask of regard.

    batch   number of sequences
    custom  whether the model combines a mask function of its own with those of transformers. Under torch.compile such a
            function cannot be translated, and is evaluated on every query-key pair instead
    """
    if torch.compiler.is_compiling():
        return MaskModMask(function, batch) if custom else read_mask_mod(function)
    return from_mask_mod(function, batch)


def _chunks(chunk_size: int, left_padding: Tensor) -> Mask:
    if can_read(left_padding) and not left_padding.any():
        return Chunks(chunk_size, 0, 0)
    return ShiftedChunks(left_padding, chunk_size)


def _visual_blocks(block_sequence_ids: Tensor) -> Mask:
    groups = block_sequence_ids.long()
    return And((DocumentMask(groups), KeyPaddingMask(groups >= 0)))


_READERS: dict[str, Callable[..., Mask]] = {
    "chunked_overlay": _chunks,
    "packed_sequence_mask_function": lambda ids: DocumentMask(ids.long()),
    "padding_mask_function": lambda real: KeyPaddingMask(real.bool()),
    "blockwise_overlay": _visual_blocks,
}


def _make_rules_readable(masking_utils: Any) -> None:
    """Patch those mask functions of transformers that read a tensor, such as padding, so that they can be translated.

    regard calls a mask function with symbols in place of positions to find its rule. For symbols, the patched functions
    return a mask of regard. For tensors of positions, they return the same as before.
    """
    for name, read in _READERS.items():
        factory = getattr(masking_utils, name)
        if not hasattr(factory, "reads_symbols"):
            setattr(masking_utils, name, _readable(factory, read))


def _readable(factory: Callable[..., Any], read: Callable[..., Mask]) -> Callable[..., Any]:
    @wraps(factory)
    def make(*args: Any) -> Callable[..., Any]:
        evaluate = factory(*args)

        def inner_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return SymbolicMask(read(*args)) if isinstance(q, SymbolicIndex) else evaluate(b, h, q, kv)

        return inner_mask

    make.reads_symbols = True  # type: ignore[attr-defined]
    return make


@dataclass(frozen=True, eq=False, repr=False)
class ShiftedChunks(DataMask):
    """Mask of chunks that start after the left padding: a query sees the keys of its own chunk.

    In sequence b, query i sees key j if (j - data[b]) // size == (i - data[b]) // size.

    data  number of padded tokens on the left of each sequence
    size  number of tokens in a chunk
    """

    data: Int[Tensor, "b"]
    size: int

    def see(self, grid: Grid) -> Tensor:
        start = self.data[grid.batch]
        return (grid.j - start) // self.size == (grid.i - start) // self.size

    def labels(self, i: Tensor, j: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        start = self.data[sequence]
        return (i - start) // self.size, (j - start) // self.size

    def table(self, spans: Any) -> BoxVisibility:
        start = self.data.cpu()[:, None, None]
        rows, columns = spans.query_positions(), spans.key_positions()
        none_all: BoxVisibility = spans.equal_labels((rows - start) // self.size, (columns - start) // self.size)
        return none_all

    def check(self, positions: Positions, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        if b is not None and b != len(self.data):
            raise ShapeError(f"{self!r} is for {len(self.data)} sequences, but q has b={b} (batch)")

    def batch(self) -> int | None:
        return len(self.data)

    def with_data(self, data: Tensor) -> Mask:
        return ShiftedChunks(data, self.size)

    def settings(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"blocks({self.size}) from {format_data(self.data)}"


def attention_forward(
    module: nn.Module,
    query: Float[Tensor, "b h i c"],
    key: Float[Tensor, "b g j c"],
    value: Float[Tensor, "b g j e"],
    attention_mask: Any,
    scaling: float | Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **settings: Any,
) -> tuple[Float[Tensor, "b i h e"], Float[Tensor, "b h i j"] | None]:
    """Compute the attention of a transformers layer with `attend`.

    transformers calls this function for `attn_implementation="regard"`. Returns the output and the attention
    weights. The weights are None unless the model is called with `output_attentions=True`.
    """
    if settings.get("cache") is not None:
        raise ConfigError(
            'attn_implementation="regard" has no paged cache, which continuous batching needs; '
            'use "sdpa" for it, or call generate with its default cache'
        )
    j = key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask, positions, terms = _read_attention_mask(attention_mask, bool(causal), query, j)
    if softcap is not None:
        terms = (Softcap(float(softcap)), *terms)
    if position_bias is not None:
        terms = (*terms, Additive(position_bias[..., :j]))
    if s_aux is not None:
        terms = (*terms, Sink(s_aux.reshape(-1)))
    beta: float | None
    if isinstance(scaling, Tensor):
        query, beta = query * scaling, 1.0
    else:
        beta = None if scaling is None else float(scaling)
    if positions is not None and positions.square(query.shape[2], j) and not torch.compiler.is_compiling():
        # the default of `attend`, which spares a small call most of its time in Python
        positions = None if positions.queries == 0 else positions
    rest: dict[str, Any] = {"mask": mask, "scores": terms or None, "beta": beta, "positions": positions}
    weights = None
    if settings.get("output_attentions"):
        out, weights = attend_with_weights(query, key, value, dropout=dropout, **rest)
    else:
        out = attend(query, key, value, dropout=dropout, **rest)
    return out.transpose(1, 2).contiguous(), weights


def _read_attention_mask(
    mask: Any, causal: bool, query: Tensor, j: int
) -> tuple[Mask, Positions | None, tuple[ScoreTerm, ...]]:
    """Convert the `attention_mask` of a transformers layer to a mask, positions and score terms of regard.

    causal  whether the layer is causal; used only if the mask is None
    j       number of keys
    """
    i = query.shape[2]
    if mask is None:
        # as torch's is_causal: the first query is at position 0
        return (Causal(), Positions(0, 0), ()) if causal and i > 1 else (Full(), None, ())
    if isinstance(mask, ModelMask):
        _check_lengths(mask.seq_lengths, i, j)
        return mask.mask, mask.positions, ()
    if hasattr(mask, "kv_num_blocks"):
        return from_block_mask(mask), None, ()
    if mask.ndim != 4:
        raise ShapeError(
            f"a layer received an attention mask of shape {tuple(mask.shape)}, but regard takes (b, 1, i, j); "
            'the model builds a mask for flash attention only; load it with attn_implementation="sdpa"'
        )
    _check_lengths((mask.shape[2], mask.shape[3]), i, j)
    if mask.dtype == torch.bool:
        return DenseMask(mask), None, ()
    # hidden pairs have the lowest number of the dtype, or that number plus a bias
    visible = mask > torch.finfo(mask.dtype).min / 2
    if can_read(mask) and not torch.where(visible, mask, 0).any() and not mask.requires_grad:
        return DenseMask(visible), None, ()
    return DenseMask(visible), None, (Additive(mask.masked_fill(~visible, 0).to(query.dtype)),)


def _check_lengths(found: tuple[int, int], i: int, j: int) -> None:
    """Check that a mask has `i` queries and `j` keys, or 1 to broadcast, else raise ShapeError.

    found  numbers of queries and keys of the mask
    """
    if found[0] not in (1, i) or found[1] not in (1, j):
        raise ShapeError(
            f"the attention mask of this layer has {found[0]} queries and {found[1]} keys, but the call has {i} and "
            f"{j}: the model adds keys of its own, or its cache has dropped some; pass a mask for the keys of "
            'the cache, or load the model with attn_implementation="eager"'
        )


def _has_table_of_classes(model: Any) -> bool:
    """Return whether the Python module of a model defines a dictionary named *_ATTENTION_CLASSES, as that of SAM.

    Such a model chooses a class of attention layers by the name of the implementation, and does not call the function
    that is registered under this name.
    """
    return any(name.endswith("_ATTENTION_CLASSES") for name in vars(sys.modules[type(model).__module__]))


def _raise_for_models_without_the_interface(base: Any) -> None:
    """Patch transformers to raise ConfigError if "regard" is requested for a model that cannot use it.

    Such a model does not call the registered attention function. Without the patch, transformers only logs a warning.
    """
    if hasattr(base, "_checks_for_regard"):
        return
    original_check, original_set = base.get_correct_attn_implementation, base.set_attn_implementation

    def check(model: Any, requested: object) -> None:
        names = requested.values() if isinstance(requested, dict) else [requested]
        if NAME in names and (not model._can_set_attn_implementation() or _has_table_of_classes(model)):
            raise ConfigError(
                f"{type(model).__name__} has attention code of its own and does not call the functions of "
                "AttentionInterface, so regard cannot run it; load it with attn_implementation=None"
            )

    @wraps(original_check)
    def get_correct_attn_implementation(self: Any, requested_attention: Any, is_init_check: bool = False) -> Any:
        check(self, requested_attention)
        return original_check(self, requested_attention, is_init_check)

    @wraps(original_set)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, attn_implementation)
        return original_set(self, attn_implementation, *args, **kwargs)

    base.get_correct_attn_implementation = get_correct_attn_implementation
    base.set_attn_implementation = set_attn_implementation
    base._checks_for_regard = True
