"""Watch the attention of any PyTorch model while it runs, without changing a bit of what it computes."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import wraps
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)

from regard.base.errors import ConfigError, RegardError
from regard.core import kernels
from regard.core.kernels.request import Request
from regard.see import compiled_models, huggingface, multihead
from regard.see.arguments import numbers, place, within
from regard.see.call_adapters import (
    ArgumentOrder,
    CallAdapter,
    InterceptedCall,
    ParsedCall,
    cut_heads,
    cut_rows,
    from_call,
    from_flex,
    from_sdpa,
    moved,
)
from regard.see.query_positions import stood
from regard.see.record import Record, Seen
from regard.see.softmax_tracer import Follower

Change = Callable[[Record], Tensor | None]
SDPA = torch.nn.functional.scaled_dot_product_attention
OUTSIDE = "attention"  # the name of a call with no module around it
COUNTS = ("num_heads", "n_heads", "n_head", "heads", "nhead", "num_attention_heads")  # how modules say it


def watch(
    model: nn.Module | Callable[..., Any] | None = None,
    *,
    layers: str | Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    values: bool = True,
) -> AbstractContextManager[Seen]:
    """Record every attention call of the model that is made inside: `with watch(model) as seen: model(x)`.

    Seen are calls of scaled_dot_product_attention, flex_attention, nn.MultiheadAttention and its encoder layers, of
    every function in Hugging Face's attention registry, attention written by hand as a softmax between two products,
    and our own `attend`. What could not be told is in `seen.left_out`, each reason with how often it came up, and so is
    compiled code that ran. Other threads are not heard. Outputs and gradients are the same bits as without watching. At
    the end, and after an error, everything is put back; what was seen stays usable.

    model    whose calls to record; None, or a function that is no model, records all calls inside
    layers   names or patterns of modules, such as "encoder.layer.3" or "*.cross_attention"; None is all
    heads    numbers of query heads to keep; None is all
    rows     numbers of queries to keep, negative ones from the end; None is all
    device   where to keep what is recorded; None leaves it where it is
    values   whether to keep the values too, which relevance needs
    """
    return Watching(Watcher(model, layers, heads, rows, device, values).listening())


class Watching(AbstractContextManager[Seen]):
    """One block of watching, entered once: what is seen in it belongs together."""

    def __init__(self, block: AbstractContextManager[Seen]) -> None:
        self._block, self._entered = block, False

    def __enter__(self) -> Seen:
        if self._entered:
            raise ConfigError(
                "this watch was entered before, and records one block: write `with watch(...) as seen:` anew for each"
            )
        self._entered = True
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._block.__exit__(kind, error, trace)


class Watcher(TorchFunctionMode):
    """Hears attention calls, finds the module they came from and keeps what was asked for.

    change  is handed each record, and may give numbers (b h i e) to be added to what that attention gives
    """

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        layers: str | Sequence[str] | None = None,
        heads: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        values: bool = True,
        change: Change | None = None,
    ) -> None:
        super().__init__()
        self.seen = Seen()
        self.model = _module(model)
        self.paths = {} if self.model is None else _paths(self.model)
        self.layers = _patterns(layers, self.paths)
        self.heads = numbers("heads", heads)
        self.rows = numbers("rows", rows)
        self.device = place("device", device)
        self.values = values
        self.change = change
        self._thread = threading.get_ident()
        self._silent = 0
        self._heard = 0  # attention calls that came by, recorded or not
        self._route: str | None = None
        self._causal = False  # whether the call being made is known to be causal attention to itself
        self._said_by_call: ParsedCall | None = None
        self._counts: dict[str, int] = {}
        self._follower = Follower(self._by_hand, self._said)

    @contextmanager
    def listening(self) -> Iterator[Seen]:
        """Put every ear in its place, and take all of them away again."""
        with ExitStack() as stack:
            stack.callback(self._follower.forget)
            stack.enter_context(kernels.observe_requests(self._attend))
            stack.enter_context(huggingface.listening(self._registered))
            stack.enter_context(compiled_models.listening(self._out_of_hearing, self._aside))
            for kind, wrapped in (
                (nn.MultiheadAttention, self._multihead),
                (nn.TransformerEncoderLayer, self._encoder_layer),
                (nn.TransformerEncoder, self._encoder),
            ):
                stack.enter_context(_replaced(kind, wrapped))
            stack.enter_context(self)
            yield self.seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self._deaf():
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is SDPA:
            self._note(lambda: self._sdpa(out, args, kwargs), out)
        elif func is torch.nn.functional.multi_head_attention_forward:
            way = multihead.Projection(args[11].detach(), args[4], batch_first=False)
            self._note(lambda: multihead.from_functional(*args, **kwargs), out[0], way)
        elif getattr(func, "__name__", "") == "flex_attention" and not kwargs:
            self._note(lambda: from_flex(*args), out[0])
        else:
            with self._harmless():
                self._follower.follow(func, args, kwargs, out)
        return out

    def _deaf(self) -> bool:
        """Whether this is no call of its own: it is part of one that is heard, or repeats one for a backward pass."""
        return (
            self._silent > 0
            or kernels.running()
            or threading.get_ident() != self._thread
            or torch._C._current_graph_task_id() != -1
        )

    @contextmanager
    def _silence(self) -> Iterator[None]:
        """Not only deaf but gone, where possible: torch leaves its fast paths while any function mode is on."""
        self._silent += 1
        try:
            if _len_torch_function_stack() and _get_current_function_mode() is self:
                with _pop_mode_temporarily():
                    yield
            else:
                yield
        finally:
            self._silent -= 1

    def _sdpa(self, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InterceptedCall:
        said = None if out.ndim == 4 else self._said()
        return from_sdpa(*args, **(kwargs | {"said": said}))

    def _attend(self, kernel: str, call: Request, out: Tensor) -> None:
        if self._silent == 0 and threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1:
            self._note(lambda: from_call(kernel, call), out)

    def _by_hand(self, heard: InterceptedCall, out: Tensor, way: CallAdapter) -> None:
        self._note(lambda: heard, out, way)

    def _registered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of Hugging Face's registry that is heard when it is called."""

        @wraps(function)
        def heard(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._deaf():
                return function(module, *args, **kwargs)
            before, left_out = self._heard, dict(self.seen.left_out)
            outer, self._causal = self._causal, huggingface.causal_by(module, kwargs)
            around, self._said_by_call = self._said_by_call, huggingface.heads_of_call(args, kwargs)
            try:
                with self._silence() if huggingface.compiles(function) else self._going_by(f"hugging face {name}"):
                    result = function(module, *args, **kwargs)
                if self._heard == before:
                    self._by_arguments(name, function, module, args, kwargs, result[0], left_out)
            finally:
                self._causal, self._said_by_call = outer, around
            return result

        return heard

    def _by_arguments(
        self,
        name: str,
        function: Callable[..., Any],
        module: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Tensor,
        left_out: dict[str, int],
    ) -> None:
        """A function of the registry in which nothing was heard. What was left out inside it is then not left out."""

        def told() -> InterceptedCall:
            heard = huggingface.from_interface(name, module, *args, **kwargs)
            if _unusable(heard.q) is not None:
                return heard
            mask = args[3] if len(args) > 3 else kwargs.get("attention_mask")
            return huggingface.held_against(heard, out, mask, huggingface.theirs(function))

        inside = dict(self.seen.left_out)
        self._note(told, out, ArgumentOrder([0, 2, 1, 3]), owner=module)  # their functions give (b i h e)
        if self.seen.left_out == inside:
            self.seen.left_out = left_out

    @contextmanager
    def _going_by(self, route: str) -> Iterator[None]:
        """Whatever is heard inside came by this way."""
        outer, self._route = self._route, route
        try:
            yield
        finally:
            self._route = outer

    def _multihead(self, original: Callable[..., Any], layer: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return original(layer, *args, **kwargs)
        repeated = torch._C._current_graph_task_id() != -1
        with self._silence():
            result = original(layer, *args, **kwargs)
        if not repeated:
            query = args[0] if args else kwargs["query"]
            weight = layer.out_proj.weight.detach()
            way = multihead.Projection(weight, layer.num_heads, layer.batch_first and query.ndim == 3)
            self._note(lambda: multihead.from_module(layer, *args, **kwargs), result[0], way, owner=layer)
        return result

    def _encoder_layer(
        self, original: Callable[..., Any], layer: nn.TransformerEncoderLayer, *args: Any, **kwargs: Any
    ) -> Any:
        standard = type(layer)._sa_block is nn.TransformerEncoderLayer._sa_block
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread or not standard:
            return original(layer, *args, **kwargs)
        heard = self._heard
        with self._silence():
            out = original(layer, *args, **kwargs)
        if self._heard == heard and torch._C._current_graph_task_id() == -1:
            # nobody asked the attention inside, so all of the layer ran as one operator
            self._note(lambda: multihead.from_encoder_layer(layer, *args, **kwargs), None, owner=layer.self_attn)
        return out

    def _encoder(self, original: Callable[..., Any], encoder: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> Any:
        kinds = {type(layer) for layer in encoder.layers}
        standard = all(
            issubclass(kind, nn.TransformerEncoderLayer)
            and kind.forward is nn.TransformerEncoderLayer.forward
            and kind._sa_block is nn.TransformerEncoderLayer._sa_block
            for kind in kinds
        )
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread or not standard:
            return original(encoder, *args, **kwargs)
        with self._silence():
            return original(encoder, *args, **kwargs)

    def _note(
        self,
        translate: Callable[[], InterceptedCall],
        out: Tensor | None,
        way: CallAdapter | None = None,
        *,
        owner: object = None,
    ) -> None:
        """Keep one call, if it is one of those asked for. `way` leads from the heads to the output and back."""
        self._heard += 1
        name = self._name(owner)
        if name is None or not _chosen(name, self.layers):
            return
        count = self._counts[name] = self._counts.get(name, 0) + 1
        record = None
        with self._harmless(), torch.inference_mode(False), torch.no_grad():
            heard = translate()
            if (reason := _unusable(heard.q)) is not None:
                self._leave_out(reason)
            else:
                record = self._record(name if count == 1 else f"{name}:{count}", stood(heard, self._causal))
                self.seen.add(record)
        if record is None or out is None:
            return
        way = ArgumentOrder(list(range(out.ndim))) if way is None else way
        if out.requires_grad:
            # the hook lives as long as the graph, so a backward pass after the end is heard as well
            shape = heard.q.shape
            out.register_hook(lambda gradient: self._keep_gradient(record, way.back(gradient.detach()), shape))
        if self.change is not None and (shift := self.change(record)) is not None:
            with torch.no_grad():
                out += way.forth(shift.to(out.dtype), out)

    def _out_of_hearing(self, called: object, how: str) -> None:
        """Compiled code is being called: of the model, or a function or script that may be or call anything."""
        if torch.compiler.is_compiling() or self._deaf():
            return
        owner = called if isinstance(called, nn.Module) else getattr(called, "__self__", None)
        name = getattr(called, "__qualname__", "some code")
        if isinstance(owner, nn.Module):
            name = self.paths.get(id(owner), type(owner).__name__)
            inside = self.model is None or any(id(module) in self.paths for module in owner.modules())
            if not inside and not isinstance(owner, torch.jit.ScriptModule) and self._name(None) is None:
                return  # the module of somebody else
        if how == "compiled":
            way = "call it uncompiled, or under torch.compiler.set_stance('force_eager')"
        else:
            way = "call the module it was made of"
        self._leave_out(f"{name} ran {how}, where nothing can be heard; {way}")

    def _aside(self) -> Callable[[], None]:
        """Leave the stack of function modes, wherever it stands in it; gives the way back to the same place."""
        stack = [_get_function_stack_at(at) for at in range(_len_torch_function_stack())]
        if self not in stack:  # in another thread, or aside already
            return lambda: None
        above = len(stack) - 1 - stack.index(self)

        def move(away: bool) -> None:
            modes = [_pop_mode() for _ in range(above)]
            if away:
                _pop_mode()
            else:
                _push_mode(self)
            for mode in reversed(modes):
                _push_mode(mode)

        move(away=True)
        return lambda: move(away=False)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """A call that cannot be told must not stop the model: it is left out, and the reason kept."""
        try:
            yield
        except RegardError:
            raise  # what was asked for cannot be had, which is for the caller to know
        except Exception as error:
            self._leave_out(f"calls that could not be told: {type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _leave_out(self, reason: str) -> None:
        self.seen.left_out[reason] = self.seen.left_out.get(reason, 0) + 1

    def _keep_gradient(self, record: Record, gradient: Tensor, shape: torch.Size) -> None:
        gradient = gradient.reshape(*shape[:3], -1)
        if record.heads is not None:
            gradient = gradient[:, list(record.heads)]
        if record.rows_kept is not None:
            gradient = gradient[:, :, list(record.rows_kept)]
        record.gradients[:] = [gradient.clone() if self.device is None else gradient.to(self.device, copy=True)]

    def _record(self, name: str, heard: InterceptedCall) -> Record:
        h, i = heard.q.shape[1:3]
        heads = None if self.heads is None else within("heads", self.heads, h, name)
        rows = None if self.rows is None else within("rows", self.rows, i, name)
        device = heard.q.device
        if heads is not None:
            heard = cut_heads(heard, torch.tensor(heads, dtype=torch.long, device=device))
        if rows is not None:
            heard = cut_rows(heard, torch.tensor(rows, dtype=torch.long, device=device))
        kept = moved(heard, self.device, self.values)
        return Record(
            name=name,
            route=self._route or kept.route,
            q=kept.q,
            k=kept.k,
            v=kept.v,
            mask=kept.mask,
            terms=kept.terms,
            beta=kept.beta,
            positions=kept.positions,
            dropout=kept.dropout,
            note=kept.note,
            heads=heads,
            rows_kept=rows,
            located=kept.located,
        )

    def _said(self) -> ParsedCall | None:
        """How many heads the call has that is being made: as a registry's function was asked, or its module says."""
        if self._said_by_call is not None:
            return self._said_by_call
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                counts = ((name, getattr(module, name, None)) for name in COUNTS)
                found = next(((name, count) for name, count in counts if type(count) is int), None)
                return (
                    None
                    if found is None
                    else ParsedCall(found[1], f"heads read from {found[0]}={found[1]} of its module")
                )
            frame = frame.f_back
        return None

    def _name(self, owner: object) -> str | None:
        """The path of the nearest module of the model on the way to this call; None where the model is not on it."""
        if self.model is None:
            return OUTSIDE
        if id(owner) in self.paths:
            return self.paths[id(owner)]
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            found = frame.f_locals.get("self")
            if found is not self and id(found) in self.paths:
                return self.paths[id(found)]
            frame = frame.f_back
        return None


def _module(model: object) -> nn.Module | None:
    if isinstance(model, nn.Module):
        return model
    owner = getattr(model, "__self__", None)  # a method of a model, such as model.generate
    if isinstance(owner, nn.Module):
        return owner
    if model is not None and not callable(model):
        raise ConfigError(f"watch takes a model, a function or nothing, not {type(model).__name__}")
    return None


def _paths(model: nn.Module) -> dict[int, str]:
    """The path of every module, by identity. The model itself goes by the name of its class."""
    for path, module in model.named_modules():
        compiled_models = type(module).__name__ == "OptimizedModule"
        if compiled_models or getattr(module, "_compiled_call_impl", None) is not None:
            what = f"{path!r} of the model" if path else "the model"
            way = (
                "watch the module that was given to torch.compile" if compiled_models else "make it without .compile()"
            )
            raise ConfigError(
                f"{what} is compiled, and compiled code makes its attention calls out of sight; {way}, "
                "whose weights are the same"
            )
    return {id(module): path or type(model).__name__ for path, module in model.named_modules()}


def _patterns(layers: str | Sequence[str] | None, paths: dict[int, str]) -> tuple[str, ...] | None:
    if layers is None:
        return None
    patterns = (layers,) if isinstance(layers, str) else tuple(layers) if isinstance(layers, Iterable) else (layers,)
    if wrong := [each for each in patterns if not isinstance(each, str)]:
        raise ConfigError(f"layers takes names or patterns of modules, such as 'blocks.3*', not {wrong[0]!r}")
    for pattern in patterns:
        if paths and not any(_chosen(path, (pattern,)) for path in paths.values()):
            some = ", ".join(list(paths.values())[1:6])
            raise ConfigError(f"layers={pattern!r} is no module of the model; it has {some} and so on")
    return patterns


def _chosen(path: str, patterns: tuple[str, ...] | None) -> bool:
    """Whether the module or one that it is part of is among those asked for."""
    if patterns is None:
        return True
    parts = path.split(".")
    ways = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(way, pattern) for way in ways for pattern in patterns)


def _unusable(q: Tensor) -> str | None:
    """Why a call cannot be kept, or None."""
    if torch._C._functorch.is_functorch_wrapped_tensor(q):
        return "calls inside a transform of torch.func, whose tensors end with it"
    if q.device.type == "meta" or type(q).__name__ == "FakeTensor":
        return "calls on tensors without numbers"
    return None


@contextmanager
def _replaced(kind: type[nn.Module], wrapped: Callable[..., Any]) -> Iterator[None]:
    """Have `wrapped(original, module, ...)` called in place of a class's forward."""
    original = kind.forward

    @wraps(original)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapped(original, module, *args, **kwargs)

    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = original
