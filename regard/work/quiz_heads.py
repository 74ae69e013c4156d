"""Quiz questions about heads and self-attention."""

from random import Random

from regard.work.quiz_question import AnswerChoice, GeneratedQuestion, Tolerance, question, sheet_choice


def _count_choices(name: str, index: int, *options: int) -> tuple[AnswerChoice, ...]:
    """Return answer choices with different counts; the true one has the count that the experiment measures.

    name, index  where the count is in the measured numbers: numbers[name][index]
    options      the counts to choose from; duplicates are removed
    """

    def choice(count: int) -> AnswerChoice:
        return AnswerChoice(f"{count:,}", lambda numbers: numbers[name][index] == count)

    return tuple(choice(count) for count in dict.fromkeys(options))


@question("weights-of-a-projection", "head-width")
def weights_of_a_projection(random: Random) -> GeneratedQuestion:
    heads = random.choice((2, 4, 8))
    width = heads * random.choice((12, 16, 24, 32))
    # a source sheet counts heads (width / heads)^2
    counts = (width**2, heads * (width // heads) ** 2, heads * width**2, 3 * width**2)
    return GeneratedQuestion(
        f"Attention of width {width} has {heads} heads of width {width // heads}. How many weights does the projection "
        "have that computes the queries of all heads?",
        {"width": width, "heads": (1, heads)},
        choices=_count_choices("weights", 1, *counts),
    )


@question("biases", "parameter-count")
def biases(random: Random) -> GeneratedQuestion:
    width, length = random.choice((6, 12, 20, 32, 48)), random.choice((5, 7, 9, 11))
    return GeneratedQuestion(
        f"Self-attention over {length} tokens of width {width}. How many biases do the projections of queries, keys "
        "and values have together?",
        {"widths": (width,), "lengths": (length,)},
        choices=_count_choices("biases", 0, 3, 3 * width, 3 * length, length**2, 3 * width * length),
    )


@question("dense-biases", "parameter-count")
def dense_biases(random: Random) -> GeneratedQuestion:
    width, length = random.choice((6, 12, 20, 32, 48)), random.choice((5, 7, 9, 11))
    return GeneratedQuestion(
        f"A fully connected layer maps all numbers of {length} tokens of width {width} to as many numbers. How many "
        "biases does it have?",
        {"widths": (width,), "lengths": (length,)},
        number=lambda numbers: numbers["dense biases"][0],
    )


@question("own-weight", "identity-layer")
def own_weight(random: Random) -> GeneratedQuestion:
    length = random.choice((3, 4, 5, 6, 9, 12))
    return GeneratedQuestion(
        f"{length} orthonormal tokens of width {length} are both queries and keys, at beta = {length} ** -0.5. What "
        "weight does a token give to itself?",
        {"length": length},
        number=lambda numbers: numbers["own weight of orthonormal tokens"],
        tolerance=Tolerance(absolute=0.05),
    )


@question("tokens-change-places", "permutation")
def tokens_change_places(random: Random) -> GeneratedQuestion:
    length, width = random.choice((5, 7, 9, 11)), random.choice((6, 8, 10))
    return GeneratedQuestion(
        f"Self-attention over {length} tokens of width {width}, in columns. The tokens are permuted: X becomes XP. "
        "Which is true?",
        {"length": length, "width": width},
        choices=(
            sheet_choice("permutation", 0),
            sheet_choice("permutation", 1),
            AnswerChoice("The outputs are permuted in the same way.", lambda numbers: numbers["error"] < 1e-9),
            AnswerChoice(
                "The outputs are permuted in the same way only if positions were added to the tokens.",
                lambda numbers: numbers["error"] > 1e-9 > numbers["difference with positions"],
            ),
        ),
    )


@question("one-more-token", "new-token")
def one_more_token(random: Random) -> GeneratedQuestion:
    heads, before = random.choice((2, 3, 4)), random.choice((99, 149, 199, 299))
    width = heads * random.choice((8, 12, 16))
    return GeneratedQuestion(
        f"Causal attention of width {width} with a KV cache has processed {before} tokens. How many multiply-adds do "
        "the scores and the output of one more token take, without the projections?",
        {"width": width, "heads": heads, "lengths": (31, before)},
        number=lambda numbers: numbers["multiply-adds of a step"][1],
        tolerance=Tolerance(relative=0.02),
    )


@question("what-a-new-token-changes", "new-token")
def what_a_new_token_changes(random: Random) -> GeneratedQuestion:
    before = random.choice((23, 31, 47, 63))
    return GeneratedQuestion(
        f"One more token is added to causal attention over {before} tokens. Which is true?",
        {"lengths": (before // 2, before)},
        choices=(
            sheet_choice("new-token", 0),
            sheet_choice("new-token", 1),
            AnswerChoice(
                "One new query attends to all keys, and no earlier output changes.",
                lambda numbers: numbers["change of earlier rows"] == 0 and numbers["error of the step"] < 1e-9,
            ),
        ),
    )


@question("linear-attention-wider", "linear-attention")
def linear_attention_wider(random: Random) -> GeneratedQuestion:
    width, length = random.choice((16, 24, 32, 48)), random.choice((256, 384, 512))
    return GeneratedQuestion(
        f"Linear attention over {length} tokens has as many features as its width. The width grows from {width} to "
        f"{2 * width}. How many times as many multiply-adds does it take?",
        {"width": width, "length": length},
        number=lambda numbers: numbers["multiply-adds of linear at twice D"] / numbers["multiply-adds of linear"],
        tolerance=Tolerance(relative=0.1),
    )


@question("channels-or-patches", "channel-attention")
def channels_or_patches(random: Random) -> GeneratedQuestion:
    side, width = random.choice((8, 12, 16)), random.choice((64, 96, 128, 192))
    return GeneratedQuestion(
        f"An image has {side} x {side} patches of width {width}. How many times as many multiply-adds do scores "
        "between channels take as scores between patches?",
        {"side": side, "width": width, "window": 4},
        number=lambda numbers: numbers["scores between channels"] / numbers["scores between patches"],
        tolerance=Tolerance(relative=0.05),
    )


@question("channels-of-a-head", "multi-head")
def channels_of_a_head(random: Random) -> GeneratedQuestion:
    heads = random.choice((2, 3, 4, 6))
    width = heads * random.choice((4, 5, 7))
    when = random.choice(("before", "after"))
    return GeneratedQuestion(
        f"Attention of width {width} has {heads} heads. The values of one head change. How many of the {width} "
        f"channels change {when} the output projection?",
        {"width": width, "heads": heads},
        number=lambda numbers: numbers[f"channels changed {when} W_o"],
    )


@question("pairs-in-a-window", "sparse-patterns")
def pairs_in_a_window(random: Random) -> GeneratedQuestion:
    length, reach = random.choice((400, 576, 784, 1024)), random.randint(3, 7)
    return GeneratedQuestion(
        f"Each of {length} patches in a row sees itself and {reach} patches on either side. How many pairs is that?",
        {"lengths": (256, length), "reach": reach},
        number=lambda numbers: numbers["pairs"]["window"][1],
        tolerance=Tolerance(relative=0.03),
    )


@question("waiting-for-the-window", "streaming")
def waiting_for_the_window(random: Random) -> GeneratedQuestion:
    depth, ahead = random.choice(((2, 2), (2, 4), (3, 2), (3, 4), (4, 2), (2, 6)))
    return GeneratedQuestion(
        f"Speech streams through {depth} layers. In each layer a token sees {ahead} tokens ahead. For how many tokens, "
        "including itself, does the output of a token wait?",
        {"chunk": 2, "look_ahead": ahead, "depths": (1, depth), "length": 24},
        number=lambda numbers: numbers["tokens waited for"]["sliding look-ahead"][1],
    )
