"""Change attention heads while a model runs: ablate or patch outputs, scale beta, hide keys, or set weights."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.base.errors import ConfigError, InterventionError, RegardError
from regard.base.validation import check_integer, check_number
from regard.see.arguments import check_indices
from regard.see.interventions.attention_call import AttentionCall
from regard.see.interventions.edits import Edit, HeadState, HideKeys, ReplaceOutput, ScaleBeta, SetWeights
from regard.see.interventions.layer_names import choose_layer, suggest_names
from regard.see.interventions.sources import Source, check_source, mean_of_source, patch_from, resample_source, zeros
from regard.see.multihead import disable_fused_layers
from regard.see.watch import NO_MODULE, Indices, Watcher, call_frames

ABLATIONS = ("zero", "mean", "resample")


def intervene(model: nn.Module | Callable[..., Any] | None = None) -> AbstractContextManager["Interventions"]:
    """Context manager to change what attention heads compute: ablation, activation patching and more.

    Every attention call that `watch` records can be edited with a method of the returned object, such as `ablate`.
    Without edits, all outputs stay bit-identical. Gradients flow through edits. At the end of the `with` block, or
    after an error, all changes to the model are undone. An edit that has changed no call by the end of the first
    forward pass raises an error with the reason.

    The argument `layer` of an edit is the name of an attention call as `watch` records it, a unique suffix of such a
    name, or the index of the call in a forward pass. A name selects every call of the module. `name:2` selects only the
    second call of the module inside the `with` block. Edits of one layer are applied in a fixed order: first
    `scale_beta` and `hide`, then `set_weights`, then `ablate` and `patch`.

    model  the model; with None, or a function that is not a method of a model, every attention call inside the `with`
           block can be edited, and `layer` is the index of the call since the start of this block

    This example sets the output of head 1 to zero:

    >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True).eval()
    >>> with regard.intervene(model) as edit:
    ...     edit.ablate("self_attn", heads=[1])
    ...     out = model(torch.zeros(1, 5, 16))
    >>> edit
    ablate('self_attn', heads=[1], how='zero'): changed 1 call
    """
    return _run_block(Interventions(model))


@contextmanager
def _run_block(edit: "Interventions") -> Iterator["Interventions"]:
    with edit._installed():
        yield edit
    edit._check_effect(edit.edits)  # skipped after an error, so that the caller reads that error


class Interventions:
    """The edits of a model inside `with intervene(model) as edit`. Each method adds an edit."""

    def __init__(self, model: nn.Module | Callable[..., Any] | None = None) -> None:
        self.edits: list[Edit] = []
        self._watcher = EditingWatcher(model, self)
        self._paths = list(self._watcher.paths.values()) or [NO_MODULE]
        self._open: ExitStack | None = None
        self._called: Counter[str] = Counter()  # attention calls of the current forward pass, by path
        self._called_before: Counter[str] = Counter()  # those of earlier passes inside the block

    def ablate(
        self,
        layer: str | int,
        *,
        heads: Indices | None = None,
        how: str = "zero",
        source: Source | None = None,
        seed: int | None = None,
    ) -> None:
        """Ablate heads: replace their output by zeros, by a mean, or by the output for other sequences.

        The replaced output is that of the heads, before the output projection.

        layer   name or index of the layer, as in `intervene`
        heads   indices of heads; None is all
        how     "zero"; "mean", the mean over the sequences and positions of `source`, or of the current call if
                `source` is None; "resample", the output for sequences of `source`, one chosen at random for each
                sequence
        source  a forward pass that `watch` recorded, as a `Seen` or `Record`
        seed    seed of the random choice of "resample"
        """
        if how not in ABLATIONS:
            raise ConfigError(f"how is one of {', '.join(ABLATIONS)}, not {how!r}")
        if how == "zero" and source is not None:
            raise ConfigError("ablate(how='zero') takes no source; use how='mean' or how='resample'")
        if how == "resample" and (source is None or seed is None):
            raise ConfigError("ablate(how='resample') draws sequences: pass source=, what watch recorded, and seed=")
        if how != "resample" and seed is not None:
            raise ConfigError(f"ablate(how={how!r}) draws nothing; a seed is for how='resample'")
        if source is not None:
            check_source("ablate(source)", source)
        values: Callable[[AttentionCall, Tensor], Tensor] = zeros
        if how == "mean":
            values = partial(mean_of_source, source)
        elif source is not None and seed is not None:
            values = partial(resample_source, source, check_integer("ablate(seed)", seed, 0))
        self._add(ReplaceOutput, "ablate", layer, heads, values, how=how)

    def scale_beta(self, layer: str | int, factor: float, *, heads: Indices | None = None) -> None:
        """Multiply beta, the inverse temperature that scales q . k, by a factor. Masks and biases stay as they are.

        factor  the factor: 0 gives equal weights to all visible keys (without biases); a large factor gives hard
                attention, in which the key with the largest score gets all weight
        """
        number = check_number("scale_beta(factor)", factor)
        if abs(number) == float("inf"):
            raise ConfigError(f"scale_beta(factor) must be finite, not {number}; 1000 is as good as infinity")
        self._add(ScaleBeta, "scale_beta", layer, heads, number, factor=factor)

    def hide(self, layer: str | int, *, keys: Indices, heads: Indices | None = None) -> None:
        """Hide keys from all queries: their weights become zero, and the remaining weights of each query sum to one.

        keys  indices of keys; negative indices count from the end
        """
        chosen = check_indices("keys", keys)
        if chosen is None:
            raise ConfigError("hide takes the indices of keys, such as keys=[0, 3]")
        self._add(HideKeys, "hide", layer, heads, chosen, keys=list(chosen))

    def set_weights(self, layer: str | int, weights: Float[Tensor, "..."], *, heads: Indices | None = None) -> None:
        """Replace the attention weights of heads.

        weights  the new weights of the chosen heads, (b, heads, i, j) or a shape that broadcasts to it
        """
        if not isinstance(weights, Tensor) or not weights.is_floating_point() or weights.ndim < 2:
            raise ConfigError("set_weights takes a floating-point tensor (..., i, j) of weights")
        self._add(SetWeights, "set_weights", layer, heads, weights, weights=f"<{tuple(weights.shape)}>")

    def patch(
        self, layer: str | int, *, source: Source, positions: Indices | None = None, heads: Indices | None = None
    ) -> None:
        """Activation patching: replace the output of heads by that of another forward pass.

        The replaced output is that of the heads, before the output projection.

        source     the other forward pass, recorded by `watch`; it must have the same number of positions as the current
                   one, and either the same number of sequences or a single sequence
        positions  indices of the queries whose output is replaced; None is all
        """
        check_source("patch(source)", source)
        rows = check_indices("positions", positions)
        self._add(ReplaceOutput, "patch", layer, heads, partial(patch_from, source), rows, positions=positions)

    def __repr__(self) -> str:
        lines = [f"{each.text}: changed {len(each.calls)} call{'s' * (len(each.calls) != 1)}" for each in self.edits]
        return "\n".join(lines) or "no edits"

    def _add(
        self, kind: Callable[..., Edit], verb: str, layer: str | int, heads: Indices | None, *values: Any, **shown: Any
    ) -> None:
        if self._open is None:
            raise ConfigError(f"{verb} has no effect here: call it inside `with regard.intervene(model) as edit:`")
        chosen = check_indices("heads", heads)
        if chosen == ():
            raise ConfigError(f"{verb} got no heads; pass their indices, or None for all")
        arguments = {"heads": None if chosen is None else list(chosen), **shown}
        named = (f"{name}={value!r}" for name, value in arguments.items() if value is not None)
        text = f"{verb}({', '.join((repr(layer), *named))})"
        edit = kind(text, choose_layer(layer, self._paths), chosen, *values)
        if not self.edits:
            self._open.enter_context(disable_fused_layers())
        self.edits.append(edit)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._watcher.recording())
            self._open = stack
            try:
                yield
            finally:
                self._open = None
                # the watcher refers back to this object, so both would live until the garbage collector runs
                del self._watcher.change, self._watcher.edit

    def _change(self, call: AttentionCall) -> Tensor | None:
        """Apply the edits to one attention call and return its new output; None if no edit selects this call."""
        index = self._called.total()
        self._called[call.path] += 1
        place = call.path, self._called[call.path] + self._called_before[call.path], index
        edits = sorted((each for each in self.edits if each.layer.includes(*place)), key=lambda each: each.stage)
        counted = next((each for each in self.edits if each.layer.index is not None), None)
        if counted is not None and self._watcher.outside_forward_pass():
            raise InterventionError(
                f"{counted.text}: {call.name} was called outside a forward pass of the model, so calls cannot be "
                "counted; call model(...) itself, or name the layer instead of its index"
            )
        if not edits:
            return None
        if _is_checkpointed():
            raise InterventionError(
                f"{edits[0].text}: {call.name} runs under activation checkpointing, which computes it again in the "
                "backward pass, without the edit; turn checkpointing off"
            )
        state = HeadState(call, call.heads)
        for each in edits:
            try:
                each.apply(state)
            except RegardError:
                raise
            except Exception as error:
                raise InterventionError(
                    f"{each.text} failed at {call.name}: {type(error).__name__}: {error}"
                ) from error
            each.calls.append(call.name)
        if state.weights_changed and call.weights is None:
            self._watcher.edits_of_weights += 1
        if state.edited is not None:
            call.edited.append(state.edited)
        return state.heads

    @contextmanager
    def _forward_pass(self) -> Iterator[None]:
        self._called_before += self._called
        self._called.clear()
        yield
        self._check_effect([each for each in self.edits if each.layer.number is None])

    def _check_effect(self, edits: Sequence[Edit]) -> None:
        """Raise InterventionError with the reason if one of the edits has changed no attention call."""
        idle = next((each for each in edits if not each.calls), None)
        if idle is None:
            return
        names = list(self._called)
        path = idle.layer.path or ""
        if not names:
            reason = "no attention was recorded"
        elif idle.layer.index is not None:
            reason = f"the forward pass made {self._called.total()} attention calls: {', '.join(names[:8])}"
        elif path in self._called:
            count = self._called[path] + self._called_before[path]
            reason = f"{path} made {count} attention call{'s' * (count != 1)} inside the block"
        else:
            reason = f"{path} made no attention call that is recorded{suggest_names(path, names)}"
        left_out = "".join(f"; left out: {each}" for each in self._watcher.seen.left_out)
        raise InterventionError(f"{idle.text} changed nothing: {reason}{left_out}")


class EditingWatcher(Watcher):
    """A `Watcher` that applies the edits of an `Interventions` to the attention calls of a model."""

    def __init__(self, model: nn.Module | Callable[..., Any] | None, edit: Interventions) -> None:
        super().__init__(model, change=edit._change)
        self.edit = edit
        self._running = False

    def outside_forward_pass(self) -> bool:
        """Return whether the current call is outside of a forward pass of the model; False if no model was passed."""
        return isinstance(self.model, nn.Module) and not self._running

    def _module_call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is not self.model or self._running or threading.get_ident() != self._thread:
            return super()._module_call(original, module, *args, **kwargs)
        self._running = True
        try:
            with self.edit._forward_pass():
                return super()._module_call(original, module, *args, **kwargs)
        finally:
            self._running = False


def _is_checkpointed() -> bool:
    """Return whether the current call runs under torch.utils.checkpoint."""
    return any(frame.f_globals.get("__name__") == "torch.utils.checkpoint" for frame in call_frames())
