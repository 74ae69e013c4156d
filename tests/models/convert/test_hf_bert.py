"""BERT of Hugging Face, read and written: same numbers, exact round trips."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError
from regard.core.masks import padding
from regard.models.bert import BERT, BERTConfig, BERTOutput
from regard.models.convert import FAMILIES, export
from regard.models.gpt import GPT, GPTConfig
from regard.models.presets import build
from regard.models.saving import load, read_weights

transformers = pytest.importorskip("transformers")

SETTINGS = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 17,
    "type_vocab_size": 3,
    "pad_token_id": None,
}
CLASSES = {
    "BertForPreTraining": {},
    "BertForMaskedLM": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    "BertForSequenceClassification": {"num_labels": 5, "hidden_act": "relu"},
    "BertModel": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2},
}
# names of what a class gives, in theirs and in ours
PARTS = {
    "BertForPreTraining": {"prediction_logits": "logits", "seq_relationship_logits": "pair_logits"},
    "BertForMaskedLM": {"logits": "logits"},
    "BertForSequenceClassification": {"logits": "logits"},
    "BertModel": {"last_hidden_state": "hidden", "pooler_output": "pooled"},
}


def drawn(name: str, **changes: Any) -> Any:
    """A model of theirs with weights large enough that no part of it hides."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**SETTINGS, **CLASSES[name], **changes})
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, segments, and which tokens are real: 13 of the first text, 6 of the second."""
    draws = torch.Generator().manual_seed(1)
    tokens, segments = torch.randint(53, (2, 13), generator=draws), torch.randint(3, (2, 13), generator=draws)
    return tokens, segments, torch.arange(13) < torch.tensor([[13], [6]])


@torch.no_grad()
def theirs_say(model: Any) -> dict[str, Tensor]:
    tokens, segments, real = inputs()
    out = model(tokens, token_type_ids=segments, attention_mask=real.long())
    return {name: only_real(out[name], real) for name in PARTS[type(model).__name__]}


@torch.no_grad()
def ours_say(model: Any, name: str) -> dict[str, Tensor]:
    tokens, segments, real = inputs()
    out: BERTOutput = model(tokens, segments=segments, padding=padding([13, 6]))
    return {theirs: only_real(getattr(out, ours), real) for theirs, ours in PARTS[name].items()}


def only_real(x: Tensor, real: Tensor) -> Tensor:
    return x[real] if x.ndim == 3 else x


@pytest.mark.parametrize("name", CLASSES)
def test_it_gives_the_outputs_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = drawn(name)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert not ours.training
    single, mine, truth = theirs_say(theirs), ours_say(ours, name), theirs_say(theirs.double())
    for part, exact in truth.items():
        allowed = 2 * (single[part].double() - exact).abs().max() + 1e-6
        assert (mine[part].double() - exact).abs().max() <= allowed, part
        assert exact.abs().max() > 0.1, part


@pytest.mark.parametrize("name", CLASSES)
def test_a_round_trip_is_exact(name: str, tmp_path: Path) -> None:
    theirs = drawn(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    export(ours, tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.config == ours.config
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in ours.state_dict().items())
    reopened, report = type(theirs).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report.values())
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(reopened.state_dict()[key], tensor), key
    for part, expected in theirs_say(theirs).items():
        assert torch.equal(theirs_say(reopened)[part], expected)


@pytest.mark.parametrize("head", ["pretraining", "masked", "classes", "none"])
def test_an_exported_model_is_loaded_by_transformers(head: str, tmp_path: Path) -> None:
    ours = BERT(
        BERTConfig(
            vocab=53, context=17, width=24, depth=2, heads=3, segments=3, head=head, classes=7, activation="silu"
        )
    ).eval()
    export(ours, tmp_path)
    name = next(name for name, implied in FAMILIES["bert"].architectures.items() if implied["head"] == head)
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    mine = ours_say(ours, name)
    for part, said in theirs_say(theirs).items():
        assert torch.allclose(said, mine[part], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "depth", "width", "heads"), [("bert-base", 12, 768, 12), ("bert-large", 24, 1024, 16)]
)
def test_presets_are_as_large_as_theirs(name: str, depth: int, width: int, heads: int) -> None:
    config = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads, intermediate_size=4 * width
    )
    with torch.device("meta"):
        theirs = transformers.BertForPreTraining(config)
    theirs.tie_weights()
    ours = build(name, device="meta")
    assert ours.parameter_count == sum(parameter.numel() for parameter in theirs.parameters())
    assert FAMILIES["bert"].read_config({**config.to_dict(), "architectures": ["BertForPreTraining"]}) == BERTConfig(
        width=width, depth=depth, heads=heads, ff_width=4 * width
    )


def test_an_old_checkpoint_with_extra_heads_is_loaded(tmp_path: Path) -> None:
    theirs = drawn("BertForPreTraining")
    theirs.save_pretrained(tmp_path)
    weights = {}
    for name, tensor in read_weights(tmp_path / "model.safetensors").items():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        weights[old] = tensor
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"].clone()
    weights["cls.predictions.decoder.bias"] = weights.pop("cls.predictions.bias")
    weights["bert.embeddings.position_ids"] = torch.arange(17)[None]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    said = theirs_say(theirs)["prediction_logits"]
    assert torch.allclose(ours_say(load(tmp_path), "BertForPreTraining")["prediction_logits"], said, atol=1e-5)
    change(tmp_path, architectures=["BertForMaskedLM"])
    masked = load(tmp_path)
    assert masked.config.head == "masked"
    assert torch.allclose(ours_say(masked, "BertForMaskedLM")["logits"], said, atol=1e-5)
    change(tmp_path, architectures=["BertModel"])
    tokens, segments, _ = inputs()
    with torch.no_grad():
        expected = theirs.bert(tokens, token_type_ids=segments).pooler_output
        assert torch.allclose(load(tmp_path)(tokens, segments=segments).pooled, expected, atol=1e-5)


def test_weights_that_are_not_tied_are_refused(tmp_path: Path) -> None:
    drawn("BertForMaskedLM").save_pretrained(tmp_path)
    weights = read_weights(tmp_path / "model.safetensors")
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"] + 1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"cls\.predictions\.decoder\.weight is not bert\.embeddings\.word"):
        load(tmp_path)


REFUSED = {
    "a decoder": ({"is_decoder": True}, "says is_decoder=True; only False is supported"),
    "other positions": (
        {"position_embedding_type": "relative_key"},
        "type='relative_key'; only 'abs",
    ),
    "another class": (
        {"architectures": ["BertForQuestionAnswering"]},
        "is of a BertForQuestionAnswering; supported are",
    ),
    "an odd activation": ({"hidden_act": "mish"}, "says hidden_act='mish', which should be one of gelu, gelu_new"),
    "a width in words": ({"hidden_size": "24"}, "says hidden_size='24', which should be a whole number of 0 or more"),
    "half a layer": ({"num_hidden_layers": 2.5}, r"says num_hidden_layers=2\.5, which should be a whole number"),
    "no head": ({"num_attention_heads": True}, "says num_attention_heads=True, which should be a whole number"),
    "a rate in words": ({"hidden_dropout_prob": "a lot"}, "says hidden_dropout_prob='a lot', which should be a number"),
    "no list": ({"architectures": 3}, "says architectures=3, which should be a list of words"),
    "odd labels": ({"id2label": 3}, "says id2label=3, which should be an object from numbers to labels"),
    "two activations": ({"hidden_act": ["gelu"]}, r"says hidden_act=\['gelu'\], which should be one of gelu"),
    "no such rate": ({"hidden_dropout_prob": 1.5}, "has settings that no model can have: dropout"),
    "no width": ({"hidden_size": None}, "config.json of this bert lacks hidden_size"),
    "another depth": ({"num_hidden_layers": 4}, r"lacks bert\.encoder\.layer\.3\."),
    "fewer layers": ({"num_hidden_layers": 2}, "16 tensors that the model does not have"),
}


def change(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_folder_is_refused(name: str, tmp_path: Path) -> None:
    settings, message = REFUSED[name]
    drawn("BertForPreTraining").save_pretrained(tmp_path)
    change(tmp_path, **settings)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_dropout_that_is_only_for_training_changes_nothing(tmp_path: Path) -> None:
    theirs = drawn("BertForSequenceClassification", classifier_dropout=0.4)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert ours.config.dropout == 0.1
    said = ours_say(ours, "BertForSequenceClassification")["logits"]
    assert torch.allclose(said, theirs_say(theirs)["logits"], atol=1e-5)


def test_a_model_that_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no hidden_act for 'gated-silu'"):
        FAMILIES["bert"].write_config(BERTConfig(activation="gated-silu"), "bert")
    with pytest.raises(ConfigError, match="bert: it is built from a BERTConfig, not GPTConfig"):
        export(GPT(GPTConfig(vocab=5, width=6, depth=1, heads=2)), tmp_path, model_type="bert")
