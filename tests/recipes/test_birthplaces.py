"""The birthplaces recipe: span infilling, resuming a run, self-training, calibrated answers and learning facts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.base.config import from_json, override
from regard.base.errors import ConfigError, DataError, UnknownNameError
from regard.base.files import read_json
from regard.base.lock import lock_folder
from regard.data.birthplaces_dataset import BirthplaceQuestion
from regard.data.characters import CharacterTokenizer
from regard.data.span_corruption import IGNORED, MASK, PAD
from regard.data.synthetic_biographies import biographies
from regard.models.gpt import GPT, Learned, SyntheticAttention
from regard.models.presets import build_from_config
from regard.recipes import birthplaces
from regard.recipes.birthplaces import BirthplaceSettings
from regard.recipes.calibration import NEVER, Confidence, calibrate
from regard.recipes.name_likelihood import name_log_likelihood
from regard.recipes.question_answering import load_question_answerer, with_threshold
from regard.recipes.reading_comprehension import PassageCollection
from regard.recipes.recipe import RunLocation, get_recipe, load_finished_run
from regard.recipes.span_infilling import MAX_ANSWER, QuestionMix, SpanInfillingTask, generate_answers

SURE = Confidence(odds=1.0, name=0.0, offset=9.0, ceiling=0.99, precision=0.9, threshold=0.9, coverage=1.0)
SMALL = {"model.width": 24, "model.depth": 1, "model.heads": 2, "people": 16, "validation": 3}


def tiny(steps: int = 6, **more: object) -> BirthplaceSettings:
    plan = replace(birthplaces.built_in().pretraining, steps=steps, batch_size=8, evaluate_every=3, save_every=2)  # type: ignore[type-var]
    return override(birthplaces.built_in(), {**SMALL, "pretraining": plan, **more})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned next to nothing, for tests that write nothing into it."""
    folder = tmp_path_factory.mktemp("run")
    get_recipe("birthplaces").run(tiny(), RunLocation(folder=folder))
    return folder


@pytest.fixture(scope="module")
def of_two_hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on 200 people, to be copied by tests that write into it."""
    folder = tmp_path_factory.mktemp("run")
    get_recipe("birthplaces").run(tiny(steps=1, people=200), RunLocation(folder=folder))
    return folder


def task(share: float = 0.3, phrase_share: float = 0.5, batch: int = 12) -> SpanInfillingTask:
    found = birthplaces.load_data(None, tiny())
    return SpanInfillingTask(
        found.texts, (QuestionMix(share, found.train),), found.validation, found.tokenizer, 96, batch, phrase_share,
        seed=5,
    )  # fmt: skip


def decode(task: SpanInfillingTask, row: torch.Tensor) -> str:
    return task.tokenizer.decode(row.tolist())


def test_infilling_the_masked_span_gives_the_text() -> None:
    masked_task = task(share=0.0)
    tokens, targets = masked_task.batch(3, 0, 1)
    for row, wanted in zip(tokens, targets, strict=True):
        prefix, suffix, rest = decode(masked_task, row).split(MASK)
        content = rest.rstrip(PAD)
        assert prefix + content + suffix in masked_task.texts
        learned = wanted[wanted != IGNORED]
        assert decode(masked_task, learned) == f"{prefix}{MASK}{suffix}{MASK}{content}{PAD}"[1:]


def test_a_cropped_text_keeps_the_name_and_the_text_around_the_span() -> None:
    found = birthplaces.load_data(None, tiny())
    settings = tiny(crop_share=1.0, position_offset=7)
    masked_task = birthplaces.make_infilling_task(settings, found, found.tokenizer, 200)
    tokens, _ = masked_task.batch(3, 0, 1)
    shortened = 0
    for row in tokens:
        prefix, suffix, rest = decode(masked_task, row).split(MASK)
        assert prefix.startswith(PAD * 7)
        begin, content = prefix.removeprefix(PAD * 7), rest.rstrip(PAD)
        name = max((name for name in found.subjects if begin.startswith(name)), key=len, default="")
        title = f"{name} " if name else ""
        bodies = [text.removeprefix(title) for text in found.texts if text.startswith(title)]
        assert any(begin.removeprefix(title) + content + suffix in body for body in bodies)
        shortened += begin + content + suffix not in found.texts
    assert shortened > 10


def test_the_loss_of_a_question_covers_its_answer_only() -> None:
    masked_task = task(share=1.0)
    tokens, targets = masked_task.batch(0, 0, 1)
    known = {each.text: each.place for each in masked_task.mixes[0].questions}
    for row, wanted in zip(tokens, targets, strict=True):
        question = decode(masked_task, row).split(MASK)[0]
        assert decode(masked_task, wanted[wanted != IGNORED]) == known[question] + PAD


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_questions_have_their_share_of_the_examples(share: float) -> None:
    masked_task = task(share=share, batch=500)
    asked = sum(decode(masked_task, row).startswith("Where was ") for row in masked_task.batch(0, 0, 1)[0])
    assert asked / 500 == pytest.approx(share, abs=0.07)


def test_phrases_are_capitalised_words() -> None:
    masked_task = task(share=0.0, phrase_share=1.0)
    for row in masked_task.batch(1, 0, 1)[0]:
        prefix, _, rest = decode(masked_task, row).split(MASK)
        assert rest[0].isupper()
        assert not prefix or not prefix[-1].isalnum()


def test_the_shards_of_a_batch_concatenate_to_the_batch() -> None:
    masked_task = task()
    whole = masked_task.batch(7, 0, 1)
    for number, half in enumerate(zip(*(masked_task.batch(7, part, 4) for part in range(4)), strict=True)):
        assert torch.equal(torch.cat(half), whole[number])


def test_the_splits_share_no_question() -> None:
    found = birthplaces.load_data(None, tiny())
    names = [{each.text for each in part} for part in (found.train, found.validation, found.test)]
    assert sum(map(len, names)) == len(set().union(*names))


def test_a_saved_run_gives_the_same_metrics_and_answers_questions(tmp_path: Path) -> None:
    chosen = get_recipe("birthplaces")
    outcome = chosen.run(tiny(), RunLocation(folder=tmp_path))
    found, settings, model, tokenizer = load_finished_run(tmp_path)
    assert settings == tiny()
    again = found.module.evaluate(settings, model, tokenizer, RunLocation())
    assert again == {name: outcome.metrics[name] for name in again}
    asking = load_question_answerer(tmp_path)
    reply = asking.reply("Where was Nobody Atall born?")
    assert reply.answer is None
    assert reply.source == "nobody"
    lost = with_threshold(asking, 0.0).reply("Where was Nobody Atall born?")
    assert (lost.source, lost.guess) == ("nobody", None), "an untrained model writes masks, which are no answer"


def test_an_interrupted_run_resumes_to_the_same_parameters(tmp_path: Path) -> None:
    finetuning = replace(tiny().pretraining, steps=4)  # type: ignore[type-var]
    settings = tiny(finetuning=finetuning)
    whole = birthplaces.run(settings, RunLocation())

    def until(phase: str, now: object) -> None:
        if phase == "finetuning":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        birthplaces.run(settings, RunLocation(folder=tmp_path, on_progress=until))
    resumed = birthplaces.run(settings, RunLocation(folder=tmp_path, resume=True))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_unknown_answers_are_looked_up_in_the_store_and_can_be_learned(tmp_path: Path) -> None:
    get_recipe("birthplaces").run(tiny(), RunLocation(folder=tmp_path))
    asking = load_question_answerer(tmp_path)
    question = asking.tokenizer.decode(asking.tokenizer.encode("Where was Ada Borin born?"))
    assert asking.reply(question).source == "nobody"
    asking.store.save(question, "Bern")
    assert (asking.reply(question).answer, asking.reply(question).source) == ("Bern", "store")
    aside = ("Где?", "Where does Ada Borin come from?")  # stored, but not learned: the model cannot read them
    for each in aside:
        asking.store.save(each, "Bern")
    messages: list[str] = []
    new, _ = asking.learn(RunLocation(on_message=messages.append), steps=300, lr=0.01)
    for each in aside:
        assert f"stays in the store only, for its form, characters or length: {each} Bern" in messages
    assert [fact.question for fact in new] == [question]
    learned = load_question_answerer(tmp_path)
    assert learned.guess(question)[0] == "Bern"
    assert [fact.learned for fact in new] == [True]
    other = question.replace("Ada Borin", "Ada Nibor")
    taught, untaught = name_log_likelihood(learned.model, learned.tokenizer, [question, other])
    assert taught > untaught + 12, "the name is learned too, not only the answer"
    assert learned.guess(f"  {question.rstrip('?').replace(' ', '  ')} ")[0] == "Bern", (
        "blanks and punctuation are ignored"
    )
    assert with_threshold(learned, 0.0).reply(question).source == "model"
    assert [fact.learned for fact in asking.store.all() if fact.question == question] == [True]
    with pytest.raises(ConfigError, match="has no facts for"):
        load_question_answerer(tmp_path).learn(RunLocation())


def test_a_model_is_not_tested_on_questions_it_was_taught(tmp_path: Path) -> None:
    get_recipe("birthplaces").run(tiny(), RunLocation(folder=tmp_path))
    found = birthplaces.load_data(None, tiny())
    asking = load_question_answerer(tmp_path)
    told = [*found.validation[:1], *found.test[:3]]
    for each in told:
        asking.store.save(each.text, "Bern")
    asking.learn(RunLocation(), steps=2)
    _, settings, model, tokenizer = load_finished_run(tmp_path)
    left = birthplaces.load_data(None, settings)
    assert {*left.validation, *left.test} == {*found.validation, *found.test} - {*told}
    metrics = birthplaces.evaluate(settings, model, tokenizer, RunLocation())
    assert read_json(tmp_path / "result.json")["metrics"] == metrics
    with pytest.raises(ConfigError, match="has learned 4 answers since it was trained, which would be lost; train in"):
        get_recipe("birthplaces").run(tiny(), RunLocation(folder=tmp_path, resume=True))
    for each in (*found.validation, *found.test):
        asking.store.save(each.text, each.place)
    messages: list[str] = []
    load_question_answerer(tmp_path).learn(RunLocation(on_message=messages.append), steps=1)
    assert "every validation or test question was taught: metrics and confidence are not updated" in messages
    assert read_json(tmp_path / "result.json")["metrics"] == metrics


def test_a_blank_answer_is_not_given(done: Path, tmp_path: Path) -> None:
    asking = load_question_answerer(done, tmp_path / "facts.sqlite")
    blank = with_threshold(replace(asking, model=constant_model(" ", asking.tokenizer)), 0.0)
    question = "Where was Ada Borin born?"
    assert (blank.reply(question).source, blank.reply(question).guess) == ("nobody", None)
    blank.store.save(question, "Bern")
    assert blank.reply(question).answer == "Bern"


def test_a_question_of_another_form_than_it_learned_is_not_answered_by_the_model(done: Path) -> None:
    asking = load_question_answerer(done)
    sure = replace(asking, model=constant_model("o", asking.tokenizer), confidence=replace(SURE, threshold=0.1))
    assert sure.reply("Where was Ada Borin born?").source == "model"
    assert sure.reply("where WAS  Ada Borin Born") == sure.reply("Where was Ada Borin born?"), "case is ignored"
    for question in ("Where is Ada Borin from?", "Where was  born?", "Where was born?", "Wherever was Ada Borin born?"):
        reply = sure.reply(question)
        assert (reply.source, reply.guess, reply.confidence) == ("nobody", None, 0), question


def test_only_one_process_at_a_time_can_learn(tmp_path: Path) -> None:
    get_recipe("birthplaces").run(tiny(), RunLocation(folder=tmp_path))
    asking = load_question_answerer(tmp_path)
    asking.store.save("Where was Ada Borin born?", "Bern")
    with lock_folder(tmp_path), pytest.raises(ConfigError, match="another process is running"):
        asking.learn(RunLocation(), steps=1)


def test_answers_do_not_depend_on_the_batch_size() -> None:
    found = birthplaces.load_data(None, tiny())
    model = birthplaces.run(tiny(), RunLocation()).model
    assert isinstance(model, GPT)
    questions = [each.text for each in found.test]
    alone = [generate_answers(model, found.tokenizer, [each])[0].tokens for each in questions]
    assert alone == [text.tokens for text in generate_answers(model, found.tokenizer, questions, batch_size=3)]


def test_a_question_with_its_text_leaves_room_for_the_answer() -> None:
    found = birthplaces.load_data(None, tiny())
    context, longest = 60, max(len(each.place) for each in found.train)
    with_text = PassageCollection(found.by_name, context, longest).questions_with_passages(found.train)
    assert {each.place for each in with_text} == {each.place for each in found.train}
    for each in with_text:
        text, question = each.text.split(" Where was ")
        name = question.removesuffix(" born?")
        assert found.by_name[name].startswith(text)
        assert len(each.text) + 2 + len(each.place) + 1 <= context
    titled = PassageCollection({"Ada Lo": "Ada Lo. Ada Lo is from Bern."}, context, longest)
    assert (
        titled.questions_with_passages([BirthplaceQuestion("Where was Ada Lo born?", "Bern")])[0].text
        == "Ada Lo is from Bern. Where was Ada Lo born?"
    )


def test_counterfactual_texts_have_another_answer() -> None:
    texts = {"Ada Lo": "Ada Lo. Ada Lo (born in Bern) left Bern for Basel.", "Bo": "Bo. Bo is from Ulm."}
    passages = PassageCollection(texts, 90, 5)
    asked = [BirthplaceQuestion("Where was Ada Lo born?", "Bern"), BirthplaceQuestion("Where was Bo born?", "Rome")]
    changed = passages.counterfactual_questions(asked, 30, seed=1)
    assert len(changed) == 30  # the other text does not contain its answer
    assert len({each.place for each in changed}) > 2
    for each in changed:
        assert each.text == f"Ada Lo (born in {each.place}) left {each.place} for Basel. Where was Ada Lo born?"
        assert len(each.place) <= 5


def test_a_validation_or_test_question_is_not_trained_on(tmp_path: Path) -> None:
    names = ("Ada Lo", "Bo", "Cy", "Di")
    (tmp_path / "wiki.txt").write_text("".join(f"{name}. {name} is from Bern.\n" for name in names))
    asked = [f"Where was {name} born?\tBern\n" for name in (*names, *names)]  # each twice, so that one is in validation
    (tmp_path / "train.tsv").write_text("".join(asked))
    (tmp_path / "dev.tsv").write_text(asked[1])
    found = birthplaces.load_data(tmp_path, tiny(validation=1))
    later = {each.text for each in (*found.validation, *found.test)}
    learned = {each.text for each in found.train}
    assert learned
    assert not later & learned


def test_self_training_uses_the_models_answers_about_everybody_else(tmp_path: Path) -> None:
    plan = replace(tiny().pretraining, steps=5)  # type: ignore[type-var]
    settings = tiny(reading_share=0.2, self_training=plan)
    setup = birthplaces.prepare(settings, RunLocation())
    first, second = setup.phases
    found = birthplaces.load_data(None, settings)
    assert [len(each.questions) > 0 for each in first.task.mixes] == [True, True]  # type: ignore[attr-defined]
    setup.model.eval()
    assert second.make_task is not None
    own = second.make_task().mixes[0].questions[len(found.train) :]  # type: ignore[attr-defined]
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
        ({"validation": 100}, "validation=100 leaves none"),
        ({"question_share": 1.0}, "question_share must be at least 0 and below 1, not 1"),
        ({"position_offset": 40}, "position_offset=40 leaves too little"),
        ({"pretraining": None}, "nothing to train"),
        ({"question_share": 0.6, "reading_share": 0.4}, "leave no share for texts"),
        ({"self_training": birthplaces.built_in().pretraining}, "needs reading comprehension"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        birthplaces.run(override(birthplaces.built_in(), {**SMALL, **changes}), RunLocation())


def test_variants_change_the_phases_of_training() -> None:
    finetuned = get_recipe("birthplaces").settings(real=True, variant="finetune")
    first, second = birthplaces.prepare(replace(finetuned, model=tiny().model, validation=3), RunLocation()).phases
    assert [(each.share, len(each.questions) > 0) for each in first.task.mixes] == [(0.0, True)]  # type: ignore[attr-defined]
    assert [each.share for each in second.task.mixes] == [1.0]  # type: ignore[attr-defined]
    proposed = get_recipe("birthplaces").settings(real=True, variant="synthesizer")
    assert (
        replace(proposed, model=finetuned.model, phrase_share=finetuned.phrase_share, crop_share=finetuned.crop_share)
        == finetuned
    )
    assert (proposed.model.positions, proposed.model.mixer) == (Learned(), SyntheticAttention())
    without = get_recipe("birthplaces").settings(real=False, variant="no_pretraining")
    assert [each.name for each in birthplaces.prepare(without, RunLocation()).phases] == ["finetuning"]
    with pytest.raises(UnknownNameError, match="no variant 'cours'; available: finetune, synthesizer, no_pretraining"):
        get_recipe("birthplaces").settings(real=False, variant="cours")
    with pytest.raises(UnknownNameError, match="vision has no variant 'x'; available: cpu"):
        get_recipe("vision").settings(real=False, variant="x")


def constant_model(word: str, tokenizer: CharacterTokenizer) -> GPT:
    """A model that is sure of one letter, whatever it is asked, and says it until it is stopped."""
    model = build_from_config(replace(tiny().model, vocab=tokenizer.vocab), seed=1)
    assert isinstance(model, GPT)
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.copy_(10_000 * model.tokens.weight[tokenizer.encode(word)[0]])
    return model.eval()


def test_a_constant_answer_is_never_given_even_if_it_is_correct() -> None:
    settings = tiny(people=150, validation=31)
    found = birthplaces.load_data(None, settings)
    validation, test = (
        tuple(BirthplaceQuestion(each.text, "o" * MAX_ANSWER) for each in part)
        for part in (found.validation, found.test)
    )
    found = replace(found, validation=validation, test=test)
    model = constant_model("o", found.tokenizer)
    metrics, confidence = birthplaces.evaluate_with_confidence(settings, model, found.tokenizer, found)
    assert (metrics["validation accuracy"], metrics["test accuracy"]) == (1, 1)
    assert (metrics["answered"], metrics["unknown people answered"], confidence.threshold) == (0, 0, NEVER)
    assert "accuracy of answered" not in metrics, "no question was answered"
    said, right = birthplaces.predict_answers(model, found.tokenizer, found.validation)
    assert calibrate(said, right, settings.precision).coverage > 0.9, "known people alone do not reveal it"


def test_without_unknown_people_no_question_is_answered(tmp_path: Path) -> None:
    names = [f"Bo{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    (tmp_path / "wiki.txt").write_text("".join(f"{name}. {name} is from Bern.\n" for name in names))
    (tmp_path / "train.tsv").write_text("".join(f"The town of {name}?\tBern\n" for name in names))
    (tmp_path / "dev.tsv").write_text("The town of Cy?\tBern\n")
    messages: list[str] = []
    outcome = birthplaces.run(tiny(2, validation=24), RunLocation(data=tmp_path, on_message=messages.append))
    assert any("no questions about unknown people can be made" in each for each in messages)
    assert "unknown people answered" not in outcome.metrics
    assert outcome.more["confidence"]["threshold"] == NEVER


def test_unknown_people_differ_between_calibration_and_test_and_from_taught_people() -> None:
    settings = tiny(people=60, validation=11)
    found = birthplaces.load_data(None, settings)
    asked = birthplaces.unknown_questions(settings, found)
    assert len(asked) == len(set(asked)) == 11 + 30
    told = replace(settings, learned=tuple(asked[:5]))
    assert not {*birthplaces.unknown_questions(told, found)} & {*asked[:5]}
    alien = replace(settings, learned=("Where was Zed Zo born?",))
    assert sum("Zed " in each or " Zo " in each for each in birthplaces.unknown_questions(alien, found)) >= 0.6 * (
        11 + 30
    )


@pytest.mark.parametrize(("facts", "share"), [(1, 0.02), (5, 0.1), (40, 0.5)])
def test_each_fact_is_a_fiftieth_of_the_examples_and_all_facts_at_most_half(
    facts: int, share: float, of_two_hundred: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny(steps=1, people=200)
    asking = load_question_answerer(shutil.copytree(of_two_hundred, tmp_path / "run"))
    told = [f"Where was Ada {one}o{other} born?" for one in "BDKLM" for other in "adeilnor"][:facts]
    for each in told:
        asking.store.save(each, "Bern")
    seen: list[SpanInfillingTask] = []
    monkeypatch.setattr("regard.recipes.question_answering.fit", lambda _, task, *__, **___: seen.append(task))
    asking.learn(RunLocation())
    (task,) = seen
    questions = [each.text in told for each in task.mixes[0].questions]
    texts = [any(each[settings.position_offset :] in text for each in told) for text in task.texts]
    assert sum(questions) / len(questions) == pytest.approx(share, rel=0.2)
    assert sum(texts) / len(texts) == pytest.approx(share, rel=0.2)


def test_the_built_in_run_reaches_its_accuracy_and_abstains_on_unknown_people() -> None:
    outcome = birthplaces.run(birthplaces.built_in(), RunLocation())
    assert outcome.metrics["test accuracy"] >= 0.9
    assert outcome.metrics["answered"] >= 0.8
    assert outcome.metrics["unknown people answered"] <= 0.06
    others = biographies(100, seed=77)
    unknown = [BirthplaceQuestion(*each) for each in (*others.training, *others.evaluation)]
    confidence = from_json("confidence", Confidence, outcome.more["confidence"])
    assert isinstance(outcome.model, GPT)
    assert isinstance(outcome.tokenizer, CharacterTokenizer)
    said, _ = birthplaces.predict_answers(outcome.model, outcome.tokenizer, unknown)
    assert sum(map(confidence.accepts, said)) <= 2
    without = birthplaces.run(birthplaces.no_pretraining(birthplaces.built_in()), RunLocation())
    assert without.metrics["test accuracy"] < 0.1
    assert "accuracy of answered" not in without.metrics


@pytest.mark.parametrize("name", ["wiki.txt", "train.tsv", "dev.tsv"])
def test_texts_and_questions_may_not_contain_mask_or_padding_characters(name: str, tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text("Ada Lo. Ada Lo is from Bern.\nBo. Bo is from Ulm.\n")
    for number, file in enumerate(("train.tsv", "dev.tsv")):
        (tmp_path / file).write_text(f"Where was {('Ada Lo', 'Bo')[number]} born?\tBern\n" * 2)
    damaged = tmp_path / name
    damaged.write_text(damaged.read_text().replace("Bern", f"Be{MASK}rn").replace("Ulm", f"U{PAD}lm"))
    with pytest.raises(
        DataError, match="texts and questions may not contain '□' or '⁇', the padding and mask characters, but one does"
    ):
        birthplaces.load_data(tmp_path, tiny(validation=1))
