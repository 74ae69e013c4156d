"""Record, measure and change the attention of any PyTorch model."""

from regard.see.adapters import Probe as Probe, as_probe as as_probe
from regard.see.interventions.activation_patching import (
    activation_patching as activation_patching,
    path_patching as path_patching,
)
from regard.see.interventions.head_importance import (
    head_importance as head_importance,
    induction_scores as induction_scores,
    previous_token_scores as previous_token_scores,
    repeated_tokens as repeated_tokens,
)
from regard.see.interventions.intervene import intervene as intervene
from regard.see.interventions.logit_attribution import direct_logit_attribution as direct_logit_attribution
from regard.see.interventions.logit_lens import logit_lens as logit_lens
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
