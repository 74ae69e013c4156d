"""Questions about attention itself."""

import math
from random import Random

from regard.work.quiz_question import Choice, Posed, Tolerance, kind, listed, said


@kind("weight-at-beta", "beta")
def weight_at_beta(draw: Random) -> Posed:
    scores = tuple(number / 2 for number in draw.sample(range(2, 11), 4))
    beta = draw.choice((0.3, 0.5, 0.8, 1.2))
    raised = [math.exp(beta * score) for score in sorted(scores)]
    return Posed(
        f"Four keys score {listed(scores)} for a query. What weight does the largest score get at beta = {beta:g}?",
        {"scores": scores, "betas": (0.001, beta, 1000.0)},
        number=lambda numbers: max(numbers["weights"][1]),
        tolerance=Tolerance(by=0.03),
        how=lambda numbers: (
            f"its exponential over the sum of all, exp({beta:g} x {max(scores):g}) = {raised[-1]:.4g} over "
            f"{sum(raised):.4g}, is {max(numbers['weights'][1]):.4g}."
        ),
    )


@kind("small-beta", "beta")
def small_beta(draw: Random) -> Posed:
    scores = tuple(float(number) for number in draw.sample(range(1, 9), 4))
    beta = draw.choice((0.0005, 0.001))
    return Posed(
        f"Four keys score {listed(scores)} for a query, and beta is {beta:g}. Which is true?",
        {"scores": scores, "betas": (beta, 1.0, 1000.0)},
        choices=(
            said("beta"),
            Choice(
                "A small beta makes all weights nearly alike, 1/m each.",
                lambda numbers: max(abs(w - 1 / len(scores)) for w in numbers["weights"][0]) < 0.01,
            ),
            Choice(
                "A small beta puts all weight on the smallest score.",
                lambda numbers: numbers["weights"][0][scores.index(min(scores))] > 0.99,
            ),
            Choice(
                "A small beta makes all weights small: they add up to less than 1.",
                lambda numbers: sum(numbers["weights"][0]) < 0.99,
            ),
        ),
    )


@kind("lead-to-copy", "copy-value")
def lead_to_copy(draw: Random) -> Posed:
    keys, error = draw.choice((5, 11, 51, 101, 501)), draw.choice((1e-2, 1e-3, 1e-4, 1e-6))
    return Posed(
        f"Of {keys} keys one has to get all but {error:g} of the weight, and the others score alike. By how much must "
        "its score, beta included, lead theirs?",
        {"keys": (2, keys), "errors": (0.1, error)},
        number=lambda numbers: numbers["bounds"][1][1],
        tolerance=Tolerance(by=0.3),
    )


@kind("all-scores-positive", "copy-value")
def all_scores_positive(draw: Random) -> Posed:
    others, lead = float(draw.randint(20, 50)), float(draw.randint(30, 40))
    scores = (others + lead, others, others)
    return Posed(
        f"Three keys score {listed(scores)}. What comes out?",
        {"scores": scores},
        choices=(
            Choice("The first value, but for less than 1e-9.", lambda numbers: numbers["lost"] < 1e-9),
            Choice(
                "Mostly the first value, by its share of the scores.",
                lambda numbers: abs(numbers["copied"] - scores[0] / sum(scores)) < 0.01,
            ),
            Choice("The mean of the three, since none is negative.", lambda numbers: numbers["copied"] < 0.34),
            Choice(
                "Not the first value alone: all keys but one must oppose the query for that.",
                said("copy-value").holds,
            ),
        ),
    )


@kind("when-it-spreads", "diffuse")
def when_it_spreads(draw: Random) -> Posed:
    tokens, width = draw.choice((5, 7, 9, 13)), draw.choice((9, 11, 16, 25))
    usual = width**-0.5
    return Posed(
        f"{tokens} random queries of width {width} look at {tokens} random keys. When is every weight within 0.01 of "
        f"1/{tokens}?",
        {"tokens": tokens, "width": width, "betas": (1000.0, usual, 1e-4)},
        choices=(
            said("diffuse"),
            Choice("At beta = 0.0001.", lambda numbers: numbers["off uniform"][2] < 0.01),
            Choice(f"At the usual beta, {usual:.2g}.", lambda numbers: numbers["off uniform"][1] < 0.01),
            Choice("Never, not even at beta = 0.", lambda numbers: numbers["off uniform"][3] > 0.01),
        ),
    )


@kind("larger-nudge", "key-nudge")
def larger_nudge(draw: Random) -> Posed:
    times = draw.choice((3, 5, 8, 10))
    return Posed(
        "One key is nudged, and the change of the output is predicted to first order. The nudge is made "
        f"{times} times as large. How many times as large is the error of the prediction?",
        {"sizes": (1.0, 0.1, times * 1e-4, 1e-4), "keys": draw.choice((7, 11, 13))},
        number=lambda numbers: times ** numbers["order of the error"],
        tolerance=Tolerance(share=0.15),
        how=lambda numbers: (
            f"what first order leaves out grows with the power {numbers['order of the error']:.3f} of the nudge, and "
            f"{times} to that power is {times ** numbers['order of the error']:.4g}."
        ),
    )


@kind("moved-by-a-key", "query-nudge")
def moved_by_a_key(draw: Random) -> Posed:
    queries, keys = draw.choice((3, 5, 6, 8)), draw.choice((7, 11, 12))
    return Posed(
        f"{queries} queries look at {keys} keys, and one key is nudged. How many of the {queries} outputs move?",
        {"queries": queries, "keys": keys, "query": draw.randrange(queries)},
        number=lambda numbers: numbers["columns moved by a key"],
    )


@kind("moved-by-a-query", "query-nudge")
def moved_by_a_query(draw: Random) -> Posed:
    queries, keys = draw.choice((3, 5, 6, 8)), draw.choice((7, 11, 12))
    return Posed(
        f"{queries} queries look at {keys} keys, and one query is nudged. How many of the {queries} outputs move?",
        {"queries": queries, "keys": keys, "query": draw.randrange(queries)},
        number=lambda numbers: sum(change > 1e-12 for change in numbers["change by column"]),
    )


@kind("stretched-key", "key-stretch")
def stretched_key(draw: Random) -> Posed:
    side, sign = draw.choice((("towards", "positive"), ("against", "negative"), ("at a right angle", "zero")))
    alpha, keys = draw.choice((500.0, 1000.0, 2000.0)), draw.choice((5, 7, 9))
    return Posed(
        f"One of {keys} keys is made {alpha:g} times as long. What becomes of its weight for a query whose product "
        f"with it is {sign}?",
        {"alphas": (1.0, 2.0, alpha), "keys": keys},
        choices=(
            Choice("It goes to 1.", lambda numbers: numbers[side][-1] > 0.999),
            Choice("It goes to 0.", lambda numbers: numbers[side][-1] < 0.001),
            Choice("It does not change.", lambda numbers: abs(numbers[side][-1] - numbers[side][0]) < 1e-9),
            Choice(
                f"It grows {alpha:g} times.",
                lambda numbers: math.isclose(numbers[side][-1], alpha * numbers[side][0], rel_tol=0.01),
            ),
        ),
    )


@kind("two-values", "average-two")
def two_values(draw: Random) -> Posed:
    keys, size = draw.choice((6, 10, 20, 40)), float(draw.randint(1, 4))
    return Posed(
        f"Of {keys} orthonormal keys a query is {size:g} times the sum of two. What weight does each of the two get, "
        "at beta = 1?",
        {"keys": keys, "width": keys + 3, "two": (1, keys - 2), "sizes": (0.0, size, 20.0)},
        number=lambda numbers: numbers["weight of a"][1],
        tolerance=Tolerance(by=0.02),
    )


@kind("jumping-head", "noisy-keys-one-head")
def jumping_head(draw: Random) -> Posed:
    size = draw.choice((12.0, 16.0, 20.0, 30.0, 40.0))
    return Posed(
        f"A head asks for two keys at once, with strength {size:g}; the length of the first varies around 1 with "
        "variance 1/2. In what percentage of draws is the output within 1 % of the first value?",
        {"size": size},
        number=lambda numbers: 100 * numbers["near a"],
        tolerance=Tolerance(by=5),
    )


@kind("steady-heads", "noisy-keys-two-heads")
def steady_heads(draw: Random) -> Posed:
    size, keys = draw.choice((18.0, 20.0, 24.0, 30.0)), draw.choice((8, 10, 11))
    return Posed(
        f"The length of one of {keys} keys varies. Two heads, one asking for that key and one for another, each with "
        f"strength {size:g}, are averaged. Which is true?",
        {"size": size, "keys": keys},
        choices=(
            said("noisy-keys-two-heads"),
            Choice(
                "The output is steady because each head asks for one key alone, and is steady by itself.",
                lambda numbers: numbers["spread of c1 alone"] < 0.5 * numbers["spread of c, one head"],
            ),
            Choice(
                "The output jumps as much as that of one head which asks for both keys.",
                lambda numbers: numbers["spread of c, two heads"] > 0.75 * numbers["spread of c, one head"],
            ),
        ),
    )


def _saturated(draw: Random) -> tuple[float, ...]:
    others = draw.sample(range(-9, 6), 4)
    inputs = [*others, max(others) + draw.randint(96, 130)]
    draw.shuffle(inputs)
    return tuple(float(number) for number in inputs)


@kind("saturated-softmax", "softmax-jacobian")
def saturated_softmax(draw: Random) -> Posed:
    inputs = _saturated(draw)
    return Posed(
        f"The inputs of a softmax are {listed(inputs)}. Which is true?",
        {"inputs": inputs},
        choices=(
            said("softmax-jacobian"),
            Choice(
                "All derivatives are near zero: a step of 1 in any input changes hardly anything.",
                lambda numbers: numbers["largest change after a step"] < 1e-6,
            ),
            Choice(
                "Only the derivative of the largest output is large.",
                lambda numbers: numbers["derivative of the winner"] > 0.01,
            ),
        ),
    )


@kind("largest-derivative", "softmax-jacobian")
def largest_derivative(draw: Random) -> Posed:
    inputs = _saturated(draw)
    return Posed(
        f"The inputs of a softmax are {listed(inputs)}. The largest of its 25 derivatives is 10 to which power?",
        {"inputs": inputs},
        number=lambda numbers: math.log10(numbers["largest derivative"]),
        tolerance=Tolerance(by=0.5),
    )


@kind("variance-of-scores", "scale-by-root")
def variance_of_scores(draw: Random) -> Posed:
    width = draw.choice((32, 48, 96, 128, 200, 256))
    return Posed(
        f"Queries and keys of width {width} have random entries of variance 1. What is the variance of their products, "
        "undivided?",
        {"widths": (4, width, 1024)},
        number=lambda numbers: numbers["variance, plain"][1],
        tolerance=Tolerance(share=0.25),
    )


@kind("why-divide", "scale-by-root")
def why_divide(draw: Random) -> Posed:
    width, keys = draw.choice((768, 1024, 1280)), draw.choice((15, 16, 18))
    return Posed(
        f"Random queries and keys of width {width}, {keys} keys a query. What does dividing scores by the root of the "
        "width do?",
        {"widths": (4, 64, width), "keys": keys},
        choices=(
            said("scale-by-root", 0),
            Choice("It is needed because the exponentials overflow without it.", said("scale-by-root", 1).holds),
            Choice(
                "It keeps the variance of scores at 1, so that no key takes nearly all weight and gradients stay.",
                lambda numbers: (
                    abs(numbers["variance, scaled"][-1] - 1) < 0.15
                    and numbers["largest weight, scaled"][-1] < 0.5 < 0.9 < numbers["largest weight, plain"][-1]
                ),
            ),
            Choice(
                "Nothing: the softmax does not notice scores that are divided by a number.",
                lambda numbers: (
                    abs(numbers["largest weight, scaled"][-1] - numbers["largest weight, plain"][-1]) < 0.01
                ),
            ),
        ),
    )
