"""Characters as tokens: every one of the alphabet comes back, and any other is named."""

import json

import pytest

from regard.base.errors import ConfigError, DataError, UnknownNameError
from regard.data.characters import CharacterTokenizer
from regard.data.tokenizers import TextStreamer, Tokenizer, tokenizer_from_json

TEXT = "Grüße,\n日本 🙂 e\u0301 <pad>"


def test_a_text_comes_back() -> None:
    tokens = CharacterTokenizer.from_texts(TEXT, special=("pad", "bos"))
    ids = tokens.encode(TEXT)
    assert len(ids) == len(TEXT)
    assert tokens.decode(ids) == TEXT
    assert min(ids) >= 2
    assert tokens.vocab == 2 + len(set(TEXT))


def test_special_tokens_have_names_and_say_nothing() -> None:
    tokens = CharacterTokenizer.from_texts("ba", special=("pad", "bos", "eos"))
    assert [tokens.token(name) for name in ("pad", "bos", "eos")] == [0, 1, 2]
    assert tokens.names == ("<pad>", "<bos>", "<eos>", "a", "b")
    assert tokens.decode([1, 4, 3, 2, 0, 0]) == "ba"
    with pytest.raises(UnknownNameError, match=r"no special token 'mask' \(it has pad, bos, eos\); pass it in spec"):
        tokens.token("mask")
    with pytest.raises(UnknownNameError, match=r"no special token 'pad' \(it has none\)"):
        CharacterTokenizer.from_texts("ba").token("pad")


def test_several_texts_share_an_alphabet_in_a_fixed_order() -> None:
    assert CharacterTokenizer.from_texts("cab", "bad").alphabet == "abcd"
    assert CharacterTokenizer.from_texts("bad", "cab") == CharacterTokenizer.from_texts("cab", "bad")


def test_an_unknown_character_is_named_with_its_place() -> None:
    with pytest.raises(
        DataError,
        match=r"character 'é' \(U\+00E9\) at position 3, in 'cabé', is not one of the 3 of the alphabet; train",
    ):
        CharacterTokenizer.from_texts("abc").encode("cabé")


def test_a_lenient_alphabet_puts_something_in_its_place() -> None:
    tokens = CharacterTokenizer.from_texts("abc", replace_unknown=True)
    assert tokens.decode(tokens.encode("cabé!")) == "cab\ufffd\ufffd"


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"token ids are less than vocab=3, not 5"):
        CharacterTokenizer("abc").decode([0, 5])
    with pytest.raises(ConfigError, match=r"token ids are 0 or more, not -2"):
        CharacterTokenizer("abc").decode([-2])


@pytest.mark.parametrize(
    ("alphabet", "special", "words"),
    [
        ("aba", (), r"the alphabet has 'a' more than once"),
        ("ab", ("pad", "pad"), r"special token 'pad' is repeated"),
        ("ab", ("",), r"have names such as 'pad', not ''"),
    ],
)
def test_invalid_alphabets_are_refused(alphabet: str, special: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CharacterTokenizer(alphabet, special)


def test_an_empty_text_has_no_alphabet() -> None:
    with pytest.raises(DataError, match="a character tokenizer needs a text that is not empty"):
        CharacterTokenizer.from_texts("", "")


def test_json_keeps_everything() -> None:
    tokens = CharacterTokenizer.from_texts(TEXT, special=("pad", "mask"))
    kept = json.loads(json.dumps(tokens.to_json()))
    assert tokenizer_from_json(kept) == tokens
    assert tokenizer_from_json(kept) == tokens
    assert isinstance(tokens, Tokenizer)


def test_parts_join_to_the_text() -> None:
    tokens = CharacterTokenizer.from_texts(TEXT)
    unfolding = TextStreamer(tokens)
    assert "".join(unfolding.push(each) for each in tokens.encode(TEXT)) == TEXT
