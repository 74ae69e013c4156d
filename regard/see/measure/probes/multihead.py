"""torch's own nn.MultiheadAttention as a probe: a copy whose projections are the identity."""

import torch
from torch import Tensor, nn

from regard.see.measure.probes.functions import merge, signature_of, split
from regard.see.measure.probes.module_copies import ModuleCopies, home
from regard.see.measure.probes.probe import Probe, Wanted, first_tensor


def probe_multihead(module: nn.MultiheadAttention, name: str, wanted: Wanted) -> Probe:
    copies = ModuleCopies(module, _identify)
    heads, batch_first = module.num_heads, module.batch_first
    (dtype, *_), device = home(module, wanted)

    def call(q: Tensor, k: Tensor, v: Tensor, **extra: object) -> Tensor:
        flat = [merge(x) if batch_first else merge(x).transpose(0, 1) for x in (q, k, v)]
        out = first_tensor(copies.at(q.dtype)(*flat, **{**wanted.extra, **extra}))
        return split(out if batch_first else out.transpose(0, 1), heads)

    return Probe(
        name,
        call,
        heads=heads,
        kv_heads=heads,
        width=module.head_dim,
        equal_widths=True,
        value_width=module.head_dim,
        parameters=signature_of(module.forward)[0],
        module=copies.shown,
        layout="b n (h c)" if batch_first else "n b (h c)",
        dtype=dtype,
        device=device,
    )


def _identify(module: nn.Module) -> None:
    """Make every projection the identity; keys and values that the layer adds of its own stay."""
    assert isinstance(module, nn.MultiheadAttention)
    d = module.embed_dim
    one = torch.eye(d, dtype=module.out_proj.weight.dtype, device=module.out_proj.weight.device)
    for separate in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        module.register_parameter(separate, None)
    module.kdim = module.vdim = d
    module._qkv_same_embed_dim = True
    module.in_proj_weight = nn.Parameter(one.repeat(3, 1))
    module.out_proj.weight = nn.Parameter(one)
    for bias in (module.in_proj_bias, module.out_proj.bias):
        if bias is not None:
            nn.init.zeros_(bias)
