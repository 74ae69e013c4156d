"""Greedy decoding, sampling and beam search on the device, as part of a decoding step in a CUDA graph.

The host reads no values between two steps. Each step writes the chosen tokens into its row of tensors (`records`),
which the host reads later.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from regard.models.beam_search import BeamSearch
from regard.models.decoding_ops import StepState, append, choose_and_append
from regard.models.sampling import Greedy, Sample, StepwiseStrategy, Strategy, top_tokens

ANY = -2  # matches every token in a stop sequence


class DeviceStrategy:
    """Base class of decoding strategies on the device: their buffers, and the choice of tokens in a decoding step.

    records  tensors with one row for each step
    step     index of the next step, as a tensor of one integer
    """

    records: tuple[Tensor, ...]
    rows_per_prompt = 1

    def __init__(self, device: torch.device) -> None:
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def choose(self, state: StepState, logits: Float[Tensor, "r w"]) -> None:
        """Choose the next token of each sequence, and write the tokens into the state and the records."""
        raise NotImplementedError


class DeviceSampling(DeviceStrategy):
    """Greedy decoding or sampling on the device, for n steps and r sequences.

    The records are the chosen tokens (n r) and their log-probabilities (n r).

    uniform  one uniform random number for each step and sequence (n r)
    """

    def __init__(self, strategy: StepwiseStrategy, rows: int, steps: int, device: torch.device) -> None:
        super().__init__(device)
        self.strategy = strategy
        temperature = strategy.temperature if isinstance(strategy, Sample) else 1.0
        self.temperature = torch.tensor([temperature], dtype=torch.float64, device=device)
        self.uniform = torch.zeros(steps, rows, dtype=torch.float64, device=device)
        self.records = (
            torch.zeros(steps, rows, dtype=torch.int64, device=device),
            torch.zeros(steps, rows, dtype=torch.float64, device=device),
        )

    def start(self, uniform: Float[Tensor, "n r"]) -> None:
        self.uniform[: len(uniform)].copy_(uniform)
        self.step.zero_()

    def choose(self, state: StepState, logits: Float[Tensor, "r w"]) -> None:
        plain = isinstance(self.strategy, Sample) and self.strategy.top_k is None and self.strategy.top_p in (None, 1.0)
        if state.triton and (plain or isinstance(self.strategy, Greedy)):
            drawn = (self.uniform, self.temperature) if plain else ()
            choose_and_append(state, logits, self.step, self.records, *drawn)
            return
        exact = logits.double()
        total = exact.logsumexp(-1, keepdim=True)
        # a row with NaN, +inf or only -inf gets some token and the log-probability NaN, which the host finds
        finite = total.isfinite()
        tokens = self.strategy.choose(logits.masked_fill(~finite, 0.0), self.uniform.index_select(0, self.step)[0])
        values = (exact.gather(1, tokens[:, None]) - total).masked_fill(~finite, torch.nan)[:, 0]
        append(state, tokens, values, self.step, self.records)


class DeviceBeamSearch(DeviceStrategy):
    """Beam search on the device: chooses the best continuations of all hypotheses of each prompt.

    Each prompt has `num_beams` rows; a row without a hypothesis has the log-probability -inf. The records describe the
    `count` best continuations of each prompt, the best first, in four tensors: the index of the continued hypothesis
    among the rows of its prompt, the new token, the log-probability of this token, and whether the continuation exists.
    Each tensor has the shape (n p count), for n steps and p prompts.
    """

    def __init__(
        self, strategy: BeamSearch, stop: Sequence[tuple[int, ...]], count: int, prompts: int, steps: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(device)
        self.rows_per_prompt, self.count = strategy.num_beams, count
        rows, longest = prompts * strategy.num_beams, max(map(len, stop), default=1)
        self.stop = torch.tensor(
            [[ANY] * (longest - len(each)) + list(each) for each in stop], dtype=torch.int64, device=device
        ).view(len(stop), longest)
        self.totals = torch.zeros(rows, dtype=torch.float64, device=device)
        self.recent = torch.full((rows, longest - 1), -1, dtype=torch.int64, device=device)
        self.first_rows = torch.arange(0, rows, strategy.num_beams, device=device)[:, None]
        shape = (steps, prompts, count)
        self.records = (
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.float64, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
        )

    def start(self, totals: Float[Tensor, "r"], new_tokens: Sequence[Sequence[int]]) -> None:
        """Start beam search from one hypothesis per row.

        totals      log-probability of each hypothesis
        new_tokens  the new tokens of each hypothesis so far
        """
        length = self.recent.shape[1]
        padded = [[*[-1] * length, *tokens][len(tokens) :] if length else [] for tokens in new_tokens]
        self.recent.copy_(torch.tensor(padded, dtype=torch.int64).view(self.recent.shape))
        self.totals.copy_(totals)
        self.step.zero_()

    def choose(self, state: StepState, logits: Float[Tensor, "r w"]) -> None:
        beams, count = self.rows_per_prompt, self.count
        tokens = top_tokens(logits, min(count, logits.shape[-1]))
        exact = logits.double()
        values = exact.gather(1, tokens) - exact.logsumexp(-1, keepdim=True)
        totals = self.totals[:, None] + values
        per_prompt = (len(self.first_rows), -1)
        # the sort is stable: of equally likely ones, earlier rows first, then lower token ids
        totals, best = totals.reshape(per_prompt).sort(stable=True, dim=-1, descending=True)
        totals, best = totals[:, :count], best[:, :count]
        parents = best // tokens.shape[1]
        tokens, values = tokens.reshape(per_prompt).gather(1, best), values.reshape(per_prompt).gather(1, best)
        found = (parents, tokens, values, totals > -torch.inf)
        for record, row in zip(self.records, found, strict=True):
            record.index_copy_(0, self.step, _pad(row, count)[None])
        self.step += 1
        rows = parents + self.first_rows
        tails = torch.cat([self.recent[rows], tokens[..., None]], -1)
        ended = ((tails[:, :, None] == self.stop) | (self.stop == ANY)).all(-1).any(-1)
        totals = totals.masked_fill(ended, -torch.inf)
        # those that go on, in order, and then others, which have no hypothesis
        chosen = (totals == -torch.inf).int().sort(stable=True, dim=-1).indices[:, :beams]
        rows = rows.gather(1, chosen).flatten()
        self.totals.copy_(totals.gather(1, chosen).flatten())
        self.recent.copy_(
            tails[..., 1:].gather(1, chosen[..., None].expand(-1, -1, self.recent.shape[1])).flatten(0, 1)
        )
        state.tokens.copy_(tokens.gather(1, chosen).flatten())
        state.positions += 1
        state.reorder(rows)


def make_device_strategy(
    strategy: Strategy, stop: Sequence[tuple[int, ...]], prompts: int, steps: int, device: torch.device
) -> DeviceSampling | DeviceBeamSearch:
    """Return the `DeviceStrategy` that runs a decoding strategy on the device.

    stop     the stop sequences
    prompts  number of prompts
    steps    maximum number of decoding steps
    """
    if isinstance(strategy, BeamSearch):
        return DeviceBeamSearch(strategy, stop, candidate_count(strategy, stop), prompts, steps, device)
    assert isinstance(strategy, StepwiseStrategy)
    return DeviceSampling(strategy, prompts, steps, device)


def candidate_count(strategy: BeamSearch, stop: Sequence[tuple[int, ...]]) -> int:
    """Return how many continuations of each prompt a step of beam search compares.

    A hypothesis has at most one continuation that ends in a given stop sequence, so at most `num_beams` continuations
    end in each stop sequence. Of the returned number of best continuations, at least `num_beams` do not end.
    """
    return strategy.num_beams * (1 + max(len(stop), 1))


def strategy_key(strategy: Strategy, stop: Sequence[tuple[int, ...]]) -> Any:
    """Return the settings of a strategy on which a CUDA graph depends, as a key of cached graphs.

    Seeds are not among them, because random numbers are inputs of the graph. The settings by which beam search scores
    finished texts are not among them, because the host computes the scores.
    """
    if isinstance(strategy, BeamSearch):
        return strategy.num_beams, tuple(stop)
    return replace(strategy, seed=0, stream=0) if isinstance(strategy, Sample) else strategy


def _pad(x: Shaped[Tensor, "p k"], count: int) -> Shaped[Tensor, "p count"]:
    """Append columns of zeros to x until each prompt has `count` continuations."""
    return torch.nn.functional.pad(x, (0, count - x.shape[1]))
