"""Every file reader of the package with valid files, and mutations of these files."""

import gzip
import io
import json
import pickle
import random
import shutil
import tarfile
import wave
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

import regard
from regard.base.array_files import read_arrays
from regard.base.files import decompress, read_bytes, read_json
from regard.base.media_files import decode_image, read_wav
from regard.base.plain_pickle import load_plain_pickle
from regard.cli.work_quiz import read_answers
from regard.core.positions import Rotary, YaRN
from regard.data.byte_pairs import BytePairTokenizer
from regard.data.fact_store import open_fact_store
from regard.data.image_formats import read_images
from regard.data.plain_text import read_text
from regard.data.sentence_pairs import read_sentence_pairs
from regard.data.spoken_digits import read_spoken_digits
from regard.data.tokenizers import load_tokenizer
from regard.lab import results
from regard.models.bert import BERTConfig
from regard.models.convert import export
from regard.models.gpt import GPTConfig
from regard.models.model import Config
from regard.models.presets import build_from_config
from regard.models.saving import read_config, read_weights, save as save_model
from regard.models.transformer import RelativeBuckets, TransformerConfig
from regard.models.vit import ViTConfig
from regard.recipes.run_folder import check_can_begin, find_data
from regard.see.serialization import load as load_records
from regard.train.checkpoint import Checkpoint, CheckpointFolder
from regard.train.log import MetricsLog
from regard.work.files import read_fields, read_matrix
from regard.work.notebook import read_sources

# pieces that damage a format more than random bytes do
PIECES = (
    *(
        b"[",
        b"]",
        b"{",
        b"}",
        b'"',
        b",",
        b":",
        b"\n",
        b"\0",
        b"\xff",
        b"null",
        b"true",
        b"-1",
        b"1e999",
        b"NaN",
        b"\\u",
    ),
    *(
        b"99999999999999999999",
        b"0.5",
        b"[" * 300,
        b"(" * 40,
        b"\xf0\x9f\x98\x80",
        b"K\x01",
        b"\x85",
        b"h\x00",
        b"R",
        b"b",
    ),
    *(b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x00", b"PK\x01\x02", b"data", b"fmt ", b"IHDR", b"IDAT"),
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return the data with one to four changes: flips, cuts, copies, insertions and swaps."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        size = min(rng.choice((1, 1, 2, 4, 9, 60)), len(changed) - at)
        match rng.randrange(7):
            case 0 if changed:
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + size]
            case 2:
                changed[at:at] = changed[at : at + size] * rng.choice((1, 3, 50))
            case 3:
                changed[at : at + rng.choice((0, size))] = rng.choice(PIECES)
            case 4:
                changed[at : at + size] = rng.randbytes(size)
            case 5:
                del changed[at:]
            case _:
                other = rng.randrange(len(changed) + 1)
                changed[at : at + size] = changed[other : other + size]
    return bytes(changed)


# values that a JSON file can have anywhere
HOSTILE = (
    *(None, True, False, "", "x", "x" * 100_000, "../..", -1, 0, 1, 3, 10**9, 10**400, -(10**400), 0.5, 1e308, 1e-320),
    *(float("nan"), float("inf"), [], [[]], [1, 2, 3], [None] * 1000, {}, {"a": 1}, {"kind": "GPT"}),
)


def replace_values(data: bytes, rng: random.Random) -> bytes:
    """Return JSON with one value, or one list or object as a whole, replaced by a hostile one."""
    whole = json.loads(data)
    holders: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            holders.append((value, key))
            collect(value[key])

    collect(whole)
    holder, key = rng.choice(holders)
    holder[key] = rng.choice(HOSTILE)
    return json.dumps(whole).encode()


@dataclass(frozen=True)
class Reader:
    """A reader, the name of its file, and valid contents of the file.

    read     called with the path of a file
    prepare  makes what has to be beside the file in its folder
    """

    name: str
    file: str
    seeds: tuple[bytes, ...]
    read: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda folder: None


def npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def image(kind: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(315, dtype=np.uint8).reshape(15, 7, 3)).convert(mode).save(file, kind)
    return file.getvalue()


def wav(width: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setparams((2, width, 8000, 0, "NONE", ""))
        opened.writeframes(bytes(range(120)))
    return file.getvalue()


def batch(protocol: int) -> bytes:
    pixels = np.arange(2 * 3072, dtype=np.uint64).astype(np.uint8).reshape(2, 3072)
    return pickle.dumps({"data": pixels, "labels": [3, 9], "filenames": ["a.png", "b.png"]}, protocol)


def tar(packed: bool) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz" if packed else "w") as archive:
        for name, data in (("cifar/train.bin", bytes([4]) + bytes(3072)), ("cifar/batches.meta.txt", b"a\n" * 10)):
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    return file.getvalue()


def sqlite(folder: Path) -> bytes:
    store = open_fact_store(folder / "seed.sqlite")
    store.save("Where was Ada born?", "In Town")
    return (folder / "seed.sqlite").read_bytes()


def checkpoint_files(folder: Path) -> tuple[bytes, bytes]:
    """The JSON file and the tensors of a checkpoint."""
    CheckpointFolder(folder).save(Checkpoint(7, {"model/a": torch.arange(5.0)}, {"losses": [[1, 2.0]]}, 0.5))
    return (folder / "step-00000007.json").read_bytes(), (folder / "step-00000007.safetensors").read_bytes()


def saved_models(folder: Path) -> dict[str, Path]:
    """Folders of small models by the name of their reader: one saved by regard, the others exported."""
    size: dict[str, Any] = {"vocab": 11, "context": 5, "width": 8, "depth": 1, "heads": 2}
    rotary = Rotary(scaling=YaRN(4.0, 64))
    llama: dict[str, Any] = {"bias": False, "tied": True, "norm": "rms", "activation": "gated-silu", "dropout": 0.0}
    t5: dict[str, Any] = {"order": "pre", "norm": "rms", "bias": False, "beta": 1.0, "scale_embedding": False}
    bart: dict[str, Any] = {"positions": "learned", "embedding_norm": True, "output_bias": True}
    rates = dict.fromkeys(("dropout", "attention_dropout", "ff_dropout"), 0.1)
    image: dict[str, Any] = {"image": 8, "patch": 4, "width": 8, "depth": 1, "heads": 2}
    configs: dict[str, Config] = {
        "regard": GPTConfig(**size, positions=rotary),
        "llama": GPTConfig(**size, **llama, positions=rotary),
        "dinov2": ViTConfig(**image, pool="class", classes=0),
        "distilbert": BERTConfig(**size, head="masked", segments=1),
        "bart": TransformerConfig(**size, **bart),
        "t5": TransformerConfig(**size, **t5, **rates, positions=RelativeBuckets(), tied=False, activation="relu"),
    }
    found = {}
    for name, config in configs.items():
        model, place = build_from_config(config, seed=0), folder / name
        save_model(model, place) if name == "regard" else export(model, place, model_type=name)
        found[f"{name} model"] = place
    return found


def model_reader(name: str, folder: Path) -> Reader:
    """The reader of the folder of a model, whose config.json is damaged."""

    def copy_weights(place: Path) -> None:
        for file in folder.glob("*.safetensors"):
            shutil.copy(file, place)

    config = (folder / "config.json").read_bytes()
    return Reader(name, "config.json", (config,), lambda file: regard.load(file.parent), copy_weights)


def read_store(file: Path) -> None:
    store = open_fact_store(file)
    store.answer("Where was Ada born?")
    store.all()
    store.save("Who?", "I")


def read_log(file: Path) -> None:
    log = MetricsLog(file.parent, 5)
    log.add(6, {"loss": 1.0})
    log.close()


def list_readers(folder: Path) -> list[Reader]:
    """All readers; `folder` is for files that the seeds are made from."""
    folder.mkdir(parents=True, exist_ok=True)
    config = GPTConfig(vocab=11, context=5, width=6, depth=1, heads=2)
    model = build_from_config(config, seed=0)
    save_model(model, folder / "model")
    with regard.watch(model) as seen:
        model(torch.tensor([[1, 2, 3]]))
    seen.save(folder / "seen.safetensors")
    tokenizer = BytePairTokenizer.train("low lower lowest", vocab=260)
    checkpoint_json, checkpoint_tensors = checkpoint_files(folder / "checkpoints")
    recordings = npz(
        samples=np.arange(-10, 13, dtype=np.int16), offsets=np.array([0, 5, 12, 23]), digit=np.array([4, 0, 9]),
        speaker=np.array([1, 0, 1]), speakers=np.array(["ann", "bob"]), sample_rate=np.array(8000),
    )  # fmt: skip
    run = json.dumps({"recipe": "vision", "settings": {"a": 1}, "data": None, "data at": None, "launch": None}).encode()
    problem = b'{"q": [[1, 0], ["1/2", -2.5]], "k": [[1, 2], [3, 4]], "v": [[1], [2]], "scaled": true}'
    lab = json.dumps({"format": results.FORMAT, "results": []}).encode()
    notebook = {"cells": [{"cell_type": "code", "source": ["%magic\n", "x = 1"], "metadata": {}}], "nbformat": 4}
    quiz = b'{"student": "ann", "count": 3, "answers": {"1": "b", "2": 0.3}}'
    return [
        Reader("json", "a.json", (problem, run), read_json),
        Reader("arrays", "a.npz", (npz(a=np.ones((2, 3)), b=np.array("x")), npy(np.arange(9))), read_arrays),
        Reader("gzip", "a.gz", (gzip.compress(b"some text\n" * 9),), lambda file: decompress(file, read_bytes(file))),
        Reader("wav", "a.wav", (wav(2), wav(3), wav(1)), read_wav),
        Reader(
            "image", "a.png", (*map(image, ("png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm")), image("png", "P")),
            lambda file: decode_image(file, read_bytes(file)),
        ),
        Reader("pickle", "a", (batch(2), batch(4)), lambda file: load_plain_pickle("a", read_bytes(file))),
        Reader("cifar", "train", (batch(2), batch(5)), lambda file: read_images(file.parent)),
        Reader("cifar binary", "train.bin", (bytes([3]) + bytes(3072),), lambda file: read_images(file.parent)),
        Reader("tar", "a.tar.gz", (tar(True), tar(False)), read_images),
        Reader("recordings", "a.npz", (recordings,), read_spoken_digits),
        Reader("tokenizer", "tokenizer.json", (json.dumps(tokenizer.to_json()).encode(), HF_TOKENIZER), load_tokenizer),
        Reader("text", "a.txt.gz", (gzip.compress("some Grüße\n".encode() * 9),), read_text),
        Reader(
            "sentences", "train.en", (b"one two\nthree\n",), lambda file: read_sentence_pairs(file.parent),
            lambda folder: (folder / "train.de").write_text("eins zwei\ndrei\n"),
        ),
        Reader("facts", "facts.sqlite", (sqlite(folder),), read_store),
        Reader(
            "model config", "config.json", ((folder / "model" / "config.json").read_bytes(),),
            lambda file: read_config(file.parent),
        ),
        Reader("weights", "a.safetensors", (save({"a": torch.arange(5.0), "b": torch.ones(2, 3)}),), read_weights),
        Reader("records", "a.safetensors", ((folder / "seen.safetensors").read_bytes(),), load_records),
        Reader(
            "checkpoint", "step-00000007.json", (checkpoint_json,),
            lambda file: CheckpointFolder(file.parent).load_latest(),
            lambda folder: (folder / "step-00000007.safetensors").write_bytes(checkpoint_tensors),
        ),
        Reader(
            "checkpoint tensors", "step-00000007.safetensors", (checkpoint_tensors,),
            lambda file: CheckpointFolder(file.parent).load_latest(),
            lambda folder: (folder / "step-00000007.json").write_bytes(checkpoint_json),
        ),
        Reader("log", "log.jsonl", (b'{"step": 1, "loss": 2.5}\n{"step": 2}\n',), read_log),
        Reader("run", "run.json", (run,), lambda file: (check_can_begin(file.parent, "vision", {"a": 1}, resume=True),
                                                        find_data(file.parent, None))),
        Reader("problem", "a.json", (problem,), read_fields),
        Reader("problem table", "a.csv", (b"q\n1,0\n1/2,-2.5\nk\n1,2\n3,4\n",), read_fields),
        Reader("problem arrays", "a.npz", (npz(q=np.eye(2), k=np.ones((2, 3)), v=np.ones((3, 1))),), read_fields),
        Reader("matrix", "q.npy", (npy(np.eye(3)),), lambda file: read_matrix(str(file), "--q")),
        Reader("notebook", "a.ipynb", (json.dumps(notebook).encode(),), read_sources),
        Reader("quiz", "a.json", (quiz,), read_answers),
        Reader("lab results", "a.json", (lab,), results._read),
        *(model_reader(name, place) for name, place in saved_models(folder / "models").items()),
    ]  # fmt: skip


HF_TOKENIZER = (
    b'{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": '
    b'{"type": "Whitespace"}, "post_processor": null, "decoder": null, "model": {"type": "WordLevel", "vocab": {"a": 0,'
    b'"b": 1}, "unk_token": "a"}}'
)
