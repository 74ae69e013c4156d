"""Infer scale, mask, heads, positions, bias and dropout of an attention function from its outputs.

`measure_attention` takes a `Probe`, an attention wrapped as a function of q, k and v, and returns an
`AttentionMeasurement`. `regard.see.xray` prints it, and `regard.check` compares it with the declared conventions.
"""

from regard.see.measure.measurement import (
    AttentionMeasurement as AttentionMeasurement,
    measure_attention as measure_attention,
)
