"""A small model that listens, for tests of hearing."""

import torch

from regard.data.log_mel import LogMel
from regard.data.tones import tones
from regard.models.presets import build_from_config
from regard.models.speech import Speech, SpeechConfig
from regard.recipes.digit_listener import heard

RATE = 4000
SOUND = LogMel(rate=RATE, bands=5)
MODEL = SpeechConfig(
    vocab=11, mels=5, width=12, depth=2, heads=3, ff_width=17, chunk=3, look_back=2, dropout=0.1, attention_dropout=0.0
)


def listening(config: SpeechConfig = MODEL, seed: int = 1) -> Speech:
    """A model that has much to say, though nothing true."""
    model = build_from_config(config, seed=seed).eval()
    assert isinstance(model, Speech)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        sound = LogMel(rate=RATE, bands=config.mels)
        rows = model(heard(tones(1, rate=RATE).sounds[0], sound)[None])
        model.head.bias.sub_(rows.mean((0, 1)))  # so that no token stands out all the time
    return model
