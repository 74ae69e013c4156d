"""A small speech model with random weights, for tests."""

import torch

from regard.data.log_mel import LogMel
from regard.data.tones import tones
from regard.models.presets import build_from_config
from regard.models.speech import Speech, SpeechConfig
from regard.recipes.digit_listener import normalized_log_mel

RATE = 4000
LOG_MEL = LogMel(sample_rate=RATE, mels=5)
MODEL = SpeechConfig(
    vocab=11, mels=5, width=12, depth=2, heads=3, ff_width=17, chunk=3, look_back=2, dropout=0.1, attention_dropout=0.0
)


def random_listener(config: SpeechConfig = MODEL, seed: int = 1) -> Speech:
    """A model that outputs many random digits."""
    model = build_from_config(config, seed=seed).eval()
    assert isinstance(model, Speech)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        sound = LogMel(sample_rate=RATE, mels=config.mels)
        rows = model(normalized_log_mel(tones(1, sample_rate=RATE).sounds[0], sound)[None])
        model.head.bias.sub_(rows.mean((0, 1)))  # so that no token dominates
    return model
