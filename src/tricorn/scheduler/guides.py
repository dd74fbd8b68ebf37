"""Which ids may come next, and which have to: what constraints say, and bans (see bans.py).

Masks of constraints are computed by grammar processes (tricorn.grammar) while the step that needs them runs, and follow
it. A mask that is not there in time holds nobody up: its row is void, and the sequence sits out until it has come. Ids
that the grammar forces are not sampled: they are known at once and are computed together, as a prompt is.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from tricorn.grammar.workers import Mask, Workers
from tricorn.request import TricornError
from tricorn.scheduler.batch import Batch
from tricorn.scheduler.sequence import Sequence, Slots

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]

MASK_SECONDS = 0.02
"""How long a step may wait for its masks, at most."""


POLL_SECONDS = 5e-4
"""How long to wait at a time: masks that nobody needs now may be much later."""


class Guides:
    """The guides of all constrained sequences, of which there are none without `workers`. True when there are any."""

    def __init__(self, workers: Workers | None, slots: Slots) -> None:
        self._given = workers
        self._slots = slots
        self.fast_forward = True
        """Otherwise forced ids are sampled too, one by one."""
        self._guided: dict[int, Sequence] = {}
        self._accepted: list[tuple[int, list[int]]] = []
        """What the processes are still to be told."""

    def __bool__(self) -> bool:
        return bool(self._guided)

    @property
    def _workers(self) -> Workers:
        if self._given is None:
            raise TricornError("this engine takes no constraints")
        return self._given

    def open(self, sequence: Sequence) -> None:
        """Begins to compile a sequence's constraint. Raises TricornError when there are too many."""
        constraint = sequence.request.params.constraint
        if constraint is not None:
            sequence.guide = self._workers.open(constraint, sequence.stops, sequence.request.resume)
            self._guided[sequence.guide] = sequence

    def close(self, sequence: Sequence) -> None:
        if sequence.guide >= 0:
            del self._guided[sequence.guide]
            self._accepted = [(guide, ids) for guide, ids in self._accepted if guide != sequence.guide]
            self._workers.close(sequence.guide)
            sequence.guide = -1

    def gather(self, seconds: float = 0.0) -> list[tuple[Sequence, str]]:
        """Takes in the masks that have come, or come within so many seconds; gives the sequences whose constraint
        failed, and why."""
        failed = []
        self._tell()
        for guide, mask in self._workers.collect(time.monotonic() + seconds).items():
            sequence = self._guided[guide]
            if mask.error is not None:
                failed.append((sequence, str(mask.error)))
            else:
                sequence.mask = mask
                sequence.sits_out = False
        return failed

    def accept(self, sequence: Sequence, token: int) -> None:
        """A sequence has sampled an id, and goes on."""
        if sequence.guide >= 0:
            sequence.mask = None
            self._accepted.append((sequence.guide, [token]))

    def masks(self, batch: Batch) -> tuple[I32, U32]:
        """`mask_index` and `mask` of a batch that samples for constrained sequences, as far as their masks have come:
        the other rows become void. Everything before it is committed, so that bans see all that was said."""
        base = self._slots.mask
        lines = list(base)
        index = np.full(len(batch.row_sequence), len(base) - 1, np.int32)
        for row in np.flatnonzero(batch.sampled).tolist():
            sequence = batch.sequences[batch.row_sequence[row]]
            if sequence.ended is not None or (sequence.guide < 0 and sequence.bans is None):
                continue
            if self._lacks(sequence):
                self._void(batch, sequence, row)
                continue
            index[row] = len(lines)
            lines.append(self._line(sequence, int(batch.step.sampling.position[row])))
        self._tell()
        mask = np.stack(lines) if lines else np.zeros((0, base.shape[1]), np.uint32)
        return index, mask

    def wait(self, batch: Batch) -> list[tuple[Sequence, str]]:
        """Gathers until no mask of a batch is missing, or for MASK_SECONDS."""
        until = time.monotonic() + MASK_SECONDS
        failed: list[tuple[Sequence, str]] = []
        while (left := until - time.monotonic()) > 0:
            failed += self.gather(min(left, POLL_SECONDS))
            gone = {sequence for sequence, _ in failed}
            if not any(self._lacks(sequence) and sequence not in gone for sequence in batch.sequences):
                break
        return failed

    def _tell(self) -> None:
        if self._accepted:
            self._workers.advance(self._accepted)
            self._accepted = []

    def _lacks(self, sequence: Sequence) -> bool:
        return sequence.guide >= 0 and sequence.ended is None and sequence.mask is None

    def _void(self, batch: Batch, sequence: Sequence, row: int) -> None:
        """What this row samples will be thrown away; its token is computed again when the mask has come."""
        batch.sampled[row] = False
        slots, slot = self._slots, sequence.slot
        slots.length[slot] -= 1
        slots.computed[slot] -= 1
        sequence.sits_out = True

    def _line(self, sequence: Sequence, position: int) -> U32:
        """The mask of a row whose id takes `position`."""
        row = None if sequence.mask is None else self._guided_line(sequence, sequence.mask, position)
        if sequence.bans is None:
            assert row is not None
            return row
        slots, slot = self._slots, sequence.slot
        return sequence.bans.line(slots.tokens[slot, slots.prompt[slot] : position], row)

    def _guided_line(self, sequence: Sequence, mask: Mask, position: int) -> U32:
        """What the constraint alone allows. Ids that are forced after it are known from here on."""
        if not mask.forced:
            return mask.row
        only = np.zeros_like(mask.row)
        only[mask.forced[0] // 32] = np.uint32(1) << np.uint32(mask.forced[0] % 32)
        free = self.fast_forward and sequence.logprobs is None and sequence.bans is None
        if free and len(mask.forced) > 1:
            slots, slot = self._slots, sequence.slot
            forced = mask.forced[: int(slots.total[slot]) - position]
            slots.tokens[slot, position : position + len(forced)] = forced
            slots.length[slot] = position + len(forced)
            sequence.forced, sequence.mask = forced[1:], None
            self._accepted.append((sequence.guide, forced))
        return only
