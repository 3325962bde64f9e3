"""Limits on calls of a function: `@rate_limit("10/minute")`."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock, Thread, current_thread
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response

from netlimit.errors import LimitError, NetlimitError
from netlimit.l7.counters import open_counters
from netlimit.l7.forks import renew_after_fork
from netlimit.l7.headers import make_headers
from netlimit.l7.holding import Holding
from netlimit.l7.limit import Algorithm, Limit, parse_limit, read_weight
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.problems import MEDIA_TYPE, describe_refusal, write_problem
from netlimit.l7.queueing import Queues
from netlimit.l7.rules import Descriptor, Entry, Node, OnLimit, Rule, RuleSet
from netlimit.l7.store import Store
from netlimit.l7.threads import NoRoom, Threads

_P = ParamSpec("_P")
_R = TypeVar("_R")
_DOMAIN = "calls"
_KEY = "key"


class RateLimited(NetlimitError):
    """A call is over its limit; after `retry_after` seconds it is not, if nobody else calls (`inf`: never)."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(describe_refusal(verdict))
        self.verdict = verdict
        self.retry_after = verdict.retry_after


async def answer_limited(request: Request, error: Exception) -> Response:
    """The 429 for a call over its limit: `app.add_exception_handler(RateLimited, answer_limited)`."""
    assert isinstance(error, RateLimited)
    headers = {name.decode(): value.decode() for name, value in make_headers(error.verdict)}
    return Response(write_problem(error.verdict), 429, headers, MEDIA_TYPE.decode())


def rate_limit(
    limit: str | Limit | Rule,
    key: Callable[..., object] | None = None,
    wait: float | None = None,
    hits: int = 1,
    counters: str | Store = "memory://",
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Limit the calls of a function or coroutine function; one that is over the limit raises RateLimited. The call of a
    generator function, asynchronous or not, lasts as long as the generator runs: from its first item to its end.

    `limit` is "10/minute", a Limit or a whole Rule (with requests in flight, say). All calls share it, or those for
    which `key` returns the same; it is called with those arguments of the call that it names. With `wait` a call waits
    for its turn up to so many seconds, first come first served; of a function that is no coroutine function it keeps a
    thread meanwhile, so that no more than 8 such calls of a process wait, and others are refused at once. `hits` is the
    weight of a call. `counters` are a store or its URL; functions that share one share a limit if they have the same
    name and module.

    Raises LimitError for what is no limit or no weight, SettingsError for what are no counters.
    """
    hits = read_weight(hits, "A call")
    store = open_counters(counters) if isinstance(counters, str) else counters

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        rule = _make_rule(limit, f"{function.__module__}.{function.__qualname__}", wait)
        calls = _Calls(rule, store, hits, wait, key is not None)
        find_key = _read_arguments(function, key) if key is not None else _no_key
        for fits, wrap in _WRAPS:
            if fits(function):
                return cast("Callable[_P, _R]", wrap(function, calls, find_key))

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            end = calls.begin_now(find_key(args, kwargs))
            try:
                return function(*args, **kwargs)
            finally:
                end()

        return call

    return decorate


_FindKey = Callable[[tuple[Any, ...], dict[str, Any]], str]


def _wrap_coroutine(function: Callable[..., Any], calls: _Calls, find_key: _FindKey) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        held = await calls.begin(find_key(args, kwargs))
        try:
            return await function(*args, **kwargs)
        finally:
            if held is not None:
                await calls.end(held)

    return call


def _wrap_generator(function: Callable[..., Any], calls: _Calls, find_key: _FindKey) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        end = calls.begin_now(find_key(args, kwargs))
        try:
            return (yield from function(*args, **kwargs))
        finally:
            end()

    return call


def _wrap_async_generator(function: Callable[..., Any], calls: _Calls, find_key: _FindKey) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        held = await calls.begin(find_key(args, kwargs))
        try:
            items = function(*args, **kwargs)
            item = await anext(items)
            while True:
                try:
                    sent = yield item
                except BaseException as error:
                    item = await items.athrow(error)
                else:
                    item = await items.asend(sent)
        except StopAsyncIteration:
            pass
        finally:
            if held is not None:
                await calls.end(held)

    return call


_WRAPS = (
    (inspect.iscoroutinefunction, _wrap_coroutine),
    (inspect.isgeneratorfunction, _wrap_generator),
    (inspect.isasyncgenfunction, _wrap_async_generator),
)


def _make_rule(limit: str | Limit | Rule, name: str, wait: float | None) -> Rule:
    if not isinstance(limit, Rule):
        limit = Rule(_DOMAIN, name, parse_limit(limit) if isinstance(limit, str) else limit)
    return limit if wait is None else replace(limit, on_limit=OnLimit.QUEUE, max_wait=wait)


def _no_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return ""


def _read_arguments(function: Callable[..., Any], key: Callable[..., object]) -> _FindKey:
    """How the key of a call is found. Raises LimitError if `key` names an argument that the function has not."""
    signature = inspect.signature(function)
    wanted = list(inspect.signature(key).parameters)
    unknown = [name for name in wanted if name not in signature.parameters]
    if unknown:
        raise LimitError("key", f"`key` asks for {unknown[0]!r}, which is no argument of {function.__qualname__}.")

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if not args and kwargs.keys() >= {*wanted}:
            given = kwargs
        else:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
        return str(key(**{name: given[name] for name in wanted}))

    return find


class _Calls:
    """The calls of one function."""

    def __init__(self, rule: Rule, store: Store, hits: int, wait: float | None, is_keyed: bool) -> None:
        rules = RuleSet({rule.domain: Node(default={_KEY: Node(rule)})})
        self._domain, self._name, self._is_keyed = rule.domain, rule.name, is_keyed
        self._hits = hits
        self._rules = lambda: rules
        self._limiter = Limiter(self._rules, store)
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, Queues] = WeakKeyDictionary()
        delays = rule.limit is not None and rule.limit.algorithm is Algorithm.LEAKY_BUCKET
        self._is_simple = isinstance(store, MemoryStore) and not (delays or rule.concurrency or wait is not None)
        self.start_anew()
        renew_after_fork(self)

    def start_anew(self) -> None:
        """Make the lock anew (see `netlimit.l7.forks`)."""
        self._lock = Lock()

    async def begin(self, key: str) -> Holding | None:
        """Let a call begin when it may. Raises RateLimited."""
        return self._read(await self._find_queues().decide(self._domain, _describe(key), self._hits))

    async def _begin_for_thread(self, key: str, threads: Threads) -> Holding | None:
        """The same where a thread waits, if one more may; else it is refused at once that would have to."""
        decide = partial(self._find_queues().decide, self._domain, _describe(key), self._hits)
        caller = (self._domain, self._name, key) if self._is_keyed else None
        if threads.has_room(caller):
            with suppress(NoRoom):  # others have begun to wait while the counters were asked
                return self._read(await decide(partial(threads.wait, caller)))
        return self._read(await decide(longest=0.0))

    def _read(self, verdict: Verdict) -> Holding | None:
        if not verdict.allowed:
            raise RateLimited(verdict)
        return Holding(self._limiter, verdict) if verdict.leases else None

    async def end(self, held: Holding) -> None:
        """A call that holds something has ended."""
        held.end()
        await self._find_queues().release(held.verdict)

    def _find_queues(self) -> Queues:
        loop = asyncio.get_running_loop()
        queues = self._queues.get(loop)
        if queues is None:
            queues = self._queues[loop] = Queues(self._limiter, self._rules)
        return queues

    def begin_now(self, key: str) -> Callable[[], None]:
        """The same for a thread; what is returned ends the call. Raises RateLimited."""
        if not self._is_simple:
            return self._begin_elsewhere(key)
        with self._lock:
            verdict = _run_now(self._limiter.decide(self._domain, _describe(key), self._hits))
        if not verdict.allowed:
            raise RateLimited(verdict)
        return _nothing

    def _begin_elsewhere(self, key: str) -> Callable[[], None]:
        held: list[Holding] = []

        async def begin() -> None:
            begun = await self._begin_for_thread(key, _elsewhere.threads)
            if begun is not None:
                held.append(begun)

        async def end() -> None:
            for each in held:
                await self.end(each)

        beginning = _elsewhere.start(begin())
        try:
            beginning.result()
        except RateLimited:
            raise
        except BaseException:  # of a signal's handler: there is no call any more
            beginning.cancel()
            _elsewhere.start(end())  # runs after that: gives back what it had got already
            raise
        return (lambda: _elsewhere.finish(end())) if held else _nothing


def _describe(key: str) -> list[Descriptor]:
    return [Descriptor((Entry(_KEY, key),))]


def _nothing() -> None:
    pass


def _run_now(deciding: Coroutine[Any, Any, Verdict]) -> Verdict:
    """The result of what never waits: a decision in memory."""
    try:
        deciding.send(None)
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict
    deciding.close()
    raise AssertionError("A decision in memory has waited.")


class _Elsewhere:
    """An event loop in a thread of its own, one for all threads, which begins with the first call."""

    def __init__(self) -> None:
        self._parents: list[asyncio.AbstractEventLoop] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self.start_anew()
        renew_after_fork(self)

    def start_anew(self) -> None:
        """Begin anew (see `netlimit.l7.forks`): the thread is the parent's."""
        self._lock, self.threads = Lock(), Threads()
        if self._loop is not None:  # is kept: to close it would change what the parent's listens to
            self._parents.append(self._loop)
        self._loop = None

    def start(self, coroutine: Coroutine[Any, Any, _R]) -> Future[_R]:
        """Run a coroutine there."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = Thread(target=self._loop.run_forever, name="rate limits", daemon=True)
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine there to its end. In that thread, where a generator may be collected, it is not awaited."""
        finishing = self.start(coroutine)
        if current_thread() is not self._thread:
            finishing.result()


_elsewhere = _Elsewhere()
