"""While watching, compiled code runs eagerly, is recorded like any other, and says so; TorchScript is reported."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.core.attend import attend
from regard.core.masks.algebra import Mask
from regard.see.watch import RAN_EAGERLY, watch
from tests.see.watch_helpers import CallModule, OneHead, no_hooks_left, qkv

pytestmark = [
    pytest.mark.usefixtures("check_hooks_removed"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor"),
]


def self_attention(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x) + 1


class SelfAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self_attention(x)


class CountingBackend:
    """A torch.compile backend that counts compilations and calls of compiled code."""

    def __init__(self) -> None:
        self.compilations = self.calls = 0

    def __call__(self, graph: Any, inputs: list[Tensor]) -> Any:
        self.compilations += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.mark.parametrize("watched", ["the model", "a part", "the compiled model", "nothing", "another model"])
def test_a_model_compiled_before_the_block_runs_eagerly_inside_it(watched: str) -> None:
    model, backend = nn.Sequential(SelfAttention()), CountingBackend()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(2, 3, 5, 8)
    plain = compiled(x)
    subject = {
        "the model": model, "a part": model[0], "the compiled model": compiled, "nothing": None,
        "another model": OneHead(True),
    }[watched]  # fmt: skip
    with watch(subject) as seen:
        torch.testing.assert_close(compiled(x), plain)
    name = {"a part": "SelfAttention", "nothing": "attention", "another model": None}.get(watched, "0")
    assert list(seen) == ([] if name is None else [name])
    assert all(record.note == RAN_EAGERLY for record in seen.values())
    assert not seen.left_out
    assert backend.calls == 1
    compiled(x)
    assert (backend.calls, backend.compilations) == (2, 1)  # compiled code is used again after the block


def test_compiled_submodules_have_the_names_they_have_uncompiled() -> None:
    model = nn.Sequential(nn.Identity(), SelfAttention(), nn.Sequential(SelfAttention()))
    model[1].compile(backend="eager")
    model[2] = torch.compile(model[2], backend="eager")  # type: ignore[assignment]
    x = torch.randn(2, 3, 5, 8)
    plain = model(x)
    with watch(model) as seen:
        torch.testing.assert_close(model(x), plain)
    assert list(seen) == ["1", "2.0"]
    assert {record.note for record in seen.values()} == {RAN_EAGERLY}
    with watch(model, layers="2") as seen:
        model(x)
    assert list(seen) == ["2.0"]


def test_a_compiled_function_inside_a_model_is_recorded_by_nested_watchers() -> None:
    inner = torch.compile(self_attention, backend="eager", fullgraph=True)
    model = CallModule(inner)
    x = torch.randn(2, 3, 5, 8)
    with watch() as outer, watch(model) as seen:
        out = model(x)
    assert torch.equal(out, self_attention(x))
    assert seen["CallModule"].note == outer["attention"].note == RAN_EAGERLY
    with pytest.raises(TypeError, match="takes 1 positional argument"), watch(model):
        model(x, x)
    assert no_hooks_left()
    with torch.compiler.set_stance("fail_on_recompile"):
        with watch(model) as seen:
            model(x)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):  # the caller's own stance is back
            model(x[:1, :, :, :4])
    assert len(seen) == 1


def test_code_compiled_for_the_first_time_inside_the_block_is_recorded() -> None:
    backend = CountingBackend()
    x = torch.randn(2, 3, 5, 8)
    with watch() as seen:
        torch.compile(self_attention, backend=backend)(x)
    assert seen["attention"].note == RAN_EAGERLY
    assert backend.compilations == 0


def test_gradients_of_a_compiled_model_are_recorded() -> None:
    model = nn.Sequential(SelfAttention())
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 3, 5, 8, requires_grad=True)
    compiled(x).square().sum().backward()
    with watch(model) as seen:
        out = compiled(x)
        out.square().sum().backward()
    torch.testing.assert_close(seen["0"].gradient, 2 * out.detach())


def test_the_kernels_of_attend_run_compiled() -> None:
    backend = CountingBackend()
    near = torch.compile(lambda i, j: (i - j).abs() < 3, backend=backend)
    q = torch.randn(2, 3, 7, 8)
    with watch() as outer, watch() as inner:
        attend(q, q, q, mask=Mask.of("near", near))
    assert len(outer) == len(inner) == 1
    assert backend.calls > 0
    assert outer["attention"].note == ""


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_recorded_compiled_or_not() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = qkv(13, 13)
    masking = torch.compile(create_block_mask, backend="aot_eager")
    compiled = torch.compile(flex_attention, backend="aot_eager")
    plain = compiled(q, k, v)
    with watch() as seen:
        masking(lambda b, h, i, j: i >= j, None, None, 13, 13, device="cpu")
        flex_attention(q, k, v)
        torch.testing.assert_close(compiled(q, k, v), plain)
    assert [record.note for record in seen.values()] == ["", RAN_EAGERLY]
    assert not seen.left_out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_reported_whether_it_is_in_the_model_or_made_from_it() -> None:
    model = nn.Sequential(SelfAttention())
    x = torch.randn(2, 3, 5, 8)
    traced = torch.jit.trace(model, (x,))
    with watch(model) as seen:
        assert torch.equal(traced(x), model(x))
    assert list(seen) == ["0"]
    (reason,) = seen.left_out
    assert reason == "Sequential ran as TorchScript, which has no hooks; call the module it was made from"
    outer = nn.ModuleDict({"part": traced})
    with watch(outer) as seen:
        outer["part"](x)
    (reason,) = seen.left_out
    assert reason.startswith("part ran as TorchScript")
