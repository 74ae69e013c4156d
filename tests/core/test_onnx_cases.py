"""The cases of the package onnx for the Attention operator, opsets 23 to 25: every kernel gives the outputs of ONNX."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Positions, attend, causal, explain, padding, softcap, window
from regard.core.masks.algebra import Full, Mask

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
import_module("onnx.backend.test.case.node.attention")  # adds its cases to the list of cases
_ALL = import_module("onnx.backend.test.case.node")._NodeTestCases
# the others are the same cases, with the operator written out in smaller ones
CASES = {case.name: case for case in _ALL if [node.op_type for node in case.model.graph.node] == ["Attention"]}


def as_tensor(array: Any) -> Tensor:
    if array.dtype.name == "bfloat16":  # of ml_dtypes, unknown to torch
        return torch.from_numpy(array.astype("float32")).bfloat16()
    return torch.from_numpy(array.copy())


def read_case(name: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """The attributes, inputs and outputs of a case, by the names that the operator's definition gives them."""
    (node,) = CASES[name].model.graph.node
    schema = onnx.defs.get_schema("Attention")
    ((given, expected),) = CASES[name].data_sets
    inputs = [formal.name for formal, used in zip(schema.inputs, node.input, strict=False) if used]
    outputs = [formal.name for formal, used in zip(schema.outputs, node.output, strict=False) if used]
    return (
        {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute},
        {key: as_tensor(array) for key, array in zip(inputs, given, strict=True)},
        {key: as_tensor(array) for key, array in zip(outputs, expected, strict=True)},
    )


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.ndim == 4 else x.unflatten(2, (heads, -1)).transpose(1, 2)


def make_call(attributes: dict[str, Any], inputs: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """The arguments of `attend` for the operator's attributes and inputs: tensors and keywords."""
    q = split_heads(inputs["Q"], attributes.get("q_num_heads", 0))
    k, v = (split_heads(inputs[name], attributes.get("kv_num_heads", 0)) for name in "KV")
    positions = Positions(queries=0)  # ONNX places queries at the first keys unless there is a cache
    mask: Mask = Full()
    if "past_key" in inputs:
        positions = Positions(queries=inputs["past_key"].shape[2])
        k, v = torch.cat([inputs["past_key"], k], 2), torch.cat([inputs["past_value"], v], 2)
    if (lengths := inputs.get("nonpad_kv_seqlen")) is not None:
        positions = Positions(queries=-q.shape[2], offsets=lengths)
        mask &= padding(lengths=lengths)
    if attributes.get("is_causal"):
        mask &= causal()
    before, after = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
    if before >= 0 or after >= 0:
        mask &= window(before=None if before < 0 else before, after=None if after < 0 else after)
    scores: list[Any] = [softcap(attributes["softcap"])] if attributes.get("softcap") else []
    if (given := inputs.get("attn_mask")) is not None:
        boolean = given.dtype == torch.bool
        missing = (0, k.shape[2] - given.shape[-1])  # keys beyond the end of the mask are hidden
        given = torch.nn.functional.pad(given, missing, value=False if boolean else -torch.inf)
        given = given[(None,) * (4 - given.ndim)].expand(-1, -1, q.shape[2], -1)
        if boolean:
            mask &= given
        else:
            scores.append(given)
    return [q, k, v], {"mask": mask, "scores": scores, "beta": attributes.get("scale"), "positions": positions}


def test_all_cases_are_found() -> None:
    assert len(CASES) >= 93


@pytest.mark.parametrize("name", CASES)
def test_the_outputs_are_those_of_onnx(name: str) -> None:
    attributes, inputs, outputs = read_case(name)
    tensors, keywords = make_call(attributes, inputs)
    if "present_key" in outputs:
        assert torch.equal(tensors[1], outputs["present_key"])
        assert torch.equal(tensors[2], outputs["present_value"])
    expected = split_heads(outputs["Y"], attributes.get("q_num_heads", 0))
    # ONNX computed its outputs in the dtype of the inputs; all of them are at most 1 or so
    most = 1e-5 if expected.dtype == torch.float32 else 8 * torch.finfo(expected.dtype).eps
    able = [answer.kernel for answer in explain(*tensors, **keywords).answers if answer.able]
    assert len(able) >= 2
    for kernel in (None, *able):
        found = attend(*tensors, **keywords, kernel=kernel)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=most, msg=lambda text, k=kernel: f"{k}: {text}")
