"""Write a quiz as a notebook: for each question a cell for the prediction and a cell that runs the experiment."""

from regard.work.notebook import Notebook, build_notebook, code_cell, markdown_cell
from regard.work.quiz import Quiz

ABOUT = """\
Write your prediction first, then run the cell below it: it runs the experiment and shows the result. Answer a choice by
its letter in quotes, `"b"`, and everything else by a number.
"""


def quiz_notebook(quiz: Quiz, *, answer_key: bool = False) -> Notebook:
    """Return a quiz as a Jupyter notebook.

    answer_key  include the correct answers and explanations, for which every experiment is run
    """
    call = f"Quiz.for_student({quiz.student!r}, count={len(quiz.questions)}, seed={quiz.seed})"
    about = f"# A quiz for {quiz.student}{': the answers' * answer_key}\n\n{ABOUT}"
    setup = f"from regard.work.quiz import Quiz\n\nquiz = {call}"
    cells = [markdown_cell("about", about), code_cell("quiz", setup, role="import")]
    for question in quiz.questions:
        number = question.number
        choices = [f"- {letter}) {text}" for letter, text in question.choices.items()]
        form = choices or [f"A number, {question.content.tolerance}."]
        prediction = repr(question.correct_answer) if answer_key else "...  # TODO: your prediction"
        cells += [
            markdown_cell(f"question-{number}", "\n".join([f"## {number}", "", question.content.text, "", *form])),
            code_cell(f"prediction-{number}", f"prediction_{number} = {prediction}"),
            code_cell(f"run-{number}", f"print(quiz.answer({number}, prediction_{number}))", role="test"),
        ]
        if answer_key:
            cells.append(markdown_cell(f"explanation-{number}", "\n\n".join(question.grade().explanation)))
    return build_notebook(cells)
