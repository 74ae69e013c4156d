"""Questions about whole Transformers."""

from random import Random

from regard.lab.claim import Numbers
from regard.work.quiz_question import Choice, Posed, Tolerance, kind, said


@kind("moved-by-feed-forward", "feed-forward")
def moved_by_feed_forward(draw: Random) -> Posed:
    length = draw.choice((6, 8, 9, 12))
    token = draw.randrange(length)
    return Posed(
        f"Token {token + 1} of {length} is replaced. How many of the {length} outputs of the feed-forward part move?",
        {"length": length, "token": token},
        number=lambda numbers: sum(change > 0 for change in numbers["changes"]),
    )


@kind("moved-by-attention", "feed-forward")
def moved_by_attention(draw: Random) -> Posed:
    length = draw.choice((6, 8, 9, 12))
    token = draw.randrange(length)
    return Posed(
        f"Token {token + 1} of {length} is replaced. How many of the {length} outputs of self-attention move?",
        {"length": length, "token": token},
        number=lambda numbers: sum(change > 0 for change in numbers["changes in attention"]),
    )


@kind("who-sees-neighbours", "feed-forward")
def who_sees_neighbours(draw: Random) -> Posed:
    length = draw.choice((7, 9, 11))
    token = draw.randrange(1, length - 1)

    def others(changes: list[float]) -> list[float]:
        return [change for at, change in enumerate(changes) if at != token]

    return Posed(
        f"Token {token + 1} of {length} is replaced, and one looks at what moves in either part of a block. Which is "
        "true?",
        {"length": length, "token": token},
        choices=(
            said("feed-forward"),
            Choice(
                "The feed-forward part moves that token alone; attention moves all of them.",
                lambda numbers: max(others(numbers["changes"])) == 0 < min(others(numbers["changes in attention"])),
            ),
            Choice(
                "Both parts move that token alone.",
                lambda numbers: max(others(numbers["changes"]) + others(numbers["changes in attention"])) == 0,
            ),
        ),
    )


@kind("gradient-behind-a-norm", "layer-norm")
def gradient_behind_a_norm(draw: Random) -> Posed:
    factor = draw.choice((4.0, 5.0, 10.0, 20.0, 50.0))
    return Posed(
        f"The input of layer normalisation is multiplied by {factor:g}. By what is the gradient at the input divided?",
        {"factor": factor},
        number=lambda numbers: numbers["gradient divided by"],
        tolerance=Tolerance(share=0.02),
    )


@kind("parameters-of-a-norm", "layer-norm")
def parameters_of_a_norm(draw: Random) -> Posed:
    width, length = draw.choice((48, 64, 96)), draw.choice((5, 7, 9))
    return Posed(
        f"How many parameters has layer normalisation of {length} tokens of width {width}?",
        {"width": width, "length": length},
        number=lambda numbers: numbers["parameters"],
    )


@kind("where-lines-cross", "self-attention-why")
def where_lines_cross(draw: Random) -> Posed:
    width = draw.choice((64, 80, 96, 112))
    return Posed(
        f"One head of width {width}. From which number of tokens on does attention itself take more multiply-adds than "
        "the four projections around it?",
        {"width": width, "lengths": (width // 4, 3 * width // 4, 5 * width // 2)},
        number=lambda numbers: numbers["crossings"]["projections"],
        tolerance=Tolerance(share=0.05),
    )


def _images(draw: Random) -> tuple[int, int, dict[str, object]]:
    small, large = sorted(draw.sample((2, 3, 4, 5, 6), 2))
    return 4 * small, 4 * large, {"sides": (small, large), "hidden": draw.choice((32, 48, 64, 96))}


@kind("perceptron-of-larger-images", "against-mlp")
def perceptron_of_larger_images(draw: Random) -> Posed:
    small, large, settings = _images(draw)
    return Posed(
        f"A perceptron with {settings['hidden']} hidden units classifies grey images. How many parameters more does it "
        f"need for {large} x {large} pixels than for {small} x {small}?",
        settings,
        number=lambda numbers: numbers["parameters of perceptron"][-1] - numbers["parameters of perceptron"][0],
        tolerance=Tolerance(share=0.02),
    )


@kind("transformer-of-larger-images", "against-mlp")
def transformer_of_larger_images(draw: Random) -> Posed:
    small, large, settings = _images(draw)
    return Posed(
        f"A Vision Transformer with patches of 4 x 4, mean pooling and no positions classifies grey images. How many "
        f"parameters more does it need for {large} x {large} pixels than for {small} x {small}?",
        settings,
        number=lambda numbers: numbers["parameters of transformer"][-1] - numbers["parameters of transformer"][0],
    )


@kind("size-of-a-vit", "vit-against-transformer")
def size_of_a_vit(draw: Random) -> Posed:
    name, words = draw.choice(
        (("vit-b/16", "patches of 16 x 16 pixels and 12 blocks of width 768"),
         ("vit-l/16", "patches of 16 x 16 pixels and 24 blocks of width 1024"),
         ("vit-h/14", "patches of 14 x 14 pixels and 32 blocks of width 1280"))
    )  # fmt: skip
    classes = draw.choice((100, 200, 500, 1000))
    return Posed(
        f"A Vision Transformer has {words}, feed-forward parts four times as wide, and {classes:,} classes. How many "
        "million parameters is that?",
        {"classes": classes},
        number=lambda numbers: numbers["millions"][name],
        tolerance=Tolerance(share=0.05),
    )


@kind("feed-forward-widths", "vit-against-transformer")
def feed_forward_widths(draw: Random) -> Posed:
    ours, theirs = draw.choice(("vit-b/16", "vit-l/16", "vit-h/14")), "transformer-base"

    def ratio(numbers: Numbers, name: str) -> float:
        return float(numbers["feed-forward widths"][name] / numbers["widths"][name])

    return Posed(
        f"The feed-forward parts of {ours} and of the base Transformer of 2017. Which is true?",
        {},
        choices=(
            said("vit-against-transformer"),
            Choice(
                "Measured by the width of the tokens both are equally wide, and ViT's has more units.",
                lambda numbers: (
                    ratio(numbers, ours) == ratio(numbers, theirs)
                    and numbers["feed-forward widths"][ours] > numbers["feed-forward widths"][theirs]
                ),
            ),
            Choice(
                "Measured by the width of the tokens ViT's is twice as wide.",
                lambda numbers: ratio(numbers, ours) == 2 * ratio(numbers, theirs),
            ),
        ),
    )


@kind("convolution-in-vit", "vit-is-convolution")
def convolution_in_vit(draw: Random) -> Posed:
    patch, channels = draw.choice((4, 5, 7, 8)), draw.choice((1, 3))
    return Posed(
        f"A Vision Transformer with patches of {patch} x {patch} looks at images of {channels} channel"
        f"{'s' * (channels > 1)}. Which is true?",
        {"patch": patch, "channels": channels},
        choices=(
            said("vit-is-convolution"),
            Choice(
                f"Its entrance is a convolution of kernel {patch} and stride {patch}.",
                lambda numbers: numbers["error of the convolution on whole numbers"] == 0,
            ),
            Choice(
                "What comes out of its entrance moves along when the image moves by one pixel.",
                lambda numbers: numbers["change if moved by a pixel"] < 1e-9,
            ),
        ),
    )


@kind("parameters-of-the-entrance", "vit-is-convolution")
def parameters_of_the_entrance(draw: Random) -> Posed:
    patch, channels, width = draw.choice((4, 5, 7, 8)), draw.choice((1, 3)), draw.choice((12, 16, 24))
    return Posed(
        f"Patches of {patch} x {patch} pixels with {channels} channel{'s' * (channels > 1)} become tokens of width "
        f"{width}. How many parameters, biases included, does that take?",
        {"patch": patch, "channels": channels, "width": width},
        number=lambda numbers: numbers["parameters"],
    )


@kind("head-after-fine-tuning", "vit-head")
def head_after_fine_tuning(draw: Random) -> Posed:
    heads, fewer = draw.choice((2, 3, 4)), draw.choice((3, 5, 7, 10))
    width = heads * draw.choice((6, 8, 10))
    return Posed(
        f"A Vision Transformer of width {width} is fine-tuned to {fewer} classes, with a linear head. How many "
        "parameters has that head?",
        {"width": width, "heads": heads, "fewer": fewer},
        number=lambda numbers: numbers["head parameters"][1],
    )
