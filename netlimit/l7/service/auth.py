"""`/v1/auth`: may a request pass? For proxies that ask about each, and read the answer in status and header fields."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any, NamedTuple, NoReturn
from urllib.parse import parse_qsl

from netlimit.l7.decision import new
from netlimit.l7.escalation import Askers
from netlimit.l7.gate import Client
from netlimit.l7.headers import Family, make_headers
from netlimit.l7.identity import PLAIN, ClientAddress, Extractor, Scope, api_key, field, find_told, header
from netlimit.l7.limiter import Verdict
from netlimit.l7.listening import ClientGone, Listener, Receive
from netlimit.l7.methods import find_heads, read_method, take_for_get
from netlimit.l7.problems import write_problem
from netlimit.l7.queueing import Queues
from netlimit.l7.rules import CLIENT_KEY, METHOD_KEY, PATH_KEY, Descriptor, Entry
from netlimit.l7.service.answers import PROBLEM, Answer, Problem
from netlimit.l7.service.exchange import AGE, LEFT
from netlimit.l7.service.leases import write_lease
from netlimit.l7.service.questions import MOST_DESCRIPTORS, MOST_HITS, SHORT
from netlimit.l7.targets import Ambiguous, plain_host, plain_path, read_paths

LOOPBACK = ("127.0.0.0/8", "::1/128")
"""The proxies that are trusted unless others are named."""
DENIALS = {"401": 401, "403": 403, "429": 429}
"""What `deny` may be: nginx knows 401 and 403 alone as refusals, and tells by 401 who is over a limit from who is
blocked; others hand a 429 on to the client."""
REMEMBERED = 256
"""What so many proxies are configured to ask is remembered; each may take 20 KB."""
_EXAMPLE = "/v1/auth?domain=web&key=remote_address&key=remote_address,path"


class Part(NamedTuple):
    """An entry of a descriptor: its key, and where its value comes from."""

    key: str
    find: Extractor
    whole: Extractor | None = None
    """Finds what is told, in the question or a header, of which the value is the plain form or the block."""

    @property
    def is_path(self) -> bool:
        """Whether it is the path of the request."""
        return self.key == PATH_KEY and self.whole is None


class Template(NamedTuple):
    """What a proxy is configured to ask."""

    domain: str
    descriptors: tuple[tuple[Part, ...], ...]
    of_paths: tuple[tuple[Part, ...], ...]
    """Those that tell a path, where any tells that of the request."""
    tells_method: bool
    hits: int
    wait: float
    """Seconds after which a request that waits for its turn is answered, from when the question has come."""
    deny: int
    client: Callable[[Scope], Client]
    """Finds the address that IP rules are asked about; where descriptors are to tell it, all that they tell."""
    escalates: bool
    """Whether a refusal may have that address blocked: not where the question tells one, or a header of a client."""


class Authorizer:
    """Answers whether requests may pass. `proxies` are those whose X-Forwarded-For is believed, `askers` know who may
    have clients blocked."""

    def __init__(self, queues: Queues, families: Collection[Family], proxies: Collection[str], askers: Askers) -> None:
        self._queues = queues
        self._askers = askers
        self._families = families
        self._address = ClientAddress(proxies)
        self._known: Mapping[str, Extractor] = {
            CLIENT_KEY: self._address,
            PATH_KEY: find_path,
            METHOD_KEY: find_method,
            "host": find_host,
            "api_key": api_key(),
        }
        self._read_again = lru_cache(REMEMBERED)(self._read_template)

    async def answer(self, scope: Scope, receive: Receive) -> Answer:
        """The answer, once the turn of the request has come. Raises Problem, CountersUnavailable."""
        if _has_left(scope):
            raise _gone()
        query = scope["query_string"]
        template = self._read_again(query) if len(query) <= SHORT else self._read_template(query)
        domain, described, of_paths, tells_method, hits, wait, deny, find_client, escalates = template
        try:
            descriptors = [*_make_descriptors(described, scope)]
            if of_paths:
                descriptors += _find_others(of_paths, scope)
        except Ambiguous as error:
            raise Problem(422, str(error), "key") from None
        if tells_method:
            descriptors += [take_for_get(descriptors[place]) for place in find_heads(descriptors)]
        verdict = await self._queues.decide(
            domain,
            descriptors,
            hits,
            partial(_stay, receive),
            find_client(scope),
            escalates and self._askers.vouch(scope["headers"]),
            wait if wait == inf else max(wait - _find_age(scope), 0.0),
        )
        headers = make_headers(verdict, self._families)
        if verdict.allowed:
            if verdict.leases:
                headers += [(b"x-netlimit-lease", write_lease(ask).encode()) for ask in verdict.leases if ask.hits]
            return new(Answer, (200, headers, b""))
        return Answer(403 if verdict.blocked else deny, [PROBLEM, *headers], write_problem(verdict))

    def _read_template(self, query: bytes) -> Template:
        """Read what a proxy is configured to ask, `domain=web&key=remote_address,path`. Raises Problem 422."""
        try:
            pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=MOST_DESCRIPTORS)
        except ValueError:
            raise Problem(422, f"The query cannot be read; write for example {_EXAMPLE}.") from None
        keys = [value for name, value in pairs if name == "key"]
        once = {name: value for name, value in pairs if name != "key"}
        if len(once) + len(keys) < len(pairs) or once.keys() - {"domain", "hits", "wait", "deny"}:
            raise Problem(422, f"There is more than domain, key, hits, wait and deny, or one twice; see {_EXAMPLE}.")
        if not once.get("domain") or not keys:
            raise Problem(422, f"The query names no domain, or no key; write for example {_EXAMPLE}.")
        deny = DENIALS.get(once.get("deny", "403"))
        if deny is None:
            raise Problem(422, f"`deny` is the status of a refusal: {' or '.join(DENIALS)}.", "deny")
        descriptors = self._read_keys(keys)
        clients = [part for parts in descriptors for part in parts if part.key == CLIENT_KEY]
        told = any(part.whole is not None for part in clients)
        finders = [*dict.fromkeys(part.whole or self._address.find for part in clients)]
        client = partial(_find_told, finders) if told else self._address.find
        reads = any(part.is_path for parts in descriptors for part in parts)
        of_paths = tuple(parts for parts in descriptors if reads and any(part.key == PATH_KEY for part in parts))
        tells_method = any(part.key == METHOD_KEY for parts in descriptors for part in parts)
        hits, wait = _read_hits(once.get("hits", "1")), _read_wait(once.get("wait"))
        return Template(once["domain"], descriptors, of_paths, tells_method, hits, wait, deny, client, not told)

    def _read_keys(self, keys: Sequence[str]) -> tuple[tuple[Part, ...], ...]:
        """The descriptors. What several of them tell is found once: a value may be long, and there may be many keys."""
        described = [[_name_part(text) for text in key.split(",")] for key in keys]
        times = Counter(text for texts in described for text in texts)
        parts = {text: self._read_part(text) for text in times}
        for place, text in enumerate(text for text, number in times.items() if number > 1):
            part = parts[text]
            parts[text] = part._replace(find=partial(_find_once, f"netlimit.{place}", part.find))
        return tuple(tuple(parts[text] for text in texts) for texts in described)

    def _read_part(self, text: str) -> Part:
        key, given, value = text.partition("=")
        if key and given:
            return _make_told(key, partial(_give, value), "utf-8")
        kind, named, name = text.partition(":")
        if kind == "header" and name:
            return _make_told(name.lower(), (field if name.lower() in PLAIN else header)(name), "latin-1")
        find = self._known.get(text)
        if find is None or named:
            known = ", ".join(self._known)
            raise Problem(422, f"There is no key {text[:100]!r}; there are {known}, header:NAME and KEY=VALUE.", "key")
        return Part(text, find)


def _name_part(text: str) -> str:
    """An entry of a key in one form: a header is the same however its name is written."""
    return text.lower() if text.startswith("header:") and "=" not in text else text


def _find_once(place: str, find: Extractor, scope: MutableMapping[str, Any]) -> str | None:
    """What has been found before of this request, or is found now."""
    if place not in scope:
        scope[place] = find(scope)
    value: str | None = scope[place]
    return value


def _give(value: str, scope: Scope) -> str:
    return value


def _make_told(key: str, find: Extractor, encoding: str) -> Part:
    """An entry that the question or a client tells, in the form in which values of this key are compared."""
    plain = PLAIN.get(key)
    return Part(key, find if plain is None else partial(_find_plain, plain, find, encoding), find)


def _find_plain(plain: Callable[[bytes], str], find: Extractor, encoding: str, scope: Scope) -> str | None:
    told = find(scope)
    return None if told is None else plain(told.encode(encoding))


def _find_told(finders: Sequence[Extractor], scope: Scope) -> tuple[str, ...]:
    """The addresses that are told of a request, whole."""
    return find_told(told for find in finders if (told := find(scope)) is not None)


def _find_age(scope: Scope) -> float:
    """Seconds for which who asks has waited already; nobody knows in a server of somebody else's."""
    find = scope.get(AGE)
    return find() if find is not None else 0.0


def _has_left(scope: Scope) -> bool:
    """Whether nobody waits for the answer any more: to find that out costs a small part of what a decision does."""
    find = scope.get(LEFT)
    return find is not None and find()


def _gone() -> Problem:
    return Problem(408, "Nobody waits for the answer any more.")


async def _stay(receive: Receive, waiting: Awaitable[Verdict]) -> Verdict:
    """Wait for a verdict while somebody waits for the answer. Raises Problem when nobody does any more."""
    listener = Listener(receive)
    try:
        return await listener.wait(waiting)
    except ClientGone:
        raise _gone() from None
    finally:
        listener.close()


def _read_hits(text: str) -> int:
    hits = int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else -1
    if not 0 <= hits <= MOST_HITS:
        raise Problem(422, f"`hits` is a whole number from 0, which only looks, to {MOST_HITS}.", "hits")
    return hits


def _read_wait(text: str | None) -> float:
    if text is None:
        return inf
    if not re.fullmatch(r"\d{1,4}(\.\d{1,3})?", text, re.ASCII):
        raise Problem(422, "`wait` is how many seconds a request waits for its turn at most, such as 0.5.", "wait")
    return float(text)


def _make_descriptor(parts: tuple[Part, ...], scope: Scope) -> Descriptor | None:
    """A descriptor; None where the request lacks one of its values, as Envoy leaves it out then."""
    entries = []
    for key, find, _ in parts:
        value = find(scope)
        if value is None:
            return None
        entries.append(new(Entry, (key, value)))
    return new(Descriptor, (tuple(entries), None, None, 0))


def _make_descriptors(described: tuple[tuple[Part, ...], ...], scope: Scope) -> Iterator[Descriptor]:
    for parts in described:
        descriptor = _make_descriptor(parts, scope)
        if descriptor is not None:
            yield descriptor


def _find_others(of_paths: tuple[tuple[Part, ...], ...], scope: Scope) -> Iterator[Descriptor]:
    """The descriptors of what a path may mean besides: its limits hold for the request as well."""
    for reading, other in [*enumerate(read_paths(_read_uri(scope)))][1:]:
        for parts in of_paths:
            meant = tuple(Part(part.key, partial(_give, other)) if part.is_path else part for part in parts)
            for descriptor in _make_descriptors((meant,), scope):
                yield descriptor._replace(besides=reading)


# What the proxy is to say, in fields of which no other form is read: it sets these, and lets others through.
_find_uri, _find_method, _find_host = (field(f"X-Forwarded-{name}") for name in ("Uri", "Method", "Host"))


def find_path(scope: Scope) -> str:
    """The path of the request in its plain form. Raises Problem 422, Ambiguous."""
    return plain_path(_read_uri(scope))


def find_method(scope: Scope) -> str:
    """The method of the request in capitals. Raises Problem 422."""
    return read_method(_find_method(scope) or _complain("method", "X-Forwarded-Method"))


def find_host(scope: Scope) -> str:
    """The host that the request is for in its plain form. Raises Problem 422."""
    host = _find_host(scope)
    if host is None or "," in host or not host.isascii():  # others read the end of a list, and letters for others
        _complain("host", "X-Forwarded-Host")
    return plain_host(host.encode("latin-1"))


def _read_uri(scope: Scope) -> bytes:
    """The target of the request; that of `GET http://host` may be empty."""
    uri = _find_uri(scope)
    return _complain("path", "X-Forwarded-Uri") if uri is None else uri.encode("latin-1")


def _complain(what: str, field: str) -> NoReturn:
    raise Problem(422, f"The proxy does not tell the {what} of the request, once and not empty, in {field}.", "key")
