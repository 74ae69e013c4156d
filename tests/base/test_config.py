"""Configurations: overrides by name, type checks, JSON."""

import json
from dataclasses import dataclass, field, replace

import pytest

from regard.base.config import coerce, from_json, override, to_json
from regard.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    factor: float
    turns: tuple[float, float] = (1.0, 4.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    factor: float
    by: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    width: int
    depth: int = 2
    heads: int | None = None
    dropout: float = 0.1
    tied: bool = True
    positions: str = "learned"
    parts: tuple[str, ...] = ()
    stretch: Stretch | Shift | None = None
    either: tuple[int, ...] | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ConfigError(f"depth is {self.depth}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    model: Inner
    steps: int = 10
    derived: int = field(init=False, default=3)


RUN = Run(model=Inner(width=8))


def test_override_returns_a_changed_copy():
    changed = override(RUN, {"steps": 5, "model.depth": 4, "model.dropout": 0})
    assert changed == Run(model=Inner(width=8, depth=4, dropout=0.0), steps=5)
    assert isinstance(changed.model.dropout, float)
    assert RUN.steps == 10
    assert override(RUN, {}) == RUN


def test_a_dotted_name_changes_a_nested_setting():
    base = replace(RUN, model=replace(RUN.model, stretch=Stretch(factor=2.0)))
    assert override(base, {"model.stretch.factor": 3}).model.stretch == Stretch(factor=3.0)


def test_a_nested_configuration_can_be_replaced_and_changed_in_one_call():
    for order in (1, -1):
        changes = dict([("model", Inner(width=5)), ("model.depth", 7)][::order])
        assert override(RUN, changes).model == Inner(width=5, depth=7)
    changed = override(RUN.model, {"stretch": Stretch(factor=2.0), "stretch.factor": 5})
    assert changed.stretch == Stretch(factor=5.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": 5}, r"Run has no setting 'step'; did you mean 'steps'\? \(there are: model, steps\)"),
        ({"model.dept": 5}, "Inner has no setting 'dept'; did you mean 'depth'"),
        ({"zzz": 5}, r"Run has no setting 'zzz' \(there are"),
        ({"derived": 5}, "Run has no setting 'derived'"),
        ({"model.": 5}, "Inner has no setting ''"),
        ({"steps.more": 5}, "steps.more is not a setting: steps is 10, which has no settings"),
        ({"model.stretch.factor": 5}, "stretch.factor is not a setting: stretch is None, which has no settings"),
        ({"steps": "5"}, "Run.steps takes a whole number, not '5'"),
        ({"steps": 5.0}, r"Run.steps takes a whole number, not 5\.0"),
        ({"steps": True}, "Run.steps takes a whole number, not True"),
        ({"steps": None}, "Run.steps takes a whole number, not None"),
        ({"model.tied": 1}, "Inner.tied takes True or False, not 1"),
        ({"model.dropout": False}, "Inner.dropout takes a real number, not False"),
        ({"model.heads": "4"}, "Inner.heads takes a whole number or None, not '4'"),
        ({"model.positions": 3}, "Inner.positions takes a word, not 3"),
        ({"model.parts": ("a", 1)}, "Inner.parts takes a word, not 1"),
        ({"model.parts": "dense"}, "Inner.parts takes"),
        ({"model": 3}, "Run.model takes Inner, not 3"),
        ({"model.depth": 0}, "depth is 0"),
    ],
)
def test_invalid_changes_raise_an_error(changes, words):
    with pytest.raises(ConfigError, match=words):
        override(RUN, changes)


@pytest.mark.parametrize(
    "config",
    [
        RUN,
        Run(model=Inner(width=3, heads=4, tied=False, parts=("dense", "dot")), steps=1),
        Run(model=Inner(width=3, stretch=Stretch(factor=2.0, turns=(0.5, 3.0)))),
        Run(model=Inner(width=3, stretch=Shift(factor=2.0, by=5))),
        Run(model=Inner(width=3, either=(1, 2))),
        Run(model=Inner(width=3, either=("a", "b"))),
    ],
)
def test_a_configuration_is_read_back_from_json(config):
    text = json.dumps(to_json(config))
    assert from_json("a file", Run, json.loads(text)) == config


def test_json_has_the_names_of_classes():
    data = to_json(Run(model=Inner(width=3, parts=("a",))))
    assert data["kind"] == "Run"
    assert data["model"]["kind"] == "Inner"
    assert data["model"]["parts"] == ["a"]
    assert "derived" not in data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": 1, "more": 2}, "a file has extra, more, which Run does not have"),
        ({"derived": 1}, "a file has derived, which Run does not have"),
        ({"kind": "Walk"}, "a file has the settings of Walk, not of Run"),
        ({"steps": 1.5}, "a file: steps takes a whole number, not 1.5"),
        ({"model": {"kind": "Other"}}, "a file: model takes Inner, not"),
        ({"model": {"kind": "Inner"}}, "a file: model lacks width, which Inner needs"),
        ({"model": {"kind": "Inner", "width": 3, "stretch": {"kind": "Stretch"}}}, "lacks factor, which Stretch needs"),
        ({"model": {"kind": "Inner", "width": 3, "stretch": {"kind": "Bend"}}}, "takes Stretch or Shift or None"),
    ],
)
def test_invalid_json_raises_an_error(change, words):
    with pytest.raises(ConfigError, match=words):
        from_json("a file", Run, {**to_json(RUN), **change})


def test_missing_settings_and_wrong_types_raise_an_error():
    with pytest.raises(ConfigError, match="a file lacks model, which Run needs"):
        from_json("a file", Run, {"steps": 3})
    with pytest.raises(ConfigError, match=r"a file must be an object with the settings of Run, not \[1\]"):
        from_json("a file", Run, [1])


def test_a_class_with_only_derived_settings_needs_none():
    @dataclass(frozen=True)
    class Derived:
        area: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "area", 4)

    assert from_json("a file", Derived, to_json(Derived())) == Derived()


def test_a_setting_called_kind_raises_an_error():
    @dataclass(frozen=True)
    class Unlucky:
        kind: str = "x"

    with pytest.raises(
        ConfigError, match="Unlucky has a setting called 'kind', which is reserved for the name of its class"
    ):
        to_json(Unlucky())


def test_values_are_converted_to_their_annotated_type():
    assert coerce("x", 3, float) == 3.0
    assert isinstance(coerce("x", 3, float), float)
    assert coerce("x", [1, 2], tuple[int, int]) == (1, 2)
    assert coerce("x", [1, 2.5], tuple[float, ...]) == (1.0, 2.5)
    assert coerce("x", None, int | None) is None
    with pytest.raises(ConfigError, match=r"x takes .*, not \[1, 2, 3\]"):
        coerce("x", [1, 2, 3], tuple[int, int])
