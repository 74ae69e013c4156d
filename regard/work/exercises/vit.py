"""Checks of the exercises on the Vision Transformer as torch modules: patches, attention, a block, the whole model."""

import numpy as np
import torch
from torch import Tensor

from regard.work.exercises.checks import Case, Draw, FunctionCheck, ModuleCheck
from regard.work.exercises.exercise import load_set
from regard.work.exercises.run_answer import TorchModule


def _draw_cases(*cases: tuple[Case, tuple[int, ...]]) -> Draw:
    """Return a function that samples test cases of a module: constructor arguments with a random input.

    cases  for each test case the constructor arguments and the shape of the input
    """

    def draw(generator: np.random.Generator) -> list[Case]:
        def tensor(shape: tuple[int, ...]) -> Tensor:
            return torch.from_numpy(generator.normal(size=shape))

        return [(arguments, (tensor(shape),)) for arguments, shape in cases]

    return draw


def _encoder(width: int, heads: int) -> TorchModule:
    """Return a torch.nn module that mixes tokens, used in tests in place of a student's attention or blocks.

    The module is a layer of torch, so that the tests do not reveal the solution of another exercise.
    """
    settings = {"d_model": width, "nhead": heads, "dim_feedforward": 7, "dropout": 0.0, "batch_first": True}
    return TorchModule("TransformerEncoderLayer", settings)


def _accuracy_cases(generator: np.random.Generator) -> list[Case]:
    """Sample test cases of logits and labels; on average more than half of the labels are predicted correctly.

    The last case has as many classes as images.
    """
    cases: list[Case] = []
    for b, w in ((97, 4), (53, 7), (31, 31)):
        logits = generator.normal(size=(b, w))
        labels = np.where(generator.random(b) < 0.5, logits.argmax(1), generator.integers(w, size=b))
        cases.append((torch.from_numpy(logits), torch.from_numpy(labels)))
    return cases


CHANNELS = TorchModule("Flatten", {"start_dim": 2})  # replaces the patches: every channel is a token

VIT = load_set(
    "vit",
    {
        "patches": ModuleCheck(
            _draw_cases(((3, 4, 10), (2, 3, 12, 8)), ((1, 2, 5), (3, 1, 6, 10)), ((2, 3, 7), (1, 2, 9, 6)))
        ),
        "attention": ModuleCheck(_draw_cases(((12, 3), (2, 5, 12)), ((10, 2), (1, 7, 10)), ((6, 1), (3, 4, 6)))),
        "block": ModuleCheck(_draw_cases(((6, 14, _encoder(6, 3)), (2, 5, 6)), ((4, 9, _encoder(4, 1)), (1, 3, 4)))),
        "vit": ModuleCheck(
            _draw_cases(
                ((CHANNELS, _encoder(6, 2), 5, 6, 5), (2, 5, 3, 2)), ((CHANNELS, _encoder(4, 1), 9, 4, 3), (3, 9, 2, 2))
            )
        ),
        "accuracy": FunctionCheck((_accuracy_cases,)),
    },
)
