"""Keywords of PyTorch and Hugging Face raise an error that names ours."""

import pytest
import torch

from regard import attend, build, causal, channel_attend, explain, generate, linear_attend
from regard.base.errors import ConfigError, KeywordError
from regard.base.keywords import TRANSLATIONS
from regard.nn.attention import Attention
from regard.nn.linear_attention import LinearAttention
from regard.nn.synthesizer import Synthesizer

Q = torch.randn(1, 2, 3, 4)
X = torch.randn(1, 3, 8)
CALLS = {
    "attend": lambda **words: attend(Q, Q, Q, **words),
    "explain": lambda **words: explain(Q, Q, Q, **words),
    "linear_attend": lambda **words: linear_attend(Q, Q, Q, **words),
    "channel_attend": lambda **words: channel_attend(Q, Q, Q, **words),
    "Attention": lambda **words: Attention(8, 2, **words),
    "Attention.forward": lambda **words: Attention(8, 2)(X, **words),
    "LinearAttention": lambda **words: LinearAttention(8, 2, **words),
    "generate": lambda **words: generate(build("birthplace", depth=1), [[1]], **words),
    "Synthesizer.forward": lambda **words: Synthesizer(8, 2, 3)(X, **words),
}


@pytest.mark.parametrize("word", TRANSLATIONS)
@pytest.mark.parametrize("name", CALLS)
def test_a_keyword_of_pytorch_is_translated(name, word):
    with pytest.raises(KeywordError) as caught:
        CALLS[name](**{word: None})
    assert str(caught.value) == f"{name}() has no keyword {word!r}; {TRANSLATIONS[word]}"
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("name", CALLS)
def test_any_other_keyword_is_an_error_too(name):
    with pytest.raises(TypeError, match="has no keyword 'colour'"):
        CALLS[name](colour=1)


@pytest.mark.parametrize(
    ("name", "word", "near"),
    [("attend", "msk", "mask"), ("Attention", "kv_head", "kv_heads"), ("generate", "temprature", "temperature")],
)
def test_a_mistyped_keyword_is_an_error_that_suggests_the_right_one(name, word, near):
    with pytest.raises(KeywordError, match=rf"{name}\(\) has no keyword '{word}'; did you mean '{near}'\?"):
        CALLS[name](**{word: 1})


def test_the_translations_work():
    m = torch.eye(3, dtype=torch.bool) | (torch.rand(3, 3) < 0.5)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(attend(Q, Q, Q, mask=causal()), sdpa(Q, Q, Q, is_causal=True))
    torch.testing.assert_close(attend(Q, Q, Q, mask=m), sdpa(Q, Q, Q, attn_mask=m))
    torch.testing.assert_close(
        attend(Q, Q, Q, scores=m.float(), beta=2.0), sdpa(Q, Q, Q, attn_mask=m.float(), scale=2.0)
    )


def test_attention_with_the_catch_all_compiles():
    compiled = torch.compile(lambda q: attend(q, q, q, mask=causal()), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(Q), attend(Q, Q, Q, mask=causal()))
