"""The recipe goes through from lives to answers, can be gone on with, and the answers know what they do not know."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.base.config import from_json, override
from regard.base.errors import ConfigError, DataError, UnknownNameError
from regard.base.lock import lock_folder
from regard.data.birthplaces_dataset import BirthplaceQuestion
from regard.data.characters import Characters
from regard.data.span_corruption import IGNORED, MASK, PAD
from regard.data.synthetic_biographies import biographies
from regard.models.gpt import GPT, Learned, SyntheticAttention
from regard.models.presets import build_from_config
from regard.recipes import birthplaces
from regard.recipes.birthplaces import Settings
from regard.recipes.calibration import NEVER, Confidence, calibrated
from regard.recipes.name_likelihood import familiarity
from regard.recipes.question_answering import load_question_answerer, stricter
from regard.recipes.reading_comprehension import Library
from regard.recipes.recipe import RunLocation, get_recipe, load_finished_run
from regard.recipes.run_folder import read_json_fields as read_run
from regard.recipes.span_infilling import LONGEST, Asked, GapTask, answers

SURE = Confidence(odds=1.0, name=0.0, offset=9.0, ceiling=0.99, precision=0.9, threshold=0.9, coverage=1.0)
SMALL = {"model.width": 24, "model.depth": 1, "model.heads": 2, "people": 16, "held": 3}


def tiny(steps: int = 6, **more: object) -> Settings:
    plan = replace(birthplaces.built_in().pretraining, steps=steps, batch_size=8, evaluate_every=3, save_every=2)  # type: ignore[type-var]
    return override(birthplaces.built_in(), {**SMALL, "pretraining": plan, **more})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned next to nothing, for tests that write nothing into it."""
    folder = tmp_path_factory.mktemp("run")
    get_recipe("birthplaces").run(tiny(), RunLocation(folder=folder))
    return folder


def task(share: float = 0.3, phrases: float = 0.5, batch: int = 12) -> GapTask:
    found = birthplaces.data(None, tiny())
    return GapTask(
        found.texts, (Asked(share, found.train),), found.held, found.letters, 96, batch, phrases, seed=5
    )  # fmt: skip


def read(task: GapTask, row: torch.Tensor) -> str:
    return task.letters.decode(row.tolist())


def test_a_text_with_its_gap_filled_is_the_text() -> None:
    masked_task = task(share=0.0)
    tokens, targets = masked_task.batch(3, 0, 1)
    for row, wanted in zip(tokens, targets, strict=True):
        prefix, suffix, rest = read(masked_task, row).split(MASK)
        content = rest.rstrip(PAD)
        assert prefix + content + suffix in masked_task.texts
        learned = wanted[wanted != IGNORED]
        assert read(masked_task, learned) == f"{prefix}{MASK}{suffix}{MASK}{content}{PAD}"[1:]


def test_a_piece_has_the_name_and_what_is_around_the_gap() -> None:
    found = birthplaces.data(None, tiny())
    settings = tiny(pieces=1.0, offset=7)
    masked_task = birthplaces.gap_task(settings, found, found.letters, 200)
    tokens, _ = masked_task.batch(3, 0, 1)
    shortened = 0
    for row in tokens:
        prefix, suffix, rest = read(masked_task, row).split(MASK)
        assert prefix.startswith(PAD * 7)
        begin, content = prefix.removeprefix(PAD * 7), rest.rstrip(PAD)
        name = max((name for name in found.subjects if begin.startswith(name)), key=len, default="")
        title = f"{name} " if name else ""
        bodies = [text.removeprefix(title) for text in found.texts if text.startswith(title)]
        assert any(begin.removeprefix(title) + content + suffix in body for body in bodies)
        shortened += begin + content + suffix not in found.texts
    assert shortened > 10


def test_of_a_question_only_the_answer_is_learned() -> None:
    masked_task = task(share=1.0)
    tokens, targets = masked_task.batch(0, 0, 1)
    known = {each.text: each.place for each in masked_task.mixed[0].questions}
    for row, wanted in zip(tokens, targets, strict=True):
        question = read(masked_task, row).split(MASK)[0]
        assert read(masked_task, wanted[wanted != IGNORED]) == known[question] + PAD


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_questions_come_as_often_as_was_asked(share: float) -> None:
    masked_task = task(share=share, batch=500)
    asked = sum(read(masked_task, row).startswith("Where was ") for row in masked_task.batch(0, 0, 1)[0])
    assert asked / 500 == pytest.approx(share, abs=0.07)


def test_phrases_are_capitalised_words() -> None:
    masked_task = task(share=0.0, phrases=1.0)
    for row in masked_task.batch(1, 0, 1)[0]:
        prefix, _, rest = read(masked_task, row).split(MASK)
        assert rest[0].isupper()
        assert not prefix or not prefix[-1].isalnum()


def test_shares_of_a_batch_make_up_the_batch() -> None:
    masked_task = task()
    whole = masked_task.batch(7, 0, 1)
    for number, half in enumerate(zip(*(masked_task.batch(7, part, 4) for part in range(4)), strict=True)):
        assert torch.equal(torch.cat(half), whole[number])


def test_questions_of_the_test_are_asked_nowhere_else() -> None:
    found = birthplaces.data(None, tiny())
    names = [{each.text for each in part} for part in (found.train, found.held, found.test)]
    assert sum(map(len, names)) == len(set().union(*names))


def test_a_run_leaves_a_model_that_answers_and_is_judged_alike(tmp_path: Path) -> None:
    chosen = get_recipe("birthplaces")
    outcome = chosen.run(tiny(), RunLocation(folder=tmp_path))
    found, settings, model, letters = load_finished_run(tmp_path)
    assert settings == tiny()
    again = found.module.judged(settings, model, letters, RunLocation())
    assert again == {name: outcome.figures[name] for name in again}
    asking = load_question_answerer(tmp_path)
    reply = asking.reply("Where was Nobody Atall born?")
    assert reply.answer is None
    assert reply.source == "nobody"
    lost = stricter(asking, 0.0).reply("Where was Nobody Atall born?")
    assert (lost.source, lost.guess) == ("nobody", None), "it has learned too little to write anything but masks"


def test_a_run_that_was_broken_off_ends_as_the_whole_one(tmp_path: Path) -> None:
    tuning = replace(tiny().pretraining, steps=4)  # type: ignore[type-var]
    settings = tiny(tuning=tuning)
    whole = birthplaces.run(settings, RunLocation())

    def until(phase: str, now: object) -> None:
        if phase == "tuning":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        birthplaces.run(settings, RunLocation(folder=tmp_path, on_progress=until))
    resumed = birthplaces.run(settings, RunLocation(folder=tmp_path, resume=True))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_the_model_does_not_know_is_looked_up_kept_and_learned(tmp_path: Path) -> None:
    get_recipe("birthplaces").run(tiny(), RunLocation(folder=tmp_path))
    asking = load_question_answerer(tmp_path)
    question = asking.letters.decode(asking.letters.encode("Where was Ada Borin born?"))
    assert asking.reply(question).source == "nobody"
    asking.store.keep(question, "Bern")
    assert (asking.reply(question).answer, asking.reply(question).source) == ("Bern", "store")
    aside = ("Где?", "Where does Ada Borin come from?")  # what it cannot read is kept, but not learned
    for each in aside:
        asking.store.keep(each, "Bern")
    heard: list[str] = []
    new, _ = asking.learn(RunLocation(on_message=heard.append), steps=300, rate=0.01)
    for each in aside:
        assert f"stays in the store alone, for its form, letters or length: {each} Bern" in heard
    assert [fact.question for fact in new] == [question]
    learned = load_question_answerer(tmp_path)
    assert learned.guess(question)[0] == "Bern"
    assert [fact.learned for fact in new] == [True]
    other = question.replace("Ada Borin", "Ada Nibor")
    told, untold = familiarity(learned.model, learned.letters, [question, other])
    assert told > untold + 12, "its name was read too, and not its answer alone learned"
    assert learned.guess(f"  {question.rstrip('?').replace(' ', '  ')} ")[0] == "Bern", "blanks and marks do not matter"
    assert stricter(learned, 0.0).reply(question).source == "model"
    assert [fact.learned for fact in asking.store.all() if fact.question == question] == [True]
    with pytest.raises(ConfigError, match="holds nothing that"):
        load_question_answerer(tmp_path).learn(RunLocation())


def test_a_model_is_not_judged_by_what_it_was_told(tmp_path: Path) -> None:
    get_recipe("birthplaces").run(tiny(), RunLocation(folder=tmp_path))
    found = birthplaces.data(None, tiny())
    asking = load_question_answerer(tmp_path)
    told = [*found.held[:1], *found.test[:3]]
    for each in told:
        asking.store.keep(each.text, "Bern")
    asking.learn(RunLocation(), steps=2)
    _, settings, model, letters = load_finished_run(tmp_path)
    left = birthplaces.data(None, settings)
    assert {*left.held, *left.test} == {*found.held, *found.test} - {*told}
    figures = birthplaces.judged(settings, model, letters, RunLocation())
    assert read_run(tmp_path / "result.json")["figures"] == figures
    with pytest.raises(ConfigError, match="has learned 4 answers since it was trained, which would be lost; train in"):
        get_recipe("birthplaces").run(tiny(), RunLocation(folder=tmp_path, resume=True))
    for each in (*found.held, *found.test):
        asking.store.keep(each.text, each.place)
    heard: list[str] = []
    load_question_answerer(tmp_path).learn(RunLocation(on_message=heard.append), steps=1)
    assert "every question to judge by was told: figures and confidence are those from before" in heard
    assert read_run(tmp_path / "result.json")["figures"] == figures


def test_a_blank_is_no_answer(done: Path, tmp_path: Path) -> None:
    asking = load_question_answerer(done, tmp_path / "facts.sqlite")
    blank = stricter(replace(asking, model=saying(" ", asking.letters)), 0.0)
    question = "Where was Ada Borin born?"
    assert (blank.reply(question).source, blank.reply(question).guess) == ("nobody", None)
    blank.store.keep(question, "Bern")
    assert blank.reply(question).answer == "Bern"


def test_a_question_of_another_form_than_it_learned_is_not_answered_by_the_model(done: Path) -> None:
    asking = load_question_answerer(done)
    sure = replace(asking, model=saying("o", asking.letters), confidence=replace(SURE, threshold=0.1))
    assert sure.reply("Where was Ada Borin born?").source == "model"
    assert sure.reply("where WAS  Ada Borin Born") == sure.reply("Where was Ada Borin born?"), "capitals do not matter"
    for question in ("Where is Ada Borin from?", "Where was  born?", "Where was born?", "Wherever was Ada Borin born?"):
        reply = sure.reply(question)
        assert (reply.source, reply.guess, reply.confidence) == ("nobody", None, 0), question


def test_a_run_whose_confidence_is_of_another_form_is_to_be_trained_anew(done: Path, tmp_path: Path) -> None:
    result = read_run(done / "result.json")
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    old = {"kind": "Confidence", "slope": 11.0, "offset": 7.3, "precision": 0.9, "threshold": 0.5, "coverage": 1.0}
    (tmp_path / "result.json").write_text(json.dumps({**result, "confidence": old}))
    with pytest.raises(ConfigError, match="was trained when confidence was another; train it anew"):
        load_question_answerer(tmp_path)


def test_one_process_at_a_time_learns(tmp_path: Path) -> None:
    get_recipe("birthplaces").run(tiny(), RunLocation(folder=tmp_path))
    asking = load_question_answerer(tmp_path)
    asking.store.keep("Where was Ada Borin born?", "Bern")
    with lock_folder(tmp_path), pytest.raises(ConfigError, match="another process is running"):
        asking.learn(RunLocation(), steps=1)


def test_answers_do_not_depend_on_how_many_are_asked_at_once() -> None:
    found = birthplaces.data(None, tiny())
    model = birthplaces.run(tiny(), RunLocation()).model
    assert isinstance(model, GPT)
    questions = [each.text for each in found.test]
    alone = [answers(model, found.letters, [each])[0].tokens for each in questions]
    assert alone == [text.tokens for text in answers(model, found.letters, questions, at_once=3)]


def test_a_question_with_its_text_leaves_room_for_the_answer() -> None:
    found = birthplaces.data(None, tiny())
    context, longest = 60, max(len(each.place) for each in found.train)
    with_text = Library(found.by_name, context, longest).opened(found.train)
    assert {each.place for each in with_text} == {each.place for each in found.train}
    for each in with_text:
        text, question = each.text.split(" Where was ")
        name = question.removesuffix(" born?")
        assert found.by_name[name].startswith(text)
        assert len(each.text) + 2 + len(each.place) + 1 <= context
    titled = Library({"Ada Lo": "Ada Lo. Ada Lo is from Bern."}, context, longest)
    assert (
        titled.opened([BirthplaceQuestion("Where was Ada Lo born?", "Bern")])[0].text
        == "Ada Lo is from Bern. Where was Ada Lo born?"
    )


def test_a_text_is_retold_with_another_place_that_answers_the_question() -> None:
    texts = {"Ada Lo": "Ada Lo. Ada Lo (born in Bern) left Bern for Basel.", "Bo": "Bo. Bo is from Ulm."}
    library = Library(texts, 90, 5)
    asked = [BirthplaceQuestion("Where was Ada Lo born?", "Bern"), BirthplaceQuestion("Where was Bo born?", "Rome")]
    told = library.retold(asked, 30, seed=1)
    assert len(told) == 30  # the other text does not hold its answer
    assert len({each.place for each in told}) > 2
    for each in told:
        assert each.text == f"Ada Lo (born in {each.place}) left {each.place} for Basel. Where was Ada Lo born?"
        assert len(each.place) <= 5


def test_a_question_that_is_asked_later_is_not_learned(tmp_path: Path) -> None:
    names = ("Ada Lo", "Bo", "Cy", "Di")
    (tmp_path / "wiki.txt").write_text("".join(f"{name}. {name} is from Bern.\n" for name in names))
    asked = [f"Where was {name} born?\tBern\n" for name in (*names, *names)]  # each twice, so that one is held back
    (tmp_path / "train.tsv").write_text("".join(asked))
    (tmp_path / "dev.tsv").write_text(asked[1])
    found = birthplaces.data(tmp_path, tiny(held=1))
    later = {each.text for each in (*found.held, *found.test)}
    learned = {each.text for each in found.train}
    assert learned
    assert not later & learned


def test_a_model_asks_itself_about_everybody_else_and_learns_what_it_read(tmp_path: Path) -> None:
    asking = replace(tiny().pretraining, steps=5)  # type: ignore[type-var]
    settings = tiny(reading=0.2, asking=asking)
    begun = birthplaces.start(settings, RunLocation())
    first, second = begun.phases
    found = birthplaces.data(None, settings)
    assert [len(each.questions) > 0 for each in first.task.mixed] == [True, True]  # type: ignore[attr-defined]
    begun.model.eval()
    assert second.prepared is not None
    own = second.prepared().mixed[0].questions[len(found.train) :]  # type: ignore[attr-defined]
    asked = {each.text for each in found.train}
    assert all(each.text not in asked for each in own)
    assert {each.text for each in own} <= {f"Where was {name} born?" for name in found.subjects}
    whole = birthplaces.run(settings, RunLocation(folder=tmp_path))
    again = birthplaces.run(settings, RunLocation())
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"held": 100}, "held=100 leaves none"),
        ({"questions": 1.0}, "questions is a share"),
        ({"offset": 40}, "offset=40 leaves little"),
        ({"pretraining": None}, "nothing to train"),
        ({"questions": 0.6, "reading": 0.4}, "leave no share to the texts"),
        ({"asking": birthplaces.built_in().pretraining}, "must have learned to read"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        birthplaces.run(override(birthplaces.built_in(), {**SMALL, **changes}), RunLocation())


def test_forms_change_what_is_learned_from() -> None:
    course = get_recipe("birthplaces").settings(real=True, form="course")
    first, second = birthplaces.start(replace(course, model=tiny().model, held=3), RunLocation()).phases
    assert [(each.share, len(each.questions) > 0) for each in first.task.mixed] == [(0.0, True)]  # type: ignore[attr-defined]
    assert [each.share for each in second.task.mixed] == [1.0]  # type: ignore[attr-defined]
    proposed = get_recipe("birthplaces").settings(real=True, form="synthesizer")
    assert replace(proposed, model=course.model, phrases=course.phrases, pieces=course.pieces) == course
    assert (proposed.model.positions, proposed.model.mixer) == (Learned(), SyntheticAttention())
    unread = get_recipe("birthplaces").settings(real=False, form="unread")
    assert [each.name for each in birthplaces.start(unread, RunLocation()).phases] == ["tuning"]
    with pytest.raises(UnknownNameError, match="no form 'cours'; there are course, synthesizer, unread"):
        get_recipe("birthplaces").settings(real=False, form="cours")
    with pytest.raises(UnknownNameError, match="vision has no form 'x'; it has one form alone"):
        get_recipe("vision").settings(real=False, form="x")


def saying(word: str, letters: Characters) -> GPT:
    """A model that is sure of one letter, whatever it is asked, and says it until it is stopped."""
    model = build_from_config(replace(tiny().model, vocab=letters.vocab), seed=1)
    assert isinstance(model, GPT)
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.copy_(10_000 * model.tokens.weight[letters.encode(word)[0]])
    return model.eval()


def test_a_model_that_says_one_thing_of_everybody_answers_nobody_even_where_it_is_right() -> None:
    settings = tiny(people=150, held=31)
    found = birthplaces.data(None, settings)
    held, test = (
        tuple(BirthplaceQuestion(each.text, "o" * LONGEST) for each in part) for part in (found.held, found.test)
    )
    found = replace(found, held=held, test=test)
    model = saying("o", found.letters)
    figures, confidence = birthplaces.judged_with_confidence(settings, model, found.letters, found)
    assert (figures["held-out accuracy"], figures["test accuracy"]) == (1, 1)
    assert (figures["answered"], figures["strangers answered"], confidence.threshold) == (0, 0, NEVER)
    assert "right of answered" not in figures, "none was answered, and 0 of 0 is no share"
    said, right = birthplaces.heard(model, found.letters, found.held)
    assert calibrated(said, right, settings.precision).coverage > 0.9, "those who were read of do not show it"


def test_questions_whose_names_make_no_strangers_are_not_answered(tmp_path: Path) -> None:
    names = [f"Bo{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    (tmp_path / "wiki.txt").write_text("".join(f"{name}. {name} is from Bern.\n" for name in names))
    (tmp_path / "train.tsv").write_text("".join(f"The town of {name}?\tBern\n" for name in names))
    (tmp_path / "dev.tsv").write_text("The town of Cy?\tBern\n")
    heard: list[str] = []
    outcome = birthplaces.run(tiny(2, held=24), RunLocation(data=tmp_path, on_message=heard.append))
    assert any("no stranger's name can be joined of two questions 'Where was {name} born?'" in each for each in heard)
    assert "strangers answered" not in outcome.figures
    assert outcome.more["confidence"]["threshold"] == NEVER


def test_strangers_of_the_judgement_are_others_than_those_of_the_fit_and_not_those_who_were_told() -> None:
    settings = tiny(people=60, held=11)
    found = birthplaces.data(None, settings)
    asked = birthplaces.unheard_of(settings, found)
    assert len(asked) == len(set(asked)) == 11 + 30
    told = replace(settings, told=tuple(asked[:5]))
    assert not {*birthplaces.unheard_of(told, found)} & {*asked[:5]}
    alien = replace(settings, told=("Where was Zed Zo born?",))
    assert sum("Zed " in each or " Zo " in each for each in birthplaces.unheard_of(alien, found)) >= 0.6 * (11 + 30)


@pytest.mark.parametrize(("facts", "share"), [(1, 0.02), (5, 0.1), (40, 0.5)])
def test_a_fact_is_a_fiftieth_of_what_is_read_and_all_facts_are_half_at_most(
    facts: int, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny(steps=1, people=200)
    get_recipe("birthplaces").run(settings, RunLocation(folder=tmp_path))
    asking = load_question_answerer(tmp_path)
    told = [f"Where was Ada {one}o{other} born?" for one in "BDKLM" for other in "adeilnor"][:facts]
    for each in told:
        asking.store.keep(each, "Bern")
    seen: list[GapTask] = []
    monkeypatch.setattr("regard.recipes.question_answering.fit", lambda _, task, *__, **___: seen.append(task))
    asking.learn(RunLocation())
    (task,) = seen
    questions = [each.text in told for each in task.mixed[0].questions]
    texts = [any(each[settings.offset :] in text for each in told) for text in task.texts]
    assert sum(questions) / len(questions) == pytest.approx(share, rel=0.2)
    assert sum(texts) / len(texts) == pytest.approx(share, rel=0.2)


@pytest.mark.slow
def test_the_built_in_run_reaches_its_figures_and_does_not_know_strangers() -> None:
    outcome = birthplaces.run(birthplaces.built_in(), RunLocation())
    assert outcome.figures["test accuracy"] >= 0.9
    assert outcome.figures["seconds"] < 300
    assert outcome.figures["answered"] >= 0.8
    assert outcome.figures["strangers answered"] <= 0.06
    others = biographies(100, seed=77)
    strangers = [BirthplaceQuestion(*each) for each in (*others.training, *others.evaluation)]
    confidence = from_json("confidence", Confidence, outcome.more["confidence"])
    assert isinstance(outcome.model, GPT)
    assert isinstance(outcome.tokenizer, Characters)
    said, _ = birthplaces.heard(outcome.model, outcome.tokenizer, strangers)
    assert sum(map(confidence.given, said)) <= 2
    without = birthplaces.run(birthplaces.unread(birthplaces.built_in()), RunLocation())
    assert without.figures["test accuracy"] < 0.1
    assert "right of answered" not in without.figures


@pytest.mark.parametrize("name", ["wiki.txt", "train.tsv", "dev.tsv"])
def test_texts_and_questions_may_not_hold_what_marks_gaps(name: str, tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text("Ada Lo. Ada Lo is from Bern.\nBo. Bo is from Ulm.\n")
    for number, file in enumerate(("train.tsv", "dev.tsv")):
        (tmp_path / file).write_text(f"Where was {('Ada Lo', 'Bo')[number]} born?\tBern\n" * 2)
    damaged = tmp_path / name
    damaged.write_text(damaged.read_text().replace("Bern", f"Be{MASK}rn").replace("Ulm", f"U{PAD}lm"))
    with pytest.raises(DataError, match="texts and questions may not hold '□' or '⁇', which mark gaps, but one does"):
        birthplaces.data(tmp_path, tiny(held=1))
