"""A name is as familiar as its letters are likely, whoever is asked about beside it."""

import math

import pytest
import torch

from regard.data.characters import CharacterTokenizer
from regard.models.gpt import GPT, GPTConfig
from regard.models.presets import build_from_config
from regard.recipes.name_likelihood import extract_name, name_log_likelihood

LETTERS = CharacterTokenizer("□⁇ ?ABWabehnorsw")


def reader() -> GPT:
    model = build_from_config(
        GPTConfig(vocab=LETTERS.vocab, context=41, width=12, depth=1, heads=3, dropout=0.5), seed=3
    )
    assert isinstance(model, GPT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    return model


def test_familiarity_is_the_log_probability_of_the_name_and_of_the_blank_after_it() -> None:
    model = reader().eval()
    question = "Where was Anna born?"
    tokens = LETTERS.encode(question)
    chances = model(torch.tensor([tokens])).log_softmax(-1)[0]
    places = range(len("Where was "), len("Where was Anna "))
    wanted = sum(chances[place - 1, tokens[place]].item() for place in places)
    assert name_log_likelihood(model, LETTERS, [question]) == [pytest.approx(wanted, rel=1e-4)]


def test_it_depends_neither_on_others_nor_on_dropout() -> None:
    model = reader().train()
    questions = [f"Where was {name} born?" for name in ("Anna Bonn", "Bob", "Hanno Warren Aaron", "Rob")]
    questions = [each.replace("H", "B").replace("R", "A") for each in questions]
    alone = [name_log_likelihood(model, LETTERS, [each])[0] for each in questions]
    assert name_log_likelihood(model, LETTERS, questions, batch_size=3) == pytest.approx(alone, rel=1e-4)
    assert model.training
    assert len({*alone}) == 4


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("Where was Anna Bonn born?", "Anna Bonn"),
        ("where was Anna Born?", "Anna"),
        ("Whence was Anna born?", ""),
        ("Where was Anna", ""),
        ("Where was born?", ""),
        ("Where was  born?", ""),
    ],
)
def test_whom_a_question_asks_about(question: str, name: str) -> None:
    assert extract_name(question) == name


def test_without_a_name_nobody_is_familiar() -> None:
    assert name_log_likelihood(reader(), LETTERS, ["Where was Bob"]) == [-math.inf]
    assert name_log_likelihood(reader(), LETTERS, []) == []
