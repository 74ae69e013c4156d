"""Channel attention as a layer: the weights relate channels instead of positions."""

from jaxtyping import Float
from torch import Tensor, nn

from regard.core.channel import channel_attend
from regard.nn.attention import check_heads, check_width, merge_heads


class ChannelAttention(nn.Module):
    """Channel attention layer with projections: channels are split into groups, and attend to each other within one.

    `groups` is the number of groups, which take the place of heads. The cost is linear in the number of positions. Ding
    et al. 2022, arXiv:2204.03645.

    >>> regard.nn.ChannelAttention(24, groups=3)(torch.randn(2, 49, 24)).shape
    torch.Size([2, 49, 24])
    """

    def __init__(self, width: int, groups: int, *, bias: bool = True) -> None:
        super().__init__()
        check_heads(width, groups)
        self.groups = groups
        self.query_key_value = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        check_width(x, self.out.in_features)
        q, k, v = self.query_key_value(x).unflatten(-1, (3, self.groups, -1)).permute(2, 0, 3, 1, 4)
        return self.out(merge_heads(channel_attend(q, k, v)))
