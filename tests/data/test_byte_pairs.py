"""Byte pairs: nothing is lost, no text can spell a special token, and training is the same every time."""

import json
import random
from pathlib import Path

import pytest

from regard.base.errors import ConfigError, DataError, UnknownNameError
from regard.data.byte_pairs import BytePairTokenizer
from regard.data.sentence_pairs import read_sentence_pairs
from regard.data.tokenizers import ByteTokenizer, TextStreamer, Tokenizer, tokenizer_from_json

TEXT = "the cat sat on the mat . the hat of the cat is on the mat . " * 5
GERMAN = "die katze saß auf der matte . der hut der katze ist auf der matte . " * 5
ODD = [
    "",
    " ",
    "plain",
    "  two  blanks ",
    "Grüße\n\tnaïve",
    "日本語",
    "🙂👩‍👩‍👧",
    "<pad> <bos> </w>",
    "e\u0301\u200d\x00\r\n",
]


@pytest.fixture(scope="module")
def exact() -> BytePairTokenizer:
    return BytePairTokenizer.train(TEXT, GERMAN, vocab=291, special=("pad", "bos", "eos"))


@pytest.fixture(scope="module")
def wordwise() -> BytePairTokenizer:
    return BytePairTokenizer.train([TEXT, "a b"], GERMAN, vocab=97, special=("pad", "bos"), words=True)


@pytest.mark.parametrize("text", [*ODD, TEXT, GERMAN])
def test_no_text_is_lost(exact: BytePairTokenizer, text: str) -> None:
    assert exact.decode(exact.encode(text)) == text
    assert all(token >= 3 for token in exact.encode(text))


def test_random_text_is_not_lost(exact: BytePairTokenizer) -> None:
    draw = random.Random(3)
    for _ in range(100):
        text = "".join(chr(draw.choice([32, 97, 98, 10, 0x301, 0x4E00, 0x1F600])) for _ in range(draw.randrange(40)))
        assert exact.decode(exact.encode(text)) == text


def test_frequent_text_takes_fewer_tokens(exact: BytePairTokenizer, wordwise: BytePairTokenizer) -> None:
    assert exact.vocab == 291
    assert len(exact.encode(TEXT)) < len(TEXT) / 2
    assert len(wordwise.encode("the cat")) <= 3


def test_texts_are_trained_jointly() -> None:
    both = BytePairTokenizer.train(TEXT, GERMAN, vocab=300)
    assert len(both.encode(GERMAN)) < len(BytePairTokenizer.train(TEXT, vocab=300).encode(GERMAN))
    assert len(both.encode(TEXT)) < len(BytePairTokenizer.train(GERMAN, vocab=300).encode(TEXT))


def test_words_come_back_with_one_blank_between(wordwise: BytePairTokenizer) -> None:
    assert wordwise.decode(wordwise.encode("the mat of the katze")) == "the mat of the katze"
    assert wordwise.decode(wordwise.encode("  the\tmat \n of ")) == "the mat of"
    assert wordwise.encode("") == []
    assert wordwise.vocab <= 97


def test_a_character_may_end_a_word_even_if_it_never_did(wordwise: BytePairTokenizer) -> None:
    assert not any(word.endswith("h") for word in f"{TEXT} {GERMAN}".split())
    assert wordwise.decode(wordwise.encode("hath h uh th")) == "hath h uh th"


def test_the_mark_of_a_word_end_may_stand_in_a_text() -> None:
    tokens = BytePairTokenizer.train("a</w> b </w> " * 9, vocab=40, words=True)
    assert tokens.decode(tokens.encode("b</w> </w>a a</w>b")) == "b</w> </w>a a</w>b"


def test_an_unknown_character_is_named_and_never_dropped(wordwise: BytePairTokenizer) -> None:
    with pytest.raises(
        DataError, match=r"character 'Q' \(U\+0051\) at position 4, in 'the Quh', is not one of the \d+ of "
    ):
        wordwise.encode("the  Quh")


def test_a_lenient_tokenizer_puts_something_in_its_place_and_keeps_the_words() -> None:
    tokens = BytePairTokenizer.train(TEXT, vocab=97, words=True, replace_unknown=True)
    assert tokens.decode(tokens.encode("the Qat is Q on xQ")) == "the \ufffdat is \ufffd on \ufffd\ufffd"


def test_special_tokens_have_names_and_say_nothing(exact: BytePairTokenizer, wordwise: BytePairTokenizer) -> None:
    assert [exact.token(name) for name in ("pad", "bos", "eos")] == [0, 1, 2]
    assert exact.names[:3] == ("<pad>", "<bos>", "<eos>")
    assert exact.decode([1, *exact.encode("the cat"), 2, 0, 0]) == "the cat"
    assert wordwise.decode([1, *wordwise.encode("the cat"), 0]) == "the cat"
    with pytest.raises(UnknownNameError, match=r"no special token 'mask' \(it has pad, bos, eos\)"):
        exact.token("mask")


def test_names_are_for_people(exact: BytePairTokenizer, wordwise: BytePairTokenizer) -> None:
    assert len(exact.names) == exact.vocab
    assert " the" in exact.names
    assert "<0xE2>" in exact.names
    assert len(wordwise.names) == wordwise.vocab
    assert "the</w>" in wordwise.names
    assert "".join(wordwise.names[token] for token in wordwise.encode("the mat")) == "the</w>mat</w>"


def test_many_texts_at_once_are_the_same_as_one_by_one(exact: BytePairTokenizer, wordwise: BytePairTokenizer) -> None:
    assert exact.encode_batch(ODD) == [exact.encode(text) for text in ODD]
    texts = ["the cat", "", "der hut"]
    assert wordwise.encode_batch(texts) == [wordwise.encode(text) for text in texts]


def test_small_texts_give_fewer_tokens_and_say_so() -> None:
    assert BytePairTokenizer.train("ab ab", vocab=5000).vocab < 270


def test_json_keeps_everything(exact: BytePairTokenizer, wordwise: BytePairTokenizer) -> None:
    for tokens in (exact, wordwise):
        kept = json.loads(json.dumps(tokens.to_json()))
        back = tokenizer_from_json(kept)
        assert back == tokens == tokenizer_from_json(kept)
        assert back.encode("the cat sat") == tokens.encode("the cat sat")
        assert isinstance(tokens, Tokenizer)


def test_a_json_of_something_else_is_refused(exact: BytePairTokenizer) -> None:
    with pytest.raises(
        ConfigError, match=r"'kind': one of CharacterTokenizer, ByteTokenizer, BytePairTokenizer, not 'Words'"
    ):
        tokenizer_from_json({"kind": "Words"})
    with pytest.raises(ConfigError, match=r"not None"):
        tokenizer_from_json([1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"merges join 'x' and 'y' before both exist"):
        BytePairTokenizer(("x",), (("x", "y"),))
    assert tokenizer_from_json({"kind": "ByteTokenizer", "special": ["pad"]}) == ByteTokenizer(("pad",))


@pytest.mark.parametrize("words", [False, True])
def test_training_is_the_same_every_time(words: bool) -> None:
    # the library numbers its own word ends by chance, and equally frequent pairs follow the numbers
    draw = random.Random(5)
    text = " ".join("".join(draw.choice("abcdefgh") for _ in range(draw.randrange(1, 6))) for _ in range(700))
    first = BytePairTokenizer.train(text, vocab=400, words=words)
    assert len(first.merges) > 100
    assert all(BytePairTokenizer.train(text, vocab=400, words=words) == first for _ in range(5))


def test_too_small_a_vocabulary_and_empty_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"too small for 256 symbols and 2 special tokens; use at least 258"):
        BytePairTokenizer.train(TEXT, vocab=200, special=("pad", "bos"))
    with pytest.raises(ConfigError, match=r"vocab=5 is too small for 8 symbols"):
        BytePairTokenizer.train("abcd", vocab=5, words=True)
    for words in (False, True):
        with pytest.raises(DataError, match="a byte-pair tokenizer needs a text that is not empty"):
            BytePairTokenizer.train("", [], vocab=300, words=words)


def test_what_utf8_cannot_spell_is_named(exact: BytePairTokenizer) -> None:
    with pytest.raises(DataError, match=r"the text has a lone surrogate, U\+D800, at position 2, which UTF-8 cannot"):
        exact.encode("ab\ud800")
    for words in (False, True):
        with pytest.raises(
            DataError, match=r"the text has a lone surrogate, U\+DCFF, at position 3, which UTF-8 canno"
        ):
            BytePairTokenizer.train("fine", ["a b\udcff c"], vocab=300, words=words)


def test_tokens_outside_the_vocabulary_are_refused(exact: BytePairTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"token ids are less than vocab=291, not 291"):
        exact.decode([291])


@pytest.mark.parametrize("text", ODD)
def test_parts_join_to_the_text(exact: BytePairTokenizer, text: str) -> None:
    unfolding = TextStreamer(exact)
    assert "".join(unfolding.push(token) for token in exact.encode(text)) + unfolding.finish() == text


@pytest.mark.real
def test_multi30k_comes_back_word_for_word(real_data: Path) -> None:
    train, test = (
        read_sentence_pairs(real_data / "multi30k", split, preprocessing="lc.norm.tok") for split in ("train", "val")
    )
    special = ("pad", "bos", "eos")
    tokens = BytePairTokenizer.train(
        train.source, train.target, vocab=10_000, special=special, words=True, replace_unknown=True
    )
    assert tokens.vocab == 10_000
    for side in (train.target, test.target, test.source):
        assert tuple(map(tokens.decode, tokens.encode_batch(side))) == side
