"""Errors for keywords that PyTorch and Hugging Face use and regard names differently."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from regard.base.errors import KeywordError
from regard.base.validation import suggest

# the type of `**unknown`: type checkers reject every keyword, at run time `reject_keywords` raises
if TYPE_CHECKING:
    from typing import Never

    UnknownKeyword: TypeAlias = Never
else:
    UnknownKeyword = object

WEIGHTS = "attention returns outputs only; record weights with `with regard.watch(model) as seen`"
TRANSLATIONS = {
    "attn_mask": "mask= takes a boolean matrix with True meaning visible (torch.nn.MultiheadAttention means hidden: "
    "pass ~attn_mask), or a mask such as regard.causal(); scores= takes a floating-point matrix to add",
    "attention_mask": "mask=regard.key_padding(attention_mask) hides padding, as regard.padding(lengths) does",
    "key_padding_mask": "mask=regard.key_padding(~key_padding_mask) hides padding, as regard.padding(lengths) does",
    "is_causal": "mask=regard.causal() is causal, with the queries as the last positions",
    "scale": "beta= is the factor of q . k; None is c ** -0.5",
    "softmax_scale": "beta= is the factor of q . k; None is c ** -0.5",
    "dropout_p": "dropout= is the probability of dropping a weight",
    "enable_gqa": "leave it out: k and v with fewer heads than q are repeated",
    "need_weights": WEIGHTS,
    "average_attn_weights": WEIGHTS,
    "output_attentions": WEIGHTS,
    "past_key_value": "cache= takes regard.DynamicCache(), regard.StaticCache(n) or regard.SlidingWindowCache(mask)",
    "past_key_values": "cache= takes regard.DynamicCache(), regard.StaticCache(n) or regard.SlidingWindowCache(mask)",
    "position_ids": "positions= takes the positions of the tokens",
    "embed_dim": "width= is the model width",
    "num_heads": "heads= is the number of query heads",
    "num_key_value_heads": "kv_heads= is the number of key and value heads",
    "head_dim": "head_width= is the width per head",
    "kdim": "memory_width= is the width of the memory, the input of keys and values",
    "vdim": "memory_width= is the width of the memory, the input of keys and values",
    "max_length": "max_new_tokens= is the maximum number of new tokens",
    "do_sample": "leave it out: temperature=, top_k= or top_p= samples",
    "eos_token_id": "stop= takes the tokens that end a text",
    "batch_first": "leave it out: tensors are (batch, positions, width)",
}


def reject_keywords(name: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise KeywordError if a function was called with keyword arguments that it does not have.

    The message names the keyword that regard uses instead. If there is none, it names the most similar keyword of the
    function.

    name     name of the function, for the message
    unknown  the unknown keywords of the call; no error is raised if there are none
    known    the keywords that the function has
    """
    for word in unknown:
        hint = f"; {TRANSLATIONS[word]}" if word in TRANSLATIONS else suggest(word, known)
        raise KeywordError(f"{name}() has no keyword {word!r}{hint}")
