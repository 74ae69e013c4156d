"""Byte pairs: nothing is lost, no text can spell a special token, and training is the same every time."""

import json
import random
from pathlib import Path

import pytest

from regard.base.errors import ConfigError, DataError, UnknownNameError
from regard.data.byte_pairs import BytePairs
from regard.data.sentence_pairs import read_sentence_pairs
from regard.data.tokenizers import Bytes, Tokenizer, Unfolding, tokenizer_from_json

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
def exact() -> BytePairs:
    return BytePairs.trained(TEXT, GERMAN, vocab=291, special=("pad", "bos", "eos"))


@pytest.fixture(scope="module")
def wordwise() -> BytePairs:
    return BytePairs.trained([TEXT, "a b"], GERMAN, vocab=97, special=("pad", "bos"), words=True)


@pytest.mark.parametrize("text", [*ODD, TEXT, GERMAN])
def test_no_text_is_lost(exact: BytePairs, text: str) -> None:
    assert exact.decode(exact.encode(text)) == text
    assert all(token >= 3 for token in exact.encode(text))


def test_random_text_is_not_lost(exact: BytePairs) -> None:
    draw = random.Random(3)
    for _ in range(100):
        text = "".join(chr(draw.choice([32, 97, 98, 10, 0x301, 0x4E00, 0x1F600])) for _ in range(draw.randrange(40)))
        assert exact.decode(exact.encode(text)) == text


def test_frequent_text_takes_fewer_tokens(exact: BytePairs, wordwise: BytePairs) -> None:
    assert exact.vocab == 291
    assert len(exact.encode(TEXT)) < len(TEXT) / 2
    assert len(wordwise.encode("the cat")) <= 3


def test_texts_are_trained_jointly() -> None:
    both = BytePairs.trained(TEXT, GERMAN, vocab=300)
    assert len(both.encode(GERMAN)) < len(BytePairs.trained(TEXT, vocab=300).encode(GERMAN))
    assert len(both.encode(TEXT)) < len(BytePairs.trained(GERMAN, vocab=300).encode(TEXT))


def test_words_come_back_with_one_blank_between(wordwise: BytePairs) -> None:
    assert wordwise.decode(wordwise.encode("the mat of the katze")) == "the mat of the katze"
    assert wordwise.decode(wordwise.encode("  the\tmat \n of ")) == "the mat of"
    assert wordwise.encode("") == []
    assert wordwise.vocab <= 97


def test_a_character_may_end_a_word_even_if_it_never_did(wordwise: BytePairs) -> None:
    assert not any(word.endswith("h") for word in f"{TEXT} {GERMAN}".split())
    assert wordwise.decode(wordwise.encode("hath h uh th")) == "hath h uh th"


def test_the_mark_of_a_word_end_may_stand_in_a_text() -> None:
    tokens = BytePairs.trained("a</w> b </w> " * 9, vocab=40, words=True)
    assert tokens.decode(tokens.encode("b</w> </w>a a</w>b")) == "b</w> </w>a a</w>b"


def test_an_unknown_character_is_named_and_never_dropped(wordwise: BytePairs) -> None:
    with pytest.raises(
        DataError, match=r"character 'Q' \(U\+0051\) at place 4, in 'the Quh', is not among the \d+ of "
    ):
        wordwise.encode("the  Quh")


def test_a_lenient_tokenizer_puts_something_in_its_place_and_keeps_the_words() -> None:
    tokens = BytePairs.trained(TEXT, vocab=97, words=True, lenient=True)
    assert tokens.decode(tokens.encode("the Qat is Q on xQ")) == "the \ufffdat is \ufffd on \ufffd\ufffd"


def test_special_tokens_have_names_and_say_nothing(exact: BytePairs, wordwise: BytePairs) -> None:
    assert [exact.token(name) for name in ("pad", "bos", "eos")] == [0, 1, 2]
    assert exact.names[:3] == ("<pad>", "<bos>", "<eos>")
    assert exact.decode([1, *exact.encode("the cat"), 2, 0, 0]) == "the cat"
    assert wordwise.decode([1, *wordwise.encode("the cat"), 0]) == "the cat"
    with pytest.raises(UnknownNameError, match=r"no special token 'mask' \(there are: pad, bos, eos\)"):
        exact.token("mask")


def test_names_are_for_people(exact: BytePairs, wordwise: BytePairs) -> None:
    assert len(exact.names) == exact.vocab
    assert " the" in exact.names
    assert "<0xE2>" in exact.names
    assert len(wordwise.names) == wordwise.vocab
    assert "the</w>" in wordwise.names
    assert "".join(wordwise.names[token] for token in wordwise.encode("the mat")) == "the</w>mat</w>"


def test_many_texts_at_once_are_the_same_as_one_by_one(exact: BytePairs, wordwise: BytePairs) -> None:
    assert exact.encode_many(ODD) == [exact.encode(text) for text in ODD]
    texts = ["the cat", "", "der hut"]
    assert wordwise.encode_many(texts) == [wordwise.encode(text) for text in texts]


def test_small_texts_give_fewer_tokens_and_say_so() -> None:
    assert BytePairs.trained("ab ab", vocab=5000).vocab < 270


def test_json_keeps_everything(exact: BytePairs, wordwise: BytePairs) -> None:
    for tokens in (exact, wordwise):
        kept = json.loads(json.dumps(tokens.to_json()))
        back = tokenizer_from_json(kept)
        assert back == tokens == BytePairs.from_json(kept)
        assert back.encode("the cat sat") == tokens.encode("the cat sat")
        assert isinstance(tokens, Tokenizer)


def test_a_json_of_something_else_is_refused(exact: BytePairs) -> None:
    with pytest.raises(ConfigError, match=r"'kind': one of Characters, Bytes, BytePairs, not 'Words'"):
        tokenizer_from_json({"kind": "Words"})
    with pytest.raises(ConfigError, match=r"not None"):
        tokenizer_from_json([1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"byte pairs join 'x' and 'y' before both are there"):
        BytePairs(("x",), (("x", "y"),))
    assert tokenizer_from_json({"kind": "Bytes", "special": ["pad"]}) == Bytes(("pad",))


@pytest.mark.parametrize("words", [False, True])
def test_training_is_the_same_every_time(words: bool) -> None:
    # the library numbers its own word ends by chance, and equally frequent pairs follow the numbers
    draw = random.Random(5)
    text = " ".join("".join(draw.choice("abcdefgh") for _ in range(draw.randrange(1, 6))) for _ in range(700))
    first = BytePairs.trained(text, vocab=400, words=words)
    assert len(first.merges) > 100
    assert all(BytePairs.trained(text, vocab=400, words=words) == first for _ in range(5))


def test_too_small_a_vocabulary_and_empty_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no room for 256 single symbols and 2 special tokens; give at least 258"):
        BytePairs.trained(TEXT, vocab=200, special=("pad", "bos"))
    with pytest.raises(ConfigError, match=r"vocab=5 has no room for 8 single symbols"):
        BytePairs.trained("abcd", vocab=5, words=True)
    for words in (False, True):
        with pytest.raises(DataError, match="byte pairs cannot be trained on texts that are all empty"):
            BytePairs.trained("", [], vocab=300, words=words)


def test_what_utf8_cannot_spell_is_named(exact: BytePairs) -> None:
    with pytest.raises(DataError, match=r"the text has U\+D800, half of a surrogate pair, at place 2; UTF-8 cannot"):
        exact.encode("ab\ud800")
    for words in (False, True):
        with pytest.raises(DataError, match=r"the text has U\+DCFF, half of a surrogate pair, at place 3; UTF-8 canno"):
            BytePairs.trained("fine", ["a b\udcff c"], vocab=300, words=words)


def test_tokens_outside_the_vocabulary_are_refused(exact: BytePairs) -> None:
    with pytest.raises(ConfigError, match=r"tokens are less than vocab=291, so 291 is none"):
        exact.decode([291])


@pytest.mark.parametrize("text", ODD)
def test_parts_join_to_the_text(exact: BytePairs, text: str) -> None:
    unfolding = Unfolding(exact)
    assert "".join(unfolding.push(token) for token in exact.encode(text)) + unfolding.finish() == text


@pytest.mark.real
def test_multi30k_comes_back_word_for_word(real_data: Path) -> None:
    train, test = (read_sentence_pairs(real_data / "multi30k", split, form="lc.norm.tok") for split in ("train", "val"))
    special = ("pad", "bos", "eos")
    tokens = BytePairs.trained(train.source, train.target, vocab=10_000, special=special, words=True, lenient=True)
    assert tokens.vocab == 10_000
    for side in (train.target, test.target, test.source):
        assert tuple(map(tokens.decode, tokens.encode_many(side))) == side
