"""Sets of exercises: what to write, how it is looked over, and the solutions."""

from regard.base.registry import Registry
from regard.work.exercises.byte_pairs import BYTE_PAIRS
from regard.work.exercises.decoding import DECODING
from regard.work.exercises.exercise import Exercises
from regard.work.exercises.self_attention import SELF_ATTENTION
from regard.work.exercises.two_heads import TWO_HEADS
from regard.work.exercises.vit import VIT

SETS: Registry[Exercises] = Registry("set of exercises")
for _exercises in (SELF_ATTENTION, TWO_HEADS, BYTE_PAIRS, DECODING, VIT):
    SETS.add(_exercises.name)(_exercises)
