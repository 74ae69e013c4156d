"""The quiz as a notebook: a cell to predict in, and one that runs the experiment."""

from regard.work.notebook import TEST, Cell, Notebook, build_notebook, code_cell, markdown_cell
from regard.work.quiz import Quiz, QuizQuestion

ABOUT = """\
Predict first, then run the cell below: it makes the experiment and shows what came out. A choice is answered by its
letter in quotes, `"b"`, everything else by a number.
"""


def of_quiz(quiz: Quiz, *, key: bool = False) -> Notebook:
    """A quiz as a notebook; the key has the answers, for which every experiment is run now."""
    start = f"from regard.work.quiz import Quiz\n\nquiz = {call(quiz)}"
    about = f"# A quiz for {quiz.student}{': the answers' * key}\n\n{ABOUT}"
    cells = [markdown_cell("about", about), code_cell("quiz", start, role="import")]
    for question in quiz.questions:
        cells += _cells(question, key)
    return build_notebook(cells)


def call(quiz: Quiz) -> str:
    """The Python that gives this quiz."""
    return f"Quiz.of({quiz.student!r}, count={len(quiz.questions)}, seed={quiz.seed})"


def _cells(question: QuizQuestion, key: bool) -> list[Cell]:
    number, choices = question.number, [f"- {letter}) {text}" for letter, text in question.letters.items()]
    form = choices or [f"A number, {question.posed.tolerance}."]
    words = "\n".join([f"## {number}", "", question.posed.text, "", *form])
    given = repr(question.right) if key else "...  # TODO: your prediction"
    cells = [
        markdown_cell(f"question-{number}", words),
        code_cell(f"prediction-{number}", f"prediction_{number} = {given}"),
        code_cell(f"run-{number}", f"print(quiz.answer({number}, prediction_{number}))", role=TEST),
    ]
    if key:
        cells.append(markdown_cell(f"explanation-{number}", "\n\n".join(question.reveal().explanation)))
    return cells
