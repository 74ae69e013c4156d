"""Printable HTML pages of exercise sets and quizzes, with or without the answers."""

from regard.base.html import render_page, tag
from regard.base.markdown import markdown_html
from regard.work.exercises.exercise import ExerciseSet
from regard.work.quiz import Quiz


def exercise_page(exercise_set: ExerciseSet, *, answer_key: bool = False) -> str:
    """Return an exercise set as a printable HTML page, with texts and code to complete.

    answer_key  show the solutions instead of the code to complete
    """
    title = f"{exercise_set.title}{': the solutions' * answer_key}"
    body = [tag("h1", title), markdown_html(exercise_set.about), tag("pre", exercise_set.setup_code)]
    for number, exercise in enumerate(exercise_set.exercises, 1):
        code = exercise.source if answer_key else exercise.starter
        heading = tag("h2", f"{number}. {exercise.title}")
        body.append(tag("article", heading, markdown_html(exercise.prompt), tag("pre", code)))
    return render_page(title, *body)


def quiz_page(quiz: Quiz, *, answer_key: bool = False) -> str:
    """Return a quiz as a printable HTML page.

    answer_key  show the answers too, for which every experiment is run
    """
    title = f"A quiz for {quiz.student}{': the answers' * answer_key}"
    body = [tag("h1", title)]
    for question in quiz.questions:
        choices = tag("ol", *(tag("li", text) for text in question.choices.values()), type="a")
        answer = choices if question.choices else tag("p", f"A number, {question.content.tolerance}: ____________")
        parts = [tag("h2", str(question.number)), tag("p", question.content.text), answer]
        if answer_key:
            result = question.grade()
            right = str(result).splitlines()[0].partition(": the answer is ")[2]
            parts += [tag("p", tag("strong", f"Answer: {right}")), *(tag("p", line) for line in result.explanation)]
        body.append(tag("article", *parts))
    return render_page(title, *body)
