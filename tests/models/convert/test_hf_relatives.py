"""Families that are one of our architectures under another name: same logits in both directions, in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.core.masks import padding
from regard.integrations.torchvision import let_torchvision_load
from regard.models.convert import export
from regard.models.saving import load
from tests.models.images import images

transformers = pytest.importorskip("transformers")
let_torchvision_load()

TEXT = {
    "vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 21,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": 53, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "max_position_embeddings": 17,
    "activation": "relu",
}  # fmt: skip
IMAGE = {
    "image_size": 12, "patch_size": 4, "num_channels": 2, "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_labels": 5,
}  # fmt: skip
DEIT = {**IMAGE, "intermediate_size": 40}
# the class of each, its configuration class and settings
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**TEXT, "pad_token_id": 1, "layer_norm_eps": 1e-5}),
    "roberta classes": ("RobertaForSequenceClassification", "RobertaConfig", {**TEXT, "num_labels": 5}),
    "roberta base": ("RobertaModel", "RobertaConfig", {**TEXT, "type_vocab_size": 1}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", DISTILBERT),
    "deit": ("DeiTForImageClassification", "DeiTConfig", DEIT),
    "deit with teacher": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", {**DEIT, "qkv_bias": False}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {**IMAGE, "mlp_ratio": 3}),
    "dinov2 base": ("Dinov2Model", "Dinov2Config", IMAGE),
}


def drawn(name: str) -> Any:
    """A model of theirs with weights large enough that no part of it hides."""
    torch.manual_seed(0)
    kind, config, settings = MODELS[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def texts() -> tuple[Tensor, list[int]]:
    """Token ids and the lengths of two texts; 0 and 1 are special tokens."""
    return torch.randint(4, 53, (2, 13), generator=torch.Generator().manual_seed(1)), [13, 6]


def is_image_model(model: Any) -> bool:
    return hasattr(model.config, "image_size") or hasattr(model.config, "patch")


@torch.no_grad()
def their_output(model: Any) -> Tensor:
    dtype = next(model.parameters()).dtype
    if is_image_model(model):
        out = model(images().to(dtype))
        return out.logits if hasattr(out, "logits") else out.last_hidden_state[:, 0]
    tokens, lengths = texts()
    real = (torch.arange(13) < torch.tensor(lengths)[:, None]).long()
    out = model(torch.where(real.bool(), tokens, 1), attention_mask=real)
    rows = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return rows[real.bool()] if rows.ndim == 3 else rows


@torch.no_grad()
def our_output(model: Any) -> Tensor:
    if is_image_model(model):
        return model(images())
    tokens, lengths = texts()
    out = model(tokens, padding=padding(lengths))
    rows = out.hidden if out.logits is None else out.logits
    return rows[torch.arange(13) < torch.tensor(lengths)[:, None]] if rows.ndim == 3 else rows


def check_close(ours: Tensor, theirs: Tensor, model: Any) -> None:
    """Ours may be off by twice what theirs is in the same precision, and a little."""
    truth = their_output(model.double())
    assert truth.std() > 0.1
    assert (ours.double() - truth).abs().max() <= 2 * (theirs.double() - truth).abs().max() + 2e-5


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_agree_in_both_directions(name: str, tmp_path: Path) -> None:
    model = drawn(name)
    model.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    expected = their_output(model)
    mine = our_output(ours)
    export(ours, tmp_path / "ours", model_type=model.config.model_type)
    kind = json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"][0]
    reopened, report = getattr(transformers, kind).from_pretrained(tmp_path / "ours", output_loading_info=True)
    allowed = {"embeddings.mask_token"}  # of DINOv2's pretraining
    assert not {key.partition(".")[2] if key.startswith("dinov2") else key for key in report["missing_keys"]} - allowed
    assert not report["unexpected_keys"]
    torch.testing.assert_close(their_output(reopened.eval()), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(our_output(load(tmp_path / "ours")), mine) or name.startswith(("deit", "dinov2"))
    check_close(mine, expected, model)
