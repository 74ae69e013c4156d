"""A cache of the kernels that were chosen for attention calls, so that equal later calls run without checks."""

from collections.abc import Hashable
from threading import Lock

from torch import Tensor

from regard.core.absolute_positions import Positions
from regard.core.kernels.request import PreparedCall
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.data import Snapshot
from regard.core.masks.plan_cache import Memo, joint_key

_FULL = Full()


class PreparedCalls:
    """A cache of the last `most` prepared calls: functions of q, k and v that run the chosen kernel without checks.

    The cache key of a call is its mask and everything else that the checks of `attend` read: shapes, dtypes, devices,
    layouts, beta and positions. If the mask object was used before and its tensors have not changed, the call is found
    by the identity of the mask object. Otherwise it is found by `Mask.key`, so that an equal mask is found too.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_key: Memo[PreparedCall] = Memo(most)
        self._by_object: dict[Hashable, tuple[Mask, list[Snapshot], PreparedCall]] = {}
        self._lock = Lock()

    def find(
        self, q: Tensor, k: Tensor, v: Tensor, mask: object, beta: float | None, positions: object
    ) -> PreparedCall | None:
        """Return the prepared call for these arguments of `attend`. None if there is none."""
        if positions is None:
            at = None
        elif type(positions) is Positions and positions.offsets is None and type(positions.keys) is int:
            at = (positions.queries, positions.keys)
        else:
            return None
        mask = _FULL if mask is None else mask
        kinds = (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q.layout, k.layout, v.layout)
        own = (id(mask), q.shape, k.shape, v.shape, kinds, beta, at)
        found = self._by_object.get(own)
        if found is not None:
            for snapshot in found[1]:
                if not snapshot.is_current():
                    break
            else:
                return found[2]
        if not isinstance(mask, Mask) or mask.by_pair():
            return None
        call = self._by_key.peek(joint_key(mask, own[1:]))
        if call is not None:
            self._keep(mask, own, call)
        return call

    def remember(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        beta: float | None,
        positions: Positions | None,
        call: PreparedCall,
    ) -> None:
        """Store a prepared call for later calls with the same arguments.

        The call is not stored if results for the mask must not be cached (`Mask.key` is None), or if the mask depends
        on row and column indices or on heads (`Mask.by_pair` is not empty).
        """
        mask = _FULL if mask is None else mask
        at = None if positions is None else (positions.queries, positions.keys)
        kinds = (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q.layout, k.layout, v.layout)
        own = (id(mask), q.shape, k.shape, v.shape, kinds, beta, at)
        key = None if mask.by_pair() else joint_key(mask, own[1:])
        if key is not None:
            self._by_key.get(key, mask, lambda: call)
            self._keep(mask, own, call)

    def _keep(self, mask: Mask, own: Hashable, call: PreparedCall) -> None:
        snapshots = [Snapshot(tensor) for tensor in mask.tensors()]
        with self._lock:
            self._by_object.pop(own, None)
            while len(self._by_object) >= self.most:
                self._by_object.pop(next(iter(self._by_object)))
            self._by_object[own] = (mask, snapshots, call)
