"""Masks spelled as text: what is understood, and what is said of the rest."""

import pytest
from hypothesis import given, strategies as some

import regard
from regard import Mask, causal, chunks, documents, full, global_tokens, padding, random_links, window
from regard.base.errors import ConfigError, RegardError, UnknownNameError
from regard.core.masks.expression import makers, parse_mask


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal()", causal()),
        ("  causal( )\n", causal()),
        ("causal() & window(before=3) | global_tokens(1)", causal() & window(before=3) | global_tokens(1)),
        ("causal() & (window(3) | global_tokens(n=1))", causal() & (window(3) | global_tokens(1))),
        ("~causal()", ~causal()),
        ("window(before=None, after=2)", window(before=None, after=2)),
        ("chunks(4, before=None)", chunks(4, before=None)),
        ("padding([3, 5])", padding([3, 5])),
        ("padding([3, 5], side='left', width=7)", padding([3, 5], side="left", width=7)),
        ("documents([[0, 0, 1], [0, 1, -1]])", documents([[0, 0, 1], [0, 1, -1]])),
        ("random_links(2, seed=7)", random_links(2, seed=7)),
    ],
)
def test_an_expression_is_the_mask_it_spells(text: str, mask: Mask) -> None:
    assert parse_mask(text) == mask


def test_every_mask_of_the_package_can_be_spelled() -> None:
    made = {name for name in regard.__all__ if "masks.forms" in getattr(getattr(regard, name), "__module__", "")}
    assert made == set(makers())


small = some.integers(0, 9)
forms = some.one_of(
    some.just(full()),
    some.just(causal()),
    some.builds(window, small, some.none() | small),
    some.builds(chunks, some.integers(1, 9), small, some.none() | small),
    some.builds(regard.dilated, some.integers(1, 9)),
    some.builds(regard.prefix, small),
    some.builds(padding, some.lists(small, min_size=1, max_size=3)),
    some.builds(random_links, small, small),
)
trees = some.recursive(
    forms,
    lambda inner: some.one_of(
        some.builds(lambda a, b: a & b, inner, inner),
        some.builds(lambda a, b: a | b, inner, inner),
        some.builds(lambda a: ~a, inner),
    ),
    max_leaves=8,
)


@given(trees)
def test_what_a_mask_prints_spells_the_mask_again(mask: Mask) -> None:
    assert parse_mask(repr(mask)) == mask


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("casual()", "unknown mask 'casual'; did you mean 'causal'?"),
        ("sliding_window(4)", "did you mean 'window'?"),
        ("causal", "causal is a function that makes a mask; write causal(...)"),
        ("casual", "unknown mask 'casual'; did you mean 'causal'?"),
        ("causal() and window(3)", "masks combine with & | ~, not with and, or, not: causal() and window(3)"),
        ("not causal()", "masks combine with & | ~"),
        ("causal() + full()", "causal() + full() is not a mask; masks are blocks, causal,"),
        ("3", "3 is not a mask"),
        ("", "is not a mask expression"),
        ("causal() &", "is not a mask expression (invalid syntax)"),
        ("causal(); full()", "is not a mask expression"),
        ("window(befor=3)", "window has no setting 'befor'; did you mean 'before'? (it takes: before, after)"),
        ("causal(3)", "causal(3) does not fit causal(): too many positional arguments"),
        ("causal(size=3)", "causal has no setting 'size' (it takes: nothing)"),
        ("dilated()", "does not fit dilated(step): missing a required argument: 'step'"),
        ("window(before=1, before=2)", "window has before= twice: window(before=1, before=2); write it once"),
        ("window(3, before=3)", "multiple values for argument 'before'"),
        ("window(before=-1)", "window(before) is -1, but must be at least 0"),
        ("window(before=1.5)", "takes a whole number, not 1.5"),
        ("window(before=True)", "True is not a setting of a mask"),
        ("window(before=99999999999999999)", "99999999999999999 is larger than any position"),
        ("documents([[0], [0, 1]])", "documents(ids) takes whole numbers in rows of one length"),
        ("documents(['a'])", "documents(ids) takes whole numbers in rows of one length"),
        ("documents([0.5])", "takes whole numbers"),
        ("padding(*[3])", "*[3] is not a setting of a mask"),
        ("padding(**{'lengths': [3]})", "padding takes its settings one by one"),
        ("window(before=2 ** 3)", "2 ** 3 is not a setting of a mask; use numbers, lists, None or a quoted word"),
        ("window(before=len('abc'))", "len('abc') is not a setting of a mask"),
        ("Mask.of('x', print)", "Mask.of('x', print) is not a mask"),
        ("causal().__class__", "causal().__class__ is not a mask"),
        ("__import__('os')", "unknown mask '__import__'"),
        ("(lambda: causal())()", "is not a mask"),
        ("[causal() for _ in range(9)]", "is not a mask"),
        ("~" * 200 + "causal()", "nests deeper than 100 levels"),
        ("(" * 500 + "causal()" + ")" * 500, "is not a mask expression (too many nested parentheses"),
        ("causal()\0", "is not a mask expression"),
    ],
)
def test_anything_else_is_a_clear_error(text: str, words: str) -> None:
    with pytest.raises(RegardError) as raised:
        parse_mask(text)
    assert words in str(raised.value)
    assert isinstance(raised.value, ConfigError | UnknownNameError | ValueError | TypeError)
