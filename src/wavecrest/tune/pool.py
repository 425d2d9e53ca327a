"""Spread keys over workers; find and leave out the candidate that ends a worker; return each result once."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from wavecrest import records
from wavecrest.dispatch.op import AnyOp
from wavecrest.errors import EnvironmentProblem
from wavecrest.measure.timing import Clock
from wavecrest.tune import child, workers
from wavecrest.tune.trial import Trial, unsolved

# seconds a worker may take to start
START = 180.0
# times a key may lose its worker to an outside cause before the candidates that ran are blamed
MOST_LOST = 3
# failed starts in a row after which a device is given up
MOST_STARTS = 2


@dataclass(frozen=True, slots=True)
class Begun:
    """A key was begun."""

    index: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker ended, or was ended, in the middle of a key; `candidates` are left out because of it."""

    index: int
    reason: str
    candidates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a key; each key has one."""

    index: int
    key: records.TunedKey


Event = Begun | Ended | Found


@dataclass(slots=True)
class Task:
    """A key in progress: the trial, and how often it lost its worker to an outside cause."""

    index: int
    trial: Trial
    lost: int = 0


@dataclass(slots=True)
class Pool:
    """The workers of a run.

    Args:
        op: of all keys.
        hello: `child.greeting`.
        timeout: seconds of silence after which a candidate is given up, beside what its step takes.
        deadline: of `now`, after which no key is begun.
        expected: facts by name that a worker must report when it is ready (versions, device).
        now: the clock of the deadline.
    """

    op: AnyOp
    hello: dict[str, Any]
    timeout: float
    deadline: float = math.inf
    expected: dict[str, Any] = field(default_factory=dict)
    now: Clock = time.perf_counter
    _waiting: deque[Task] = field(default_factory=deque)
    _open: int = 0
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _events: queue.SimpleQueue[Event | None] = field(default_factory=queue.SimpleQueue)
    _alive: list[workers.Worker] = field(default_factory=list)
    _gone: list[str] = field(default_factory=list)
    _stopped: bool = False

    def run(self, trials: Sequence[Trial], starts: Sequence[workers.Start]) -> Iterator[Event]:
        """Tune the keys of trials; yields events as they happen, in the caller's thread.

        Raises:
            EnvironmentProblem: keys are left, but no worker.
        """
        self._waiting.extend(Task(index, trial) for index, trial in enumerate(trials))
        self._open = len(trials)
        threads = [threading.Thread(target=self._serve, args=(start,), daemon=True) for start in starts]
        finished: set[int] = set()
        try:
            for thread in threads:
                thread.start()
            left = len(threads)
            while left and len(finished) < len(trials):
                event = self._events.get()
                if event is None:
                    left -= 1
                elif not isinstance(event, Found):
                    yield event
                elif event.index not in finished:
                    # a worker that was given up may have had its result under way, and another worker the key
                    finished.add(event.index)
                    yield event
        finally:
            self.stop()
        if len(finished) < len(trials) and self._gone and self.now() <= self.deadline:
            raise EnvironmentProblem(f"no process is left to tune in: {'; '.join(dict.fromkeys(self._gone))}")

    def stop(self) -> None:
        """End all workers, at once."""
        with self._lock:
            self._stopped = True
            alive = list(self._alive)
            self._lock.notify_all()
        for worker in alive:
            worker.stop()

    def _serve(self, start: workers.Start) -> None:
        """A device's thread: one key after another, in one worker as long as it lives."""
        worker: workers.Worker | None = None
        task: Task | None = None
        try:
            while self._wanted():
                # before a key is taken: where a node is lost the next start may wait for minutes for another
                if worker is None:
                    worker = self._started(start)
                if worker is None or (task := self._take()) is None:
                    return
                self._events.put(Begun(task.index))
                alive, task = self._conduct(worker, task), None
                if not alive:
                    self._end(worker)
                    worker = None
        # an unexpected failure ends the thread, with the reason; another one takes its key
        except Exception as error:
            self._gone.append(f"{type(error).__name__}: {error}")
            if task is not None:
                self._put_back(task)
        finally:
            if worker is not None:
                self._end(worker)
            self._events.put(None)

    def _wanted(self) -> bool:
        """Wait for a key; False: no key is left, and no other worker can give one back."""
        with self._lock:
            while not self._stopped and self._open and self.now() <= self.deadline:
                if self._waiting:
                    return True
                self._lock.wait(0.5)
        return False

    def _take(self) -> Task | None:
        """The next key; None when no key is left."""
        while self._wanted():
            with self._lock:
                # another thread may have been faster
                if self._waiting:
                    return self._waiting.popleft()
        return None

    def _put_back(self, task: Task) -> None:
        with self._lock:
            self._waiting.appendleft(task)
            self._lock.notify_all()

    def _started(self, start: workers.Start) -> workers.Worker | None:
        """Start a worker and wait until it is ready; None, with the reason noted, if it fails."""
        for _ in range(MOST_STARTS):
            if self._stopped:
                return None
            worker = start()
            with self._lock:
                self._alive.append(worker)
            worker.send(self.hello)
            reply = worker.next(START)
            if reply["event"] == "ready":
                other = {name: reply.get(name) for name, value in self.expected.items() if reply.get(name) != value}
                if not other:
                    return worker
                mine = {name: self.expected[name] for name in other}
                self._gone.append(f"a child has {other}, and this is {mine}")
                self._end(worker)
                return None
            silent = f"a child was not ready after {START:.0f} s"
            self._gone.append(silent if reply["event"] == "silent" else f"a child {reply['reason']}")
            self._end(worker)
        return None

    def _end(self, worker: workers.Worker) -> None:
        worker.stop()
        with self._lock:
            if worker in self._alive:
                self._alive.remove(worker)

    def _finish(self, task: Task, key: records.TunedKey) -> None:
        with self._lock:
            self._open -= 1
            self._lock.notify_all()
        self._events.put(Found(task.index, key))

    def _conduct(self, worker: workers.Worker, task: Task) -> bool:
        """Have the worker tune a key; False if the worker must not be used again (the key is done or queued again)."""
        worker.send(child.job(self.op, task.trial))
        phase, who, limit = "make", (), self.timeout
        while not self._stopped:
            reply = worker.next(limit)
            event = reply["event"]
            if event == "step":
                phase, who = reply["phase"], tuple(reply["who"])
                limit = self.timeout + 2 * reply["seconds"]
            elif event == "done":
                self._finish(task, records.TunedKey.model_validate(reply["key"]))
                return True
            elif event == "problem":
                self._finish(task, unsolved(self.op, task.trial, reply["reason"]))
                return True
            else:
                outside = event == "ended" and reply["outside"]
                reason = f"did not come to an end within {limit:.0f} s" if event == "silent" else reply["reason"]
                self._fail(task, phase, who, reason, outside=outside)
                return False
        return False

    def _fail(self, task: Task, phase: str, who: tuple[int, ...], reason: str, *, outside: bool) -> None:
        """Leave out the candidate that ended a worker, and put the key back."""
        one = task.trial
        if outside and task.lost < MOST_LOST - 1:
            task.lost += 1
            self._events.put(Ended(task.index, reason))
            self._put_back(task)
            return
        # a candidate that is left out did not run, so it is not to blame
        who = tuple(index for index in who if index not in one.ended)
        if phase == "make" or not who:
            self._events.put(Ended(task.index, reason))
            self._finish(task, unsolved(self.op, one, f"making its arguments {reason}"))
            return
        if phase == "round" and not one.alone:
            one.alone = True
            self._events.put(Ended(task.index, f"{reason}, while {len(who)} candidates were timed"))
            self._put_back(task)
            return
        guilty = who
        if phase == "round":
            # the process ends only when several candidates run: suspect the default and PyTorch last
            roles = {index: one.field.candidates[index].role for index in who}
            last = next(role for role in ("tried", "default", "native") if role in roles.values())
            guilty = tuple(index for index in who if roles[index] == last)
            reason = f"{reason}, while {len(who)} candidates were timed in turn; alone none of them did"
        one.ended.update(dict.fromkeys(guilty, reason))
        self._events.put(Ended(task.index, reason, guilty))
        self._put_back(task)
