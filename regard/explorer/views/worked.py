"""The worked solution of the Attention view, and the check of a student's numbers: `regard work` for the page."""

import math
from typing import Any

from regard.base.errors import ConfigError
from regard.core.masks.expression import parse_mask
from regard.work.check import check
from regard.work.files import parse_matrix
from regard.work.problem import build_problem
from regard.work.solution import solve
from regard.work.student_answer import parse_answer
from regard.work.writing import FORMATS
from regard.work.writing.document import build_document

DIGITS = 4


def work_out(request: dict[str, Any]) -> dict[str, str]:
    """Compute every step of an attention calculation as text, and check a student's answer for one step if given.

    request  the fields of `regard.explorer.api.WorkRequest`
    """
    matrices = {name: (parse_matrix(request[name], name),) for name in ("q", "k", "v")}
    width = len(matrices["q"][0][0]) / request["heads"]
    scaled = math.isclose(request["beta"], 1 / math.sqrt(width), rel_tol=1e-5)
    if not scaled and request["beta"] != 1:
        raise ConfigError(
            f"a worked solution has beta = 1 or beta = 1/sqrt({width:g}) = {1 / math.sqrt(width):.4g}, "
            f"not {request['beta']:g}"
        )
    problem = build_problem(
        "your matrices", matrices, scaled=scaled, mask=parse_mask(request["mask"]), heads=request["heads"]
    )
    solution = solve(problem)
    answer = {"text": FORMATS["text"](build_document(solution, digits=DIGITS, every_step=True), DIGITS), "review": ""}
    if request["answer"].strip():
        rows = [row.split(",") for row in request["answer"].strip().split(";")]
        answer["review"] = str(check(solution, parse_answer({request["step"]: rows}, solution, "your numbers")))
    return answer
