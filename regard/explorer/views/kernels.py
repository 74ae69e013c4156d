"""Which kernel runs a call of `attend`, and why the others refuse, for the Masks view."""

from typing import Any


def explain_kernels(mask: str, queries: int, keys: int, heads: int = 8, width: int = 64) -> dict[str, Any]:
    """Return the costs of each attention kernel for this mask and these sizes, or why it cannot run, as JSON data.

    The result also names the kernel that would run.
    """
    # torch takes seconds to import, and the page is shown before it is needed
    import torch

    from regard.core.attend import explain
    from regard.core.masks.expression import parse_mask

    q = torch.zeros(()).expand(1, heads, queries, width)
    k = torch.zeros(()).expand(1, heads, keys, width)
    found = explain(q, k, k, mask=parse_mask(mask))
    answers = [
        {
            "kernel": answer.kernel,
            "reasons": list(answer.reasons),
            "work": answer.work if answer.able else None,
            "memory": answer.memory,
        }
        for answer in found.answers
    ]
    return {"chosen": found.chosen, "answers": answers}
