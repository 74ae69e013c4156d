"""Questions with the text that answers them, and the answers that a model finds there.

A few thousand questions teach a model to look into a text. It can then ask itself about everybody who has one, and
learn its own answers as if it had been told them: what it could read it knows by heart from then on.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from regard.data.birthplaces_dataset import QUESTION, BirthplaceQuestion
from regard.data.characters import Characters
from regard.data.span_corruption import PHRASE
from regard.models.gpt import GPT
from regard.recipes.span_infilling import answers

MARKS = 4  # characters besides text, question and answer: a blank, two masks and the end
AT_ONCE = 1024  # questions that are answered together


@dataclass(frozen=True)
class Library:
    """Texts by whom they are about, for a model that reads so many characters at once.

    longest  characters that an answer may have
    """

    texts: Mapping[str, str]
    context: int
    longest: int

    def opened(self, questions: Sequence[BirthplaceQuestion]) -> list[BirthplaceQuestion]:
        """The questions about people with a text, each after as much of it as leaves room for the answer."""
        places = {each.text: each.place for each in questions}
        return [
            BirthplaceQuestion(self._after(name), places[each]) for name, each in self._asked.items() if each in places
        ]

    def retold(self, questions: Sequence[BirthplaceQuestion], times: int, seed: int) -> list[BirthplaceQuestion]:
        """The questions whose answer their text holds, each so many times with something else in its place.

        What is known by heart is of no use for them: they teach to look.
        """
        places = {each.text: each.place for each in questions}
        others = [some for some in (sorted({*places.values()}), self._names) if some]
        draw = random.Random(seed)
        found = []
        for name, question in self._asked.items():
            for number in range(times if question in places else 0):
                other = draw.choice(others[number % len(others)])
                parts = re.split(rf"\b{re.escape(places[question])}\b", self._body(name))
                text = self._cut(other.join(parts), question)
                if len(parts) > 1 and other in text:
                    found.append(BirthplaceQuestion(f"{text} {question}", other))
        return found

    def own_questions(
        self, model: GPT, letters: Characters, known: Sequence[BirthplaceQuestion]
    ) -> list[BirthplaceQuestion]:
        """Questions about everybody else, and the answers that the model reads."""
        told = {each.text for each in known}
        new = {name: each for name, each in self._asked.items() if each not in told}
        read = answers(model, letters, [self._after(name) for name in new], AT_ONCE)
        places = [letters.decode(text.body) for text in read]
        # nothing, or a run of letters without an end, is no answer
        found = zip(new.values(), places, strict=True)
        return [BirthplaceQuestion(each, place) for each, place in found if 0 < len(place) <= self.longest]

    @cached_property
    def _asked(self) -> dict[str, str]:
        """The question about everybody."""
        return {name: QUESTION.format(name=name) for name in self.texts}

    @cached_property
    def _names(self) -> list[str]:
        """Capitalised phrases of all texts, of people and places and all else."""
        found = {phrase for text in self.texts.values() for phrase in PHRASE.findall(text)}
        return sorted(phrase for phrase in found if 1 < len(phrase) <= self.longest)

    def _after(self, name: str) -> str:
        """The question about somebody after the text."""
        question = self._asked[name]
        return f"{self._cut(self._body(name), question)} {question}"

    def _cut(self, text: str, question: str) -> str:
        """As much of a text as leaves room for the question and its answer."""
        return text[: max(0, self.context - MARKS - len(question) - self.longest)]

    def _body(self, name: str) -> str:
        """A text without its title: the question says the name too, and room is scarce."""
        return self.texts[name].removeprefix(f"{name}. ")
