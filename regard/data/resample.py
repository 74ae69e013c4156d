"""Resampling of sounds to another sample rate, by a windowed sinc filter."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv1d, pad

from regard.base.validation import check_integer

ZERO_CROSSINGS = 24  # number on each side of the sinc: more make the filter sharper
PASSBAND = 0.95  # share of the band below half the lower rate; the window needs the rest to fall off


def resample(sound: Float[Tensor, "*b n"], rate: int, to: int) -> Float[Tensor, "*b m"]:
    """Resample a sound from sample rate `rate` to sample rate `to`.

    A low-pass filter removes frequencies above half of the lower of the two rates. It also attenuates the frequencies
    between 95 % of this limit and the limit.

    >>> resample(torch.zeros(8000), rate=8000, to=16000).shape
    torch.Size([16000])
    """
    rate, to = check_integer("resample(rate)", rate, 1), check_integer("resample(to)", to, 1)
    if rate == to:
        return sound
    common = math.gcd(rate, to)
    down, up = rate // common, to // common
    n = sound.shape[-1]
    cut = PASSBAND * min(1.0, up / down)  # share of the old band that is kept
    reach = math.ceil(ZERO_CROSSINGS / cut)
    # every `down` old samples give `up` new ones, always at the same distances: one filter for each
    positions = torch.arange(up, dtype=torch.float64)[:, None] * down / up
    distance = positions - torch.arange(-reach, reach + down, dtype=torch.float64)
    window = torch.cos(distance / reach * math.pi / 2).square().where(distance.abs() < reach, torch.zeros(()).double())
    filters = cut * torch.sinc(cut * distance) * window
    rows = sound.reshape(-1, 1, n)
    blocks = conv1d(pad(rows, (reach, reach + down)), filters[:, None].to(sound), stride=down)
    return blocks.transpose(1, 2).reshape(*sound.shape[:-1], -1)[..., : -(-n * up // down)]
