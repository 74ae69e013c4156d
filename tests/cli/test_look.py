"""`regard look`: what it prints, writes and draws is what the library gives, and bad input ends in one line."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from tokenizers import Tokenizer as Library, models, pre_tokenizers, processors
from torch import Tensor
from typer.testing import CliRunner, Result

from regard.base.shading import SHADES
from regard.cli import print_errors
from regard.cli.look import command
from regard.cli.looking.relevance import grid_side
from regard.data.tokenizers import load_tokenizer
from regard.models.bert import BERTConfig
from regard.models.convert import FAMILIES
from regard.models.davit import DaViTConfig
from regard.models.gpt import GPTConfig
from regard.models.model import Config
from regard.models.presets import build_from_config
from regard.models.saving import load
from regard.models.transformer import TransformerConfig
from regard.models.vit import ViTConfig
from regard.nn.windows import merge
from regard.recipes import vision
from regard.see.images import normalise_pixels, read_image
from regard.see.record import Seen
from regard.see.relevance import encoder_decoder_rollout, patch_map, rollout
from regard.see.watch import watch
from tests.see.test_report import Reader

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("look")(print_errors(command))
TEXT = "the cat sat on the mat"


def look(*words: str, stdin: str | None = None) -> Result:
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, list(words), input=stdin)


def look_json(*words: str) -> Any:
    result = look(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def error_of(*words: str) -> str:
    result = look(*words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("regard: ")
    return last.removeprefix("regard: ")


def save_model(path: Path, config: Config) -> str:
    model = build_from_config(config, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(6.0)  # heads that differ
    model.save(path)
    return str(path)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = GPTConfig(vocab=256, context=600, width=24, depth=3, heads=4, ff_width=20, tied=False)
    return save_model(tmp_path_factory.mktemp("gpt"), config)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = TransformerConfig(vocab=256, context=40, width=24, depth=2, heads=3, ff_width=20)
    return save_model(tmp_path_factory.mktemp("pair"), config)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = ViTConfig(image=20, patch=4, classes=7, width=24, depth=2, heads=3)
    return save_model(tmp_path_factory.mktemp("vit"), config)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("images") / "noise.png"
    pixels = torch.randint(0, 255, (31, 47, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    Image.frombytes("RGB", (47, 31), pixels.numpy().tobytes()).save(path)
    return str(path)


def watch_model(folder: str, *inputs: Tensor, **limits: Any) -> Seen:
    model = load(folder)
    with torch.no_grad(), watch(model, **limits) as seen:
        model(*inputs)
    return seen


def run_code(code: str) -> Any:
    """What code makes, by name, and the value of its last line as `last`."""
    *before, last = code.rstrip().split("\n")
    space: dict[str, Any] = {}
    exec(code if last.startswith(" ") else "\n".join(before), space)
    space["last"] = None if last.startswith(" ") else eval(last, space)
    return space


def test_json_has_the_statistics_of_the_library(gpt: str) -> None:
    tokens = torch.tensor([list(TEXT.encode())])
    seen = watch_model(gpt, tokens)
    found = look_json(gpt, TEXT)
    table = seen.table(tokens).sorted("spread", descending=False)
    assert [(head["layer"], head["head"]) for head in found["heads"]] == [(head.layer, head.head) for head in table]
    for head, truth in zip(found["heads"], table, strict=True):
        for column in ("entropy", "spread", "distance", "previous", "first", "induction"):
            assert head[column] == pytest.approx(getattr(truth, column), rel=1e-5)
    best = table[0]
    assert (found["chosen"]["layer"], found["chosen"]["head"]) == (best.layer, best.head)
    assert found["chosen"]["keys"] == list(TEXT)
    weights = seen[best.layer].weights()[0, best.head]
    torch.testing.assert_close(torch.tensor(found["chosen"]["map"]), weights)
    (relevance,) = found["relevance"]
    torch.testing.assert_close(torch.tensor(relevance["values"]), rollout(seen)[0, -1])
    assert relevance["title"] == "Relevance of each token for the output of the last token (rollout)"
    assert found["weights"] == "from the folder"
    again = run_code(found["code"])["seen"]
    assert torch.equal(again["blocks.1.attention"].entropy, seen["blocks.1.attention"].entropy)


def test_the_terminal_shows_heads_map_and_relevance(gpt: str) -> None:
    result = look(gpt, "abcabc", "--most", "5", "--sort", "induction", "--layer", "1", "--head", "2")
    assert result.exit_code == 0
    assert result.stderr == f"running {gpt} on 6 tokens\n"
    tokens = torch.tensor([list(b"abcabc")])
    seen = watch_model(gpt, tokens)
    lines = result.stdout.splitlines()
    start = lines.index("layer               head  entropy  spread  distance  previous  first  induction")
    table = seen.table(tokens).sorted("induction")
    for line, head in zip(lines[start + 1 : start + 6], table, strict=False):
        numbers = (head.entropy, head.spread, head.distance, head.previous, head.first, head.induction)
        assert line.split() == [head.layer, str(head.head), *(f"{number:.3f}" for number in numbers)]
    assert "5 of 12 heads" in lines[start + 6]
    at = lines.index("blocks.1.attention, head 2")
    drawn = lines[at + 1 : at + 7]
    assert [line[:2] for line in drawn] == ["a ", "b ", "c ", "a ", "b ", "c "]
    weights = seen["blocks.1.attention"].weights()[0, 2]
    brightest = int(weights[5].argmax())
    assert drawn[5][2 + 2 * brightest] == max(drawn[5][2:], key=SHADES.index)
    assert drawn[0][2:].rstrip() == "██"
    most = int(rollout(seen)[0, -1].argmax())
    first = lines[lines.index("Relevance of each token for the output of the last token (rollout)") + 1].split()
    assert first[:2] == [str(most), "abcabc"[most]]


def test_a_model_with_nan_weights_is_reported(tmp_path: Path) -> None:
    model = build_from_config(GPTConfig(vocab=256, context=20, width=24, depth=3, heads=4, ff_width=20), seed=3)
    with torch.no_grad():
        model.get_parameter("blocks.1.feedforward.down.weight").fill_(torch.nan)
    model.save(tmp_path / "broken")
    page = tmp_path / "page.html"
    result = look(str(tmp_path / "broken"), "abcabc", "--html", str(page), "--picture", str(tmp_path / "heads.png"))
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    note = "NaN: 4 of 12 heads have scores that are NaN or inf, first blocks.2.attention, head 0; their statistics"
    assert note in words
    assert note in page.read_text()
    assert "blocks.2.attention 0 nan nan nan nan nan nan" in words
    found = look_json(str(tmp_path / "broken"), "abcabc", "--layer", "2")
    assert [head["layer"] for head in found["heads"][:4]] == ["blocks.2.attention"] * 4
    assert found["heads"][0]["entropy"] is None
    assert found["relevance"] == []
    assert "?" in look(str(tmp_path / "broken"), "abcabc", "--layer", "2").stdout


def test_a_preset_says_that_its_weights_are_random(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = look("birthplace", "hi", "--most", "1", "--html", str(page))
    assert result.exit_code == 0
    assert result.stderr.startswith("birthplace is a preset with random weights,")
    assert "weights: random, from seed 0 (an untrained preset)" in result.stdout
    reader = Reader(page.read_text("utf-8"))
    assert "random, from seed 0" in reader.words
    assert "model = build('birthplace', seed=0).eval()" in reader.code[0]


@pytest.mark.parametrize(("length", "cells"), [(50, "50 x 50"), (100, "34 x 34"), (300, "38 x 38")])
def test_a_map_wider_than_the_terminal_is_pooled(gpt: str, length: int, cells: str) -> None:
    result = look(gpt, "ab" * (length // 2), "--most", "1")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    if length == 50:
        assert "weights in" not in result.stdout
    else:
        assert f", {length} x {length} weights in {cells} cells" in result.stdout


def test_the_page_can_be_run_again_and_is_bounded(gpt: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = "<img src=x onerror=alert(1)></script>" * 14
    result = look(gpt, text[:512], "--html", str(page), "--most", "1")
    assert result.exit_code == 0
    written = page.read_text("utf-8")
    assert f"wrote {page}, {page.stat().st_size:,} bytes" in result.stderr
    assert len(written) < 3_000_000
    reader = Reader(written)
    assert not reader.names & {"script"}
    assert all(source.startswith("data:") for source in reader.sources)
    space = run_code(reader.code[0])
    exec(reader.code[1].replace("print(", "shown = ("), space)
    rows = [[head.layer, str(head.head), f"{head.entropy:.4f}"] for head in space["shown"]]
    assert [row[:3] for row in reader.rows[1:13]] == rows
    assert "rollout(seen, rows=[-1])[0, 0]" in reader.code[3]
    assert eval("rollout(seen, rows=[-1])[0, 0]", {**space, "rollout": rollout}).shape == (512,)


def test_the_picture_opens(gpt: str, vit: str, picture: str, tmp_path: Path) -> None:
    for folder, given in ((gpt, "a $b_ 漢"), (vit, picture)):
        file = tmp_path / "maps.png"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert look(folder, given, "--picture", str(file), "--most", "1").exit_code == 0
        with Image.open(file) as image:
            assert image.format == "PNG"
            assert image.width >= 1200


def test_an_encoder_decoder_has_relevance_of_source_and_target(pair: str) -> None:
    found = look_json(pair, "source!", "--target", "target", "--layer", "decoder.blocks.1.cross")
    source, target = (torch.tensor([list(text)]) for text in (b"source!", b"target"))
    seen = watch_model(pair, source, target)
    both = encoder_decoder_rollout(seen)
    assert [(len(each["labels"]), each["title"].split()[3]) for each in found["relevance"]] == [
        (7, "source"),
        (6, "target"),
    ]
    torch.testing.assert_close(torch.tensor(found["relevance"][0]["values"]), both.source[0, -1])
    torch.testing.assert_close(torch.tensor(found["relevance"][1]["values"]), both.target[0, -1])
    assert (found["chosen"]["queries"], found["chosen"]["keys"]) == (list("target"), list("source!"))
    induction = {head["layer"]: head["induction"] for head in found["heads"] if head["head"] == 0}
    assert induction["decoder.blocks.0.cross"] is None
    assert induction["encoder.blocks.0.attention"] is None  # no letter of `source!` comes twice
    assert induction["decoder.blocks.0.attention"] is not None  # t does
    result = look(pair, "source!", "--target", "target", "--layer", "decoder.blocks.1.cross")
    assert "keys: s o u r c e !" in result.stdout
    assert "running" in result.stderr
    assert "7 source tokens, 6 target tokens" in result.stderr


def test_a_target_starts_with_decoder_start_token_id(tmp_path: Path) -> None:
    folder = save_model(tmp_path, TransformerConfig(vocab=256, context=40, width=24, depth=1, heads=3, ff_width=20))
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 7}')
    found = look_json(folder, "abc", "--target", "de", "--layer", "decoder.blocks.0.cross")
    assert found["chosen"]["queries"] == ["\x07", "d", "e"]
    assert run_code(found["code"])["target"].tolist() == [[7, 100, 101]]


def test_a_vision_transformer_has_relevance_for_its_class_token(vit: str, picture: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = look_json(vit, picture, "--html", str(page))
    image = normalise_pixels(read_image(picture, 20))
    seen = watch_model(vit, image)
    truth = patch_map(rollout(seen))[0]
    assert truth.shape == (5, 5)
    torch.testing.assert_close(torch.tensor(found["overlays"][0]["values"]), truth)
    layer, head = found["chosen"]["layer"], found["chosen"]["head"]
    own = seen[layer].weights()[0, head, 0, 1:].reshape(5, 5)
    torch.testing.assert_close(torch.tensor(found["overlays"][1]["values"]), own)
    assert found["chosen"]["keys"][:3] == ["class", "0,0", "0,1"]
    reader = Reader(page.read_text("utf-8"))
    space = run_code(reader.code[0])
    torch.testing.assert_close(
        eval(reader.code[3].split("\n")[-1], {**space, "patch_map": patch_map, "rollout": rollout}), truth
    )
    shown = look(vit, picture, "--most", "1").stdout
    assert "Relevance of each patch for the class token (rollout)" in shown


def test_mean_pooling_and_grey_images(picture: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, ViTConfig(image=12, patch=4, channels=1, width=12, depth=2, heads=2, pool="mean"))
    found = look_json(folder, picture)
    seen = watch_model(folder, normalise_pixels(read_image(picture, 12, channels=1)))
    truth = patch_map(rollout(seen), prefix=0, pool="mean")[0]
    torch.testing.assert_close(torch.tensor(found["overlays"][0]["values"]), truth)
    assert found["overlays"][0]["title"] == "Relevance of each patch for the mean of the patches (rollout)"
    assert run_code(found["code"])["image"].shape == (1, 1, 12, 12)


def test_a_davit_shows_received_weights_of_windows(picture: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, DaViTConfig(classes=5, widths=(8, 12), depths=(1, 1), heads=(2, 3), window=5))
    found = look_json(folder, picture, "--layer", "stages.1.blocks.0.window.attention", "--head", "2")
    seen = watch_model(folder, normalise_pixels(read_image(picture, 224)))
    received = seen["stages.1.blocks.0.window.attention"].received[:, 2, :, None]
    truth = merge(received, 5, 28, 28)[0, :, :, 0]
    torch.testing.assert_close(torch.tensor(found["overlays"][0]["values"]), truth)
    assert any(note.startswith("No relevance: windows") for note in found["notes"])
    assert (grid_side(224, 0), grid_side(224, 3), grid_side(30, 1)) == (56, 7, 4)
    channels = look_json(folder, picture, "--layer", "stages.0.blocks.0.channel.attention")
    assert channels["chosen"]["keys"][:2] == ["channel 0", "channel 1"]
    assert "window.attention" in channels["overlays"][0]["title"]


def test_special_tokens_have_their_names(tmp_path: Path) -> None:
    folder = save_model(tmp_path, BERTConfig(vocab=11, context=9, width=12, depth=2, heads=2, ff_width=8))
    words = {word: number for number, word in enumerate(["[CLS]", "[SEP]", "?", "the", "cat", "</script>", "[b]x[/b]"])}
    library = Library(models.WordLevel(words, unk_token="?"))
    library.add_special_tokens(["[CLS]", "[SEP]"])
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 0), ("[SEP]", 1)])
    library.save(str(tmp_path / "tokenizer.json"))
    found = look_json(folder, "the cat </script>")
    assert found["chosen"]["keys"] == ["[CLS]", "the", "cat", "</script>", "[SEP]"]
    seen = watch_model(folder, torch.tensor([load_tokenizer(folder).encode("the cat </script>")]))
    torch.testing.assert_close(torch.tensor(found["relevance"][0]["values"]), rollout(seen)[0, 0])
    assert "first token" in found["relevance"][0]["title"]
    assert "load_tokenizer" in found["code"]
    assert "\n[b]x[/b] " in look(folder, "the [b]x[/b] cat").stdout  # no markup of the terminal either
    assert torch.equal(run_code(found["code"])["seen"]["blocks.1.attention"].lse, seen["blocks.1.attention"].lse)


def test_bytes_that_are_not_text_are_shown_as_hex(gpt: str) -> None:
    assert look_json(gpt, "aé\x1b[1m")["chosen"]["keys"] == ["a", "\\xc3", "\\xa9", "\x1b", "[", "1", "m"]
    result = look(gpt, "[bold]\x1b[31m", "--most", "1")
    assert "\x1b" not in result.stdout
    assert "\n    \\x1b " in result.stdout or "\n\\x1b " in result.stdout


def test_a_hugging_face_folder_gives_the_scaling_of_pixels(picture: str, tmp_path: Path) -> None:
    from transformers import ViTImageProcessorPil

    config = ViTConfig(image=20, patch=4, classes=7, width=24, depth=2, heads=3)
    build_from_config(config, seed=1).export(tmp_path)
    settings = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25], "resample": 3}
    processor = ViTImageProcessorPil(size={"height": 20, "width": 20}, **settings)
    processor.save_pretrained(tmp_path)
    found = look_json(str(tmp_path), picture)
    assert any(
        "mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25) (from preprocessor_config.json)" in n for n in found["notes"]
    )
    with Image.open(picture) as image:
        theirs = processor(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(run_code(found["code"])["image"], theirs, atol=1e-5, rtol=0)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": "x"}')
    assert "preprocessor_config.json has no valid scaling of pixels" in error_of(str(tmp_path), picture)


def test_a_hugging_face_gpt2(tmp_path: Path) -> None:
    config = GPTConfig(vocab=256, context=31, width=24, depth=2, heads=3)
    build_from_config(config, seed=1).export(tmp_path)
    assert {head["layer"] for head in look_json(str(tmp_path), "hello")["heads"]} == {
        "blocks.0.attention",
        "blocks.1.attention",
    }


@pytest.fixture(scope="module")
def pegasus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that regard does not read itself."""
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    torch.manual_seed(0)
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    sizes = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20}
    folder = tmp_path_factory.mktemp("pegasus")
    config = PegasusConfig(vocab_size=300, decoder_start_token_id=0, max_position_embeddings=40, **heads, **sizes)
    PegasusForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def test_an_encoder_decoder_loaded_by_transformers(pegasus: str) -> None:
    found = look_json(pegasus, "the cat", "--target", "le chat", "--layer", "model.decoder.layers.1.encoder_attn")
    assert found["chosen"]["queries"] == ["\x00", *"le chat"]
    assert found["chosen"]["keys"] == list("the cat")
    again = run_code(found["code"])["seen"]
    layer, head = found["chosen"]["layer"], found["chosen"]["head"]
    torch.testing.assert_close(torch.tensor(found["chosen"]["map"]), again[layer].weights()[0, head])
    source, target = (torch.tensor(each["values"]) for each in found["relevance"])
    torch.testing.assert_close(source, encoder_decoder_rollout(again).source[0, -1])
    torch.testing.assert_close(target, encoder_decoder_rollout(again).target[0, -1])
    assert error_of(pegasus, "the cat").endswith("is an encoder-decoder: give the target text with --target")


def test_a_text_model_loaded_by_transformers(tmp_path: Path) -> None:
    from transformers import ElectraConfig, ElectraForMaskedLM

    sizes = {"embedding_size": 24, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = ElectraConfig(vocab_size=300, intermediate_size=20, max_position_embeddings=9, **sizes)
    ElectraForMaskedLM(config).save_pretrained(tmp_path)
    found = look_json(str(tmp_path), "abcabc")
    assert found["chosen"]["keys"] == list("abcabc")
    (relevance,) = found["relevance"]
    assert relevance["title"] == "Relevance of each token for the output of the first token (rollout)"
    assert error_of(str(tmp_path), "a" * 10).endswith("takes at most 9; shorten it by 1")


def test_a_missing_transformers_is_an_error(pegasus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert error_of(pegasus, "a", "--target", "b") == (
        f"{pegasus} is a pegasus, which regard cannot load itself (it can load: {', '.join(FAMILIES)}); it needs the "
        "package transformers, which is not installed: pip install 'regard[huggingface]'"
    )


def test_an_error_of_transformers_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "swn", "architectures": ["pipeline"]}')
    assert f"transformers cannot load {tmp_path} as a swn: " in error_of(str(tmp_path), "abc")


def test_layers_and_rows_limit_the_records(gpt: str) -> None:
    found = look_json(gpt, TEXT, "--layers", "blocks.1", "--layers", "blocks.2", "--rows", "0,3:5,-1")
    seen = watch_model(gpt, torch.tensor([list(TEXT.encode())]), layers=["blocks.1", "blocks.2"], rows=[0, 3, 4, -1])
    assert {head["layer"] for head in found["heads"]} == set(seen)
    layer, head = found["chosen"]["layer"], found["chosen"]["head"]
    torch.testing.assert_close(torch.tensor(found["chosen"]["map"]), seen[layer].weights()[0, head])
    assert found["relevance"] == []
    assert "No relevance: rollout needs every layer and every row." in found["notes"]
    assert run_code(found["code"])["seen"][layer].rows_kept == (0, 3, 4, 21)
    assert "\nt " in look(gpt, "pqrst", "--rows", "-1", "--most", "1").stdout


def test_a_text_may_come_from_stdin(gpt: str) -> None:
    result = CliRunner().invoke(app, [gpt, "-", "--json"], input="from stdin\n")
    assert json.loads(result.stdout)["prompt"] == "from stdin"


def test_a_long_text_is_not_repeated_on_the_page(tmp_path: Path) -> None:
    folder = save_model(tmp_path, GPTConfig(vocab=256, context=5000, width=8, depth=1, heads=1, ff_width=8))
    found = look_json(folder, "ab" * 2250)
    assert found["prompt"].endswith("... (4,500 characters)")
    assert "open('text.txt').read()" in found["code"]


def test_an_unknown_model_suggests_the_nearest() -> None:
    assert error_of("brthplace", "x").startswith(
        "there is no folder 'brthplace', and no model of this name; did you mean 'birthplace'"
    )
    assert "did you mean 'vit-ti/16'" in error_of("vit-ti/61", "x")
    assert error_of("no/such/place", "x").startswith(
        "there is no folder 'no/such/place'; a model is a folder with config.json"
    )
    assert error_of("vit-ti/16") == "there is no text or image; give one after the model, or - to read it from stdin"


def test_a_pretrained_model_is_shown_on_its_example() -> None:
    found = json.loads(look("--json", "--sort", "induction").stdout)
    assert (found["model"], found["weights"]) == ("induction-gpt", "trained, from the package")
    assert (found["heads"][0]["layer"], found["heads"][0]["induction"] > 0.9) == ("blocks.1.attention", True)
    assert found["chosen"]["queries"][:3] == ["K", "x", "7"]
    assert "words = load_tokenizer(pretrained_folder('induction-gpt'))" in found["code"]
    layer, head = found["chosen"]["layer"], found["chosen"]["head"]
    again = run_code(found["code"])["seen"][layer].weights()[0, head]
    torch.testing.assert_close(again, torch.tensor(found["chosen"]["map"]))


def test_an_image_is_scaled_as_in_the_training_of_the_pretrained_model() -> None:
    found = json.loads(look("digits-vit", "--json").stdout)
    assert any("mean=(0.5,), std=(0.25,) (from preprocessor_config.json)" in note for note in found["notes"])
    image = run_code(found["code"])["image"]
    pixels = vision.load_data(None, vision.built_in()).test.pixels[:1]
    torch.testing.assert_close(image, vision.normalize_pixels(pixels / 255))


def test_the_target_of_a_pretrained_translation_begins_with_its_start_token() -> None:
    found = json.loads(
        look("number-words", "twenty", "--target", "zwanzig", "--layer", "decoder.blocks.0.attention", "--json").stdout
    )
    assert found["chosen"]["queries"] == ["<1>", "zwanzig"]
    assert "target = torch.tensor([[1] + words.encode('zwanzig', special=False)])" in found["code"]


def test_errors_of_text_and_images(gpt: str, vit: str, picture: str, tmp_path: Path) -> None:
    assert error_of(gpt, picture) == (
        f"{gpt} takes text, but {picture} is an image; use a ViT, such as vit-ti/16, or a DaViT"
    )
    assert error_of(vit, "a dog") == f"{vit} takes an image, but there is no file 'a dog'; give a png or jpeg"
    assert error_of(vit, "a" * 5000).startswith(f"{vit} takes an image, but there is no file 'aaa")
    broken = tmp_path / "broken.png"
    broken.write_text("no image")
    assert error_of(vit, str(broken)) == (
        f"{broken} cannot be read as an image: its 8 bytes are truncated or of an unknown format"
    )
    assert error_of(vit, str(tmp_path)) == f"{tmp_path} is a folder; pass a file"
    assert error_of(vit, picture, "--tokenizer", "x.json") == f"--tokenizer is for text; {vit} takes an image"


def test_errors_of_tokens_and_targets(gpt: str, pair: str) -> None:
    assert error_of(gpt, "a" * 613) == (f"the text has 613 tokens, but {gpt} takes at most 600; shorten it by 13")
    assert error_of(gpt, "") == "the text is empty; give at least one token"
    assert error_of("birthplace-synthesizer", "a" * 128).endswith("takes at most 127; shorten it by 1")
    assert error_of(gpt, "a", "--target", "b") == f"--target is for encoder-decoders; {gpt} takes one text"
    assert error_of(pair, "a") == f"{pair} is an encoder-decoder: give the target text with --target"
    assert error_of(pair, "a", "--target", "") == "the target is empty; give at least one token"


def test_a_tokenizer_of_another_model_is_an_error(tmp_path: Path) -> None:
    folder = save_model(tmp_path, GPTConfig(vocab=3, context=9, width=8, depth=1, heads=1, ff_width=8))
    library = Library(models.WordLevel({"a": 0, "b": 1, "c": 2, "d": 3}, unk_token="a"))
    library.save(str(tmp_path / "tokenizer.json"))
    assert error_of(folder, "d").startswith(f"the tokenizer returns token 3, but the vocabulary of {folder} has 3")


def test_models_without_attention_weights_are_errors(picture: str, tmp_path: Path) -> None:
    assert error_of("mlp", "x").startswith("mlp is a MLP, which has no attention over text or an image; these have: t")
    assert error_of("speech-stream", "x").startswith(
        "speech-stream is a Speech, which has no attention over text or an"
    )
    config = ViTConfig(image=12, patch=4, width=12, depth=1, heads=2, attention="linear")
    words = "ran, but no attention was recorded: it mixes positions without attention weights"
    assert error_of(save_model(tmp_path, config), picture) == f"{tmp_path} {words}"


def test_errors_of_layers_heads_and_rows(gpt: str) -> None:
    names = "blocks.0.attention, blocks.1.attention, blocks.2.attention"
    assert error_of(gpt, "abc", "--layer", "7") == (
        f"there is no record of layer '7'; give a number from 0 to 2 or a name: {names}"
    )
    assert (
        error_of(gpt, "abc", "--layer", "2", "--head", "4")
        == "blocks.2.attention has no head 4; there are heads 0 to 3"
    )
    assert error_of(gpt, "abc", "--layers", "blocks.7").startswith(
        "layers='blocks.7' matches no module of the model; it has"
    )
    assert error_of(gpt, "abc", "--layers", "norm") == (
        "no attention was recorded in --layers norm; omit it to list the attention layers"
    )
    assert error_of(gpt, "abc", "--rows", "3").startswith("rows has index 3, but blocks.0.attention has 3 rows")
    assert error_of(gpt, "abc", "--rows", "1,x") == "--rows takes indices and ranges such as 0,5,8:12,-1, not 'x'"
    assert error_of(gpt, "abc", "--rows", "5:5").startswith("--rows 5:5 selects no row")


def test_an_unknown_column_is_an_error_before_the_model_runs(gpt: str) -> None:
    result = look(gpt, "abc", "--sort", "sharp")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("regard: there is no column 'sharp' to sort by; choose from layer")


def test_errors_of_files_and_devices(gpt: str, tmp_path: Path) -> None:
    nowhere = tmp_path / "none" / "page.html"
    assert error_of(gpt, "abc", "--html", str(nowhere)) == (
        f"{nowhere} cannot be written: there is no folder {nowhere.parent}"
    )
    assert error_of(gpt, "abc", "--picture", str(tmp_path / "x.txt")) == (
        f"--picture {tmp_path / 'x.txt'} has no known picture format; end it in .png, .svg, .pdf"
    )
    result = look(gpt, "abc", "--html", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"regard: {tmp_path} cannot be written: Is a directory"
    assert error_of(gpt, "abc", "--device", "gpu").startswith("--device='gpu' cannot be used here: ")
    assert error_of(gpt, "abc", "--device", "gpu").endswith("; 'cpu' always can")
