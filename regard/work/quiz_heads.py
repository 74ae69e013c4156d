"""Questions about heads and self-attention."""

from random import Random

from regard.work.quiz_question import Choice, Posed, Tolerance, kind, said


def _counts(name: str, at: int, *options: int) -> tuple[Choice, ...]:
    """Counts to choose from, each once; the one that was counted in the run holds."""

    def choice(count: int) -> Choice:
        return Choice(f"{count:,}", lambda numbers: numbers[name][at] == count)

    return tuple(choice(count) for count in dict.fromkeys(options))


@kind("weights-of-a-projection", "head-width")
def weights_of_a_projection(draw: Random) -> Posed:
    heads = draw.choice((2, 4, 8))
    width = heads * draw.choice((12, 16, 24, 32))
    return Posed(
        f"Attention of width {width} has {heads} heads of width {width // heads}. How many weights has the projection "
        "that makes the queries of all heads?",
        {"width": width, "heads": (1, heads)},
        # a sheet counts heads (width / heads)^2
        choices=_counts("weights", 1, width**2, heads * (width // heads) ** 2, heads * width**2, 3 * width**2),
    )


@kind("biases", "parameter-count")
def biases(draw: Random) -> Posed:
    width, length = draw.choice((6, 12, 20, 32, 48)), draw.choice((5, 7, 9, 11))
    return Posed(
        f"Self-attention over {length} tokens of width {width}. How many biases make queries, keys and values?",
        {"widths": (width,), "lengths": (length,)},
        choices=_counts("biases", 0, 3, 3 * width, 3 * length, length**2, 3 * width * length),
    )


@kind("dense-biases", "parameter-count")
def dense_biases(draw: Random) -> Posed:
    width, length = draw.choice((6, 12, 20, 32, 48)), draw.choice((5, 7, 9, 11))
    return Posed(
        f"{length} tokens of width {width}. How many biases has a fully connected layer from all their numbers to as "
        "many?",
        {"widths": (width,), "lengths": (length,)},
        number=lambda numbers: numbers["dense biases"][0],
    )


@kind("own-weight", "identity-layer")
def own_weight(draw: Random) -> Posed:
    length = draw.choice((3, 4, 5, 6, 9, 12))
    return Posed(
        f"{length} orthonormal tokens of width {length} are queries and keys, at beta = {length} ** -0.5. What weight "
        "does a token give itself?",
        {"length": length},
        number=lambda numbers: numbers["own weight of orthonormal tokens"],
        tolerance=Tolerance(by=0.05),
    )


@kind("tokens-change-places", "permutation")
def tokens_change_places(draw: Random) -> Posed:
    length, width = draw.choice((5, 7, 9, 11)), draw.choice((6, 8, 10))
    return Posed(
        f"Self-attention over {length} tokens of width {width}, in columns: X becomes XP, tokens in another order. "
        "Which is true?",
        {"length": length, "width": width},
        choices=(
            said("permutation", 0),
            said("permutation", 1),
            Choice("The outputs change places as the tokens do.", lambda numbers: numbers["error"] < 1e-9),
            Choice(
                "The outputs change places as the tokens do only if positions were added to them.",
                lambda numbers: numbers["error"] > 1e-9 > numbers["difference with positions"],
            ),
        ),
    )


@kind("one-more-token", "new-token")
def one_more_token(draw: Random) -> Posed:
    heads, before = draw.choice((2, 3, 4)), draw.choice((99, 149, 199, 299))
    width = heads * draw.choice((8, 12, 16))
    return Posed(
        f"After {before} tokens one more comes to masked attention of width {width} with a cache. How many "
        "multiply-adds do its scores and its output take, projections aside?",
        {"width": width, "heads": heads, "lengths": (31, before)},
        number=lambda numbers: numbers["multiply-adds of a step"][1],
        tolerance=Tolerance(share=0.02),
    )


@kind("what-a-new-token-changes", "new-token")
def what_a_new_token_changes(draw: Random) -> Posed:
    before = draw.choice((23, 31, 47, 63))
    return Posed(
        f"One more token comes to masked attention over {before} tokens. Which is true?",
        {"lengths": (before // 2, before)},
        choices=(
            said("new-token", 0),
            said("new-token", 1),
            Choice(
                "One new query meets all keys, and no earlier output changes.",
                lambda numbers: numbers["change of earlier rows"] == 0 and numbers["error of the step"] < 1e-9,
            ),
        ),
    )


@kind("linear-attention-wider", "linear-attention")
def linear_attention_wider(draw: Random) -> Posed:
    width, length = draw.choice((16, 24, 32, 48)), draw.choice((256, 384, 512))
    return Posed(
        f"Linear attention over {length} tokens, with as many features as the width. The width goes from {width} to "
        f"{2 * width}. How many times as many multiply-adds does it take?",
        {"width": width, "length": length},
        number=lambda numbers: numbers["linear at twice D"] / numbers["linear"],
        tolerance=Tolerance(share=0.1),
    )


@kind("channels-or-patches", "channel-attention")
def channels_or_patches(draw: Random) -> Posed:
    side, width = draw.choice((8, 12, 16)), draw.choice((64, 96, 128, 192))
    return Posed(
        f"An image has {side} x {side} patches of width {width}. How many times as many multiply-adds do scores "
        "between channels take as scores between patches?",
        {"side": side, "width": width, "window": 4},
        number=lambda numbers: numbers["scores between channels"] / numbers["scores between patches"],
        tolerance=Tolerance(share=0.05),
    )


@kind("channels-of-a-head", "multi-head")
def channels_of_a_head(draw: Random) -> Posed:
    heads = draw.choice((2, 3, 4, 6))
    width = heads * draw.choice((4, 5, 7))
    place = draw.choice(("before", "after"))
    return Posed(
        f"Attention of width {width} with {heads} heads: the values of one head are changed. How many of the {width} "
        f"channels move, {place} the output projection?",
        {"width": width, "heads": heads},
        number=lambda numbers: numbers[f"channels moved {place} W_o"],
    )


@kind("pairs-in-a-window", "sparse-patterns")
def pairs_in_a_window(draw: Random) -> Posed:
    length, reach = draw.choice((400, 625, 900, 1024)), draw.randint(3, 7)
    return Posed(
        f"{length} patches in a row each see themselves and the {reach} on either side. How many pairs are that?",
        {"lengths": (256, length), "reach": reach},
        number=lambda numbers: numbers["pairs"]["window"][1],
        tolerance=Tolerance(share=0.03),
    )


@kind("waiting-for-the-window", "streaming")
def waiting_for_the_window(draw: Random) -> Posed:
    depth, ahead = draw.choice(((2, 2), (2, 4), (3, 2), (3, 4), (4, 2), (2, 6)))
    return Posed(
        f"Speech streams through {depth} layers, each with a window that sees {ahead} tokens ahead of every row. For "
        "how many tokens, its own included, does a row wait?",
        {"chunk": 2, "look_ahead": ahead, "depths": (1, depth), "length": 24},
        number=lambda numbers: numbers["waits"]["sliding look-ahead"][1],
    )
