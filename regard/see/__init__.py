"""Record and measure the attention of any model, without building the matrix of weights."""

from regard.see.adapters import Probe as Probe, as_probe as as_probe
from regard.see.record import Record as Record, Seen as Seen
from regard.see.relevance import (
    flow as flow,
    gradient_relevance as gradient_relevance,
    rollout as rollout,
    value_weighted as value_weighted,
)
from regard.see.row_statistics import Statistics as Statistics, Top as Top, statistics as statistics
from regard.see.value_zeroing import value_zeroing as value_zeroing
from regard.see.watch import watch as watch
from regard.see.xray import XRay as XRay, xray as xray
