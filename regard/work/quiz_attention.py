"""Quiz questions about attention itself."""

import math
from collections.abc import Callable
from random import Random

from regard.lab.verdict import Numbers
from regard.work.quiz_question import AnswerChoice, GeneratedQuestion, Tolerance, format_list, question, sheet_choice


@question("weight-at-beta", "beta")
def weight_at_beta(random: Random) -> GeneratedQuestion:
    scores = tuple(number / 2 for number in random.sample(range(2, 11), 4))
    beta = random.choice((0.3, 0.5, 0.8, 1.2))
    exponentials = [math.exp(beta * score) for score in sorted(scores)]
    return GeneratedQuestion(
        f"Four keys have the scores {format_list(scores)}. What weight does the largest score get at beta = {beta:g}?",
        {"scores": scores, "betas": (0.001, beta, 1000.0)},
        number=lambda numbers: max(numbers["weights"][1]),
        tolerance=Tolerance(absolute=0.03),
        explain=lambda numbers: (
            f"its exponential divided by the sum of all, exp({beta:g} x {max(scores):g}) = {exponentials[-1]:.4g} "
            f"divided by {sum(exponentials):.4g}, is {max(numbers['weights'][1]):.4g}."
        ),
    )


@question("small-beta", "beta")
def small_beta(random: Random) -> GeneratedQuestion:
    scores = tuple(float(number) for number in random.sample(range(1, 9), 4))
    beta = random.choice((0.0005, 0.001))
    return GeneratedQuestion(
        f"Four keys have the scores {format_list(scores)}, and beta is {beta:g}. Which is true?",
        {"scores": scores, "betas": (beta, 1.0, 1000.0)},
        choices=(
            sheet_choice("beta"),
            AnswerChoice(
                "A small beta makes all weights nearly equal, 1/m each.",
                lambda numbers: max(abs(w - 1 / len(scores)) for w in numbers["weights"][0]) < 0.01,
            ),
            AnswerChoice(
                "A small beta puts all weight on the smallest score.",
                lambda numbers: numbers["weights"][0][scores.index(min(scores))] > 0.99,
            ),
            AnswerChoice(
                "A small beta makes all weights small: they add up to less than 1.",
                lambda numbers: sum(numbers["weights"][0]) < 0.99,
            ),
        ),
    )


@question("lead-to-copy", "copy-value")
def lead_to_copy(random: Random) -> GeneratedQuestion:
    keys, error = random.choice((5, 11, 51, 101, 501)), random.choice((1e-2, 1e-3, 1e-4, 1e-6))
    return GeneratedQuestion(
        f"One of {keys} keys should get all but {error:g} of the weight. The others have equal scores. By how much "
        "must its score, times beta, exceed theirs?",
        {"keys": (2, keys), "errors": (0.1, error)},
        number=lambda numbers: numbers["bounds"][1][1],
        tolerance=Tolerance(absolute=0.3),
    )


@question("all-scores-positive", "copy-value")
def all_scores_positive(random: Random) -> GeneratedQuestion:
    others, lead = float(random.randint(20, 50)), float(random.randint(30, 40))
    scores = (others + lead, others, others)
    return GeneratedQuestion(
        f"Three keys have the scores {format_list(scores)}. What is the output?",
        {"scores": scores},
        choices=(
            AnswerChoice(
                "The first value, up to less than 1e-9.", lambda numbers: numbers["weight of the other keys"] < 1e-9
            ),
            AnswerChoice(
                "Mostly the first value, in proportion to its share of the scores.",
                lambda numbers: abs(numbers["weight of the first key"] - scores[0] / sum(scores)) < 0.01,
            ),
            AnswerChoice(
                "The mean of the three, because no score is negative.",
                lambda numbers: numbers["weight of the first key"] < 0.34,
            ),
            AnswerChoice(
                "Not the first value alone: for that, all other keys must have negative scores.",
                sheet_choice("copy-value").is_true,
            ),
        ),
    )


@question("when-it-spreads", "diffuse")
def when_it_spreads(random: Random) -> GeneratedQuestion:
    tokens, width = random.choice((5, 7, 9, 13)), random.choice((9, 11, 16, 25))
    usual = width**-0.5
    return GeneratedQuestion(
        f"{tokens} random queries of width {width} attend to {tokens} random keys. When is every weight within 0.01 of "
        f"1/{tokens}?",
        {"tokens": tokens, "width": width, "betas": (1000.0, usual, 1e-4)},
        choices=(
            sheet_choice("diffuse"),
            AnswerChoice("At beta = 0.0001.", lambda numbers: numbers["distance from 1/m"][2] < 0.01),
            AnswerChoice(f"At the usual beta, {usual:.2g}.", lambda numbers: numbers["distance from 1/m"][1] < 0.01),
            AnswerChoice("Never, not even at beta = 0.", lambda numbers: numbers["distance from 1/m"][3] > 0.01),
        ),
    )


@question("larger-nudge", "key-nudge")
def larger_nudge(random: Random) -> GeneratedQuestion:
    times = random.choice((3, 5, 8, 10))
    return GeneratedQuestion(
        "One key changes a little, and a first-order approximation predicts the change of the output. Now the key "
        f"changes {times} times as much. How many times as large is the error of the prediction?",
        {"sizes": (1.0, 0.1, times * 1e-4, 1e-4), "keys": random.choice((7, 11, 13))},
        number=lambda numbers: times ** numbers["order of the error"],
        tolerance=Tolerance(relative=0.15),
        explain=lambda numbers: (
            f"the error grows with the power {numbers['order of the error']:.3f} of the change, and "
            f"{times} to that power is {times ** numbers['order of the error']:.4g}."
        ),
    )


def _changed_outputs(random: Random, part: str, count: Callable[[Numbers], float]) -> GeneratedQuestion:
    queries, keys = random.choice((3, 5, 6, 8)), random.choice((7, 11, 12))
    return GeneratedQuestion(
        f"{queries} queries attend to {keys} keys. One {part} changes. How many of the {queries} outputs change?",
        {"queries": queries, "keys": keys, "query": random.randrange(queries)},
        number=count,
    )


@question("moved-by-a-key", "query-nudge")
def moved_by_a_key(random: Random) -> GeneratedQuestion:
    return _changed_outputs(random, "key", lambda numbers: numbers["columns changed by a key"])


@question("moved-by-a-query", "query-nudge")
def moved_by_a_query(random: Random) -> GeneratedQuestion:
    return _changed_outputs(
        random, "query", lambda numbers: sum(change > 1e-12 for change in numbers["change by column"])
    )


@question("stretched-key", "key-stretch")
def stretched_key(random: Random) -> GeneratedQuestion:
    side, sign = random.choice([(f"weight, {sign} score", sign) for sign in ("positive", "negative", "zero")])
    alpha, keys = random.choice((500.0, 1000.0, 2000.0)), random.choice((5, 7, 9))
    return GeneratedQuestion(
        f"One of {keys} keys becomes {alpha:g} times as long. Its dot product with a query is {sign}. What happens to "
        "its weight for that query?",
        {"alphas": (1.0, 2.0, alpha), "keys": keys},
        choices=(
            AnswerChoice("It goes to 1.", lambda numbers: numbers[side][-1] > 0.999),
            AnswerChoice("It goes to 0.", lambda numbers: numbers[side][-1] < 0.001),
            AnswerChoice("It does not change.", lambda numbers: abs(numbers[side][-1] - numbers[side][0]) < 1e-9),
            AnswerChoice(
                f"It becomes {alpha:g} times as large.",
                lambda numbers: math.isclose(numbers[side][-1], alpha * numbers[side][0], rel_tol=0.01),
            ),
        ),
    )


@question("two-values", "average-two")
def two_values(random: Random) -> GeneratedQuestion:
    keys, size = random.choice((6, 10, 20, 40)), float(random.randint(1, 4))
    return GeneratedQuestion(
        f"There are {keys} orthonormal keys, and a query is {size:g} times the sum of two of them. What weight does "
        "each of the two get at beta = 1?",
        {"keys": keys, "width": keys + 3, "two": (1, keys - 2), "sizes": (0.0, size, 20.0)},
        number=lambda numbers: numbers["weight of a"][1],
        tolerance=Tolerance(absolute=0.02),
    )


@question("jumping-head", "noisy-keys-one-head")
def jumping_head(random: Random) -> GeneratedQuestion:
    size = random.choice((12.0, 16.0, 20.0, 30.0, 40.0))
    return GeneratedQuestion(
        f"The query of a head is {size:g} times the sum of two keys. The length of the first key varies around 1 with "
        "variance 1/2. In what percentage of draws is the output within 1 % of the first value?",
        {"size": size},
        number=lambda numbers: 100 * numbers["share near v_a"],
        tolerance=Tolerance(absolute=5),
    )


@question("steady-heads", "noisy-keys-two-heads")
def steady_heads(random: Random) -> GeneratedQuestion:
    size, keys = random.choice((18.0, 20.0, 24.0, 30.0)), random.choice((8, 10, 11))
    return GeneratedQuestion(
        f"The length of one of {keys} keys varies. One head attends to that key and another head to another key; each "
        f"query is {size:g} times its key. The outputs of the two heads are averaged. Which is true?",
        {"size": size, "keys": keys},
        choices=(
            sheet_choice("noisy-keys-two-heads"),
            AnswerChoice(
                "The output is stable because each head attends to one key only, and is stable by itself.",
                lambda numbers: (
                    numbers["standard deviation of c1"] < 0.5 * numbers["standard deviation of c, one head"]
                ),
            ),
            AnswerChoice(
                "The output varies as much as that of one head that attends to both keys.",
                lambda numbers: (
                    numbers["standard deviation of c, two heads"] > 0.75 * numbers["standard deviation of c, one head"]
                ),
            ),
        ),
    )


def _saturated_inputs(random: Random) -> tuple[float, ...]:
    others = random.sample(range(-9, 6), 4)
    inputs = [*others, max(others) + random.randint(96, 130)]
    random.shuffle(inputs)
    return tuple(float(number) for number in inputs)


@question("saturated-softmax", "softmax-jacobian")
def saturated_softmax(random: Random) -> GeneratedQuestion:
    inputs = _saturated_inputs(random)
    return GeneratedQuestion(
        f"The inputs of a softmax are {format_list(inputs)}. Which is true?",
        {"inputs": inputs},
        choices=(
            sheet_choice("softmax-jacobian"),
            AnswerChoice(
                "All derivatives are near zero: a step of 1 in any input changes almost nothing.",
                lambda numbers: numbers["largest change after a step"] < 1e-6,
            ),
            AnswerChoice(
                "Only the derivative of the largest output is large.",
                lambda numbers: numbers["derivative of the largest"] > 0.01,
            ),
        ),
    )


@question("largest-derivative", "softmax-jacobian")
def largest_derivative(random: Random) -> GeneratedQuestion:
    inputs = _saturated_inputs(random)
    return GeneratedQuestion(
        f"The inputs of a softmax are {format_list(inputs)}. What is the base-10 logarithm of the largest of its 25 "
        "derivatives?",
        {"inputs": inputs},
        number=lambda numbers: math.log10(numbers["largest derivative"]),
        tolerance=Tolerance(absolute=0.5),
    )


@question("variance-of-scores", "scale-by-root")
def variance_of_scores(random: Random) -> GeneratedQuestion:
    width = random.choice((32, 48, 96, 128, 200, 256))
    return GeneratedQuestion(
        f"Queries and keys of width {width} have random entries of variance 1. What is the variance of their dot "
        "products, without a scale?",
        {"widths": (4, width, 1024)},
        number=lambda numbers: numbers["variance, undivided"][1],
        tolerance=Tolerance(relative=0.25),
    )


@question("why-divide", "scale-by-root")
def why_divide(random: Random) -> GeneratedQuestion:
    width, keys = random.choice((768, 1024, 1280)), random.choice((15, 16, 18))
    return GeneratedQuestion(
        f"Random queries of width {width} attend to {keys} random keys each. What does dividing the scores by the "
        "square root of the width do?",
        {"widths": (4, 64, width), "keys": keys},
        choices=(
            sheet_choice("scale-by-root", 0),
            AnswerChoice(
                "It is needed because the exponentials overflow without it.", sheet_choice("scale-by-root", 1).is_true
            ),
            AnswerChoice(
                "It keeps the variance of the scores at 1, so that no key gets nearly all the weight and gradients do "
                "not vanish.",
                lambda numbers: (
                    abs(numbers["variance, divided"][-1] - 1) < 0.15
                    and numbers["largest weight, divided"][-1] < 0.5 < 0.9 < numbers["largest weight, undivided"][-1]
                ),
            ),
            AnswerChoice(
                "Nothing: dividing all scores by a number does not change the softmax.",
                lambda numbers: (
                    abs(numbers["largest weight, divided"][-1] - numbers["largest weight, undivided"][-1]) < 0.01
                ),
            ),
        ),
    )
