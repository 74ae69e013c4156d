"""Saving and loading: exact, safe in a crash, and strict about damaged files."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.base.errors import CheckpointError, ConfigError, RegardError
from regard.core.positions import Llama3, Rotary
from regard.models import saving
from regard.models.davit import DaViTConfig
from regard.models.gpt import GPT, GPTConfig, SyntheticAttention
from regard.models.transformer import TransformerConfig
from regard.nn.embeddings import TokenEmbedding
from regard.nn.synthesizer import Synthesizer

TINY = GPTConfig(vocab=29, context=15, width=24, depth=2, heads=4, tied=False)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("config", [
    TINY,
    replace(TINY, positions=Rotary(scaling=Llama3(factor=4.0, original=64)), window=3),
    replace(TINY, mixer=SyntheticAttention(parts=("dense", "dot")), tied=True),
], ids=["plain", "a scaling", "a tuple"])  # fmt: skip
def test_a_saved_model_is_loaded_exactly(config: GPTConfig, tmp_path: Path) -> None:
    model = GPT(config)
    model.save(tmp_path / "model")
    loaded = regard.load(tmp_path / "model")
    assert loaded.config == config
    assert same(loaded, model)
    assert not loaded.training
    assert saving.load_config(tmp_path / "model") == config


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    model = GPT(TINY).to(dtype)
    model.save(tmp_path)
    loaded = regard.load(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert same(loaded, model)


def test_old_weights_are_deleted(tmp_path: Path) -> None:
    GPT(TINY).save(tmp_path)
    model = regard.build("birthplace", depth=1)
    model.save(tmp_path)
    assert len(list(tmp_path.glob("[!.]*"))) == 2
    assert same(regard.load(tmp_path), model)


def test_saves_that_overlap_leave_one_complete_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save has replaced the configuration and is about to delete the old weights, which the second writes."""
    old, new = GPT(TINY), GPT(replace(TINY, depth=1))
    old.save(tmp_path)
    second = threading.Thread(target=old.save, args=(tmp_path,))
    glob = Path.glob

    def start_second(self: Path, pattern: str) -> list[Path]:
        found = list(glob(self, pattern))
        if pattern.startswith("weights") and not second.is_alive() and second.ident is None:
            second.start()
            second.join(0.5)  # it waits for the lock, or without one it is finished
        return found

    monkeypatch.setattr(Path, "glob", start_second)
    new.save(tmp_path)
    second.join()
    monkeypatch.undo()
    assert same(regard.load(tmp_path), old)


@pytest.mark.parametrize("depth", [2_001, 10**7])
def test_a_depth_that_no_model_has_is_refused_at_once(depth: int, tmp_path: Path) -> None:
    GPT(TINY).save(tmp_path)
    edit_config(tmp_path, depth=depth)
    with pytest.raises(ConfigError, match=f"depth is {depth}, but a model has at most 2000 blocks"):
        regard.load(tmp_path)
    with pytest.raises(ConfigError, match="decoder_depth is 2001, but"):
        TransformerConfig(vocab=5, decoder_depth=2_001)
    with pytest.raises(ConfigError, match="depths is 2001, but"):
        DaViTConfig(depths=(1, 1, 2_001, 1))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_of_torch_is_used(device: str, tmp_path: Path) -> None:
    model = regard.build("gpt2", vocab=29, width=24, depth=1, heads=4, seed=3)
    model.save(tmp_path)
    with torch.device(device):
        inside = [regard.build("gpt2", vocab=29, width=24, depth=1, heads=4, seed=3), regard.load(tmp_path)]
    torch.set_default_device(device)
    try:
        inside += [regard.build("gpt2", vocab=29, width=24, depth=1, heads=4, seed=3), regard.load(tmp_path)]
    finally:
        torch.set_default_device(None)
    for other in inside:
        assert {parameter.device.type for parameter in other.parameters()} == {device}
        assert device == "meta" or same(other, model)
    with torch.device("meta"):
        assert same(regard.build("gpt2", vocab=29, width=24, depth=1, heads=4, seed=3, device="cpu"), model)


MOMENTS = ["while weights are written", "before weights are renamed", "before the configuration", "while it is renamed"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_crash_leaves_the_old_model(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = GPT(TINY), GPT(replace(TINY, depth=1))
    old.save(tmp_path)
    rename = Path.replace

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def fail_for(suffix: str):
        return lambda self, target: fail() if str(target).endswith(suffix) else rename(self, target)

    if moment == "while weights are written":
        monkeypatch.setattr(saving, "save_file", lambda tensors, file: (file.write_bytes(b"half"), fail()))
    elif moment == "before weights are renamed":
        monkeypatch.setattr(Path, "replace", fail_for(".safetensors"))
    elif moment == "before the configuration":
        monkeypatch.setattr(saving, "to_json", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail_for(".json"))
    with pytest.raises(KeyboardInterrupt):
        new.save(tmp_path)
    monkeypatch.undo()
    assert same(regard.load(tmp_path), old)
    assert not list(tmp_path.glob(".unfinished*"))


def test_a_kill_leaves_the_old_model(tmp_path: Path) -> None:
    """A process that ends without any clean-up, when the new weights lie there and the configuration does not."""
    old = GPT(TINY)
    old.save(tmp_path)
    child = os.fork()
    if child == 0:  # pragma: no cover
        saving.to_json = lambda config: os._exit(9)
        GPT(replace(TINY, depth=1)).save(tmp_path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert same(regard.load(tmp_path), old)


def edit(folder: Path, **changes: object) -> None:
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | changes))


def edit_config(folder: Path, **changes: object) -> None:
    edit(folder, config=json.loads((folder / "config.json").read_text())["config"] | changes)


def weights(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def without(folder: Path, name: str) -> None:
    tensors = load_file(weights(folder))
    del tensors[name]
    rewritten(folder, tensors)


def reshaped(folder: Path) -> None:
    rewritten(folder, load_file(weights(folder)) | {"norm.bias": torch.zeros(23)})


def whole_numbers(folder: Path) -> None:
    rewritten(folder, load_file(weights(folder)) | {"norm.bias": torch.zeros(24, dtype=torch.long)})


def rewritten(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Other weights, named as they should be."""
    file = weights(folder)
    save_file(tensors, file)
    edit(folder, weights=file.rename(folder / f"weights-{saving.content_hash(file)}.safetensors").name)


def flipped(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40] + bytes(40))


WRONG = {
    "no weights": (lambda folder: weights(folder).unlink(), "does not exist"),
    "half the weights": (
        lambda folder: weights(folder).write_bytes(weights(folder).read_bytes()[:999]),
        "not a complete",
    ),
    "a tensor gone": (lambda folder: without(folder, "head.weight"), "1 missing: head.weight"),
    "another kind": (whole_numbers, r"norm.bias in .* is torch.int64, but the model has torch.float32"),
    "another shape": (reshaped, r"norm.bias in .* is \(23,\), but its configuration has \(24,\)"),
    "other bytes": (
        lambda folder: flipped(weights(folder)),
        "is damaged: its contents do not match the hash in its name",
    ),
    "weights elsewhere": (lambda folder: edit(folder, weights=f"../{weights(folder).name}x"), "does not exist"),
    "another depth": (lambda folder: edit_config(folder, depth=3), "12 missing: blocks.2"),
    "a lower depth": (lambda folder: edit_config(folder, depth=1), "12 unknown: blocks.1"),
    "an unknown setting": (lambda folder: edit_config(folder, dept=3), "has dept, which GPTConfig does not have"),
    "a wrong type": (lambda folder: edit_config(folder, depth="3"), "depth takes a whole number, not '3'"),
    "a wrong value": (lambda folder: edit_config(folder, heads=5), "width must be a multiple of heads"),
    "an unknown model": (lambda folder: edit(folder, model="gtp"), "unknown architecture 'gtp'; did you mean 'gpt'"),
    "nothing known": (lambda folder: edit(folder, format="x"), "neither our format nor a model_type"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json; it has: weights-"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_spoiled_folder_is_refused(name: str, tmp_path: Path) -> None:
    GPT(TINY).save(tmp_path)
    spoil, message = WRONG[name]
    spoil(tmp_path)
    with pytest.raises(RegardError, match=message):
        regard.load(tmp_path)


def test_a_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder '.*nothing'; a model is a folder with config"):
        regard.load(tmp_path / "nothing")
    (tmp_path / "a file").write_text("")
    with pytest.raises(CheckpointError, match="a file is not a folder; a model is a folder with config"):
        regard.load(tmp_path / "a file")
    with pytest.raises(CheckpointError, match=r"pickled checkpoint.*if you trust it, convert it"):
        regard.load(tmp_path / "model.pt")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file; a model is saved as a folder"):
        GPT(TINY).save(tmp_path / "file")


def test_build_refuses_unknown_names_and_settings() -> None:
    with pytest.raises(RegardError, match="unknown model 'gtp2'; did you mean 'gpt2'"):
        regard.build("gtp2")
    with pytest.raises(ConfigError, match="GPTConfig has no setting 'dept'; did you mean 'depth'"):
        regard.build("birthplace", dept=3)
    with pytest.raises(ConfigError, match=r"GPTConfig.depth takes a whole number, not 2.5"):
        regard.build("birthplace", depth=2.5)
    with pytest.raises(ConfigError, match="build takes the name of a model"):
        regard.build(3)


def test_a_seed_decides_all_values() -> None:
    a, b, c = (regard.build("birthplace", depth=1, seed=seed) for seed in (0, 0, 1))
    assert same(a, b)
    assert not torch.equal(a.tokens.weight, c.tokens.weight)
    deeper = regard.build("birthplace", depth=2)
    assert torch.equal(a.blocks[0].attention.query_key_value.weight, deeper.blocks[0].attention.query_key_value.weight)


def test_on_the_meta_device_nothing_is_allocated() -> None:
    model = regard.build("gpt2-xl", device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_each_tensor_keeps_its_dtype(tmp_path: Path) -> None:
    model = GPT(TINY)
    model.norm.double()
    model.save(tmp_path)
    loaded = regard.load(tmp_path)
    assert same(loaded, model)
    assert (loaded.norm.weight.dtype, loaded.tokens.weight.dtype) == (torch.float64, torch.float32)
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_saved_files_are_readable_by_others(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        GPT(TINY).save(tmp_path)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}


def test_a_model_that_cannot_be_loaded_is_not_saved(tmp_path: Path) -> None:
    class Other(GPT):
        """A model of one's own."""

    with pytest.raises(CheckpointError, match="Other could not be loaded again"):
        Other(TINY).save(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"tokens\.weight has no numbers to save"):
        regard.build("birthplace", device="meta").save(tmp_path / "meta")
    for wrong, text in (
        ({"dtype": torch.int64}, "dtype takes a floating-point type"),
        ({"device": "nope"}, "device takes"),
    ):
        with pytest.raises(ConfigError, match=text):
            regard.build("birthplace", **wrong)


def test_a_layer_by_itself_begins_at_zero_not_at_random_memory() -> None:
    assert not TokenEmbedding(5, 3).weight.any()
    assert not Synthesizer(8, 2, 5).dense_keys.any()


def test_a_model_that_is_saved_while_another_is_loaded_does_not_mix_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shallow, deep = regard.build("birthplace", depth=1, width=32), regard.build("birthplace", depth=2, width=32)
    shallow.save(tmp_path)
    read, saved = saving.read_weights, []

    def save_first(file: Path) -> dict[str, torch.Tensor]:
        if not saved:
            saved.append(deep.save(tmp_path))  # another process, between config.json and the weights
        return read(file)

    monkeypatch.setattr(saving, "read_weights", save_first)
    assert regard.load(tmp_path).config == deep.config


@pytest.mark.parametrize("saves", [1, 3])
def test_weights_that_are_replaced_after_they_were_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    shallow, *deeper = (regard.build("birthplace", depth=depth, width=32) for depth in range(1, saves + 2))
    shallow.save(tmp_path)
    read = saving.read_weights

    def save_afterwards(file: Path) -> dict[str, torch.Tensor]:
        weights = read(file)
        if deeper:
            deeper.pop(0).save(tmp_path)  # another process, between the weights and their checksum
        return weights

    monkeypatch.setattr(saving, "read_weights", save_afterwards)
    assert regard.load(tmp_path).config.depth == saves + 1


def test_nan_in_a_damaged_folder_does_not_repeat_for_ever(tmp_path: Path) -> None:
    GPT(TINY).save(tmp_path)
    edit_config(tmp_path, dropout=float("nan"))
    with pytest.raises(RegardError, match="dropout"):
        regard.load(tmp_path)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        regard.load(tmp_path)


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="File name too long"):
        regard.load("x" * 300)
    with pytest.raises(CheckpointError, match="File name too long"):
        regard.load(tmp_path / ("x" * 300))


def test_a_configuration_of_any_width_allocates_nothing() -> None:
    huge = replace(TINY, width=1 << 39, positions=Rotary())
    assert huge.width == 1 << 39
