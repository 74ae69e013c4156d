"""Model cards of the zoo: how each pretrained model was trained, on which data, and its measured metric."""

from dataclasses import dataclass

from regard.base.config import from_json
from regard.base.errors import CheckpointError
from regard.base.files import read_json
from regard.models.presets import find_pretrained

CARD = "card.json"


@dataclass(frozen=True, kw_only=True)
class Card:
    """The model card of a pretrained model.

    command          the command that trained the model
    metric           what was measured, and on which split of the data
    value            the measured result
    at_least         the lowest accepted result, for a metric where larger is better; else None
    at_most          the highest accepted result, for a metric where smaller is better; else None
    subset           number of test records of a shorter test; None is all of them
    subset_value     the result of the shorter test
    licence          licence of the training data
    parameters       number of parameters
    bytes            size of the model's folder in bytes
    example          an input: a text, or the name of a file beside the card
    example_command  a command that runs the model on an example
    """

    name: str
    about: str
    command: str
    seed: int
    metric: str
    unit: str
    value: float
    at_least: float | None = None
    at_most: float | None = None
    subset: int | None
    subset_value: float
    data: str
    licence: str
    parameters: int
    bytes: int
    seconds: float
    python: str
    torch: str
    example: str
    example_command: str

    def meets_bound(self, value: float) -> bool:
        """Return whether a result is accepted: not below `at_least` and not above `at_most`, where these are set."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def format(self, value: float) -> str:
        """Format a measured result as text with its unit."""
        return f"{100 * value:.4g} %" if self.unit == "%" else f"{value:.3g} {self.unit}".strip()


def read_card(name: str) -> Card:
    """Read the model card of a pretrained model. `list_models(pretrained=True)` lists the names.

    >>> read_card("digits-vit").command
    'regard train vision --folder runs/digits-vit'
    """
    folder = find_pretrained(name)
    if folder is None:
        raise CheckpointError(f"there is no pretrained model {name!r}; `list_models(pretrained=True)` lists them")
    return from_json(str(folder / CARD), Card, read_json(folder / CARD, CheckpointError))
