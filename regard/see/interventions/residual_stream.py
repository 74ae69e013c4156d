"""Find the blocks and feed-forward layers that write to a Transformer's residual stream, and read its logits."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.base.errors import InterventionError

# the list of blocks, and the module in each block whose output is added to the residual stream besides attention
LAYOUTS = (
    ("transformer.h", "mlp"),  # GPT-2
    ("model.layers", "mlp"),  # Llama, Mistral, Qwen
    ("bert.encoder.layer", "output.dense"),  # BERT
    ("vit.layers", "mlp"),  # ViT
    ("vit.encoder.layer", "output.dense"),  # ViT, before transformers 5
    ("blocks", "feedforward"),  # GPT, BERT and ViT of regard
    ("blocks", "mlp"),  # ViT of timm
    ("blocks", ""),  # attention only
)
SUPPORTED = "GPT-2, Llama, BERT and ViT of Hugging Face, and GPT, BERT and ViT of regard"


@dataclass(frozen=True)
class ResidualStream:
    """The blocks and feed-forward layers of a model, which write to the residual stream.

    blocks        the Transformer blocks by path, in order
    feedforwards  the feed-forward layer of each block by path; empty for an attention-only model
    """

    blocks: dict[str, nn.Module]
    feedforwards: dict[str, nn.Module]

    @contextmanager
    def changed(
        self,
        inputs: Callable[[Tensor], Tensor] | None = None,
        outputs: Callable[[str, Tensor], Tensor | None] | None = None,
        feedforward: Callable[[str, Tensor], Tensor] | None = None,
    ) -> Iterator[None]:
        """Context manager: change activations of the residual stream with forward hooks.

        inputs       inputs(x) returns the new input of the first block
        outputs      outputs(path, x) returns the new output of a block, or None to keep it
        feedforward  feedforward(path, x) returns the new output of a feed-forward layer
        """
        with ExitStack() as stack:
            if inputs is not None:
                first = next(iter(self.blocks.values()))
                hook = first.register_forward_pre_hook(_change_input(inputs), with_kwargs=True)
                stack.callback(hook.remove)
            for change, modules in ((outputs, self.blocks), (feedforward, self.feedforwards)):
                for path, module in modules.items():
                    if change is None:
                        break
                    stack.callback(module.register_forward_hook(_change_result(change, path)).remove)
            yield


def find_residual_stream(model: nn.Module) -> ResidualStream:
    """Find the Transformer blocks of a model by known module names; raise InterventionError if there are none."""
    for path, inside in LAYOUTS:
        try:
            blocks = model.get_submodule(path)
            named = {f"{path}.{at}": block for at, block in blocks.named_children()}
            found = {f"{name}.{inside}": block.get_submodule(inside) for name, block in named.items() if inside}
        except AttributeError:
            continue
        if named:
            return ResidualStream(named, found)
    known = ", ".join(dict.fromkeys(path for path, _ in LAYOUTS))
    raise InterventionError(
        f"{type(model).__name__} has no list of blocks under a known name ({known}); supported are {SUPPORTED}"
    )


def read_logits(output: Any) -> Tensor:
    """Return the logits (b n w) or (b w) from a model's output: the output itself, or its field `logits`."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
        raise InterventionError(
            f"run() must return logits (b n w) or (b w), or an output with a field `logits`, not "
            f"{type(output).__name__}; a model without a head has none"
        )
    return logits


def _change_input(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    return hook


def _change_result(change: Callable[[str, Tensor], Tensor | None], path: str) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        first = output if isinstance(output, Tensor) else output[0]
        changed = change(path, first)
        if changed is None:
            return None
        return changed if isinstance(output, Tensor) else (changed, *output[1:])

    return hook
