"""Many requests, a few servers, so many at a time on each: whoever is free takes the next one."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stalewise.generate.endpoint import Gone

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Share(Generic[Answer]):
    """What one server did of the requests."""

    answers: dict[int, Answer] = field(default_factory=dict)  # by the request's number
    gone: Gone | None = None  # it went away in the middle


def share_out(
    requests: Sequence[int],
    ask: Sequence[Callable[[int], Answer]],
    *,
    concurrency: int,
    on_answer: Callable[[Answer], object],
    abort: Callable[[], object],
) -> list[Share[Answer]]:
    """Let each server (`ask` has one function for each) answer requests until none is left, or until all are gone.

    At most `concurrency` requests are under way on a server; the rest wait here, not in the server. An error other than
    Gone ends everything: `abort` breaks off what is under way, and the error is raised here. So does Ctrl-C.
    """
    waiting = deque(requests)
    shares: list[Share[Answer]] = [Share() for _ in ask]
    done: queue.SimpleQueue[tuple[int, int, Answer] | BaseException | None] = queue.SimpleQueue()

    def work(server: int) -> None:
        try:
            while shares[server].gone is None:
                try:
                    request = waiting.popleft()
                except IndexError:
                    return  # nothing is left
                done.put((server, request, ask[server](request)))
        except Gone as gone:
            shares[server].gone = gone
        except BaseException as error:  # told to the thread that waits
            done.put(error)
        finally:
            done.put(None)

    workers = min(concurrency, len(requests))
    for server in range(len(ask)):
        for _ in range(workers):
            # Daemons: a program that is told to end must not wait for a server.
            threading.Thread(target=work, args=(server,), daemon=True).start()
    try:
        running = workers * len(ask)
        while running:
            item = done.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                server, request, answer = item
                shares[server].answers[request] = answer
                on_answer(answer)
    except BaseException:
        waiting.clear()
        abort()
        raise
    return shares
