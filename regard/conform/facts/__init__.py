"""The facts of attention, one small function each, in the order in which they are tested.

What is asked first explains most: an attention that mixes sequences has no scale to be measured.
"""

from regard.base.registry import Registry
from regard.conform.fact import Fact
from regard.conform.facts import behaviour, conventions, decoder, dependence, masks, numbers

ATTENTION: Registry[Fact] = Registry("fact")
for _part in (behaviour, dependence, conventions, numbers, masks):
    for _name in _part.FACTS:
        ATTENTION.add(_name)(_part.FACTS[_name])
DECODER = decoder.FACTS
