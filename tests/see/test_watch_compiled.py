"""Compiled code runs as ever, and that nothing can be heard in it is told."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError
from regard.see.watch import watch
from tests.see.watching import Calls, OneHead, nothing_left, qkv

pytestmark = [
    pytest.mark.usefixtures("nothing_stays"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor"),
]


def test_compiled_models_are_refused_with_the_way_out() -> None:
    class Fake(nn.Module):
        pass

    Fake.__name__ = "OptimizedModule"
    with pytest.raises(ConfigError, match="watch the module that was given to"), watch(Fake()):
        pass
    compiled = torch.compile(nn.Linear(3, 5), backend="eager")
    with pytest.raises(ConfigError, match=r"the model is compiled.*out of sight"), watch(compiled):
        pass
    model = nn.Sequential(nn.Linear(3, 5))
    model[0].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"'0' of the model is compiled"), watch(model):
        pass


def nearest(x: Tensor) -> Tensor:
    """Attention of a sequence to itself."""
    return functional.scaled_dot_product_attention(x, x, x) + 1


class Nearest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nearest(x)


UNHEARD = "ran compiled, where nothing can be heard; call it uncompiled, or under torch.compiler.set_stance"


@pytest.mark.parametrize("watched", ["the model", "a part", "nothing", "another model"])
def test_a_compiled_model_runs_as_ever_and_that_it_cannot_be_heard_is_told(watched: str) -> None:
    model, other = nn.Sequential(Nearest()), OneHead(True)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 3, 5, 8)
    plain = compiled(x)
    with watch({"the model": model, "a part": model[0], "nothing": None, "another model": other}[watched]) as seen:
        assert torch.equal(compiled(x), plain)
        assert torch.equal(compiled(x), plain)
    assert len(seen) == 0
    if watched == "another model":
        assert not seen.left_out
    else:
        ((reason, count),) = seen.left_out.items()
        assert (reason.partition("(")[0], count) == (f"Sequential {UNHEARD}", 2)
    if watched != "another model":
        with torch.compiler.set_stance("force_eager"), watch(model) as seen:
            compiled(x)
        assert list(seen) == ["0"]
        assert not seen.left_out


def test_a_compiled_function_inside_a_model_is_told_also_to_a_watcher_around() -> None:
    inner = torch.compile(nearest, backend="aot_eager")
    model = Calls(inner)
    x = torch.randn(2, 3, 5, 8)
    with watch() as outer, watch(model) as seen:
        out = model(x)
    assert torch.equal(out, nearest(x))
    assert [reason.partition("(")[0] for reason in seen.left_out] == [f"nearest {UNHEARD}"]
    assert outer.left_out == seen.left_out
    with pytest.raises(TypeError, match="takes 1 positional argument"), watch(model):
        model(x, x)
    assert nothing_left()


def test_a_watcher_steps_aside_for_compiled_code_and_listens_again_after_it() -> None:
    def split(x: Tensor) -> Tensor:
        return nearest(x.unflatten(-1, (3, 8)).transpose(1, 2))  # which no compiler takes with a watcher around it

    made = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        made.append(graph)
        return graph.forward

    compiled = torch.compile(split, backend=backend, fullgraph=True)
    x = torch.randn(2, 5, 24)
    plain = compiled(x)
    with watch() as outer, watch() as inner:
        assert torch.equal(compiled(x), plain)
        with pytest.raises(Exception, match="unflatten"):
            compiled(x[..., :23])
        assert [type(torch._C._get_function_stack_at(at)).__name__ for at in range(2)] == ["Watcher"] * 2
        split(x)
    assert len(outer) == len(inner) == 1
    assert list(inner.left_out.values()) == list(outer.left_out.values()) == [2]
    assert len(made) == 1  # nothing was compiled again


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_heard_where_it_is_not_compiled_and_told_where_it_is() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = qkv(13, 13)
    masking = torch.compile(create_block_mask, backend="aot_eager")
    with watch() as seen:
        masking(lambda b, h, i, j: i >= j, None, None, 13, 13, device="cpu")
        flex_attention(q, k, v)
    assert len(seen) == 1
    assert not seen.left_out
    compiled = torch.compile(flex_attention, backend="aot_eager")
    plain = compiled(q, k, v)
    with watch() as seen:
        assert torch.equal(compiled(q, k, v), plain)
    assert [reason.partition("(")[0] for reason in seen.left_out] == [f"flex_attention {UNHEARD}"]
    with torch.compiler.set_stance("force_eager"), watch() as seen:
        compiled(q, k, v)
    assert len(seen) == 1


def test_code_compiled_for_the_first_time_inside_the_block_is_told() -> None:
    """In a process of its own, where nothing has loaded the compiler yet."""
    script = """
import sys, torch
from regard.see.watch import watch
assert "torch._dynamo.eval_frame" not in sys.modules
original = torch.compile
with watch() as seen:
    f = torch.compile(lambda x: x.softmax(-1) @ x, backend="eager")
    f(torch.ones(1, 5, 5))
    f(torch.ones(1, 5, 5))
assert list(seen.left_out.values()) == [2], seen
assert torch.compile is original
assert not hasattr(torch._dynamo.eval_frame._callback_from_stance, "__wrapped__")
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning:regard", "-c", script], check=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_told_whether_it_is_in_the_model_or_made_of_it() -> None:
    model = nn.Sequential(Nearest())
    x = torch.randn(2, 3, 5, 8)
    traced = torch.jit.trace(model, (x,))
    with watch(model) as seen:
        assert torch.equal(traced(x), model(x))
    assert list(seen) == ["0"]
    (reason,) = seen.left_out
    assert reason.endswith("ran as TorchScript, where nothing can be heard; call the module it was made of")
    outer = nn.ModuleDict({"part": traced})
    with watch(outer) as seen:
        outer["part"](x)
    (reason,) = seen.left_out
    assert reason.startswith("part ran as TorchScript")
