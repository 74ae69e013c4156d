"""Quiz questions about whole Transformers."""

from random import Random

from regard.lab.verdict import Numbers
from regard.work.exact_numbers import format_count
from regard.work.quiz_question import AnswerChoice, GeneratedQuestion, Tolerance, question, sheet_choice


def _replaced_token(random: Random, part: str, changes: str) -> GeneratedQuestion:
    length = random.choice((6, 8, 9, 12))
    token = random.randrange(length)
    return GeneratedQuestion(
        f"Token {token + 1} of {length} is replaced. How many of the {length} outputs of {part} change?",
        {"length": length, "token": token},
        number=lambda numbers: sum(change > 0 for change in numbers[changes]),
    )


@question("moved-by-feed-forward", "feed-forward")
def moved_by_feed_forward(random: Random) -> GeneratedQuestion:
    return _replaced_token(random, "the feed-forward part", "changes")


@question("moved-by-attention", "feed-forward")
def moved_by_attention(random: Random) -> GeneratedQuestion:
    return _replaced_token(random, "self-attention", "changes in attention")


@question("who-sees-neighbours", "feed-forward")
def who_sees_neighbours(random: Random) -> GeneratedQuestion:
    length = random.choice((7, 9, 11))
    token = random.randrange(1, length - 1)

    def others(changes: list[float]) -> list[float]:
        return [change for index, change in enumerate(changes) if index != token]

    return GeneratedQuestion(
        f"Token {token + 1} of {length} is replaced. What changes in the two parts of a block?",
        {"length": length, "token": token},
        choices=(
            sheet_choice("feed-forward"),
            AnswerChoice(
                "The feed-forward part changes only that token; attention changes all tokens.",
                lambda numbers: max(others(numbers["changes"])) == 0 < min(others(numbers["changes in attention"])),
            ),
            AnswerChoice(
                "Both parts change only that token.",
                lambda numbers: max(others(numbers["changes"]) + others(numbers["changes in attention"])) == 0,
            ),
        ),
    )


@question("gradient-behind-a-norm", "layer-norm")
def gradient_behind_a_norm(random: Random) -> GeneratedQuestion:
    factor = random.choice((4.0, 5.0, 10.0, 20.0, 50.0))
    return GeneratedQuestion(
        f"The input of layer normalisation is multiplied by {factor:g}. By what factor does the gradient at the input "
        "become smaller?",
        {"factor": factor},
        number=lambda numbers: numbers["gradient divided by"],
        tolerance=Tolerance(relative=0.02),
    )


@question("parameters-of-a-norm", "layer-norm")
def parameters_of_a_norm(random: Random) -> GeneratedQuestion:
    width, length = random.choice((64, 80, 96)), random.choice((5, 7, 9))
    return GeneratedQuestion(
        f"How many parameters does layer normalisation of {length} tokens of width {width} have?",
        {"width": width, "length": length},
        number=lambda numbers: numbers["parameters"],
    )


@question("where-lines-cross", "self-attention-why")
def where_lines_cross(random: Random) -> GeneratedQuestion:
    width = random.choice((64, 80, 96, 112))
    return GeneratedQuestion(
        f"One head has width {width}. From which number of tokens on does attention itself take more multiply-adds "
        "than the four projections around it?",
        {"width": width, "lengths": (width // 4, 3 * width // 4, 5 * width // 2)},
        number=lambda numbers: numbers["crossings"]["projections"],
        tolerance=Tolerance(relative=0.05),
    )


def _larger_images(random: Random, model: str, key: str, tolerance: Tolerance) -> GeneratedQuestion:
    small, large = sorted(random.sample((2, 3, 4, 5, 6), 2))
    hidden = random.choice((32, 48, 64, 96))
    return GeneratedQuestion(
        f"{model.format(hidden=hidden)} classifies grey images. How many more parameters does it need for "
        f"{4 * large} x {4 * large} pixels than for {4 * small} x {4 * small}?",
        {"sides": (small, large), "hidden": hidden},
        number=lambda numbers: numbers[key][-1] - numbers[key][0],
        tolerance=tolerance,
    )


@question("perceptron-of-larger-images", "against-mlp")
def perceptron_of_larger_images(random: Random) -> GeneratedQuestion:
    model = "A multilayer perceptron with {hidden} hidden units"
    return _larger_images(random, model, "parameters of perceptron", Tolerance(relative=0.02))


@question("transformer-of-larger-images", "against-mlp")
def transformer_of_larger_images(random: Random) -> GeneratedQuestion:
    model = "A Vision Transformer with patches of 4 x 4, mean pooling and no positions"
    return _larger_images(random, model, "parameters of transformer", Tolerance())


@question("size-of-a-vit", "vit-against-transformer")
def size_of_a_vit(random: Random) -> GeneratedQuestion:
    name, patch, depth, width = random.choice(
        (("vit-b/16", 16, 12, 768), ("vit-l/16", 16, 24, 1024), ("vit-h/14", 14, 32, 1280))
    )
    return GeneratedQuestion(
        f"A Vision Transformer has patches of {patch} x {patch} pixels and {depth} blocks of width {width}, "
        f"feed-forward parts four times as wide, and 1,000 classes. How many million parameters does it have?",
        {},
        number=lambda numbers: numbers["millions"][name],
        tolerance=Tolerance(relative=0.05),
    )


@question("feed-forward-widths", "vit-against-transformer")
def feed_forward_widths(random: Random) -> GeneratedQuestion:
    vit, base = random.choice(("vit-b/16", "vit-l/16", "vit-h/14")), "transformer-base"

    def ratio(numbers: Numbers, name: str) -> float:
        return float(numbers["feed-forward widths"][name] / numbers["widths"][name])

    return GeneratedQuestion(
        f"Compare the feed-forward parts of {vit} and of the base Transformer of 2017. Which is true?",
        {},
        choices=(
            sheet_choice("vit-against-transformer"),
            AnswerChoice(
                "Relative to the width of the tokens both are equally wide, and that of the ViT has more units.",
                lambda numbers: (
                    ratio(numbers, vit) == ratio(numbers, base)
                    and numbers["feed-forward widths"][vit] > numbers["feed-forward widths"][base]
                ),
            ),
            AnswerChoice(
                "Relative to the width of the tokens that of the ViT is twice as wide.",
                lambda numbers: ratio(numbers, vit) == 2 * ratio(numbers, base),
            ),
        ),
    )


@question("convolution-in-vit", "vit-is-convolution")
def convolution_in_vit(random: Random) -> GeneratedQuestion:
    patch, channels = random.choice((4, 5, 7, 8)), random.choice((1, 3))
    return GeneratedQuestion(
        f"A Vision Transformer with patches of {patch} x {patch} gets images of {format_count(channels, 'channel')}. "
        "Which is true?",
        {"patch": patch, "channels": channels},
        choices=(
            sheet_choice("vit-is-convolution"),
            AnswerChoice(
                f"Its patch embedding is a convolution of kernel size {patch} and stride {patch}.",
                lambda numbers: numbers["error of the convolution on whole numbers"] == 0,
            ),
            AnswerChoice(
                "If the image moves by one pixel, the output of the patch embedding moves with it.",
                lambda numbers: numbers["change if shifted by a pixel"] < 1e-9,
            ),
        ),
    )


@question("parameters-of-patch-embedding", "vit-is-convolution")
def parameters_of_patch_embedding(random: Random) -> GeneratedQuestion:
    patch, channels, width = random.choice((4, 5, 7, 8)), random.choice((1, 3)), random.choice((12, 16, 24))
    return GeneratedQuestion(
        f"A patch embedding turns patches of {patch} x {patch} pixels with {format_count(channels, 'channel')} into "
        f"tokens of width {width}. How many parameters, including biases, does it have?",
        {"patch": patch, "channels": channels, "width": width},
        number=lambda numbers: numbers["parameters"],
    )


@question("head-after-fine-tuning", "vit-head")
def head_after_fine_tuning(random: Random) -> GeneratedQuestion:
    heads, fewer = random.choice((2, 3, 4)), random.choice((3, 5, 7, 10))
    width = heads * random.choice((6, 8, 10))
    return GeneratedQuestion(
        f"A Vision Transformer of width {width} is fine-tuned to {fewer} classes with a linear head. How many "
        "parameters does that head have?",
        {"width": width, "heads": heads, "fewer": fewer},
        number=lambda numbers: numbers["head parameters"][1],
    )
