"""Episodes in slots: a slot whose turn has ended keeps its keys and values while the environment answers.

The answer's tokens are given to the decoding steps of that slot instead of sampled ones, so nothing is computed again
and no other slot waits. Where blocks run short, or an answer is long, the slot is given up and the episode waits in the
queue with all its tokens, as a response does that had to make room.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from stalewise.models.transfer import to_device
from stalewise.rollout.engines.request_queue import BegunResponse, RequestQueue
from stalewise.rollout.engines.slot_decode import (
    FinishedResponses,
    PutBack,
    SlotBoard,
    SlotDecoder,
    SlotStatus,
)

MOST_GIVEN = 256  # tokens of an answer that go through decoding steps: more are prefilled at once


class SlotTurns:
    """Decodes the turns of a queue's requests until `next_turns` has no more.

    `on_turns` gets responses whose turn has ended, with all their tokens so far. `next_turns` returns what was answered
    since: requests, and tokens from outside that the next turn follows, none if the episode is over. Its argument says
    whether to wait for an answer.
    """

    def __init__(
        self,
        decoder: SlotDecoder,
        queue: RequestQueue,
        on_turns: Callable[[FinishedResponses], object],
        next_turns: Callable[[bool], list[tuple[int, list[int]]]],
    ) -> None:
        self.decoder, self.queue, self.on_turns, self.next_turns = decoder, queue, on_turns, next_turns
        self.board = decoder.board = SlotBoard(decoder.size)
        self.slot_of: dict[int, int] = {}  # of requests that rest in a slot
        self.begun: dict[int, BegunResponse] = {}  # of all requests whose environment is asked

    @torch.inference_mode()
    def run(self) -> None:
        """Decode everything."""
        decoder, board = self.decoder, self.board
        decoder.alive_S.zero_()
        nothing_S = np.zeros(decoder.slots, dtype=bool)
        last = SlotStatus(torch.from_numpy(nothing_S), torch.from_numpy(nothing_S), nothing_S)
        last.filled_S = decoder.fill(self.queue)
        while True:
            put_back = self._steps()
            status = decoder.status(put_back)
            alive_S, count_S = last.wait()
            known_S = (board.request_S >= 0) & ~last.filled_S & ~board.ended_S & ~self._resting_S()
            ended = np.flatnonzero(known_S & ~alive_S)
            if last.ended is not None:
                self._rest(last.ended)
            if last.put_back is not None:
                self._resolve(last.put_back)
            if len(ended):
                board.tokens_S[ended] = count_S[ended]
                status.ended = decoder.collect(ended, board.request_S[ended].copy(), count_S[ended].copy())
                self.slot_of |= dict(zip(board.request_S[ended].tolist(), ended.tolist(), strict=True))
            is_idle = not len(self._living()) and not len(ended) and put_back is None and not self.queue
            for request, outside in self.next_turns(is_idle and bool(self.begun)):
                self._answer(request, outside, status)
            if self.queue:
                status.filled_S = status.filled_S | decoder.fill(self.queue)
            if decoder.device.type == "cuda":
                status.copied = torch.cuda.Event()
                status.copied.record()
            last = status
            is_open = len(self._living()) or self.slot_of or self.begun or self.queue
            if not is_open and status.ended is None and status.put_back is None:
                return

    def _resting_S(self) -> np.ndarray:
        resting_S = np.zeros(self.decoder.slots, dtype=bool)
        resting_S[list(self.slot_of.values())] = True
        return resting_S

    def _living(self) -> np.ndarray:
        return self.board.living[~self._resting_S()[self.board.living]]

    def _steps(self) -> PutBack | None:
        """Run some steps of the slots that are alive; returns responses that had to make room."""
        decoder, board = self.decoder, self.board
        resting_S = self._resting_S()
        board.ended_S[resting_S] = True  # for `living` of the decoder, which knows no rest
        try:
            living = board.living
            if not len(living):
                return None
            wanted = np.minimum(board.tokens_S[living] + decoder.steps_per_check, decoder.new_tokens)
            while self.slot_of and board.blocks.lacking(living, wanted).sum() > board.blocks.free:
                self._give_up(next(iter(self.slot_of)))
            put_back = decoder.make_room(self.queue)
            living = board.living
            decoder.run(*decoder.rows_for(living), decoder.steps_per_check)
            board.tokens_S[living] = np.minimum(board.tokens_S[living] + decoder.steps_per_check, decoder.new_tokens)
            return put_back
        finally:
            board.ended_S[resting_S] = False

    def _rest(self, ended: FinishedResponses) -> None:
        """These turns are on the host: their environments are asked."""
        for row, request in enumerate(ended.requests.tolist()):
            ids, logp = (x[row, : ended.lengths[row]].copy() for x in (ended.ids, ended.logp))
            self.begun[request] = BegunResponse(ids, logp)
        self.on_turns(ended)

    def _resolve(self, put_back: PutBack) -> None:
        """Those that were alive wait again; of the others the turn has ended."""
        alive, count = put_back.alive.numpy(), put_back.count.numpy()
        ids, logp = put_back.ids.numpy(), put_back.logp.numpy()
        for row in np.flatnonzero(alive):
            own = BegunResponse(ids[row, : count[row]].copy(), logp[row, : count[row]].copy())
            self.queue.put_back(int(put_back.requests[row]), own)
        ended = np.flatnonzero(~alive)
        if len(ended):
            self._rest(FinishedResponses(put_back.requests[ended], ids[ended], logp[ended], count[ended].copy()))

    def _give_up(self, request: int) -> None:
        """Free the slot of a request that rests."""
        slot = np.array([self.slot_of.pop(request)])
        self.board.blocks.release(slot)
        self.board.clear(slot)
        self.queue.leave(np.array([request]))

    def _answer(self, request: int, outside: list[int], status: SlotStatus) -> None:
        begun, decoder = self.begun.pop(request), self.decoder
        slot = self.slot_of.get(request)
        if not outside:
            if slot is not None:
                self._give_up(request)
            self.queue.end(np.array([request]), np.array([len(begun.ids)]), self.board.blocks)
        elif slot is None or len(outside) > MOST_GIVEN:
            if slot is not None:
                self._give_up(request)
            given = np.array(outside, dtype=np.int32)
            zeros = np.zeros(len(given), dtype=np.float32)
            both = BegunResponse(np.concatenate([begun.ids, given]), np.concatenate([begun.logp, zeros]))
            self.queue.put_back(request, both)
        else:
            count = len(begun.ids)
            given = to_device(np.array(outside, dtype=np.int32), decoder.device)
            decoder.ids_SN[slot, count : count + len(outside)] = given
            decoder.forced_S[slot] = count + len(outside)
            decoder.token_S[slot] = int(begun.ids[-1])
            decoder.count_S[slot] = count
            decoder.alive_S[slot] = True
            del self.slot_of[request]
            self.board.tokens_S[slot] = count
            status.filled_S = status.filled_S.copy()
            status.filled_S[slot] = True
