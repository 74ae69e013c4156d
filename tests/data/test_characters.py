"""Characters as tokens: every one of the alphabet comes back, and any other is named."""

import json

import pytest

from regard.base.errors import ConfigError, DataError, UnknownNameError
from regard.data.characters import Characters
from regard.data.tokenizers import Tokenizer, Unfolding, tokenizer_from_json

TEXT = "Grüße,\n日本 🙂 e\u0301 <pad>"


def test_a_text_comes_back() -> None:
    tokens = Characters.of(TEXT, special=("pad", "bos"))
    ids = tokens.encode(TEXT)
    assert len(ids) == len(TEXT)
    assert tokens.decode(ids) == TEXT
    assert min(ids) >= 2
    assert tokens.vocab == 2 + len(set(TEXT))


def test_special_tokens_have_names_and_say_nothing() -> None:
    tokens = Characters.of("ba", special=("pad", "bos", "eos"))
    assert [tokens.token(name) for name in ("pad", "bos", "eos")] == [0, 1, 2]
    assert tokens.names == ("<pad>", "<bos>", "<eos>", "a", "b")
    assert tokens.decode([1, 4, 3, 2, 0, 0]) == "ba"
    with pytest.raises(
        UnknownNameError, match=r"no special token 'mask' \(there are: pad, bos, eos\); name it in spec"
    ):
        tokens.token("mask")
    with pytest.raises(UnknownNameError, match=r"no special token 'pad' \(it was made without any\)"):
        Characters.of("ba").token("pad")


def test_several_texts_share_an_alphabet_in_a_fixed_order() -> None:
    assert Characters.of("cab", "bad").alphabet == "abcd"
    assert Characters.of("bad", "cab") == Characters.of("cab", "bad")


def test_an_unknown_character_is_named_with_its_place() -> None:
    with pytest.raises(
        DataError, match=r"character 'é' \(U\+00E9\) at place 3, in 'cabé', is not among the 3 of the alphabet; gather"
    ):
        Characters.of("abc").encode("cabé")


def test_a_lenient_alphabet_puts_something_in_its_place() -> None:
    tokens = Characters.of("abc", lenient=True)
    assert tokens.decode(tokens.encode("cabé!")) == "cab\ufffd\ufffd"


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tokens are less than vocab=3, so 5 is none"):
        Characters("abc").decode([0, 5])
    with pytest.raises(ConfigError, match=r"tokens count from 0, so -2 is none"):
        Characters("abc").decode([-2])


@pytest.mark.parametrize(
    ("alphabet", "special", "words"),
    [
        ("aba", (), r"has each character once, but 'a' is there twice"),
        ("ab", ("pad", "pad"), r"special token 'pad' is named twice"),
        ("ab", ("",), r"named by words such as 'pad', not ''"),
    ],
)
def test_unfit_alphabets_are_refused(alphabet: str, special: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Characters(alphabet, special)


def test_an_empty_text_has_no_alphabet() -> None:
    with pytest.raises(DataError, match="an alphabet cannot be gathered from texts that are all empty"):
        Characters.of("", "")


def test_json_keeps_everything() -> None:
    tokens = Characters.of(TEXT, special=("pad", "mask"))
    kept = json.loads(json.dumps(tokens.to_json()))
    assert Characters.from_json(kept) == tokens
    assert tokenizer_from_json(kept) == tokens
    assert isinstance(tokens, Tokenizer)


def test_parts_join_to_the_text() -> None:
    tokens = Characters.of(TEXT)
    unfolding = Unfolding(tokens)
    assert "".join(unfolding.push(each) for each in tokens.encode(TEXT)) == TEXT
