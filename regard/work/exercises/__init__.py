"""Exercise sets: what to write, how answers are checked, and the reference solutions."""

from regard.base.registry import Registry
from regard.work.exercises.byte_pairs import BYTE_PAIRS
from regard.work.exercises.decoding import DECODING
from regard.work.exercises.exercise import ExerciseSet
from regard.work.exercises.self_attention import SELF_ATTENTION
from regard.work.exercises.two_heads import TWO_HEADS
from regard.work.exercises.vit import VIT

EXERCISE_SETS: Registry[ExerciseSet] = Registry("exercise set")
for _set in (SELF_ATTENTION, TWO_HEADS, BYTE_PAIRS, DECODING, VIT):
    EXERCISE_SETS.add(_set.name)(_set)
