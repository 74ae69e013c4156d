"""The facts that `check` tests, one function each, in the order in which they are tested.

A fact is a rule that a correct attention or decoder follows. The docstring of its function has three paragraphs: the
rule in words for a student, the rule in words for an engineer, and the usual causes of a failure. The sizes of the
tensors have the same letters everywhere: b batch size, h query heads, g key heads, i queries, j keys, c width of
queries and keys, e width of values.

Facts whose failure explains many others come first. For example, the scale of an attention that mixes sequences cannot
be measured.
"""

from regard.base.registry import Registry
from regard.conform.fact import Fact
from regard.conform.facts import behaviour, causality, conventions, decoder, dependence, masks, numbers

ATTENTION: Registry[Fact] = Registry("fact")
for _part in (behaviour, dependence, causality, conventions, numbers, masks):
    for _name in _part.FACTS:
        ATTENTION.add(_name)(_part.FACTS[_name])
DECODER = decoder.FACTS
