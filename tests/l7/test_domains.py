"""Domains that are asked about and that no document has."""

from __future__ import annotations

import asyncio

import pytest

from netlimit.l7.document import parse_document
from netlimit.l7.domains import MOST, SECONDS, UnknownDomains
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import Descriptor, Entry, RuleSet

WBE = (
    "There are questions about the domain 'wbe', which no document of limits has: all of them pass. There is 'web'. "
    "Correct the name where it is asked about (`domain=…`), or write a document of it."
)
MORE = "There are questions about further domains that are in no document of limits: all pass."
DESCRIPTORS = (Descriptor((Entry("user", "alice"),)),)
DOCUMENT = "domain: {}\ndescriptors: [{{key: user, rate_limit: {{unit: day, requests_per_unit: 1}}}}]"


class Asked:
    """A limiter that is asked about domains."""

    def __init__(self) -> None:
        self.now = 0.0
        self.unknown = UnknownDomains(lambda: self.now)
        self.write("web")
        self._limiter = Limiter(lambda: self._rules, MemoryStore(), unknown=self.unknown)

    def write(self, *domains: str) -> None:
        self._rules = RuleSet({domain: parse_document(DOCUMENT.format(domain)).root for domain in domains})

    def ask(self, *domains: str) -> list[bool]:
        return [asyncio.run(self._limiter.decide(domain, DESCRIPTORS)).allowed for domain in domains]

    @property
    def troubles(self) -> list[str]:
        return self.unknown.list_troubles(self._rules.domains)


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_it_is_told_once_in_the_log_and_as_long_as_it_is_asked(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    assert asked.ask("web", "web") == [True, False]
    assert asked.troubles == []
    assert asked.ask(*["wbe"] * 5) == [True] * 5
    assert (asked.troubles, caplog.messages) == ([WBE], [WBE])
    asked.now += SECONDS - 1
    asked.ask("wbe")
    asked.now += SECONDS - 1
    assert asked.troubles == [WBE]
    asked.now += 1
    assert (asked.troubles, caplog.messages) == ([], [WBE])


def test_a_document_of_it_ends_that(asked: Asked) -> None:
    asked.ask("wbe")
    asked.write("web", "wbe")
    assert asked.ask("wbe", "wbe") == [True, False]
    assert asked.troubles == []


def test_a_domain_that_is_taken_away_is_told_too(asked: Asked) -> None:
    asked.ask("web")
    asked.write()
    asked.ask("web")
    (trouble,) = asked.troubles
    assert "the domain 'web', which no document of limits has: all of them pass. There is none." in trouble


def test_whoever_invents_domains_fills_neither_log_nor_memory(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    asked.ask("wbe")
    asked.ask(*(f"invented {number}\n" + "x" * 10**6 for number in range(100)))
    *named, more = asked.troubles
    assert (len(named), len(caplog.messages), named[0], more) == (MOST, MOST, WBE, MORE)
    assert all(len(sentence) < 500 and "\n" not in sentence for sentence in (*named, *caplog.messages))
    asked.now += SECONDS / 2
    asked.ask("wbe")
    asked.now += SECONDS / 2
    assert asked.troubles == [WBE]
    asked.ask("shpo")
    assert len(asked.troubles) == len(caplog.messages) - MOST + 1 == 2


def test_a_lone_surrogate_is_told(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    asked.ask("\udcff")
    assert asked.troubles == caplog.messages
    assert asked.troubles[0].encode()
