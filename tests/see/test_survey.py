"""`watch` on models of many families: everything is recorded, or refused with a reason; nothing is missed or wrong."""

import pytest

from tests.see.survey import huggingface_outcome, timm_outcome
from tests.see.survey_models import HUGGINGFACE, TIMM


@pytest.mark.parametrize("family", HUGGINGFACE)
def test_a_family_of_hugging_face(family: str) -> None:
    outcome = huggingface_outcome(family)
    assert outcome.kind in ("recorded", "refused"), outcome


@pytest.mark.parametrize("name", TIMM)
def test_a_model_of_timm(name: str) -> None:
    outcome = timm_outcome(name)
    assert outcome.kind in ("recorded", "refused"), outcome
