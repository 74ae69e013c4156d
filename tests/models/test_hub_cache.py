"""Models in the cache folder of the Hugging Face Hub: found by name where `hf download` writes them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from regard.base.errors import CheckpointError
from regard.models.hub_cache import find_cached, hub_cache, list_cached

transformers = pytest.importorskip("transformers")
COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf" / "hub"


def download(cache: Path, name: str, commit: str = COMMIT, seed: int = 0) -> torch.nn.Module:
    """Write a randomly initialised GPT-2 as `hf download` does: links in a snapshot to files in blobs."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=37, n_positions=11, n_embd=12, n_layer=2, n_head=3)
    model = transformers.GPT2LMHeadModel(config).eval()
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    model.save_pretrained(repository / "blobs")
    for file in (repository / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    (repository / "refs" / "main").write_text(commit)
    return model


@pytest.mark.parametrize("name", ["gpt2", "someone/small.gpt-2"])
def test_a_downloaded_model_is_loaded_by_its_name(cache: Path, name: str) -> None:
    theirs = download(cache, name)
    tokens = torch.tensor([[3, 36, 5, 5, 11]])
    with torch.no_grad():
        torch.testing.assert_close(regard.load(name)(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-4)
    assert list_cached() == [name]


def test_a_folder_comes_before_the_cache(cache: Path) -> None:
    download(cache, "gpt2")
    regard.build("gpt2", vocab=7, context=5, width=6, depth=1, heads=2).save("gpt2")
    assert regard.load("gpt2").config.vocab == 7
    assert regard.load("induction-gpt").config.vocab == 95


def test_a_revision_that_is_not_main_is_not_used(cache: Path) -> None:
    download(cache, "gpt2")
    (cache / "models--gpt2" / "refs" / "main").write_text("0" * 40)
    assert find_cached("gpt2") is None
    (cache / "models--gpt2" / "refs" / "main").unlink()
    assert (find_cached("gpt2"), list_cached()) == (None, [])


@pytest.mark.parametrize(("data", "words"), [(b"\xff", "is not UTF-8 text"), (b"0" * 5000, "which is too large")])
def test_a_damaged_revision_is_an_error_that_names_the_file(cache: Path, data: bytes, words: str) -> None:
    ref = cache / "models--gpt2" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"main .*{words}"):
        find_cached("gpt2")


def test_the_error_says_how_to_get_a_model(cache: Path) -> None:
    with pytest.raises(CheckpointError) as preset:
        regard.load("gpt2")
    assert str(preset.value) == (
        f"'gpt2' is a preset without trained weights, and neither a folder nor in {cache}; `hf download gpt2` gets the "
        "model of this name from the Hugging Face Hub, regard.load takes the path of a folder too, and "
        "regard.build('gpt2') has random weights"
    )
    with pytest.raises(
        CheckpointError, match=r"no model of this name; .* and `hf download someone/llama` gets a model"
    ):
        regard.load("someone/llama")
    download(cache, "someone/llama-small")
    with pytest.raises(CheckpointError, match=r"no model of this name; did you mean 'someone/llama-small'\?"):
        regard.load("someone/lama-small")
    with pytest.raises(CheckpointError, match=r"no model of this name; did you mean 'gpt2'"):
        regard.load("GPT2")
    with pytest.raises(CheckpointError, match=r"there is no folder '\.\./a/b'; a model is a folder with config\.json"):
        regard.load("../a/b")


def test_a_download_without_weights_is_refused(cache: Path) -> None:
    download(cache, "gpt2")
    snapshot = find_cached("gpt2")
    assert snapshot is not None
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors and no model\.safetensors\.index\.json"):
        regard.load("gpt2")
    (snapshot / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        regard.load("gpt2")


def test_the_folder_of_the_cache_is_that_of_hugging_face(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    constants = """
import json
from huggingface_hub import constants
print(json.dumps(constants.HF_HUB_CACHE))
"""
    for settings in (
        {},
        {"HF_HOME": str(tmp_path / "home")},
        {"XDG_CACHE_HOME": str(tmp_path / "xdg")},
        {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")},
    ):
        for name in ("HF_HOME", "XDG_CACHE_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        theirs = subprocess.run([sys.executable, "-c", constants], capture_output=True, text=True, check=True)
        assert Path(json.loads(theirs.stdout)) == hub_cache()
