"""Text as tokens and back: nothing is lost, and one token at a time says the same."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library, decoders, models, pre_tokenizers, processors, trainers

from regard.base.errors import CheckpointError, ConfigError, UnknownNameError
from regard.data.characters import CharacterTokenizer
from regard.data.tokenizers import (
    ByteTokenizer,
    PretrainedTokenizer,
    TextStreamer,
    Tokenizer,
    load_tokenizer,
    tokenizer_from_json,
)

TEXTS = ["", "plain", "Grüße, naïve café", "日本語と漢字", "🙂👩‍👩‍👧 mixed a\tb\nc", "e\u0301 \u200d \x00 end"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 290 tokens, two of them special: one is put before every text."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<start>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["the cat and the hat", "the rain in spain", *TEXTS], trainer)
    start = library.token_to_id("<start>")
    library.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", start)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(path))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_the_byte_tokenizer_restores_every_text(text: str) -> None:
    tokens = ByteTokenizer().encode(text)
    assert tokens == list(text.encode())
    assert ByteTokenizer().decode(tokens) == text
    assert ByteTokenizer().vocab == 256


def test_every_byte_is_a_token_and_what_is_no_utf8_is_shown_as_such() -> None:
    assert ByteTokenizer().decode(range(128)) == "".join(map(chr, range(128)))
    assert ByteTokenizer().decode([65, 0xE2, 0x82, 66]) == "A\ufffdB"
    assert ByteTokenizer().decode([65, 256, 50256, 66]) == "A\ufffd\ufffdB"
    assert ByteTokenizer().encode("a\ud800b") == [97, 63, 98]
    with pytest.raises(ConfigError, match="token ids are 0 or more, not -3"):
        ByteTokenizer().decode([1, -3])


def test_special_tokens_come_after_the_bytes_and_decode_to_nothing() -> None:
    tokens = ByteTokenizer(("pad", "bos"))
    assert (tokens.vocab, ByteTokenizer.vocab) == (258, 256)
    assert (tokens.token("pad"), tokens.token("bos")) == (256, 257)
    assert tokens.decode([257, *tokens.encode("<pad>é"), 256, 256]) == "<pad>é"
    assert tokens.decode([65, 258]) == "A\ufffd"
    assert (tokens.names[65], tokens.names[0xE9], tokens.names[256]) == ("A", "<0xE9>", "<pad>")
    assert tokenizer_from_json(json.loads(json.dumps(tokens.to_json()))) == tokens
    assert repr(tokens) == "ByteTokenizer(('pad', 'bos'))"
    with pytest.raises(UnknownNameError, match=r"no special token 'eos' \(it has pad, bos\)"):
        tokens.token("eos")


def test_a_saved_tokenizer_agrees_with_its_library(trained: Path) -> None:
    library, ours = Library.from_file(str(trained)), load_tokenizer(trained)
    assert ours.vocab == library.get_vocab_size() == 290
    for text in TEXTS:
        assert ours.encode(text) == library.encode(text).ids
        assert ours.encode(text)[0] == library.token_to_id("<start>")
        assert ours.encode(text, special=False) == ours.encode(text)[1:]
        assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode("the cat", special=False)) < len("the cat")


def test_special_tokens_in_a_text_are_one_token_and_are_not_shown(trained: Path) -> None:
    ours = load_tokenizer(trained)
    tokens = ours.encode("cat<end>", special=False)
    assert tokens[-1] == Library.from_file(str(trained)).token_to_id("<end>")
    assert ours.decode(tokens) == "cat"
    with pytest.raises(ConfigError, match="token ids are 0 or more, not -1"):
        ours.decode([-1])


def test_a_folder_serves_as_well_as_its_file(trained: Path) -> None:
    assert load_tokenizer(trained.parent).encode("the rain") == load_tokenizer(trained).encode("the rain")
    assert repr(load_tokenizer(trained.parent)) == f"PretrainedTokenizer({str(trained)!r})"


def test_both_are_tokenizers(trained: Path) -> None:
    assert isinstance(ByteTokenizer(), Tokenizer)
    assert isinstance(load_tokenizer(trained), Tokenizer)
    assert repr(ByteTokenizer()) == "ByteTokenizer()"


@pytest.mark.parametrize("kind", ["bytes", "trained"])
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_parts_concatenate_to_the_text(kind: str, text: str, trained: Path) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else load_tokenizer(trained)
    unfolding = TextStreamer(tokenizer)
    parts = [unfolding.push(token) for token in tokenizer.encode(text)]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == text
    assert unfolding.finish() == ""


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_streamed_parts_of_any_tokens_concatenate_to_the_text(kind: str, trained: Path) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else load_tokenizer(trained)
    draw = random.Random(5)
    for _ in range(200):
        tokens = [draw.randrange(tokenizer.vocab) for _ in range(draw.randrange(1, 30))]
        unfolding = TextStreamer(tokenizer)
        parts = [unfolding.push(token) for token in tokens]
        assert "".join([*parts, unfolding.finish()]) == tokenizer.decode(tokens)


def test_a_character_comes_with_its_last_byte() -> None:
    unfolding = TextStreamer(ByteTokenizer())
    assert [unfolding.push(byte) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert unfolding.push(0xE2) == ""
    assert unfolding.finish() == "\ufffd"


def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent does not exist; pass a tokenizer\.json, or"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    for text in ("not json", json.dumps({"version": "1.0"}), json.dumps([1])):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json(, line 1, column 1 is not JSON| is not a token)"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not UTF-8 text: "):
        PretrainedTokenizer(tmp_path / "tokenizer.json")


def test_our_own_are_read_from_a_folder_too(tmp_path: Path) -> None:
    letters = CharacterTokenizer.from_texts("the rain", special=("pad",))
    (tmp_path / "tokenizer.json").write_text(json.dumps(letters.to_json()))
    found = load_tokenizer(tmp_path)
    assert found == letters
    assert found.decode(found.encode("the rain")) == "the rain"
