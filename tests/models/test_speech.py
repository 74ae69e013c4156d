"""The streaming encoder: every chunking equals one pass, memory is bounded, latency, and what it learns."""

import math
from dataclasses import replace
from itertools import product

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import CacheError, ConfigError, DtypeError, ShapeError
from regard.models.ctc_decoding import CTCGreedyDecoder, ctc_greedy_decode
from regard.models.presets import PRESETS, build, build_from_config
from regard.models.saving import load, save
from regard.models.speech import Speech, SpeechConfig
from tests.models.weights import weights_of

MELS, VOCAB = 5, 7
SMALL = SpeechConfig(vocab=VOCAB, mels=MELS, width=12, depth=2, heads=3, ff_width=17, chunk=3, look_back=2, dropout=0.2)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model(dtype: torch.dtype = torch.float32, **changes: object) -> Speech:
    """A small one whose parameters are all drawn, so that nothing is hidden behind a zero."""
    speech = build_from_config(replace(SMALL, **changes), dtype=dtype).eval()
    assert isinstance(speech, Speech)
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in speech.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.2)
    return speech


def streamed(speech: Speech, frames: Tensor, sizes: list[int]) -> Tensor:
    stream = speech.stream(batch=len(frames))
    out = [stream.push(part) for part in frames.split(sizes, 1)]
    out.append(stream.finish())
    assert stream.received == frames.shape[1]
    assert stream.emitted == frames.shape[1] // 4
    return torch.cat(out, 1)


def test_every_split_of_a_short_input_is_one_pass(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shapes are checked by the other tests
    speech, frames = model(chunk=1, look_back=1, look_ahead=1), noise(2, 8, MELS)
    with torch.no_grad():
        whole = speech(frames)
    for cuts in product([False, True], repeat=7):
        sizes = [1]
        for cut in cuts:
            sizes = [*sizes, 1] if cut else [*sizes[:-1], sizes[-1] + 1]
        torch.testing.assert_close(streamed(speech, frames, sizes), whole, rtol=0, atol=1e-5, msg=f"split {sizes}")


FORMS = [
    {},
    {"look_ahead": 1},
    {"look_back": None},
    {"look_back": 0, "chunk": 4},
    {"look_ahead": 2, "chunk": 2, "depth": 1},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 29), min_size=1, max_size=9))
def test_every_chunking_is_one_pass(form, sizes):
    speech, frames = model(**form), noise(2, max(4, sum(sizes)), MELS)
    sizes = [*sizes, frames.shape[1] - sum(sizes)] if sum(sizes) < 4 else sizes
    with torch.no_grad():
        whole = speech(frames)
    torch.testing.assert_close(streamed(speech, frames, sizes), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_frame_by_frame_is_one_pass(form):
    speech, frames = model(torch.float64, **form), noise(1, 67, MELS).double()
    with torch.no_grad():
        # in float64 what is left is the rounding of rotary's float32 phases, which are the same
        torch.testing.assert_close(streamed(speech, frames, [1] * 67), speech(frames), rtol=0, atol=1e-12)


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_the_latency_is_as_documented(look_ahead):
    speech, frames = model(look_ahead=look_ahead), noise(1, 130, MELS)
    config, stream = speech.config, speech.stream()
    left = {}
    for n in range(130):
        before = stream.emitted
        stream.push(frames[:, n : n + 1])
        left.update(dict.fromkeys(range(before, stream.emitted), n))
    chunk = 4 * config.chunk
    waited = {row: last - 4 * row for row, last in left.items()}  # frames after the first one of the row
    assert max(waited.values()) == config.latency == chunk * (look_ahead + 1) - 1
    # a chunk leaves with the last frame of the chunk look_ahead later, all at once, whatever the depth
    for row, last in left.items():
        assert last == (row // config.chunk + look_ahead + 1) * chunk - 1


def test_no_row_depends_on_frames_after_its_latency():
    speech, frames = model(look_ahead=1), noise(1, 96, MELS)
    with torch.no_grad():
        whole = speech(frames)
        changed = frames.clone()
        changed[:, 48:] = 9.0
        # rows of chunk 2, frames 24 to 35, see up to the end of chunk 3, frame 47
        torch.testing.assert_close(speech(changed)[:, :9], whole[:, :9], rtol=0, atol=1e-5)
        assert (speech(changed)[:, 9:12] - whole[:, 9:12]).abs().max() > 1e-3


def test_its_attention_stays_in_the_chunks_it_may_see():
    """The map is the mask: nothing outside, something everywhere inside, and only the first block looks ahead."""
    speech, frames = model(look_ahead=1), noise(1, 96, MELS)
    maps = weights_of(lambda: speech(frames))
    assert len(maps) == speech.config.depth
    for weights, mask in zip(maps, speech.masks, strict=True):
        assert torch.equal(weights > 0, mask.dense(24).expand_as(weights))
    ahead = [bool((weights.triu(speech.config.chunk) > 0).any()) for weights in maps]
    assert ahead == [True, *[False] * (speech.config.depth - 1)]


def test_memory_stays_bounded_however_long_the_input(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    speech = model(look_ahead=1)
    stream, sizes = speech.stream(), []
    for n in range(400):
        stream.push(noise(1, 7, MELS, seed=n))
        sizes.append(stream.nbytes)
    config = speech.config
    rows = (config.look_back + config.look_ahead + 2) * config.chunk  # seen by some later row, or waiting
    assert max(sizes) <= 4 * config.width * config.depth * 4 * rows + 4 * 2 * (MELS + config.width)
    assert max(sizes[-50:]) == max(sizes[50:100])
    assert all(not tensor.requires_grad for tensor in stream.tensors())
    assert sum(tensor.untyped_storage().nbytes() for tensor in stream.tensors()) < 3 * max(sizes)


def test_padding_changes_no_real_row():
    speech, frames = model(), noise(3, 50, MELS)
    lengths = torch.tensor([50, 33, 6])
    with torch.no_grad():
        batched = speech(frames, lengths=lengths)
        noisy = frames.clone()
        for row, length in enumerate(lengths.tolist()):
            noisy[row, length:] = torch.nan
            alone = speech(frames[row : row + 1, :length])
            real = length // 4
            torch.testing.assert_close(batched[row, :real], alone[0], rtol=0, atol=1e-5)
        noisy = speech(noisy, lengths=lengths)
        for row, length in enumerate(lengths.tolist()):
            # calls with NaN are computed row by row, which rounds in another order
            torch.testing.assert_close(noisy[row, : length // 4], batched[row, : length // 4], rtol=0, atol=1e-5)


def test_a_stream_may_have_an_end_before_its_first_row():
    stream = model().stream()
    assert stream.push(noise(1, 3, MELS)).shape == (1, 0, VOCAB)
    assert stream.push(noise(1, 0, MELS)).shape == (1, 0, VOCAB)
    assert stream.finish().shape == (1, 0, VOCAB)


def test_a_stream_refuses_what_does_not_fit_and_goes_on():
    speech, frames = model(), noise(2, 40, MELS)
    stream = speech.stream(batch=2)
    with pytest.raises(CacheError, match="nothing was pushed into this stream, so there is nothing to finish"):
        stream.finish()
    out = [stream.push(frames[:, :11])]
    with pytest.raises(CacheError, match=r"frames is \(1, 4, 5\), but this stream has batch=2"):
        stream.push(frames[:1, :4])
    with pytest.raises(ShapeError, match=r"frames is \(2, 4, 3\), but is read as \(b n mels\) with 5 mels"):
        stream.push(frames[:, :4, :3])
    out += [stream.push(frames[:, 11:]), stream.finish()]
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(out, 1), speech(frames), rtol=0, atol=1e-5)
    for late in (lambda: stream.push(frames), stream.finish):
        with pytest.raises(CacheError, match=r"this stream is finished; start another with model\.stream\(\)"):
            late()
    with pytest.raises(ConfigError, match=r"call eval\(\) before streaming"):
        speech.train().stream()
    with pytest.raises(ConfigError, match="batch is 0, but must be at least 1"):
        speech.eval().stream(batch=0)


@pytest.mark.parametrize(
    ("frames", "lengths", "kind", "words"),
    [
        (torch.zeros(2, 9, 4), None, ShapeError, r"frames is \(2, 9, 4\), but is read as \(b n mels\) with 5 mels"),
        (torch.zeros(9, 5), None, ShapeError, r"frames is \(9, 5\)"),
        (torch.zeros(0, 9, 5), None, ShapeError, "and b of at least one"),
        (torch.zeros(2, 3, 5), None, ShapeError, "frames has 3 frames, but a row of logits is made of 4"),
        (torch.zeros(2, 9, 5).long(), None, DtypeError, r"read as \(b n mels\), not torch\.int64"),
        ("sound", None, DtypeError, "not str"),
        (torch.zeros(2, 9, 5), torch.tensor([9]), ShapeError, r"lengths is \(1,\), but frames has b=2"),
        (torch.zeros(2, 9, 5), torch.tensor([9, 10]), ShapeError, "lengths holds 10, but frames has 9 frames"),
        (torch.zeros(2, 9, 5), torch.tensor([9, -1]), ShapeError, "lengths holds -1"),
        (
            torch.zeros(2, 9, 5),
            torch.tensor([9.0, 1.0]),
            DtypeError,
            r"read as \(b\), not torch\.float32",
        ),
        (torch.zeros(2, 9, 5), [9, 9], DtypeError, "whole numbers .* not list"),
    ],
)
def test_bad_inputs_are_refused(frames, lengths, kind, words):
    with pytest.raises(kind, match=words):
        model()(frames, lengths=lengths)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab": 0}, "vocab is 0, but must be at least 1"),
        ({"chunk": 0}, "chunk is 0, but must be at least 1"),
        ({"look_ahead": -1}, "look_ahead is -1, but must be at least 0"),
        ({"look_back": -2}, "look_back is -2, but must be at least 0"),
        ({"heads": 5}, "width must be a multiple of heads: width=12, heads=5; try heads=4"),
        ({"dropout": 1.5}, "dropout is a share"),
        ({"mels": 2.5}, "mels takes a whole number"),
    ],
)
def test_bad_settings_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(SMALL, **changes)


def test_names_are_stable():
    block = [
        *(f"attention.{part}.{kind}" for part in ("query_key_value", "out") for kind in ("weight", "bias")),
        *(f"attention_norm.{kind}" for kind in ("weight", "bias")),
        *(f"feedforward.{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias")),
        *(f"feedforward_norm.{kind}" for kind in ("weight", "bias")),
    ]
    front = [f"front.{half}.convolution.{kind}" for half in ("first", "second") for kind in ("weight", "bias")]
    rest = [f"{part}.{kind}" for part in ("norm", "head") for kind in ("weight", "bias")]
    assert list(model().state_dict()) == [*front, *(f"blocks.{n}.{name}" for n in range(2) for name in block), *rest]


def test_the_preset_is_small():
    speech = build("speech-stream", device="meta")
    assert PRESETS["speech-stream"].latency == 63  # 0.64 s of 10 ms frames, the frame itself among them
    assert speech(torch.empty(2, 103, 80, device="meta")).shape == (2, 25, 29)


def test_it_compiles_and_exports():
    speech, frames = model(), noise(2, 41, MELS)
    lengths = {"lengths": torch.tensor([41, 30])}
    with torch.no_grad():
        whole = speech(frames, **lengths)
        torch._dynamo.reset()
        compiled = torch.compile(speech, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(frames, **lengths), whole)
        exported = torch.export.export(speech, (frames,), lengths).module()
        torch.testing.assert_close(exported(frames, **lengths), whole)


def test_autocast_gives_bfloat16_near_the_truth_and_streams_so_too():
    speech, frames = model(), noise(2, 41, MELS)
    with torch.no_grad():
        truth = speech(frames)
        with torch.autocast("cpu", torch.bfloat16):
            low = speech(frames)
            split = streamed(speech, frames, [5, 20, 16])
    assert low.dtype == torch.bfloat16
    assert (low - truth).abs().max() < 0.05 * truth.abs().max()
    assert (split - truth).abs().max() < 0.05 * truth.abs().max()


def test_recomputing_gives_the_same_gradients():
    speech, frames, found = model().train(), noise(2, 41, MELS), []
    for recompute in (False, True):
        speech.gradient_checkpointing = recompute
        speech.zero_grad()
        torch.manual_seed(4)
        speech(frames).square().sum().backward()
        found.append([parameter.grad for parameter in speech.parameters()])
    assert all(torch.equal(plain, again) for plain, again in zip(*found, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in found[0])


def test_it_is_saved_and_loaded(tmp_path):
    speech, frames = model(look_back=None), noise(2, 41, MELS)
    save(speech, tmp_path)
    again = load(tmp_path)
    assert again.config == speech.config
    assert torch.equal(again(frames), speech(frames))


@pytest.mark.cuda
def test_a_gpu_gives_the_same_rows_and_streams():
    speech, frames, lengths = model(look_ahead=1), noise(2, 61, MELS), torch.tensor([61, 40])
    with torch.no_grad():
        whole, padded = speech(frames), speech(frames, lengths=lengths)
        speech, frames = speech.cuda(), frames.cuda()
        torch.testing.assert_close(speech(frames).cpu(), whole, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(speech(frames, lengths=lengths.cuda()).cpu()[0], padded[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(streamed(speech, frames, [5, 20, 36]).cpu(), whole, rtol=1e-3, atol=1e-3)


def tones(count: int, seed: int) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Strings of digits, each digit a tone of its own, held for a while, with pauses and noise."""
    draws = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draws))

    frames, strings = [], []
    for _ in range(count):
        digits, parts = [between(0, 9) for _ in range(between(2, 5))], []
        for digit in digits:
            tone = torch.zeros(between(8, 16), 13)
            tone[:, digit], tone[:, digit + 2] = 1.5, 0.8
            parts += [tone, torch.zeros(between(4, 8), 13)]
        sound = torch.cat(parts)
        frames.append(sound + 0.2 * torch.randn(sound.shape, generator=draws))
        strings.append([1 + digit for digit in digits])
    lengths = torch.tensor([len(sound) for sound in frames])
    return nn.utils.rnn.pad_sequence(frames, batch_first=True), lengths, strings


def test_it_learns_to_read_digits_coded_as_tones(monkeypatch):
    """Chance is below 1 string in 100; 200 that it has never heard are read without an error, streamed as well."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    config = SpeechConfig(vocab=11, mels=13, width=32, depth=2, heads=2, ff_width=64, chunk=4, look_back=2, dropout=0.0)
    speech = build_from_config(replace(config, attention_dropout=0.0))
    steps = 240
    optimiser = torch.optim.Adam(speech.parameters(), lr=4e-3)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 4e-3 * min(1.0, 2 * (1 - step / steps))
        frames, lengths, strings = tones(16, seed=step)
        scores = speech(frames, lengths=lengths).log_softmax(-1).transpose(0, 1)
        wanted = torch.tensor([token for string in strings for token in string])
        counts = torch.tensor([len(string) for string in strings])
        loss = functional.ctc_loss(scores, wanted, lengths // 4, counts)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < math.log(11) / 10

    frames, lengths, strings = tones(200, seed=10**6)
    speech.eval()
    with torch.no_grad():
        logits = speech(frames, lengths=lengths)
    assert ctc_greedy_decode(logits, lengths=lengths // 4) == strings

    for number in range(5):
        stream, reader, heard = speech.stream(), CTCGreedyDecoder(), []
        for part in frames[number : number + 1, : lengths[number]].split(3, 1):
            heard += reader.push(stream.push(part))[0]
        assert heard + reader.push(stream.finish())[0] == strings[number]


def test_it_exports_for_every_number_of_rows():
    speech = model()
    rows = torch.export.Dim("rows", min=4, max=4096)
    program = torch.export.export(speech, (noise(2, 40, MELS),), dynamic_shapes=({1: 4 * rows},))
    with torch.no_grad():
        for n in (40, 88, 132):
            frames = noise(2, n, MELS, seed=n)
            torch.testing.assert_close(program.module()(frames), speech(frames), rtol=0, atol=1e-5)
