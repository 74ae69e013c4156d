"""A plain GPT for torch.compile, with which decoding of regard is compared. It has the same weights as regard's GPT."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


class PlainDecoder:
    """Greedy decoding by one compiled step of a plain GPT-2, captured as a CUDA graph and replayed.

    The KV cache has room for exactly the prompt and the new tokens. Positions, tokens and results are on the device.

    backend  backend of scaled_dot_product_attention; None lets torch choose. With MATH, torch.compile generates kernels
    """

    def __init__(
        self, model: Any, prompt: Tensor, new: int, *, compiled: bool = True, backend: SDPBackend | None = None
    ) -> None:
        self.model, config = model, model.config
        b, self.prompt_length = prompt.shape
        device, dtype = prompt.device, next(model.parameters()).dtype
        every = [
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.MATH,
        ]
        self.backends = every if backend is None else [backend]
        self.heads, self.new, self.prompt = config.heads, new, prompt
        self.length = self.prompt_length + new
        shape = (b, config.heads, self.length, config.width // config.heads)
        # one tensor each: the compiler copies a whole tensor if a part of it is written
        self.cache = [[torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"] for _ in range(config.depth)]
        self.columns = torch.arange(self.length, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.token = torch.zeros(b, 1, dtype=torch.int64, device=device)
        self.out = torch.zeros(b, self.length + 1, dtype=torch.int64, device=device)
        self.step = torch.compile(self._step, fullgraph=True) if compiled else self._step
        self.graph: torch.cuda.CUDAGraph | None = None

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        model = self.model
        x = functional.embedding(tokens, model.tokens.weight) + functional.embedding(positions, model.positions.weight)
        visible = self.columns[None, :] <= positions[:, None]
        for number, block in enumerate(model.blocks):
            h = functional.layer_norm(x, x.shape[-1:], block.attention_norm.weight, block.attention_norm.bias)
            layer = block.attention
            qkv = functional.linear(h, layer.query_key_value.weight, layer.query_key_value.bias)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
            keys, values = self.cache[number]
            keys.index_copy_(2, positions, k)
            values.index_copy_(2, positions, v)
            with sdpa_kernel(self.backends):
                h = functional.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
            x = x + functional.linear(h.transpose(1, 2).flatten(2), layer.out.weight, layer.out.bias)
            h = functional.layer_norm(x, x.shape[-1:], block.feedforward_norm.weight, block.feedforward_norm.bias)
            part = block.feedforward
            h = functional.gelu(functional.linear(h, part.up.weight, part.up.bias), approximate="tanh")
            x = x + functional.linear(h, part.down.weight, part.down.bias)
        x = functional.layer_norm(x[:, -1], x.shape[-1:], model.norm.weight, model.norm.bias)
        return functional.linear(x, model.tokens.weight)

    def _step(self, token: Tensor, position: Tensor, out: Tensor) -> None:
        chosen = self._forward(token, position).argmax(-1, keepdim=True)
        token.copy_(chosen)
        position.add_(1)
        out.index_copy_(1, position, chosen)

    @torch.no_grad()
    def __call__(self) -> list[list[int]]:
        """Run greedy decoding and return the new tokens of each text."""
        n = self.prompt_length
        if self.graph is None and self.prompt.device.type == "cuda":
            self._capture()
        chosen = self._forward(self.prompt, torch.arange(n, device=self.prompt.device)).argmax(-1, keepdim=True)
        self.token.copy_(chosen)
        self.out[:, n : n + 1] = chosen
        self.position.fill_(n)
        for _ in range(self.new - 1):
            if self.graph is None:
                self.step(self.token, self.position, self.out)
            else:
                self.graph.replay()
        texts: list[list[int]] = self.out[:, n : n + self.new].tolist()
        return texts

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step(self.token, self.position, self.out)
        torch.cuda.current_stream().wait_stream(stream)
        self.position.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step(self.token, self.position, self.out)
