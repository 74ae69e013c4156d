"""Models by name on the command line: pretrained models with an example input, and presets without weights."""

from pathlib import Path

from regard.base.errors import CheckpointError, ConfigError


def is_untrained(name: str) -> bool:
    """Return whether a name is the name of a preset, and not a folder or a pretrained or downloaded model."""
    from regard.models.presets import PRESETS
    from regard.models.saving import find_folder

    return name in PRESETS and find_folder(name) is None


def example_input(name: str, missing: str) -> str:
    """Return the example input of a pretrained model, from its model card: a text, or the path of a file.

    missing  error message if the name is a preset or a folder, which have no example. An unknown name has another error
             message
    """
    from regard.models.cards import read_card
    from regard.models.presets import PRESETS, find_pretrained
    from regard.models.saving import find_folder, unknown_model_error

    folder = find_pretrained(name)
    if folder is None:
        if Path(name).is_file():
            raise ConfigError(f"{name} is a file, not a model; give the model before its input")
        if name in PRESETS or find_folder(name):
            raise ConfigError(missing)
        error = str(unknown_model_error(name))
        hint = "" if "did you mean" in error else "; if this is the input, give the model before it"
        raise CheckpointError(error + hint)
    example = read_card(name).example
    return str(folder / example) if (folder / example).is_file() else example
