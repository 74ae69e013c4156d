"""The numbers of a training run, all of them: two runs of one plan end alike."""

from dataclasses import dataclass, field

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_number
from regard.train.averaging import ExponentialAverage, LastKAverage
from regard.train.optimizers import AdamW, Muon
from regard.train.schedule import Constant, Cosine, InverseRoot, Linear

PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How a model is trained.

    batch           records a step, over all processes and shares
    accumulate      shares into which the batch is cut, one after the other, where it does not fit at once
    precision       what the forward pass computes in; weights stay float32
    clip            the largest norm of the gradient, None for any
    averaging       weights that are evaluated and kept in the end are means over the run; None is the last ones
    evaluate_every  steps between evaluations, None for one at the end
    save_every      steps between states on disk
    keep            states on disk besides the best
    patience        evaluations without a better score after which the run stops; None never does
    choose          "best" by score or "last": whose weights the model has in the end
    compile         whether torch.compile goes over the model
    seed            of every generator that the model or the task may draw from
    """

    steps: int
    batch: int
    accumulate: int = 1
    optimiser: AdamW | Muon = field(default_factory=AdamW)
    schedule: Constant | Cosine | Linear | InverseRoot = field(default_factory=Cosine)
    clip: float | None = 1.0
    precision: str = "float32"
    averaging: ExponentialAverage | LastKAverage | None = None
    evaluate_every: int | None = None
    save_every: int = 500
    keep: int = 2
    patience: int | None = None
    choose: str = "last"
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "save_every", "keep"):
            check_integer(f"Plan({name})", getattr(self, name), 1)
        check_integer("Plan(seed)", self.seed, 0)
        for name in ("evaluate_every", "patience"):
            if getattr(self, name) is not None:
                check_integer(f"Plan({name})", getattr(self, name), 1)
        if self.batch % self.accumulate:
            raise ConfigError(f"a batch of {self.batch} has no {self.accumulate} equal shares; see Plan(accumulate)")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"Plan(precision) is one of {', '.join(PRECISIONS)}, not {self.precision!r}")
        if self.choose not in ("best", "last"):
            raise ConfigError(f"Plan(choose) is 'best' or 'last', not {self.choose!r}")
        if self.clip is not None and not check_number("Plan(clip)", self.clip) > 0:
            raise ConfigError(f"Plan(clip) is above 0 or None, not {self.clip}")
