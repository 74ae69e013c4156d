"""A small model, task and plans: a run of twelve steps takes milliseconds."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.seeds import make_generator
from regard.data.sampler import ShuffledOrder
from regard.train.averaging import ExponentialAverage, LastKAverage
from regard.train.objectives import IGNORED, cross_entropy
from regard.train.optimizers import AdamW, Muon, ParamGroup
from regard.train.plan import TrainingPlan
from regard.train.schedule import Cosine
from regard.train.task import Loss

WIDTH, CLASSES, RECORDS, BATCH = 13, 5, 57, 24


class Tiny(nn.Module):
    """Two blocks between two layers, and a buffer that counts calls."""

    def __init__(self, dropout: float = 0.0, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@dataclass
class Points:
    """Classify points. Every fourth target is ignored, so that micro-batches have different counts."""

    batch_size: int = BATCH
    order: ShuffledOrder = field(init=False)

    def __post_init__(self) -> None:
        self.order = ShuffledOrder(RECORDS, self.batch_size, seed=5)
        self.x = torch.randn(RECORDS, 7, generator=make_generator(0))
        self.y = (self.x @ torch.randn(7, CLASSES, generator=make_generator(1))).argmax(1)
        self.seen = torch.where(torch.arange(RECORDS) % 4 == 0, IGNORED, self.y)

    def batch(self, step: int, part: int, of: int) -> tuple[Tensor, Tensor]:
        rows = self.order.at(step, part, of)
        return self.x[rows], self.seen[rows]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return cross_entropy(model(batch[0]), batch[1], smoothing=0.1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        logits = model(self.x)
        return {"likelihood": -nn.functional.cross_entropy(logits, self.y).item(), "drawn": torch.rand(()).item()}


def adamw(lr: float = 3e-2) -> AdamW:
    return AdamW(lr=lr, param_groups=(ParamGroup(pattern=r"^head", lr_scale=0.5, weight_decay_scale=0.0),))


def plan(**changes: Any) -> TrainingPlan:
    """A plan for `Points`, with some settings changed."""
    settings: dict[str, Any] = {
        "steps": 12, "batch_size": BATCH, "optimizer": adamw(), "schedule": Cosine(warmup=3, min_lr_ratio=0.1),
        "max_grad_norm": 0.3, "evaluate_every": 6, "save_every": 4,
    }  # fmt: skip
    return TrainingPlan(**settings | changes)


# plans with which several processes must give the results of one
PLANS = {
    "accumulated": plan(gradient_accumulation_steps=3, max_grad_norm=0.05, averaging=ExponentialAverage(decay=0.7)),
    "last": plan(averaging=LastKAverage(count=3, every=2)),
    "muon": plan(gradient_accumulation_steps=2, optimizer=Muon(lr=0.03, adamw=AdamW(lr=0.02))),
    "float16": plan(precision="float16"),
}
