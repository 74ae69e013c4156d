"""The hyperparameters of a training run."""

from dataclasses import dataclass, field

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_range
from regard.train.averaging import ExponentialAverage, LastKAverage
from regard.train.optimizers import AdamW, Muon
from regard.train.schedule import Constant, Cosine, InverseSquareRoot, Linear

PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The hyperparameters of a training run.

    steps           optimizer steps
    batch_size      samples per step, over all processes and gradient accumulation steps
    gradient_accumulation_steps  micro-batches per step, if the batch does not fit in memory at once
    optimizer       AdamW or Muon with its settings
    schedule        learning rate schedule
    max_grad_norm   gradient clipping: the largest norm of the gradient; None does not clip
    precision       dtype of the forward pass (autocast); weights stay float32
    averaging       weight averaging: the averaged weights are evaluated and kept; None uses the last weights
    evaluate_every  steps between validations; None validates at the end only
    save_every      steps between checkpoints
    keep_checkpoints  number of latest checkpoints to keep, besides the best
    patience        early stopping: validations without a better score until the run stops; None never stops
                    early
    load_best_at_end  load the weights with the best score at the end, instead of the last weights
    compile         compile the model with torch.compile
    cuda_graphs     on a GPU, replay whole training steps as CUDA graphs where possible; the losses are the same
    seed            seed of all random number generators
    """

    steps: int
    batch_size: int
    gradient_accumulation_steps: int = 1
    optimizer: AdamW | Muon = field(default_factory=AdamW)
    schedule: Constant | Cosine | Linear | InverseSquareRoot = field(default_factory=Cosine)
    max_grad_norm: float | None = 1.0
    precision: str = "float32"
    averaging: ExponentialAverage | LastKAverage | None = None
    evaluate_every: int | None = None
    save_every: int = 500
    keep_checkpoints: int = 2
    patience: int | None = None
    load_best_at_end: bool = False
    compile: bool = False
    cuda_graphs: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "gradient_accumulation_steps", "save_every", "keep_checkpoints"):
            check_integer(f"TrainingPlan({name})", getattr(self, name), 1)
        check_integer("TrainingPlan(seed)", self.seed, 0)
        for name in ("evaluate_every", "patience"):
            if getattr(self, name) is not None:
                check_integer(f"TrainingPlan({name})", getattr(self, name), 1)
        self.micro_batch_size(1)
        if self.precision not in PRECISIONS:
            raise ConfigError(f"TrainingPlan(precision) must be one of {', '.join(PRECISIONS)}, not {self.precision!r}")
        if self.max_grad_norm is not None:
            check_range("TrainingPlan(max_grad_norm)", self.max_grad_norm, 0, above=True)

    def micro_batch_size(self, world_size: int) -> int:
        """Return the number of samples in one micro-batch, the part of a batch that a process computes at once.

        Raises ConfigError if the batch cannot be divided evenly.

        world_size  number of processes
        """
        parts = world_size * self.gradient_accumulation_steps
        if self.batch_size % parts:
            fitting = self.batch_size + -self.batch_size % parts
            raise ConfigError(
                f"batch_size={self.batch_size} cannot be divided evenly by world size {world_size} x "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}; use a multiple of {parts}, "
                f"such as {fitting}"
            )
        return self.batch_size // parts
