"""The built-in text for induction heads: random strings, each written twice.

In the first copy, each next character is random. In the second copy, a model can predict the next character by
induction: it finds the previous occurrence of the current character, and copies the character after it. Olsson et al.
2022, arXiv:2209.11895.
"""

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.data.sampler import sampler_generator

ALPHABET = "".join(map(chr, range(32, 127)))  # printable ASCII
LENGTH = (8, 48)  # shortest and longest string


def repeated_text(characters: int = 1_000_000, *, seed: int = 0) -> str:
    """Return a text of random strings, each written twice in a row; the text has `characters` characters.

    The characters of a string are all different. The strings have random lengths, so that a model cannot find the copy
    at a fixed distance.

    >>> len(repeated_text(1000))
    1000
    """
    check_integer("characters", characters, 1)
    generator, text, size = sampler_generator(seed, 0, "repeated text"), list[str](), 0
    while size < characters:
        length = int(torch.randint(LENGTH[0], LENGTH[1] + 1, (), generator=generator))
        order = torch.randperm(len(ALPHABET), generator=generator)[:length].tolist()
        text.append("".join(ALPHABET[each] for each in order) * 2)
        size += 2 * length
    return "".join(text)[:characters]


def repeated_permutations(
    count: int, length: int, *, vocab: int = len(ALPHABET), seed: int = 0
) -> Int64[Tensor, "count n"]:
    """Return `count` sequences of 2 * `length` tokens: `length` different random tokens, then the same tokens again.

    >>> repeated_permutations(2, 5).shape
    torch.Size([2, 10])
    """
    if check_integer("length", length, 1, "tokens") > vocab:
        raise ConfigError(f"length={length} different tokens need a vocabulary of at least {length}, not {vocab}")
    generator = sampler_generator(seed, 0, "repeated tokens")
    halves = torch.stack([torch.randperm(vocab, generator=generator)[:length] for _ in range(count)])
    return halves.repeat(1, 2)
