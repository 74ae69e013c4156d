"""Record the attention calls of any PyTorch model with hooks that leave its outputs unchanged."""

import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import wraps
from itertools import chain, islice, product
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from regard.base.errors import ConfigError, InterventionError, RegardError
from regard.core import kernels
from regard.core.kernels.request import Request
from regard.see import huggingface, multihead
from regard.see.arguments import check_device, check_indices, resolve_indices
from regard.see.call_adapters import (
    AxisPermutation,
    HeadTransform,
    OutputTransform,
    build_attend_record,
    build_flex_record,
    build_sdpa_record,
    copy_record,
    keep_heads,
    keep_rows,
)
from regard.see.interventions.attention_call import AttentionCall, OutputChange
from regard.see.interventions.returned_weights import ResultWeights, ReturnedWeights
from regard.see.leading_axes import HeadCount, LeadingAxes, read_leading_axes
from regard.see.query_positions import infer_query_positions, is_over_channels
from regard.see.record import Record, Seen, UnsupportedAttention, attention_role
from regard.see.simple_layers import is_simple_layer
from regard.see.softmax_tracer import SoftmaxTracer, can_start_trace, function_name

Indices = Sequence[int] | Tensor
NO_MODULE = "attention"  # the name of a call that no module makes
# attributes in which modules keep their number of heads
HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "heads", "nhead", "num_attention_heads", "num_attn_heads")
FUSED_OPERATORS = ("scaled_dot_product", "flash_attention", "efficient_attention", "fused_sdp")
LINEAR = torch.nn.functional.linear
OTHER_ATTENTION = ("multi_head_attention_forward", "flex_attention")
_edits = threading.local()
_OWN = globals()  # the globals of each frame of this file
RAN_EAGERLY = "torch.compile is disabled while watching: this call ran eagerly"


def watch(
    model: nn.Module | Callable[..., Any] | None = None,
    *,
    layers: str | Sequence[str] | None = None,
    heads: Indices | None = None,
    rows: Indices | None = None,
    device: torch.device | str | None = None,
    values: bool = True,
) -> AbstractContextManager[Seen]:
    """Context manager: record every attention call of a model inside the `with` block, using hooks.

    The recorded functions are scaled_dot_product_attention, flex_attention, nn.MultiheadAttention and its encoder
    layers, the functions of Hugging Face's attention registry, attention written by hand as a softmax between two
    products, and `regard.attend`. `seen.left_out` lists why other calls could not be recorded. Only calls of the thread
    that entered the `with` block are recorded; if other threads call modules of the model, `seen.left_out` says so.
    Inside `intervene`, the recorded inputs are those after the edits `scale_beta` and `hide`: `scale_beta` appears as
    multiplied queries, `hide` as part of the mask.

    Outputs and gradients are bitwise the same as without watching, except in code that was compiled by `torch.compile`:
    such code runs eagerly inside the `with` block (`torch.compiler.set_stance("force_eager")`), and the `note` of their
    records says so. All hooks are removed at the end of the `with` block, also after an error; the records remain
    usable.

    model   the model to record; None, or a function that is not a method of a model, records all calls
    layers  names or glob patterns of the modules to record, such as "encoder.layer.3" or "*.cross_attention"; None is
            all
    heads   indices of the query heads to keep; None is all
    rows    indices of the queries to keep; negative indices count from the end; None is all
    device  the device on which records are stored; None keeps the device of the call
    values  whether to keep the values, which relevance methods need

    This layer runs as nn.MultiheadAttention with 2 heads on 1 sequence of 5 positions:

    >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
    >>> with regard.watch(model) as seen:
    ...     out = model(torch.zeros(1, 5, 16))
    >>> print(seen)
    self_attn: b=1 h=2 i=5 j=5, full(), by nn.MultiheadAttention
    >>> seen["self_attn"].entropy.shape
    torch.Size([1, 2, 5])
    """
    return Watcher(model, layers, heads, rows, device, values).recording()


class Watcher(TorchFunctionMode):
    """Torch function mode that intercepts attention calls, finds the module of each call and records the call.

    change  function that is called for each attention call in place of recording it; it returns a new output of
            the heads (b h i e), or None to keep the output
    """

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        layers: str | Sequence[str] | None = None,
        heads: Indices | None = None,
        rows: Indices | None = None,
        device: torch.device | str | None = None,
        values: bool = True,
        change: OutputChange | None = None,
    ) -> None:
        super().__init__()
        self.seen = Seen()
        self.model = _find_module(model)
        modules = [] if self.model is None else _named_modules(self.model)
        self.paths = {id(module): path for path, module in modules}
        # Setting `__call__` of a class updates all its subclasses, which takes longer than setting `_call_impl`. But
        # a module after `module.compile()` calls the `_call_impl` that it had then.
        compiled = self.model is None or any("_compiled_call_impl" in vars(module) for _, module in modules)
        self._calling_method = "__call__" if compiled else "_call_impl"
        self.layers = _check_patterns(layers, self.paths)
        self.heads = check_indices("heads", heads)
        self.rows = check_indices("rows", rows)
        self.device = check_device("device", device)
        self.values = values
        self.change = change
        self._thread = threading.get_ident()
        self._other_threads: set[int] = set()
        self._disabled_depth = 0
        self._intercepted = 0  # attention calls so far, recorded or not
        self._route: str | None = None
        self._causal = False  # whether the current call is known to be causal self-attention
        self._call_heads: HeadCount | None = None
        self._counts: dict[str, int] = {}
        self._tracer = SoftmaxTracer(self._softmax, self._head_count)
        self._ignored: set[Any] = set()  # torch functions that are no attention and start none
        self._changed: Tensor | None = None  # the output that replaces that of the traced function
        self.edits_of_weights = 0  # calls whose weights `change` edited without knowing where the model has them

    @contextmanager
    def recording(self) -> Iterator[Seen]:
        """Context manager: install all hooks, and remove them on exit."""
        with ExitStack() as stack:
            stack.callback(self._tracer.close)
            stack.callback(_edits.__dict__.pop, "latest", None)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(kernels.observe_requests(self._attend, self._compiled))
            stack.enter_context(huggingface.intercept_registry(self._registered))
            for kind, name, wrapper in (
                (nn.MultiheadAttention, "forward", self._multihead),
                (nn.TransformerEncoderLayer, "forward", self._encoder_layer),
                (nn.TransformerEncoder, "forward", self._encoder),
                (torch.jit.ScriptModule, "__call__", self._torchscript),
                (nn.Module, self._calling_method, self._module_call),
            ):
                stack.enter_context(_patch_method(kind, name, wrapper))
            stack.enter_context(self)
            yield self.seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        # most calls end here: these lines decide what watching costs
        if not self._tracer.traced:
            try:
                if func in self._ignored:
                    return out
            except TypeError:  # a callable object without a hash
                pass
            if func is LINEAR and len(args) > 1 and type(args[1]) is nn.Parameter:
                return out
        return self._intercept(func, args, kwargs or {}, out)

    def _intercept(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """Record a torch function's call if it is attention, else pass it to the softmax tracer; return its output."""
        if self._is_disabled():
            return out
        name = function_name(func)
        starts = can_start_trace(name) or name in OTHER_ATTENTION or name.startswith(FUSED_OPERATORS)
        if not starts and isinstance(func, Hashable):
            self._ignored.add(func)
        changed: Tensor | None = None
        if name == "scaled_dot_product_attention":
            changed = self._sdpa(out, args, kwargs)
        elif name.startswith(FUSED_OPERATORS):
            self._leave_out(f"the operator {name} was called directly; call scaled_dot_product_attention")
        elif func is torch.nn.functional.multi_head_attention_forward:
            return self._multihead_function(args, kwargs, out)
        elif (operator := _custom_operator(func)) and ("attention" in name or "attn" in name):
            self._leave_out(f"the custom operator {operator} was called; it may be attention")
        elif name == "flex_attention" and not kwargs:
            changed = self._record_call(lambda: build_flex_record(*args), out[0])
        else:
            self._changed = None
            with self._catch_errors(), torch.set_grad_enabled(self.change is not None and torch.is_grad_enabled()):
                self._tracer.trace(func, args, kwargs, out)
            changed = self._changed
        return out if changed is None else _replace_output(out, changed, kwargs.get("out"))

    def _multihead_function(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        given = multihead.bind_arguments(*args, **kwargs)
        projection = multihead.OutputProjection(
            given.out_proj_weight, given.out_proj_bias, given.num_heads, batch_first=False
        )
        weights = None if out[1] is None else ResultWeights(out[1], given.average_attn_weights)
        changed = self._record_call(
            lambda: multihead.build_functional_record(*args, **kwargs), out[0], projection, weights=weights
        )
        return out if changed is None else _replace_output(out, changed, weights=weights)

    def _is_disabled(self) -> bool:
        """Return whether the current call must not be recorded.

        A call is not recorded if a compiler, another thread, an edit of `intervene` or a backward pass makes it, or if
        it runs inside a call that is recorded as a whole, such as one of nn.MultiheadAttention.
        """
        return self._disabled_depth > 0 or self._is_foreign()

    def _is_foreign(self) -> bool:
        """Return whether a compiler, another thread, an edit of `intervene` or a backward pass made the call."""
        return (
            torch.compiler.is_compiling()
            or threading.get_ident() != self._thread
            or torch._C._current_graph_task_id() != -1
            or getattr(_edits, "running", False)
        )

    @contextmanager
    def _disabled(self) -> Iterator[None]:
        """Context manager: remove this torch function mode while the function that was intercepted runs.

        It is removed because torch skips its fast paths while any function mode is active. Nothing is recorded
        meanwhile.
        """
        stack = [_get_function_stack_at(at) for at in range(_len_torch_function_stack())]
        above = len(stack) - 1 - stack.index(self) if self in stack else None
        self._disabled_depth += 1
        if above is not None:
            modes = [_pop_mode() for _ in range(above)]
            _pop_mode()
            for mode in reversed(modes):
                _push_mode(mode)
        try:
            yield
        finally:
            self._disabled_depth -= 1
            if above is not None:
                modes = [_pop_mode() for _ in range(above)]
                for mode in (self, *reversed(modes)):
                    _push_mode(mode)

    @contextmanager
    def _compiled(self) -> Iterator[None]:
        """Context manager: let a compiled function run compiled; inside `watch`, it would otherwise run eagerly.

        Such a function is recorded by its arguments, so the operations inside it need not be intercepted.
        """
        if threading.get_ident() != self._thread:
            yield
            return
        with self._disabled(), torch.compiler.set_stance("default"):
            yield

    def _sdpa(self, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if (reason := _reason_unusable(out)) is not None:
            self._intercepted += 1
            self._leave_out(reason)
            return None
        leading = out.shape[:-2]
        if kwargs.get("enable_gqa"):
            axes = LeadingAxes(tuple(leading), len(leading) - 1, len(leading), tuple(leading))
        else:
            axes = read_leading_axes(leading, None if len(leading) == 2 else self._head_count())
        transform = HeadTransform(axes, AxisPermutation(list(range(out.ndim))))
        return self._record_call(lambda: build_sdpa_record(*args, **(kwargs | {"axes": axes})), out, transform)

    def _module_call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module, with this torch function mode removed if it is a simple layer such as nn.Linear.

        A function mode is active in one thread only, so calls of other threads cannot be recorded. The first time that
        another thread calls a module, a reason is added to `left_out`.
        """
        if is_simple_layer(module) and not self._tracer.traced:
            top = _len_torch_function_stack() - 1
            if top >= 0 and _get_function_stack_at(top) is self:
                _pop_mode()
                try:
                    return original(module, *args, **kwargs)
                finally:
                    _push_mode(self)
        thread = threading.get_ident()
        if thread != self._thread and thread not in self._other_threads and self._is_own_module(module):
            self._other_threads.add(thread)
            name = self.paths.get(id(module), type(module).__name__)
            self._leave_out(f"another thread called {name}: only the thread that opened the block is recorded")
        return original(module, *args, **kwargs)

    def _is_own_module(self, module: nn.Module) -> bool:
        """Return whether a module belongs to the watched model, or to a replica made by nn.DataParallel."""
        return id(module) in self.paths or getattr(module, "_is_replica", False)

    def _attend(self, kernel: str, call: Request, out: Tensor) -> Tensor | None:
        if self._is_disabled():
            return None
        if call.positions.offsets is not None:
            self._leave_out("positions differ between sequences (Positions.offsets)")
            return None
        weights = None if call.weights is None else ResultWeights(call.weights)
        changed = self._record_call(
            lambda: build_attend_record(kernel, call), out, positions_given=True, weights=weights
        )
        if weights is not None:
            call.weights = weights.value
        return changed

    def _softmax(
        self, record: Record, out: Tensor, transform: OutputTransform, find_weights: Callable[[], ReturnedWeights]
    ) -> None:
        weights = None if self.change is None else find_weights()
        self._changed = self._record_call(lambda: record, out, transform, weights=weights)

    def _registered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an attention function of Hugging Face's registry, so that its calls are recorded."""

        @wraps(function)
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_disabled():
                return function(module, *args, **kwargs)
            before, left_out = self._intercepted, dict(self.seen.left_out)
            edits = self.edits_of_weights
            outer = self._causal, self._call_heads, self._route
            self._causal = huggingface.is_causal_call(module, kwargs)
            self._call_heads = huggingface.heads_of_call(args, kwargs)
            self._route = f"hugging face {name}"
            try:
                with self._compiled() if huggingface.is_compiled_flex(function) else nullcontext():
                    result = function(module, *args, **kwargs)
                if self._intercepted == before:
                    result = self._record_arguments(name, function, module, args, kwargs, result, left_out)
                elif self.edits_of_weights > edits and isinstance(result[1], Tensor):
                    raise InterventionError(
                        f"{name} returns attention weights that it computes apart from its output, so they are not "
                        "those of the edit; run the model without output_attentions"
                    )
            finally:
                self._causal, self._call_heads, self._route = outer
            return result

        return wrapper

    def _record_arguments(
        self,
        name: str,
        function: Callable[..., Any],
        module: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        left_out: dict[str, int],
    ) -> Any:
        """Record a call of a function of Hugging Face's registry by its arguments; return its result.

        Used if no operation inside the function was intercepted as attention.

        result    result of the call: a tuple of the output, and the weights or None
        left_out  copy of `seen.left_out` from before the call; `seen.left_out` is reset to this copy if the call could
                  be recorded
        """

        out = result[0]

        def build() -> Record:
            record = huggingface.build_interface_record(name, module, *args, **kwargs)
            if _reason_unusable(record.q) is not None:
                return record
            mask = args[3] if len(args) > 3 else kwargs.get("attention_mask")
            return huggingface.verify_output(record, out, mask, huggingface.is_library_function(function))

        inside = dict(self.seen.left_out)
        # the output is (b i h e)
        weights = ResultWeights(result[1]) if isinstance(result[1], Tensor) else None
        changed = self._record_call(build, out, AxisPermutation([0, 2, 1, 3]), owner=module, weights=weights)
        if self.seen.left_out == inside:
            self.seen.left_out = left_out
        return result if changed is None else _replace_output(result, changed, weights=weights)

    def _multihead(self, original: Callable[..., Any], layer: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        if self._is_foreign():
            return original(layer, *args, **kwargs)
        with self._disabled():
            result = original(layer, *args, **kwargs)
        query = args[0] if args else kwargs["query"]
        weight, bias = layer.out_proj.weight, layer.out_proj.bias
        projection = multihead.OutputProjection(weight, bias, layer.num_heads, layer.batch_first and query.ndim == 3)
        weights = None
        if result[1] is not None:
            weights = ResultWeights(result[1], multihead.averages_weights(*args, **kwargs))
        changed = self._record_call(
            lambda: multihead.build_module_record(layer, *args, **kwargs),
            result[0],
            projection,
            owner=layer,
            weights=weights,
        )
        return result if changed is None else _replace_output(result, changed, weights=weights)

    def _encoder_layer(
        self, original: Callable[..., Any], layer: nn.TransformerEncoderLayer, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_foreign() or not _is_standard(type(layer)):
            return original(layer, *args, **kwargs)
        before = self._intercepted
        with self._disabled():
            out = original(layer, *args, **kwargs)
        if self._intercepted == before:
            # the attention module was not called: the layer ran as one fused operator
            self._record_call(
                lambda: multihead.build_encoder_layer_record(layer, *args, **kwargs), None, owner=layer.self_attn
            )
        return out

    def _encoder(self, original: Callable[..., Any], encoder: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> Any:
        kinds = {type(layer) for layer in encoder.layers}
        standard = all(_is_standard(kind) and kind.forward is nn.TransformerEncoderLayer.forward for kind in kinds)
        with self._disabled() if standard and not self._is_foreign() else nullcontext():
            return original(encoder, *args, **kwargs)

    def _torchscript(
        self, original: Callable[..., Any], module: torch.jit.ScriptModule, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._is_disabled():
            name = self.paths.get(id(module), module.original_name)
            self._leave_out(f"{name} ran as TorchScript, which has no hooks; call the module it was made from")
        return original(module, *args, **kwargs)

    def _record_call(
        self,
        build: Callable[[], Record],
        out: Tensor | None,
        transform: OutputTransform | None = None,
        *,
        owner: object = None,
        positions_given: bool = False,
        weights: ReturnedWeights | None = None,
    ) -> Tensor | None:
        """Record one attention call if its module is selected, or, if there is a `change`, let it replace the output.

        Returns the new output, or None if the output does not change.

        build            function that builds the record from the arguments of the call
        out              the output that the call returned; None if it cannot be read or replaced
        transform        the transform from the output of the heads to `out`; None if the two are the same
        owner            the module that makes the call, if known
        positions_given  whether the call specifies the positions of its queries; otherwise they are inferred from the
                         mask
        weights          the attention weights that the model returns or stores, which an edit can replace; None if the
                         model computes no weights
        """
        self._intercepted += 1
        name = self._module_name(owner)
        if name is None or not _is_selected(name, self.layers):
            return None
        if out is not None and transform is None:
            transform = AxisPermutation(list(range(out.ndim)))
        count = self._counts[name] = self._counts.get(name, 0) + 1
        full_name = name if count == 1 else f"{name}:{count}"
        if self.change is not None:
            if out is None or transform is None:
                return None
            call = AttentionCall(name, full_name, build, out, transform, weights)
            return self._change_output(self.change, call)
        record = None
        with self._catch_errors(), _ordinary_mode(), torch.no_grad():
            edited = _find_edited(out)
            whole = build() if edited is None else edited[0]
            if (reason := _reason_unusable(whole.q)) is not None:
                self._leave_out(reason)
            else:
                if is_over_channels(
                    whole, lambda: owner if isinstance(owner, nn.Module) else next(_calling_modules(), None)
                ):
                    whole = replace(whole, over_channels=True, positions_known=False)
                elif not positions_given:
                    whole = infer_query_positions(whole, self._causal, attention_role(name) == "cross")
                if edited is not None:
                    whole = replace(whole, q=edited[1].q, mask=edited[1].mask)
                record = self._select(whole, full_name)
                self.seen.add(record)
        if record is not None and out is not None and transform is not None and out.requires_grad:
            # the hook lives as long as the graph, so a backward pass after the block is recorded too
            shape = whole.q.shape
            out.register_hook(lambda gradient: self._keep_gradient(record, transform.pull_back(gradient), shape))
        return None

    def _change_output(self, change: OutputChange, call: AttentionCall) -> Tensor | None:
        """Let the function `change` edit an attention call; return the new output, or None if it does not change."""
        with self._disabled():
            _edits.running = True  # no other watcher records what an edit computes
            try:
                heads = change(call)
                if heads is None:
                    return None
                out = call.output(heads)
                if call.edited:
                    _edits.latest = ref(out), (call.record, call.edited[-1])
                return out
            finally:
                _edits.running = False

    def _select(self, record: Record, name: str) -> Record:
        """Return a copy of the record with the given name and only the selected heads and rows."""
        h, i = record.q.shape[1:3]
        heads = None if self.heads is None else resolve_indices("heads", self.heads, h, name)
        rows = None if self.rows is None else resolve_indices("rows", self.rows, i, name)
        device = record.q.device
        if heads is not None:
            record = keep_heads(record, torch.tensor(heads, dtype=torch.long, device=device))
        if rows is not None:
            record = keep_rows(record, torch.tensor(rows, dtype=torch.long, device=device))
        note = "; ".join(part for part in (record.note, RAN_EAGERLY if _is_compiled_call() else "") if part)
        route = self._route or record.route
        return copy_record(
            record, self.device, self.values, name=name, route=route, heads=heads, rows_kept=rows, note=note
        )

    def _keep_gradient(self, record: Record, gradient: Tensor, shape: torch.Size) -> None:
        gradient = gradient.detach().reshape(*shape[:3], -1)
        if record.heads is not None:
            gradient = gradient[:, list(record.heads)]
        if record.rows_kept is not None:
            gradient = gradient[:, :, list(record.rows_kept)]
        record.gradients[:] = [gradient.clone() if self.device is None else gradient.to(self.device, copy=True)]

    @contextmanager
    def _catch_errors(self) -> Iterator[None]:
        """Context manager: catch an error of recording and add it to `left_out`, so that the model continues.

        A RegardError is not caught, because it reports an invalid argument that the user passed to `watch`.
        """
        try:
            yield
        except RegardError:
            raise  # an invalid selection, for the caller of watch
        except UnsupportedAttention as error:
            self._leave_out(str(error))
        except Exception as error:
            self._leave_out(f"could not be recorded: {type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _leave_out(self, reason: str) -> None:
        self.seen.left_out[reason] = self.seen.left_out.get(reason, 0) + 1

    def _head_count(self) -> HeadCount | None:
        """Return the number of heads of the current call, from its arguments or its module; None if unknown."""
        if self._call_heads is not None:
            return self._call_heads
        for module, name in product(islice(_calling_modules(), 2), HEAD_COUNTS):
            if type(count := getattr(module, name, None)) is int:
                return HeadCount(count, f"heads read from {name}={count} of its module")
        return None

    def _module_name(self, owner: object) -> str | None:
        """Return the path of the innermost module of the model that makes the current call; None if there is none.

        owner  the module that makes the call, if known
        """
        if self.model is None:
            return NO_MODULE
        found = (self.paths[id(caller)] for caller in chain((owner,), _callers()) if id(caller) in self.paths)
        return next(found, None)


def call_frames() -> Iterator[FrameType]:
    """Yield the Python frames of the current call stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _callers() -> Iterator[object]:
    """Yield the `self` of each method on the call stack, innermost first."""
    for frame in call_frames():
        code = frame.f_code
        # f_locals copies all variables, so we ask for it only where it has a `self`
        named = "self" in code.co_varnames or "self" in code.co_freevars or "self" in code.co_cellvars
        if named and frame.f_globals is not _OWN and (local := frame.f_locals.get("self")) is not None:
            yield local


def _calling_modules() -> Iterator[nn.Module]:
    """Yield the modules on the call stack, each once, innermost first."""
    seen: set[int] = set()
    for caller in _callers():
        if isinstance(caller, nn.Module) and id(caller) not in seen:
            seen.add(id(caller))
            yield caller


def _ordinary_mode() -> AbstractContextManager[object]:
    """Context manager: leave torch.inference_mode if it is on, so that ordinary tensors are created inside."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _is_compiled_call() -> bool:
    """Return whether the current call was made through torch.compile.

    An eager call of flex_attention does not count, although this function uses torch.compile internally.
    """
    # torch has no public sign of a compiled function that a stance runs eagerly, so its frame is looked for;
    # tests/see/test_watch_compiled.py fails if the frame is renamed
    return any(
        frame.f_code.co_name == "compile_wrapper"
        and frame.f_globals.get("__name__", "").startswith("torch._dynamo")
        and (frame.f_back is None or frame.f_back.f_globals.get("__name__") != "torch.nn.attention.flex_attention")
        for frame in call_frames()
    )


def _replace_output(
    out: Any, changed: Tensor, buffer: Tensor | None = None, weights: ResultWeights | None = None
) -> Any:
    """Return the result of a call with its output replaced; in a tuple, the output is the first entry.

    buffer   the tensor that was passed as the argument `out`, if any; the new output is copied into it
    weights  the weights after the edit, which replace the second entry of the tuple; None keeps this entry
    """
    if buffer is not None:
        return buffer.copy_(changed)
    if isinstance(out, Tensor):
        return changed
    return (changed, *out[1:]) if weights is None else (changed, weights.value, *out[2:])


def _find_edited(out: Tensor | None) -> tuple[Record, Record] | None:
    """Return the inputs of a call before and after an edit of `intervene`, if `out` is its new output; else None."""
    made, records = getattr(_edits, "latest", (lambda: None, None))
    return records if out is not None and made() is out else None


def _custom_operator(func: Any) -> str:
    """Return the name of a custom operator, such as "flash_attn::_flash_attn_forward"; "" for torch's operators."""
    packet = getattr(func, "overloadpacket", func)
    name: str = getattr(packet, "_qualified_op_name", "")
    return "" if name.startswith(("aten::", "prims::", "regard::")) else name


def _find_module(model: object) -> nn.Module | None:
    if isinstance(model, nn.Module):
        return model
    owner = getattr(model, "__self__", None)  # a method of a model, such as model.generate
    if isinstance(owner, nn.Module):
        return owner
    if model is not None and not callable(model):
        raise ConfigError(f"watch takes a model, a function or None, not {type(model).__name__}")
    return None


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module with its path, without the "_orig_mod" that torch.compile adds to paths.

    The path of the model itself is its class name. If a module has several paths, the first is used. Apart from the
    names, the result equals that of `model.named_modules()`, which takes much longer.
    """
    own = type(getattr(model, "_orig_mod", model)).__name__
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append((prefix[:-1] or own, module))
            for name, child in reversed(module._modules.items()):
                if child is not None:
                    waiting.append((prefix if name == "_orig_mod" else f"{prefix}{name}.", child))
    return found


def _check_patterns(layers: str | Sequence[str] | None, paths: dict[int, str]) -> tuple[str, ...] | None:
    if layers is None:
        return None
    patterns = (layers,) if isinstance(layers, str) else tuple(layers) if isinstance(layers, Iterable) else (layers,)
    if wrong := [each for each in patterns if not isinstance(each, str)]:
        raise ConfigError(f"layers takes names or patterns of modules, such as 'blocks.3*', not {wrong[0]!r}")
    for pattern in patterns:
        if paths and not any(_is_selected(path, (pattern,)) for path in paths.values()):
            some = ", ".join(list(paths.values())[1:6])
            raise ConfigError(f"layers={pattern!r} matches no module of the model; it has {some} and so on")
    return patterns


def _is_selected(path: str, patterns: tuple[str, ...] | None) -> bool:
    """Return whether a glob pattern matches the path of a module, or of one that contains it; None matches all."""
    if patterns is None:
        return True
    parts = path.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(prefix, pattern) for prefix in prefixes for pattern in patterns)


def _is_standard(kind: type[nn.Module]) -> bool:
    """Return whether a class is nn.TransformerEncoderLayer or a subclass that does not override its self-attention."""
    return issubclass(kind, nn.TransformerEncoderLayer) and kind._sa_block is nn.TransformerEncoderLayer._sa_block


def _reason_unusable(q: Tensor) -> str | None:
    """Return the reason why a call with this q cannot be recorded; None if it can be recorded."""
    if torch._C._functorch.is_functorch_wrapped_tensor(q):
        return "calls inside a transform of torch.func, whose tensors end with it"
    if q.is_nested:
        return "calls on nested tensors; pad them with torch.nested.to_padded_tensor"
    if q.device.type == "meta" or type(q).__name__ == "FakeTensor":
        return "calls on meta or fake tensors, which hold no numbers"
    return None


@contextmanager
def _patch_method(kind: type[nn.Module], name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Context manager: call `wrapper(original, module, ...)` in place of the method `name` of a class of modules."""
    inherited = name not in vars(kind)
    original = getattr(kind, name)

    @wraps(original)
    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, module, *args, **kwargs)

    setattr(kind, name, method)
    try:
        yield
    finally:
        if inherited:
            delattr(kind, name)
        else:
            setattr(kind, name, original)
