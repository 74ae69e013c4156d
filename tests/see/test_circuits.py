"""Scores, attribution, ablation and patching recover a circuit that was built by hand, and none from a shuffled one."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.base.errors import ConfigError, InterventionError, RegardError
from regard.see.interventions.activation_patching import activation_patching, path_patching
from regard.see.interventions.head_importance import (
    head_importance,
    induction_scores,
    previous_token_scores,
    repeated_tokens,
)
from regard.see.interventions.logit_attribution import direct_logit_attribution
from regard.see.interventions.logit_lens import logit_lens
from regard.see.record import Seen
from tests.see.circuits import CONSTANT_HEAD, FIRST_HEAD, INDUCTION_HEAD, PREVIOUS_HEAD, TOKENS, build_circuit
from tests.see.watch_helpers import CallModule

CIRCUIT = {PREVIOUS_HEAD, INDUCTION_HEAD}
# 7 was followed by 5, so 5 is predicted after the second 7. In the other prompt the first 7 is a 2, and nothing repeats
CLEAN = torch.tensor([[3, 7, 5, 1, 4, 9, 7]])
CORRUPTED = torch.tensor([[3, 2, 5, 1, 4, 9, 7]])
AFTER = 2  # the position of the 5


def right(logits: Tensor) -> Tensor:
    """The logit of the right token, less the mean of all."""
    return (logits[0, -1, 5] - logits[0, -1].mean()).detach()


def test_the_circuit_predicts_the_token_that_followed() -> None:
    tokens = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))[:8].repeat(1, 2)
    with torch.no_grad():
        guesses = build_circuit()(tokens).argmax(-1)
        shuffled = build_circuit(shuffled=True)(tokens).argmax(-1)
    assert torch.equal(guesses[:, 8:-1], tokens[:, 9:])
    assert not torch.equal(shuffled[:, 8:-1], tokens[:, 9:])


@pytest.mark.parametrize("shuffled", [False, True])
def test_labels_and_scores_of_every_head(shuffled: bool) -> None:
    model = build_circuit(shuffled)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))[:8]
    tokens = order.repeat(3, 2)
    with torch.no_grad(), regard.watch(model) as seen:
        model(tokens)
    table = {(head.layer, head.head): head for head in seen.table(tokens)}
    previous, induction = previous_token_scores(model, tokens), induction_scores(model, tokens, 8)
    found = {
        PREVIOUS_HEAD: (table[PREVIOUS_HEAD].previous, float(previous[PREVIOUS_HEAD[0]][0])),
        FIRST_HEAD: (table[FIRST_HEAD].first,),
        INDUCTION_HEAD: (table[INDUCTION_HEAD].induction, float(induction[INDUCTION_HEAD[0]][0])),
        CONSTANT_HEAD: (table[CONSTANT_HEAD].spread,),
    }
    for head, numbers in found.items():
        for number in numbers:
            assert number is not None
            if head == CONSTANT_HEAD:  # a head without queries is uniform, whatever it reads
                assert number == pytest.approx(15 / 16)  # the first of 16 tokens sees one key, and has 0
            else:
                assert (number > 0.99) != shuffled, head
    if not shuffled:
        # no other head has a high score
        for name, scores, own in (("previous", previous, PREVIOUS_HEAD), ("induction", induction, INDUCTION_HEAD)):
            for layer, values in scores.items():
                for head, value in enumerate(values.tolist()):
                    assert ((layer, head) == own) == (value > 0.5), (name, layer, head)


@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
def test_ablating_a_head_of_the_circuit_destroys_the_prediction_and_no_other_does(how: str) -> None:
    model = build_circuit()
    others = torch.stack([torch.randperm(TOKENS, generator=torch.Generator().manual_seed(s))[:7] for s in range(5)])
    others = others[~((others[:, :-1] == 7) & (others[:, 1:] == 5)).any(1)]
    with torch.no_grad(), regard.watch(model) as seen:
        model(others)
    source = {"zero": {}, "mean": {"source": seen}, "resample": {"source": seen, "seed": 2}}[how]
    with torch.no_grad():
        whole = right(model(CLEAN))
        for layer in seen:
            for head in range(3):
                with regard.intervene(model) as edit:
                    edit.ablate(layer, heads=[head], how=how, **source)  # type: ignore[arg-type]
                    without = right(model(CLEAN))
                if (layer, head) in CIRCUIT:
                    assert without < 0.3 * whole
                else:
                    torch.testing.assert_close(without, whole)


def test_ablation_of_a_shuffled_model_finds_no_circuit() -> None:
    model = build_circuit(shuffled=True)
    with torch.no_grad():
        whole = float(right(model(CLEAN)))
        assert whole < 5  # a perfect prediction has 10 * (1 - 1 / 11)
        for layer in (0, 1):
            with regard.intervene(model) as edit:
                edit.ablate(layer, heads=[0])
                assert abs(float(right(model(CLEAN))) - whole) < 5


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_logit_is_attributed_to_the_induction_head(shuffled: bool) -> None:
    model = build_circuit(shuffled)
    found = direct_logit_attribution(model, lambda: model(CLEAN), 5)
    torch.testing.assert_close(found.values.sum(1), model(CLEAN)[:, -1, 5].detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found.logits, found.values.sum(1), atol=1e-12, rtol=1e-12)
    share = float(found.of("blocks.1.attention head 0")[0] / 10)  # of the factor of the unembedding
    assert (share > 0.98) != shuffled
    assert "blocks.1.attention head 0  +10.0" in str(found).splitlines()[0] or shuffled


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_logit_lens_finds_the_answer_after_the_second_block(shuffled: bool) -> None:
    model = build_circuit(shuffled)
    lens = logit_lens(model, lambda: model(CLEAN))
    assert lens.shape == (3, 1, 7, TOKENS)
    torch.testing.assert_close(lens[-1], model(CLEAN).detach())
    chances = lens[:, 0, -1].softmax(-1)[:, 5]
    assert float(chances[:2].max()) < 0.2
    assert (float(chances[2]) > 0.99) != shuffled


def test_activation_patching_restores_the_prediction_by_the_circuit_alone() -> None:
    model = build_circuit()
    with torch.no_grad(), regard.watch(model) as clean:
        model(CLEAN)
    found = activation_patching(model, lambda: model(CORRUPTED), clean, right, positions=[AFTER, 4, 6])
    whole = float(right(model(CLEAN)))
    assert found.baseline < 0.3 * whole
    for head, at in ((PREVIOUS_HEAD, 0), (INDUCTION_HEAD, 2)):
        assert float(found.of(*head)[at]) > 0.98 * whole
    changed = (found.values - found.baseline).abs() > 0.02 * whole
    assert int(changed.sum()) == 2
    assert set(found.sorted()[:2]) == CIRCUIT
    shuffled = build_circuit(shuffled=True)
    with torch.no_grad(), regard.watch(shuffled) as other:
        shuffled(CLEAN)
    nothing = activation_patching(shuffled, lambda: shuffled(CORRUPTED), other, right)
    assert float(nothing.values.max()) < 0.6 * whole


@pytest.mark.parametrize("inputs", [("q", "k", "v"), ("k",), ("q", "v")])
def test_path_patching_finds_that_the_second_step_reads_the_first_as_keys(inputs: tuple[str, ...]) -> None:
    model = build_circuit()
    with torch.no_grad(), regard.watch(model) as clean:
        model(CLEAN)
    whole = float(right(model(CLEAN)))
    found = path_patching(model, lambda: model(CORRUPTED), clean, right, receiver=INDUCTION_HEAD, inputs=inputs)
    assert found.heads == tuple(("blocks.0.attention", head) for head in range(3))
    for head in found.heads:
        restored = head == PREVIOUS_HEAD and "k" in inputs
        assert (float(found.of(*head)) > 0.98 * whole) == restored


def test_path_patching_to_the_logits_finds_the_last_head_alone() -> None:
    model = build_circuit()
    with torch.no_grad(), regard.watch(model) as clean:
        model(CLEAN)
    whole = float(right(model(CLEAN)))
    direct = path_patching(model, lambda: model(CORRUPTED), clean, right)
    assert float(direct.of(*INDUCTION_HEAD)) > 0.98 * whole
    assert float(direct.of(*PREVIOUS_HEAD)) == pytest.approx(direct.baseline)  # it writes nothing that logits read


def test_head_importance_is_largest_in_the_circuit() -> None:
    model = build_circuit()
    found = head_importance(model, lambda: torch.nn.functional.cross_entropy(model(CLEAN)[:, -1], torch.tensor([5])))
    for layer, values in found.items():
        for head, value in enumerate(values.tolist()):
            assert ((layer, head) in CIRCUIT) == (value > 1e-6)


def test_head_importance_is_the_formula_by_hooks() -> None:
    torch.manual_seed(0)
    model = regard.build("birthplace", depth=1, width=24, heads=3, context=32, seed=1).eval()
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    kept: list[Tensor] = []

    def keep(module: object, args: tuple[Tensor, ...]) -> None:
        args[0].retain_grad()
        kept.append(args[0])

    handle = model.get_submodule("blocks.0.attention.out").register_forward_pre_hook(keep)
    model(tokens).logsumexp(-1).sum().backward()
    handle.remove()
    assert kept[0].grad is not None
    expected = (kept[0] * kept[0].grad).unflatten(-1, (3, 8)).sum((1, 3)).abs().mean(0)
    found = head_importance(model, lambda: model(tokens).logsumexp(-1).sum())
    torch.testing.assert_close(found["blocks.0.attention"], expected.detach(), atol=1e-6, rtol=1e-4)


def test_induction_scores_are_the_published_mean_over_all_earlier_copies() -> None:
    model = regard.build("birthplace", depth=1, width=24, heads=3, context=128, seed=1).eval()
    tokens = repeated_tokens(256, length=5, repeats=4, b=2, seed=7)
    assert tokens.shape == (2, 20)
    assert torch.equal(tokens[:, :5], tokens[:, 15:])
    with torch.no_grad(), regard.watch(model) as seen:
        model(tokens)
    weights = seen["blocks.0.attention"].weights()
    total = torch.zeros(3)
    for i in range(5, 20):
        for copy in range(i - 5, -1, -5):
            total += weights[:, :, i, copy + 1].mean(0)
    found = induction_scores(model, tokens, 5)["blocks.0.attention"]
    torch.testing.assert_close(found, total / 15, atol=1e-6, rtol=1e-4)


def test_what_a_model_lacks_is_said() -> None:
    model = CallModule(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x))
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(InterventionError, match="CallModule has no list of blocks under a known name"):
        logit_lens(model, lambda: model(x))
    circuit = build_circuit()
    with pytest.raises(InterventionError, match=r"without torch\.no_grad"):
        direct_logit_attribution(circuit, torch.no_grad()(lambda: circuit(CLEAN)), 5)
    with pytest.raises(InterventionError, match="a model without a head has none"):
        logit_lens(circuit, lambda: [circuit(CLEAN)])
    with pytest.raises(InterventionError, match="must return a scalar"):
        head_importance(circuit, lambda: circuit(CLEAN))
    with pytest.raises(ConfigError, match="length is that of one copy"):
        induction_scores(circuit, CLEAN, 7)
    with regard.watch(circuit) as seen:
        circuit(CLEAN)
    with pytest.raises(ConfigError, match="inputs are some of q, k, v"):
        path_patching(circuit, lambda: circuit(CLEAN), seen, right, inputs=("o",))


WRONG_PATCHING: dict[str, tuple[dict[str, Any], str]] = {
    "a position after the end": (
        {"positions": [0, 12]},
        "positions has index 12, but blocks.0.attention has 7 positions",
    ),
    "a position that is text": ({"positions": "12"}, "positions takes a list of whole numbers"),
    "a fraction": ({"positions": [0.5]}, "each of positions takes a whole number, not 0.5"),
    "no position": ({"positions": []}, "positions is empty"),
    "one name": ({"layers": "blocks.0.attention"}, r"layers takes a list of names, such as \['blocks.0.attention'\]"),
    "an unknown name": ({"layers": ["blocks.0.atention"]}, "did you mean 'blocks.0.attention'"),
    "no name": ({"layers": []}, "layers is empty"),
    "a source that is a tensor": ({"source": CLEAN}, "what was recorded by .* not Tensor"),
    "an empty source": ({"source": Seen()}, "has no records; run the model inside"),
}


@pytest.mark.parametrize("name", WRONG_PATCHING)
def test_arguments_of_patching_are_checked_before_the_model_runs(name: str) -> None:
    wrong, words = WRONG_PATCHING[name]
    model = build_circuit()
    with torch.no_grad(), regard.watch(model) as clean:
        model(CLEAN)
    runs: list[Tensor] = []
    for function in (activation_patching, path_patching) if "positions" not in wrong else (activation_patching,):
        given = {"source": clean, "metric": right} | wrong
        with pytest.raises(RegardError, match=words):
            function(model, lambda: runs.append(model(CLEAN)), **given)  # type: ignore[operator]
    assert not runs


def test_inputs_and_layers_of_path_patching_are_checked() -> None:
    model = build_circuit()
    with torch.no_grad(), regard.watch(model) as clean, regard.watch() as unnamed:
        model(CLEAN)
    assert list(unnamed) != list(clean)
    with pytest.raises(ConfigError, match="inputs is empty"):
        path_patching(model, lambda: model(CLEAN), clean, right, inputs=())
    with pytest.raises(
        ConfigError, match=r"source has a record of 'attention', but run\(\) makes no such call; it makes b"
    ):
        path_patching(model, lambda: model(CLEAN), unnamed, right)
    one, several = (
        path_patching(model, lambda: model(CORRUPTED), clean, right, receiver=INDUCTION_HEAD, inputs=inputs)
        for inputs in ("k", ("k",))
    )
    assert torch.equal(one.values, several.values)


class HiddenPart(torch.nn.Module):
    """A circuit with something else in its residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.circuit = build_circuit()
        self.blocks = self.circuit.blocks
        self.blocks[1].register_forward_hook(lambda module, args, out: out + out.square())

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.circuit(tokens)
        return out


def test_parts_that_do_not_sum_to_the_logit_are_an_error() -> None:
    model = HiddenPart()
    with pytest.raises(InterventionError, match="do not sum to the logit"):
        direct_logit_attribution(model, lambda: model(CLEAN), 5)
