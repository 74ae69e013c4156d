"""Reading comprehension: questions after a text that contains the answer, and self-training on the model's answers.

A few thousand questions teach a model to find the answer in a text. The model can then answer questions about every
person who has a text, and learn these answers without the text.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from regard.data.birthplaces_dataset import QUESTION, BirthplaceQuestion
from regard.data.characters import CharacterTokenizer
from regard.data.span_corruption import PHRASE
from regard.models.gpt import GPT
from regard.recipes.span_infilling import generate_answers

EXTRA_CHARACTERS = 4  # besides text, question and answer: a blank, two masks and the end
BATCH_SIZE = 1024  # questions that are answered together


@dataclass(frozen=True)
class PassageCollection:
    """Passages for reading comprehension: one text about each person, which precedes a question about that person.

    texts    text by the name of the person
    context  maximum number of characters that the model reads
    longest  maximum number of characters of an answer
    """

    texts: Mapping[str, str]
    context: int
    longest: int

    def questions_with_passages(self, questions: Sequence[BirthplaceQuestion]) -> list[BirthplaceQuestion]:
        """Return the questions about people who have a text, each preceded by as much of the text as fits."""
        places = {each.text: each.place for each in questions}
        return [
            BirthplaceQuestion(self._with_passage(name), places[each])
            for name, each in self._questions.items()
            if each in places
        ]

    def counterfactual_questions(
        self, questions: Sequence[BirthplaceQuestion], copies: int, seed: int
    ) -> list[BirthplaceQuestion]:
        """Return questions preceded by their texts, with another name in place of the correct answer in the text.

        This other name is the answer to learn. The answer that the model may have memorised is wrong here, so the model
        has to read the text.

        copies  maximum number of copies of each question; a copy is left out if the text does not contain the answer
        """
        places = {each.text: each.place for each in questions}
        others = [some for some in (sorted({*places.values()}), self._names) if some]
        rng = random.Random(seed)
        found = []
        for name, question in self._questions.items():
            for number in range(copies if question in places else 0):
                other = rng.choice(others[number % len(others)])
                parts = re.split(rf"\b{re.escape(places[question])}\b", self._body(name))
                text = self._truncate(other.join(parts), question)
                if len(parts) > 1 and other in text:
                    found.append(BirthplaceQuestion(f"{text} {question}", other))
        return found

    def self_labelled_questions(
        self, model: GPT, tokenizer: CharacterTokenizer, known: Sequence[BirthplaceQuestion]
    ) -> list[BirthplaceQuestion]:
        """Return questions about people who are not in `known`, with answers that the model reads in their texts.

        These answers are pseudo-labels: they may be wrong. Empty and too long answers are left out.
        """
        excluded = {each.text for each in known}
        new = {name: each for name, each in self._questions.items() if each not in excluded}
        read = generate_answers(model, tokenizer, [self._with_passage(name) for name in new], BATCH_SIZE)
        answers = zip(new.values(), (tokenizer.decode(text.body) for text in read), strict=True)
        # an empty answer, or one without an end, is left out
        return [BirthplaceQuestion(each, answer) for each, answer in answers if 0 < len(answer) <= self.longest]

    @cached_property
    def _questions(self) -> dict[str, str]:
        """A dict from the name of each person to the question about the person."""
        return {name: QUESTION.format(name=name) for name in self.texts}

    @cached_property
    def _names(self) -> list[str]:
        """All runs of capitalised words in the texts: names of people, places and anything else."""
        found = {phrase for text in self.texts.values() for phrase in PHRASE.findall(text)}
        return sorted(phrase for phrase in found if 1 < len(phrase) <= self.longest)

    def _with_passage(self, name: str) -> str:
        """Return the text about a person, followed by the question."""
        question = self._questions[name]
        return f"{self._truncate(self._body(name), question)} {question}"

    def _truncate(self, text: str, question: str) -> str:
        """Truncate a text so that the text, the question and the answer fit into the context."""
        return text[: max(0, self.context - EXTRA_CHARACTERS - len(question) - self.longest)]

    def _body(self, name: str) -> str:
        """Return the text about a person without the name at its start, because the question contains the name."""
        return self.texts[name].removeprefix(f"{name}. ")
