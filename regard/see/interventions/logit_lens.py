"""The logit lens: the logits that a model would return if it ended after an earlier block."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.see.interventions.progress import show_progress
from regard.see.interventions.residual_stream import find_residual_stream, read_logits


def logit_lens(
    model: nn.Module, run: Callable[[], Any], *, progress: bool = True
) -> Float[Tensor, "depth b n w"] | Float[Tensor, "depth b w"]:
    """The logit lens: apply the final norm and the output head to the residual stream before and after every block.

    nostalgebraist 2020, *interpreting GPT: the logit lens*. Entry 0 is for the embedding and entry L for the output of
    block L, counted from 1; the last entry equals the logits of the model. The model runs once for each entry.

    run       function without arguments that calls the model and returns its output, such as lambda: model(x)
    progress  show a progress bar on a terminal

    The model of this example has two blocks and 256 tokens, and its input is one sequence of 19 positions:

    >>> lens = logit_lens(model, lambda: model(tokens), progress=False)
    >>> lens.shape
    torch.Size([3, 1, 19, 256])
    """
    stream = find_residual_stream(model)
    *_, last = stream.blocks
    states: list[Tensor] = []

    def keep_input(x: Tensor) -> Tensor:
        states.append(x)
        return x

    with torch.no_grad(), stream.changed(inputs=keep_input, outputs=lambda path, x: states.append(x)):
        read_logits(run())
    found = []
    for at in show_progress(range(len(stream.blocks) + 1), "logit lens", progress):
        with torch.no_grad(), stream.changed(outputs=_replace_state(last, states[at])):
            found.append(read_logits(run()))
    return torch.stack(found)


def _replace_state(last: str, state: Tensor) -> Callable[[str, Tensor], Tensor | None]:
    return lambda path, x: state if path == last else None
