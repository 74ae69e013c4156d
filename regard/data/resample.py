"""Sound at another rate: a windowed sinc, evaluated where the new samples stand."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv1d, pad

from regard.base.validation import check_integer

ZEROS = 24  # crossings of the sinc on each side: more are sharper
KEPT = 0.95  # of the band below half the lower rate; the window needs the rest to fall off


def resample(sound: Float[Tensor, "*b n"], rate: int, to: int) -> Float[Tensor, "*b m"]:
    """The sound at the rate `to`: sample i of the result stands at i / to seconds.

    Pitches above half of either rate go; those just below it, about a twentieth of the band, grow weaker.
    """
    rate, to = check_integer("resample(rate)", rate, 1), check_integer("resample(to)", to, 1)
    if rate == to:
        return sound
    common = math.gcd(rate, to)
    down, up = rate // common, to // common
    n = sound.shape[-1]
    cut = KEPT * min(1.0, up / down)  # the share of the old band that stays
    reach = math.ceil(ZEROS / cut)
    # `up` new samples fall on every `down` old ones, always at the same distances: one filter for each
    places = torch.arange(up, dtype=torch.float64)[:, None] * down / up
    distance = places - torch.arange(-reach, reach + down, dtype=torch.float64)
    window = torch.cos(distance / reach * math.pi / 2).square().where(distance.abs() < reach, torch.zeros(()).double())
    filters = cut * torch.sinc(cut * distance) * window
    rows = sound.reshape(-1, 1, n)
    blocks = conv1d(pad(rows, (reach, reach + down)), filters[:, None].to(sound), stride=down)
    return blocks.transpose(1, 2).reshape(*sound.shape[:-1], -1)[..., : -(-n * up // down)]
