"""Recurrent slots that requests of the unified cache own, and those they clone."""

import numpy as np

from .. import jitted
from .params import DecLockRefParams, MatchResult
from .rank_states import RankStates
from .request import Request


class RecurrentSlots(RankStates):
    """Slots of requests; without recurrent state there are none to take."""

    owned_slots: int
    """Slots that a running request owns."""

    def _take_slots(self, req: Request) -> bool:
        owned = self.owned_slots
        if not owned or req.recurrent_pool_idx:
            return True
        rank = self._rank(req.dp_rank)
        if not self._has_room(rank, (0, 0, owned)):
            return False
        self.states[rank], given = jitted.alloc_slots(
            self.states[rank], np.int32(owned), max_new=owned, partial=False
        )
        slots = np.asarray(given.ids).tolist()
        req.recurrent_pool_idx, req.recurrent_track_slots = slots[0], slots[1:]
        req.recurrent_next_track_idx = req.recurrent_last_track_seqlen = 0
        return True

    def _admit(self, req: Request, match: MatchResult) -> DecLockRefParams | None:
        lock = super()._admit(req, match)
        if lock is None and match.cow_src_slot:
            lock = self._move_in(req, match)
        return lock

    def _move_in(self, req: Request, match: MatchResult) -> DecLockRefParams | None:
        """Start an idle rank's request in the snapshot's own slot.

        The slot that its hit would lock is the one it lacks: nobody would ever free
        another.
        """
        rank = self._rank(req.dp_rank)
        free, tree = (
            self.recurrent_available_size(rank),
            self.recurrent_total_size(rank),
        )
        if free + tree < self.config.num_recurrent_slots:
            return None
        state, moved = jitted.cow_move(self.states[rank], match.best_match_node.match)
        self.states[rank] = state
        req.recurrent_pool_idx, req.recurrent_cow_src_index = int(moved.slot), 0
        self._take_tracks(req, rank)
        return DecLockRefParams(receipt=moved.receipt)

    def _take_tracks(self, req: Request, rank: int) -> None:
        count = self.owned_slots - 1
        if count:
            self.states[rank], given = jitted.alloc_slots(
                self.states[rank], np.int32(count), max_new=count, partial=False
            )
            req.recurrent_track_slots = np.asarray(given.ids).tolist()

    def release_clone(self, req: Request) -> None:
        """The snapshot has been copied to the running slot: unlock its slot.

        The rest of the request's lock stays; without SWA nothing else changes.
        """
        req.recurrent_cow_src_index = 0
        if req.lock is None or req.lock.receipt is None or self.config.has_swa:
            return
        rank = self._rank(req.dp_rank)
        self.states[rank], receipt = jitted.release_window(
            self.states[rank], req.lock.receipt
        )
        req.lock = DecLockRefParams(receipt=receipt)
