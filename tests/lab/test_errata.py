"""The errata of the sheets: quoted, refuted by the shipped numbers, and recomputed by independent paths."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from regard.lab.answers import sheet_answers
from regard.lab.claim import claims
from regard.lab.errata import WrongAnswer, wrong_answers
from regard.lab.results import shipped_results
from regard.lab.templates import evaluate, render, round_outward
from regard.lab.verdict import REFUTED, SUPPORTED, Numbers
from regard.models.presets import build
from regard.nn.attention import Attention
from regard.nn.feedforward import FeedForward
from regard.nn.init import fan_in, init_parameters, normal
from tests.lab.quick import claim, numbers

ERRATA = wrong_answers()
PLACES = {place for answer in sheet_answers() for place in answer.questions}
# whose numbers come from trainings; their intervals over seeds are checked with the claims
TRAINED = {"against-rnn", "bert-tasks", "encoder-decoder", "made-up-answers", "pretraining-knowledge"}


def identify(answer: WrongAnswer) -> str:
    same = [each for each in ERRATA if each.claim == answer.claim]
    return f"{answer.claim}-{same.index(answer)}"


# numbers of a run that would agree with each wrong answer, in the order of the file
IF_RIGHT: dict[str, Callable[[Numbers], Numbers]] = {
    "beta-0": lambda n: {"weights": [[0.0, 0.0, 0.0, 1.0]] * 5},
    "beta-1": lambda n: {"weights": [[1.0, 0.0, 0.0, 0.0]] * 5},
    "copy-value-0": lambda n: {"weight of the first key": 0.4},
    "copy-value-1": lambda n: {"distance from the identity, equal queries": 1e-9},
    "diffuse-0": lambda n: {"distance from 1/m": [1e-9]},
    "diffuse-1": lambda n: {"entropy of the peaked weights": 1.9},
    "key-nudge-0": lambda n: {"deviation from twice the change": [1e-12] * 5},
    "key-nudge-1": lambda n: {"difference to the added weights": 1e-12},
    "key-nudge-2": lambda n: {"other weights, before and after": [[0.3, 0.2], [0.3, 0.2]]},
    "dot-product-0": lambda n: {"size of H": [15, 4]},
    "dot-product-1": lambda n: {"size of Q, K, V": [[1, 4], [1, 5], [3, 5]]},
    "key-stretch-0": lambda n: {"weights for scores 1, 1/2, 0": [1.0, 1.0, 1.0]},
    "key-stretch-1": lambda n: {"weights with the first key doubled": n["weights for scores 1, 1/2, 0"]},
    "multi-head-0": lambda n: {"difference without W_o": 0.0},
    "multi-head-1": lambda n: {"queries and keys": [23, 23]},
    "multi-head-2": lambda n: {"sizes of W_q, W_k, W_v, W_o": [[12, 60]] * 4},
    "multi-head-3": lambda n: {"difference to torch": {"cross attention": 0.5}},
    "multi-head-4": lambda n: {"other heads changed": 2},
    "multi-head-5": lambda n: {"other heads changed": 2},
    "grouped-convolution-0": lambda n: {"smallest error with groups = channels": 0.0},
    "grouped-convolution-1": lambda n: {"channels read with groups = channels": 15},
    "positions-0": lambda n: {"weight at distance 999": 0.1},
    "positions-1": lambda n: {"accuracy": {"relative": n["accuracy"]["relative"] | {"none": [1.0, 1.0, 1.0]}}},
    "positions-2": lambda n: {"weight at distance 999": 0.1},
    "positions-3": lambda n: {"schemes that accept longer input": ["learned"]},
    "identity-layer-0": lambda n: {"own weight of orthonormal tokens, beta = 1": 1.0},
    "identity-layer-1": lambda n: {"distinct outputs at zero scores": 4},
    "identity-layer-2": lambda n: {"tokens 1, 2, 3, ... at zero scores": 0.0},
    "identity-layer-3": lambda n: {"own weight of orthonormal tokens": 0.0},
    "identity-layer-4": lambda n: {"own weight of orthonormal tokens, beta = 1": n["own weight of orthonormal tokens"]},
    "running-linear-0": lambda n: {"difference with biases of 1": 0.0},
    "running-linear-1": lambda n: {"positions read": 3},
    "as-convolution-0": lambda n: {"error of conv1d": 100.0},
    "as-convolution-1": lambda n: {"shifted input: difference of the phrases": 0.0},
    "against-rnn-0": lambda n: {"accuracy": n["accuracy"] | {"recurrent": [0.1, 0.1]}},
    "against-rnn-1": lambda n: {"longest path": {"attention": [15, 60, 240], "recurrent": [69, 261, 1029]}},
    "against-rnn-2": lambda n: {"accuracy": n["accuracy"] | {"recurrent with attention": [0.1, 0.1]}},
    "against-rnn-3": lambda n: {"input matrices": {"RNN": 1, "GRU": 1, "LSTM": 1}},
    "self-attention-why-0": lambda n: {"multiply-adds": n["multiply-adds"] | {"projections": [0] * 7}},
    "feed-forward-0": lambda n: {"changes": [0.0, 0.0, 0.2, 1.0, 0.2, 0.0, 0.0, 0.0, 0.0]},
    "vit-is-convolution-0": lambda n: {"convolution against matrix on whole numbers": 3.0},
    "vit-against-transformer-0": lambda n: {"feed-forward widths": n["feed-forward widths"] | {"vit-b/16": 1024}},
    "vit-against-transformer-1": lambda n: {"widths": n["widths"] | {"vit-l/16": 2048}},
    "average-two-0": lambda n: {"weight of a": [1.0] * 6},
    "average-two-1": lambda n: {"lowest score of the others": [-20.0]},
    "noisy-keys-one-head-0": lambda n: {"share near v_a": 0.01},
    "noisy-keys-one-head-1": lambda n: {"distance from one half, tiny noise": 0.5},
    "noisy-keys-two-heads-0": lambda n: {"standard deviation of c, two equal heads": 0.1},
    "noisy-keys-two-heads-1": lambda n: {"histogram": [0.0] * 20 + [0.9]},
    "noisy-keys-two-heads-2": lambda n: {"standard deviation of c, two equal heads": 0.1},
    "scale-by-root-0": lambda n: {"gradient of q, undivided": [0.1, 1.0, 2.0, 4.0, 9.0]},
    "scale-by-root-1": lambda n: {"overflow: share finite": 0.5},
    "scale-by-root-2": lambda n: {"variance, undivided": [2.0, 4.0, 8.0, 16.0, 32.0]},
    "softmax-jacobian-0": lambda n: {"largest change after a step": 0.3},
    "parameter-count-0": lambda n: {"biases": [3] * 5},
    "parameter-count-1": lambda n: {"dense biases": [9, 25, 49, 256, 4096]},
    "permutation-0": lambda n: {"difference of weights": 0.0, "difference by the sheet": 0.0},
    "permutation-1": lambda n: {"difference of rows": 0.0},
    "head-width-0": lambda n: {"weights": [512**2 // heads for heads in n["heads"]]},
    "head-width-1": lambda n: {
        "multiply-adds of a head's projection per token": [(512 // heads) ** 2 for heads in n["heads"]]
    },
    "bert-tasks-0": lambda n: {"accuracy": n["accuracy"] | {"logic, labelled": 0.5}},
    "new-token-0": lambda n: {"change of earlier rows": 0.1},
    "new-token-1": lambda n: {"error of the step": 0.1},
    "sparse-patterns-0": lambda n: {"pairs": n["pairs"] | {"global tokens, then all pairs": [1024, 4096]}},
    "linear-attention-0": lambda n: {"multiply-adds of linear at twice D": 2_162_688},
    "linear-attention-1": lambda n: {"multiply-adds of all weights by features": 2_000_000},
    "pretraining-knowledge-0": lambda n: {"accuracy": n["accuracy"] | {"read about others": 0.9}},
    "pretraining-knowledge-1": lambda n: {"accuracy": n["accuracy"] | {"read about others": 0.9}},
    "made-up-answers-0": lambda n: {"accuracy, unknown people": 0.0},
    "made-up-answers-1": lambda n: {"unknown: fits the surname": n["chance of fitting the surname"]},
    "against-mlp-0": lambda n: {"hidden states read": 1},
    "rows-are-distributions-0": lambda n: {"weights of three tokens": np.eye(3).tolist()},
    "rows-are-distributions-1": lambda n: {"scores of three tokens": [[0.2, 0.3, 0.5]] * 3},
    "rows-are-distributions-2": lambda n: {"smallest sum of the other weights in a row": 1.0},
    "rows-are-distributions-3": lambda n: {"scores of three tokens": [[1.5, 2.5, 8.0]] * 3},
    "rows-are-distributions-4": lambda n: {"third output of three tokens": [1.17, 0.21]},
    "rows-are-distributions-5": lambda n: {"permuted example differs by": 0.4},
    "rows-are-distributions-6": lambda n: {"column sums of the weights": [1.0, 1.0]},
    "rows-are-distributions-7": lambda n: {"weights": [[1.0] * 7] * 7},
    "encoder-decoder-0": lambda n: {"blocks with cross attention": {"with encoder": 1, "alone": 1}},
}


def test_every_erratum_has_numbers_that_agree_with_it() -> None:
    assert {identify(answer) for answer in ERRATA} == set(IF_RIGHT)


@pytest.mark.parametrize("answer", ERRATA, ids=identify)
def test_shipped_numbers_refute_a_wrong_answer_and_numbers_that_agree_support_it(answer: WrongAnswer) -> None:
    found = shipped_results()[answer.claim].numbers
    assert answer.applies(found)
    assert answer.verdict(found).word == REFUTED
    agreeing = found | IF_RIGHT[identify(answer)](found)
    assert answer.verdict(agreeing).word == SUPPORTED


@pytest.mark.parametrize("answer", ERRATA, ids=identify)
def test_an_erratum_quotes_the_sheet_and_says_what_is_right(answer: WrongAnswer) -> None:
    assert answer.claim in claims()
    assert all(place in PLACES for place in answer.source.split(", ")), "errata belong to questions of the sheets"
    assert answer.source[:3] in claim(answer.claim).source
    assert answer.status in ("wrong", "partly right", "unsupported", "slip")
    sentence = answer.verdict(shipped_results()[answer.claim].numbers).sentence
    assert "{" not in sentence
    assert all(text.strip() == text and text for text in (answer.quote, answer.says, answer.place, answer.right))


def test_errata_do_not_apply_to_other_setups() -> None:
    """`--set inputs=1,2,3` is not the softmax that the sheet speaks of."""
    softmax = claim("softmax-jacobian")
    outcome = softmax.run(softmax.setup({"inputs": (1.0, 2.0, 3.0)}))
    assert outcome.wrong_answers == []
    assert outcome.verdict.word == "unclear"
    assert "the 9 derivatives" in outcome.verdict.sentence
    assert "not saturated" in outcome.verdict.sentence


def test_a_single_key_is_not_an_example_against_a_stack_of_blocks() -> None:
    dot_product = claim("dot-product")
    judged = dot_product.run(dot_product.setup({"keys": 1})).wrong_answers
    assert [answer.source for answer, _ in judged] == ["001 review 5"]


def test_bounds_are_rounded_outward() -> None:
    assert round_outward(9.49e-42) == "1e-41"
    assert round_outward(7.43e-08) == "8e-08"
    assert round_outward(9.687e-42, 2) == "9.7e-42"
    assert round_outward(0.239, 1, down=True) == "0.2"
    assert round_outward(0.0) == "0"


def test_templates_format_numbers_and_refuse_unknown_names() -> None:
    assert render("{{ n['a b']|fixed(1) }} of {{ n.c|comma }}", n={"a b": 0.25, "c": 12345}) == "0.2 of 12,345"
    assert render("{{ n|short }}", n=2.51924e22) == "2.5e+22"
    assert render("{{ n|short }}", n=4096.0) == "4096"
    assert evaluate("n.a|max > 2", n={"a": [1, 3]}) is True
    with pytest.raises(Exception, match="no attribute 'b'"):
        render("{{ n.b }}", n={})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("they differ by at most {{ n|at_most }}.", "they differ by 0."),
        ("they differ by up to {{ n|at_most }}.", "they differ by 0."),
        ("they are equal up to {{ n|at_most }}; so", "they are equal exactly; so"),
        ("at most {{ n|percent }} of them", "0 % of them"),
        ("up to {{ n|percent }} of them", "up to 0 % of them"),
        ("by at most {{ n|fixed(2) }}", "by at most 0.00"),
    ],
)
def test_a_bound_of_exactly_zero_is_not_called_a_bound(template: str, words: str) -> None:
    assert render(template, n=0.0) == words
    assert render(template, n=0.25) != words


def softmax(scores: Any) -> Any:
    powers = np.exp(np.asarray(scores, dtype=np.float64) - np.max(scores, -1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def entropy(weights: Any) -> float:
    return float(-sum(w * math.log(w) for w in weights))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal_arrays(*shapes: tuple[int, ...]) -> list[Any]:
    """The first random tensors of a claim's default seed, in this order."""
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draws, dtype=torch.float64).numpy() for shape in shapes]


def check_beta(n: Numbers) -> None:
    assert n["weights"][0] == pytest.approx(softmax(0.01 * np.array([1, 2, 3, 4])).tolist())
    assert round(max(n["weights"][0]), 3) == 0.254
    tokens = np.array([[1.0, 2.0, 3.0, 4.0]])  # by the sheet: softargmax(X' x) of one-number tokens, with x the first
    assert n["weights"][-1] == pytest.approx(softmax(100 * tokens.T @ tokens[:, 0]).tolist())


def check_copy_value(n: Numbers) -> None:
    assert n["weight of the other keys"] == pytest.approx(2 * math.exp(-30) / (1 + 2 * math.exp(-30)), rel=1e-9)
    assert n["weight of the first key, others opposed"] == pytest.approx(1 / (1 + 2 * math.exp(-0.2)))
    # three equal one-hot columns against the identity
    assert n["distance from the identity, equal queries"] == 1.0


def check_diffuse(n: Numbers) -> None:
    assert n["entropy of the peaked weights"] == pytest.approx(entropy([0.97, *[0.005] * 6]), rel=1e-9)
    assert round(entropy([0.97, *[0.005] * 6]), 3) == 0.188
    assert n["entropy"][-1] == pytest.approx(math.log(7))
    assert n["largest weight"][0] > 0.999


def check_key_nudge(n: Numbers) -> None:
    """By numpy for the same draws: how far the change for twice eps is from twice the change."""
    q, k, v, eps = (
        each[:, 0] for each in normal_arrays(*((201, 1, *sizes) for sizes in ((5, 8), (11, 8), (11, 3), (1, 8))))
    )

    def change(size: float) -> Any:
        def out(keys: Any) -> Any:
            return softmax(q @ keys.transpose(0, 2, 1) / math.sqrt(8)) @ v

        return out(np.concatenate([k[:, :1] + size * eps, k[:, 1:]], 1)) - out(k)

    for size, measured in zip(n["sizes"][:4], n["deviation from twice the change"], strict=False):
        twice = change(2 * size)
        norms = [np.sqrt((each**2).sum((1, 2))) for each in (twice - 2 * change(size), twice)]
        assert np.median(norms[0] / norms[1]) == pytest.approx(measured, rel=1e-6)
    before, after = softmax([1, 0.5, 0]), softmax([1.1, 0.5, 0])
    assert n["other weights, before and after"] == [pytest.approx(before[1:]), pytest.approx(after[1:])]


def check_dot_product(n: Numbers) -> None:
    q, k, v = (np.ones(size) for size in n["size of Q, K, V"])
    h = v @ softmax((k.T @ q).T).T
    assert n["size of H"] == list(h.shape) == [3, 4]
    width = n["size of Q, K, V"][0][0]
    w_q, x = np.ones((width, width)), np.ones((width, 1))
    with pytest.raises(ValueError, match="mismatch"):
        w_q @ x.T
    assert ((w_q @ x).T @ w_q @ x).shape == (x.T @ w_q.T @ w_q @ x).shape == (1, 1)


def check_as_convolution(n: Numbers) -> None:
    """By means over slices: token i of a shifted row is in the phrase of token i, not of token i - 1."""
    row = torch.randint(-9, 10, (1, 8, 31), generator=torch.Generator().manual_seed(0)).numpy()[0]

    def means(tokens: Any) -> Any:
        return np.stack([tokens[:, at // 5 * 5 : at // 5 * 5 + 5].mean(1) for at in range(31)], 1)

    change = means(np.roll(row, 1, 1)) - np.roll(means(row), 1, 1)
    assert n["shifted input: difference of the phrases"] == pytest.approx(np.abs(change[:, 2:-2]).max())
    assert n["shifted input: difference of the heads"] == 0


def check_self_attention_why(n: Numbers) -> None:
    assert n["multiply-adds"]["attention"][0] == 2 * 32**2 * 256
    assert n["multiply-adds"]["projections"][0] == 4 * 32 * 256**2
    assert n["multiply-adds"]["recurrent"][0] == 2 * 32 * 256**2


def check_key_stretch(n: Numbers) -> None:
    assert n["weights for scores 1, 1/2, 0"] == pytest.approx(softmax([1, 0.5, 0]).tolist())
    assert n["weights with the first key doubled"] == pytest.approx(softmax([2, 0.5, 0]).tolist())


def check_identity_layer(n: Numbers) -> None:
    assert n["own weight of orthonormal tokens, beta = 1"] == pytest.approx(softmax(np.eye(4))[0, 0])
    assert n["own weight of orthonormal tokens"] == pytest.approx(softmax(np.eye(4) / 2)[0, 0])
    assert n["tokens 1, 2, 3, ... at zero scores"] == pytest.approx(2.5)


def check_running_linear(n: Numbers) -> None:
    draws = torch.Generator().manual_seed(0)
    c = torch.randint(-9, 10, (1, 16, 29), generator=draws).numpy()[0]
    w = torch.randint(-9, 10, (12, 16), generator=draws).numpy()
    assert n["difference with biases of 1"] == pytest.approx(np.abs((w @ c).mean(1, keepdims=True) - w @ c).max())


def check_grouped_convolution(n: Numbers) -> None:
    """By loops over positions and taps, and one least-squares fit per channel."""
    length, heads, c, size = 41, 4, 6, 5
    x, value, _, taps = normal_arrays((length, 24), (heads, c, c), (24, 24), (heads, size))
    weights, wanted = softmax(taps), np.zeros((length, 24))
    for i in range(length):
        for h in range(heads):
            seen = sum(weights[h, t] * x[(i + t - size // 2) % length, h * c : (h + 1) * c] for t in range(size))
            wanted[i, h * c : (h + 1) * c] = c**-0.5 * value[h] @ seen
    missed = 0.0
    for channel in range(24):
        shifted = np.stack([np.roll(x[:, channel], size // 2 - t) for t in range(size)], 1)
        fitted = np.linalg.lstsq(shifted, wanted[:, channel])[0]
        missed += np.sum((shifted @ fitted - wanted[:, channel]) ** 2)
    assert n["smallest error with groups = channels"] == pytest.approx(math.sqrt(missed) / np.linalg.norm(wanted))
    assert n["channels read with groups = channels"] == 1


def check_positions(n: Numbers) -> None:
    near, far = (math.exp(10) / (math.exp(10) + 999) for _ in range(2))
    assert [n["weight at distance 1"], n["weight at distance 999"]] == pytest.approx([near, far])
    slope = 2**-8  # of one head
    for distance in (1, 999):
        scores = -slope * np.arange(999, -1, -1.0)
        scores[999 - distance] += 10
        assert n[f"weight at distance {distance} with alibi"] == pytest.approx(softmax(scores)[999 - distance])
    # without positions the best guess is the most frequent token so far, and every token counts alike
    tokens = np.random.default_rng(0).integers(8, size=(4000, 16))
    seen = (tokens[:, :, None] == np.arange(8)).cumsum(1)[:, 3:]
    assert n["accuracy"]["relative"]["none"][0] == pytest.approx((seen.max(-1) / seen.sum(-1)).mean(), abs=0.03)


def check_multi_head(n: Numbers) -> None:
    """Head by head in numpy, with the weights of the layer."""
    layer = Attention(60, 5).double()
    init_parameters(layer, {"*.weight": fan_in(), "*.bias": normal(0.5)}, 0)
    (x,) = normal_arrays((23, 60))
    maps = [part.detach().numpy() for part in (layer.query_key_value.weight, layer.query_key_value.bias)]
    q, k, v = np.split(x @ maps[0].T + maps[1], 3, axis=1)
    parts = [slice(12 * h, 12 * (h + 1)) for h in range(5)]
    joined = np.concatenate([softmax(q[:, h] @ k[:, h].T / math.sqrt(12)) @ v[:, h] for h in parts], 1)
    out = joined @ layer.out.weight.detach().numpy().T + layer.out.bias.detach().numpy()
    assert n["difference without W_o"] == pytest.approx(np.abs(joined - out).max())
    assert n["other heads changed"] == 0


def check_feed_forward(n: Numbers) -> None:
    """The changed output by numpy: W_2 gelu(W_1 x + b_1) + b_2 for one token."""
    layer = FeedForward(24, 96).double()
    init_parameters(layer, {"*.weight": fan_in(), "*.bias": normal(0.1)}, 0)
    w1, b1, w2 = (each.detach().numpy() for each in (layer.up.weight, layer.up.bias, layer.down.weight))
    x, replaced = normal_arrays((9, 24), (24,))

    def hidden(token: Any) -> Any:
        inside = w1 @ token + b1
        return [z * 0.5 * (1 + math.erf(z / math.sqrt(2))) for z in inside]

    change = np.abs(w2 @ (np.array(hidden(replaced)) - np.array(hidden(x[n["token"]])))).max()
    assert n["changes"] == pytest.approx([change if at == n["token"] else 0.0 for at in range(9)])


def check_vit_is_convolution(n: Numbers) -> None:
    rng = generator()
    image, kernel = rng.integers(-9, 9, (8, 8)), rng.integers(-9, 9, (4, 4))
    patches = [image[r : r + 4, c : c + 4].reshape(-1) @ kernel.reshape(-1) for r in (0, 4) for c in (0, 4)]
    convolved = [
        sum(int(image[r + u, c + w] * kernel[u, w]) for u in range(4) for w in range(4)) for r in (0, 4) for c in (0, 4)
    ]
    assert patches == convolved
    assert n["convolution against matrix on whole numbers"] == 0


def check_vit_against_transformer(n: Numbers) -> None:
    published = {"vit-b/16": (768, 3072), "vit-l/16": (1024, 4096), "vit-h/14": (1280, 5120)}
    published |= {"transformer-base": (512, 2048), "transformer-big": (1024, 4096)}
    assert {name: (n["widths"][name], n["feed-forward widths"][name]) for name in published} == published


def check_encoder_decoder(n: Numbers) -> None:
    """By the names of the parameters: every decoder block of a Transformer has cross attention, none of GPT-2 has."""
    crossing = {}
    for preset in ("transformer-tiny", "gpt2"):
        with torch.device("meta"):
            names = [name for name, _ in build(preset).named_parameters()]
        crossing[preset] = {name.split(".cross.")[0] for name in names if ".cross." in name}
    assert all(name.startswith("decoder.") for name in crossing["transformer-tiny"])
    assert len(crossing["transformer-tiny"]) >= n["blocks with cross attention"]["with encoder"] == 1
    assert len(crossing["gpt2"]) == n["blocks with cross attention"]["alone"] == 0


def check_average_two(n: Numbers) -> None:
    assert n["sizes"][-1] == 20
    assert n["score difference to the others"][-1] == pytest.approx(20)
    assert n["weight of a"][-1] == pytest.approx(softmax([20, 20] + [0] * 8)[0])
    assert max(map(abs, n["lowest score of the others"])) < 1e-13
    # q = s (k_a + k_b) has the length s sqrt 2; a unit key opposite to it scores minus that
    q = 20 * np.array([1.0, 1.0, 0.0])
    assert -q / np.linalg.norm(q) @ q == pytest.approx(-(2**0.5) * 20)


def check_noisy_keys_one_head(n: Numbers) -> None:
    # noise of variance 1e-12 in four entries changes the score difference, and a weight of 1/2 by a quarter of that
    most = np.abs(20 * math.sqrt(4e-12) / 4 * generator().standard_normal(100_000)).max()
    assert n["distance from one half, tiny noise"] == pytest.approx(most, rel=0.2)
    gamma = 1 + math.sqrt(0.5) * generator().standard_normal(200_000)
    assert n["share near v_a"] == pytest.approx(np.mean(1 / (1 + np.exp(-20 * (gamma - 1))) > 0.99), abs=0.005)


def check_noisy_keys_two_heads(n: Numbers) -> None:
    gamma = 1 + math.sqrt(0.5) * generator().standard_normal(400_000)
    gamma = gamma[gamma > 0]
    first = 1 / (1 + 9 * np.exp(-20 * gamma))
    one = 1 / (1 + np.exp(-20 * (gamma - 1)) + 8 * np.exp(-20 * gamma))
    assert n["standard deviation of c1"] == pytest.approx(first.std(), abs=0.003)
    assert n["standard deviation of c, two heads"] == pytest.approx(first.std() / 2, abs=0.003)
    assert n["standard deviation of c, one head"] == pytest.approx(one.std(), abs=0.003)
    # one-hot values: no output is longer than a value, and no weight is outside the histogram
    c1 = np.column_stack([first, *[(1 - first) / 9] * 9])
    assert np.linalg.norm(c1, axis=1).max() <= 1
    assert sum(n["histogram"]) == pytest.approx(1)
    assert sum(n["histogram of one head"]) == pytest.approx(1)


def check_scale_by_root(n: Numbers) -> None:
    """The gradient by its formula, K' (a * (g - a . g)) with g = V out, for the same draws."""
    draws = torch.Generator().manual_seed(0)
    for at, width in enumerate(n["widths"]):
        shapes = ((1, 1000, 1, width), (1, 1000, 16, width), (1, 1000, 16, 3), (1, 1000, 1, 3))
        q, k, v, out = (torch.randn(shape, generator=draws, dtype=torch.float64).numpy()[0] for shape in shapes)
        weights, along = softmax((k @ q.transpose(0, 2, 1))[..., 0]), (v @ out.transpose(0, 2, 1))[..., 0]
        to_scores = weights * (along - (weights * along).sum(-1, keepdims=True))
        found = np.linalg.norm(np.einsum("rj,rjc->rc", to_scores, k), axis=-1)
        middle = np.sort(found)[499]  # torch's median of an even number is the lower one
        assert n["gradient of q, undivided"][at] == pytest.approx(middle, rel=1e-6)
        assert n["largest gradient of q, undivided"][at] == pytest.approx(found.max(), rel=1e-6)
    assert n["overflow: largest exponent of float32"] == pytest.approx(math.log(np.finfo(np.float32).max))


def check_softmax_jacobian(n: Numbers) -> None:
    """By exact sums of small terms, which do not cancel: 1 - y_3 is the sum of the other weights."""

    def tail(z: tuple[float, ...]) -> float:
        rest = sum(math.exp(x - z[2]) for at, x in enumerate(z) if at != 2)
        return rest / (1 + rest)

    z = (-3.0, 1.0, 100.0, 5.0, -1.0)
    lost = tail(z)
    assert n["derivative of the largest"] == pytest.approx(lost * (1 - lost), rel=1e-12)
    assert n["largest derivative"] == pytest.approx(5.64e-42, rel=1e-3)
    # z_3 falls by 1: y_3 falls by the growth of the tail
    assert n["largest change after a step"] == pytest.approx(tail((-3.0, 1.0, 99.0, 5.0, -1.0)) - lost, rel=1e-9)
    assert round_outward(n["largest change after a step"], 2) == "9.7e-42"


def check_parameter_count(n: Numbers) -> None:
    assert n["biases"] == [12, 36, 96, 192, 1536]
    assert n["dense biases"] == [12, 60, 224, 1024, 32_768]


def check_permutation(n: Numbers) -> None:
    draws = torch.Generator().manual_seed(0)
    shapes = ((8, 7), (3, 8, 8), (3, 8, 1))
    x, maps, shifts = (torch.randn(shape, generator=draws, dtype=torch.float64).numpy() for shape in shapes)
    order, rows = torch.randperm(7, generator=draws).numpy(), torch.randperm(8, generator=draws).numpy()

    def attended(x: Any) -> tuple[Any, Any, Any]:
        q, k, v = (8**-0.5 * omega @ x + shift for omega, shift in zip(maps, shifts, strict=True))
        weights = softmax((k.T @ q).T).T
        return v @ weights, weights, v

    out, weights, v = attended(x)
    permuted, permuted_weights, _ = attended(x[:, order])
    assert n["difference of weights"] == pytest.approx(np.abs(permuted_weights - weights).max())
    assert n["difference by the sheet"] == pytest.approx(np.abs(permuted - v[:, order] @ weights).max())
    assert n["difference of rows"] == pytest.approx(np.abs(attended(x[rows])[0] - out[rows]).max())


def check_head_width(n: Numbers) -> None:
    at = n["heads"].index(8)
    assert n["multiply-adds of a head's projection per token"][at] == 32_768
    assert n["multiply-adds of a head's scores"][at] == 262_144
    assert n["weights"][at] == 262_144


def check_new_token(n: Numbers) -> None:
    assert n["lengths"][-1] == 1023
    assert n["multiply-adds of a step"][-1] == 2 * 1024 * 64 == 131_072
    assert n["multiply-adds of the visible pairs"][-1] == 2 * 64 * sum(range(1, 1025)) == 67_174_400


def check_sparse_patterns(n: Numbers) -> None:
    # two global tokens: 2 rows and 2 columns of 4,096, less the corner counted twice
    assert n["pairs"]["global tokens, then all pairs"][-1] == 4096**2 + 4 * 4096 - 4 == 16_793_596


def check_linear_attention(n: Numbers) -> None:
    assert n["multiply-adds of all weights by features"] == 512 * 512 * 32 + 2 * 512 * 32 == 8_421_376
    assert n["multiply-adds of all weights by softmax"] == 512 * 512 * 32 == 8_388_608
    assert n["multiply-adds of linear"] == 1_081_344
    assert n["multiply-adds of linear at twice D"] == 4_259_840


def check_against_mlp(n: Numbers) -> None:
    assert n["hidden states read"] == n["tokens"][-1] == 8 * 8  # the largest side, in patches


def check_rows_are_distributions(n: Numbers) -> None:
    q, k = normal_arrays((7, 9), (7, 9))
    others = 1 - softmax(q @ k.T / 3).diagonal()
    assert n["smallest sum of the other weights in a row"] == pytest.approx(others.min())
    assert n["weights"][1] == pytest.approx(softmax(q @ k.T / 3)[1])
    tokens = np.array([[1, -1, 0, 2], [0, -1, 2, 1], [-2, 2, -1, 0]])
    by_query = np.array([[0, 1], [1, 0], [-0.5, 0], [1, 1]])
    by_key = np.array([[1, -0.5], [0, 1], [0.5, -0.5], [1, 0.5]])
    by_value = np.array([[1, 0.5], [-0.5, 0], [-1, 2], [0.5, -1]])
    scores = tokens @ by_query @ (tokens @ by_key).T
    assert n["scores of three tokens"] == scores.tolist()
    assert n["scores of three tokens"][0] == [1.5, -2.5, 8.0]
    assert n["third output of three tokens"] == pytest.approx((softmax(scores) @ tokens @ by_value)[2])
    assert n["third output of three tokens"] == pytest.approx([1.178608, 0.198933], abs=1e-6)
    assert n["weights of three tokens"][0] == pytest.approx(softmax(scores)[0])
    wrong = softmax([1.5, 2.5, 8.0]) @ tokens @ by_value
    assert n["first output with the score 2.5"] == pytest.approx(wrong)
    assert wrong == pytest.approx([-1.989, -2.973], abs=1e-3)
    q, k = normal_arrays((7, 9), (7, 9))
    sums = softmax(q @ k.T / 3).sum(0)  # softmax over the keys, summed over the queries
    assert n["column sums of the weights"] == pytest.approx([sums.min(), sums.max()])


CHECKS = [check for name, check in globals().items() if name.startswith("check_")]
RECOMPUTED: dict[str, Callable[[Numbers], None]] = {
    check.__name__.removeprefix("check_").replace("_", "-"): check for check in CHECKS
}


def test_the_numbers_of_every_erratum_are_recomputed_or_trained() -> None:
    assert {answer.claim for answer in ERRATA} == set(RECOMPUTED) | TRAINED


@pytest.mark.parametrize("name", RECOMPUTED)
def test_the_numbers_of_an_erratum_by_an_independent_path(name: str) -> None:
    RECOMPUTED[name](shipped_results()[name].numbers)


def test_quick_numbers_have_the_names_that_errata_use() -> None:
    for answer in ERRATA:
        if answer.claim not in TRAINED and answer.applies(numbers(answer.claim)):
            assert answer.verdict(numbers(answer.claim)).word == REFUTED
