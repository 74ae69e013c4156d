"""The recurrent baseline: compared with torch's LSTM, step by step, and what attention adds."""

from dataclasses import replace

import jaxtyping
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard import attend, causal, padding
from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.models import rnn
from regard.models.presets import build, build_from_config
from regard.models.rnn import LSTM, RNN, RNNConfig, RNNState
from regard.models.saving import load, save

SMALL = RNNConfig(vocab=13, width=6, depth=2, dropout=0.2)
FORMS = ["dot", None]


def tokens(b: int, n: int, vocab: int, seed: int = 1) -> Tensor:
    return torch.randint(0, vocab, (b, n), generator=torch.Generator().manual_seed(seed))


SOURCE, TARGET = tokens(3, 9, 11), tokens(3, 7, 13)


def model(**changes: object) -> RNN:
    recurrent = build_from_config(replace(SMALL, **changes)).eval()
    assert isinstance(recurrent, RNN)
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in recurrent.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.3)
    return recurrent


def test_a_layer_and_its_loop_are_that_of_torch():
    torch.manual_seed(3)
    layer, theirs = LSTM(5), nn.LSTM(5, 5, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(layer.input.weight)
        theirs.weight_hh_l0.copy_(layer.hidden.weight)
        theirs.bias_ih_l0.copy_(layer.input.bias)
        theirs.bias_hh_l0.zero_()
    x, state = torch.randn(3, 8, 5), RNNState(torch.randn(3, 5), torch.randn(3, 5))
    expected, (h, c) = theirs(x, (state.h[None], state.c[None]))
    for form in (layer, layer.step_by_step):
        rows, after = form(x, state)
        torch.testing.assert_close(rows, expected)
        torch.testing.assert_close(after.h, h[0])
        torch.testing.assert_close(after.c, c[0])


def by_hand(recurrent: RNN, source: Tensor, target: Tensor) -> Tensor:
    """One sequence, one step at a time, attention as a softmax over all source rows."""
    width = recurrent.config.width

    def read(
        layers: nn.ModuleList, vectors: Tensor, begins: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[Tensor]]:
        ends = []
        for layer, (h, c) in zip(layers, begins, strict=True):
            rows = []
            for x in vectors:
                gates = layer.input.weight @ x + layer.input.bias + layer.hidden.weight @ h
                enter, forget, cell, leave = gates.split(width)
                c = torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(cell)
                h = torch.sigmoid(leave) * torch.tanh(c)
                rows.append(h)
            vectors = torch.stack(rows)
            ends.append(h)
        return vectors, ends

    nothing = (torch.zeros(width), torch.zeros(width))
    memory, ends = read(recurrent.encoder, recurrent.source.weight[source], [nothing] * recurrent.config.depth)
    begins = [tuple(bridge(end).tanh().split(width)) for bridge, end in zip(recurrent.bridge, ends, strict=True)]
    rows, _ = read(recurrent.decoder, recurrent.target.weight[target], begins)
    if recurrent.combine is not None:
        weights = (rows @ memory.T).softmax(-1)
        rows = recurrent.combine(torch.cat([weights @ memory, rows], -1)).tanh()
    return recurrent.head(rows)


@pytest.mark.parametrize("form", FORMS)
def test_it_matches_a_computation_by_hand(form):
    recurrent = model(attention=form)
    logits = recurrent(SOURCE, TARGET)
    assert logits.shape == (3, 7, 13)
    for row in range(3):
        torch.testing.assert_close(logits[row], by_hand(recurrent, SOURCE[row], TARGET[row]))


@pytest.mark.parametrize("form", FORMS)
def test_padding_of_the_source_changes_nothing(form):
    recurrent, lengths = model(attention=form), [9, 4, 1]
    logits = recurrent(SOURCE, TARGET, source_padding=padding(lengths))
    other = SOURCE.clone()
    for row, length in enumerate(lengths):
        alone = recurrent(SOURCE[row : row + 1, :length], TARGET[row : row + 1])
        torch.testing.assert_close(logits[row : row + 1], alone)
        other[row, length:] = 10 - other[row, length:]
    assert torch.equal(recurrent(other, TARGET, source_padding=padding(lengths)), logits)


def test_an_empty_source_is_forgotten():
    recurrent = model()
    logits = recurrent(SOURCE, TARGET, source_padding=padding([9, 0, 9]))
    other = recurrent(10 - SOURCE, TARGET, source_padding=padding([9, 0, 9]))
    assert torch.equal(logits[1], other[1])
    assert not torch.equal(logits[0], other[0])


@pytest.mark.parametrize("form", FORMS)
def test_every_split_of_the_target_is_one_pass(form):
    recurrent = model(attention=form)
    with torch.no_grad():
        whole = recurrent(SOURCE, TARGET, source_padding=padding([9, 4, 6]))
        for first in range(1, 7):
            for second in range(1, 8 - first):
                encoded, parts = recurrent.encode(SOURCE, source_padding=padding([9, 4, 6])), []
                for part in TARGET.split([first, second, 7 - first - second][: 2 if first + second == 7 else 3], 1):
                    logits, encoded = recurrent.decode(part, encoded)
                    parts.append(logits)
                torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_no_row_depends_on_later_tokens_of_the_target():
    recurrent, changed = model(), TARGET.clone()
    changed[:, 4:] = 12 - changed[:, 4:]
    torch.testing.assert_close(recurrent(SOURCE, changed)[:, :4], recurrent(SOURCE, TARGET)[:, :4])


def test_names_are_stable():
    layers = [
        *(f"encoder.{n}.{name}" for n in range(2) for name in ("input.weight", "input.bias", "hidden.weight")),
        *(f"bridge.{n}.{name}" for n in range(2) for name in ("weight", "bias")),
        *(f"decoder.{n}.{name}" for n in range(2) for name in ("input.weight", "input.bias", "hidden.weight")),
    ]
    embeddings, head = ["source.weight", "target.weight"], ["head.weight", "head.bias"]
    combine = ["combine.weight", "combine.bias"]
    assert list(model(attention=None).state_dict()) == [*embeddings, *layers, *head]
    assert list(model().state_dict()) == [*embeddings, *layers, *combine, *head]


def test_presets_differ_by_attention_alone():
    counts = {name: build(name, device="meta").parameter_count for name in ("rnn", "rnn-attention")}
    assert counts["rnn-attention"] - counts["rnn"] == 2 * 512 * 512 + 512


def test_it_compiles_and_exports():
    recurrent = model(depth=1)
    source, target, real = SOURCE[:, :4], TARGET[:, :3], padding([4, 2, 3])
    whole = recurrent(source, target, source_padding=real)
    torch._dynamo.reset()
    compiled = torch.compile(recurrent, fullgraph=True, backend="aot_eager")
    out = compiled(source, target, source_padding=real)
    torch.testing.assert_close(out, whole)
    ours, theirs = ([*torch.autograd.grad(x.square().sum(), [*recurrent.parameters()])] for x in (whole, out))
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-4)
    exported = torch.export.export(recurrent, (source, target)).module()
    torch.testing.assert_close(exported(source, target), recurrent(source, target))


@pytest.mark.parametrize("form", FORMS)
def test_autocast_gives_bfloat16_near_the_truth(form):
    recurrent = model(attention=form)
    truth = recurrent(SOURCE, TARGET)
    with torch.autocast("cpu", torch.bfloat16):
        low = recurrent(SOURCE, TARGET)
        first, encoded = recurrent.decode(TARGET[:, :3], recurrent.encode(SOURCE))
        rest, _ = recurrent.decode(TARGET[:, 3:], encoded)
    assert low.dtype == torch.bfloat16
    for out in (low, torch.cat([first, rest], 1)):
        assert (out - truth).abs().max() < 0.05 * truth.abs().max()


def test_it_is_saved_and_loaded(tmp_path):
    recurrent = model(attention=None)
    save(recurrent, tmp_path)
    again = load(tmp_path)
    assert again.config == recurrent.config
    assert torch.equal(again(SOURCE, TARGET), recurrent(SOURCE, TARGET))


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_gives_the_same_rows_and_gradients(form):
    recurrent, real = model(attention=form, dropout=0.0), padding([9, 4, 0])
    whole = recurrent(SOURCE, TARGET, source_padding=real)
    whole.square().sum().backward()
    there = model(attention=form, dropout=0.0).cuda()
    out = there(SOURCE.cuda(), TARGET.cuda(), source_padding=real)
    torch.testing.assert_close(out.cpu(), whole, rtol=1e-3, atol=1e-3)
    out.square().sum().backward()
    for mine, theirs in zip(recurrent.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad.cpu(), mine.grad, rtol=1e-2, atol=1e-2)


def test_dropout_acts_in_training_only():
    recurrent = model()
    assert torch.equal(recurrent(SOURCE, TARGET), recurrent(SOURCE, TARGET))
    recurrent.train()
    assert not torch.equal(recurrent(SOURCE, TARGET), recurrent(SOURCE, TARGET))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": "cosine"}, "attention is one of dot, not 'cosine'"),
        ({"width": 0}, "width is 0, but must be at least 1"),
        ({"depth": 1.5}, r"depth takes a whole number, not 1\.5"),
        ({"dropout": 1.0}, "dropout is a share, at least 0 and less than 1"),
    ],
)
def test_bad_settings_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(SMALL, **changes)


def test_bad_inputs_are_refused():
    recurrent = model()
    with pytest.raises(ShapeError, match="source holds 13, but the vocabulary has tokens 0 to 12"):
        recurrent(SOURCE + 13 - SOURCE.max(), TARGET)
    with pytest.raises(DtypeError, match=r"source must be a tensor of whole numbers read as \(b n\), not torch"):
        recurrent(SOURCE.float(), TARGET)
    with pytest.raises(ShapeError, match="target holds 13, but the vocabulary has tokens 0 to 12"):
        recurrent(SOURCE, TARGET + 13 - TARGET.max())
    with pytest.raises(ShapeError, match="target has b=2 sequences, but the source has b=3"):
        recurrent(SOURCE, TARGET[:2])
    with pytest.raises(ConfigError, match=r"source_padding takes padding\(lengths\), with padding on the right"):
        recurrent(SOURCE, TARGET, source_padding=causal())
    with pytest.raises(ConfigError, match="with padding on the right"):
        recurrent(SOURCE, TARGET, source_padding=padding([9, 9, 9], side="left", width=9))
    with pytest.raises(ShapeError, match="source_padding has 2 lengths, but source has b=3 sequences"):
        recurrent(SOURCE, TARGET, source_padding=padding([9, 9]))


def reversal(count: int, seed: int, n: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """Source, the target as the decoder is fed it (0 first), and the target: the source from last to first."""
    source = 1 + tokens(count, n, 12, seed)
    wanted = source.flip(1)
    return source, torch.cat([torch.zeros(count, 1, dtype=torch.long), wanted[:, :-1]], 1), wanted


def look(recurrent: RNN, source: Tensor, fed: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Its weights, (b i j): attention is linear in the values, and the identity as values gives the weights."""
    seen = []

    def seeing(q: Tensor, k: Tensor, v: Tensor, **settings: object) -> Tensor:
        seen.append(attend(q, k, torch.eye(k.shape[2]).expand(len(k), 1, -1, -1), **settings)[:, 0])
        return attend(q, k, v, **settings)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(rnn, "attend", seeing)
        recurrent(source, fed)
    return seen[0]


def test_attention_learns_to_reverse_where_one_state_does_not(monkeypatch):
    """10 of 12 tokens do not fit one small state in 200 steps; with attention they are looked up, last to first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shapes are checked by the other tests
    right = {}
    for form in ("dot", None):
        recurrent = build_from_config(RNNConfig(vocab=13, width=48, depth=1, attention=form, dropout=0.0))
        optimiser = torch.optim.Adam(recurrent.parameters(), lr=5e-3)
        for step in range(200):
            source, fed, wanted = reversal(32, seed=step)
            loss = functional.cross_entropy(recurrent(source, fed).flatten(0, 1), wanted.flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        source, fed, wanted = reversal(200, seed=10**6)
        with torch.no_grad():
            right[form] = (recurrent(source, fed).argmax(-1) == wanted).float().mean().item()
        if form == "dot":
            weights = look(recurrent, source, fed, monkeypatch)
            assert (weights.argmax(-1) == torch.arange(9, -1, -1)).float().mean() > 0.9
    assert right["dot"] > 0.99
    assert right[None] < 0.7
