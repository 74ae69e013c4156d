"""Probe nn.MultiheadAttention: in a copy, all projections are the identity, so that its inputs are q, k and v."""

import torch
from torch import Tensor, nn

from regard.core.heads import merge_heads, split_heads
from regard.see.measure.probes.functions import read_signature
from regard.see.measure.probes.module_copies import ModuleCopies, dtypes_and_device
from regard.see.measure.probes.probe import Probe, ProbeOptions, first_tensor


def probe_multihead(module: nn.MultiheadAttention, name: str, options: ProbeOptions) -> Probe:
    """Build the probe of a torch.nn.MultiheadAttention, in copies of which all projections are the identity."""
    copies = ModuleCopies(module, _set_identity_projections)
    heads, batch_first = module.num_heads, module.batch_first
    (dtype, *_), device = dtypes_and_device(module, options)

    def call(q: Tensor, k: Tensor, v: Tensor, **keywords: object) -> Tensor:
        merged = [merge_heads(x) if batch_first else merge_heads(x).transpose(0, 1) for x in (q, k, v)]
        out = first_tensor(copies.at(q.dtype)(*merged, **{**options.extra, **keywords}))
        return split_heads(out if batch_first else out.transpose(0, 1), heads)

    return Probe(
        name,
        call,
        heads=heads,
        kv_heads=heads,
        width=module.head_dim,
        equal_widths=True,
        value_width=module.head_dim,
        parameters=read_signature(module.forward).further,
        module=copies.reference,
        layout="b n (h c)" if batch_first else "n b (h c)",
        dtype=dtype,
        device=device,
    )


def _set_identity_projections(module: nn.Module) -> None:
    """Set all projections of an nn.MultiheadAttention to the identity; bias_k, bias_v and add_zero_attn are kept."""
    assert isinstance(module, nn.MultiheadAttention)
    d = module.embed_dim
    identity = torch.eye(d, dtype=module.out_proj.weight.dtype, device=module.out_proj.weight.device)
    for separate in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        module.register_parameter(separate, None)
    module.kdim = module.vdim = d
    module._qkv_same_embed_dim = True
    module.in_proj_weight = nn.Parameter(identity.repeat(3, 1))
    module.out_proj.weight = nn.Parameter(identity)
    for bias in (module.in_proj_bias, module.out_proj.bias):
        if bias is not None:
            nn.init.zeros_(bias)
