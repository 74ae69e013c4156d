"""Questions with the text that answers them, and the answers that a model finds there.

A few thousand questions teach a model to look into a text. It can then ask itself about everybody who has one, and
learn its own answers as if it had been told them: what it could read it knows by heart from then on.
"""

from collections.abc import Mapping, Sequence

from regard.data.birthplaces import QUESTION, Question
from regard.data.characters import Characters
from regard.models.gpt import GPT
from regard.recipes.gaps import answers

MARKS = 4  # characters besides text, question and answer: a blank, two masks and the end
AT_ONCE = 1024  # questions that are answered together


def opened(texts: Mapping[str, str], questions: Sequence[Question], context: int) -> list[Question]:
    """The questions about people with a text (by name), each with as much of it as leaves room for the answer."""
    answer = max(len(each.place) for each in questions)
    places = {each.text: each.place for each in questions}
    asked = {QUESTION.format(name=name): text for name, text in texts.items()}
    return [Question(_after(asked[each], each, context, answer), places[each]) for each in asked if each in places]


def own_questions(
    model: GPT, letters: Characters, texts: Mapping[str, str], questions: Sequence[Question]
) -> list[Question]:
    """Questions about everybody with a text (by name) who is in no question yet, and the answers the model reads."""
    answer = max(len(each.place) for each in questions)
    known = {each.text for each in questions}
    asked = {QUESTION.format(name=name): text for name, text in texts.items()}
    new = [each for each in asked if each not in known]
    prompts = [_after(asked[each], each, model.config.context, answer) for each in new]
    told = [letters.decode(text.body) for text in answers(model, letters, prompts, AT_ONCE)]
    # nothing, or a run of letters without an end, is no answer
    return [Question(each, place) for each, place in zip(new, told, strict=True) if 0 < len(place) <= answer]


def _after(text: str, question: str, context: int, answer: int) -> str:
    room = context - MARKS - len(question) - answer
    return f"{text[: max(0, room)]} {question}"
