"""The loop of the process that runs vLLM; the whole of it in test_vllm.py."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

from stalewise.rollout.engines.vllm_process import serve


class Engine:
    def double(self, number: int) -> int:
        return 2 * number

    def fail(self) -> None:
        raise ValueError("no kernel\nfor this")


def test_calls_are_answered_in_order_and_an_error_is_one_line() -> None:
    made: list[Engine] = []

    def make() -> Engine:
        made.append(Engine())
        return made[-1]

    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs, make))
    thread.start()
    for call in (("double", (4,)), ("fail", ()), ("double", (5,))):
        ours.send(call)
    assert [ours.recv() for _ in range(3)] == [("ok", 8), ("error", "ValueError: no kernel"), ("ok", 10)]
    ours.close()
    thread.join(10)
    assert not thread.is_alive() and len(made) == 1
