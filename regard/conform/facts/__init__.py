"""The facts that `check` tests on an attention, one function each, in the order in which they are tested.

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
