from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import update

from netlimit.records import Request
from netlimit.store import Store
from netlimit.store.tables import requests


def test_a_question_is_asked_seen_and_answered_once(store: Store) -> None:
    first = store.ask("gw1", "plan", {})
    second = store.ask("gw1", "offenders", {"limit": 5, "since": None})
    other = store.ask("gw2", "plan", {})
    assert store.questions("gw1") == [
        Request(first, "plan", {}),
        Request(second, "offenders", {"limit": 5, "since": None}),
    ]
    assert store.answered(first) is None
    store.answer(first, {"text": "nothing to do", "steps": []})
    assert store.answered(first) == {"text": "nothing to do", "steps": []}
    assert [question.id for question in store.questions("gw1")] == [second]
    assert [question.id for question in store.questions("gw2")] == [other]


def test_an_empty_answer_is_an_answer(store: Store) -> None:
    asked = store.ask("gw1", "counters", {})
    store.answer(asked, {})
    assert store.answered(asked) == {}
    assert store.questions("gw1") == []


def test_an_answer_to_what_nobody_asked_is_no_error(store: Store) -> None:
    store.answer(99, {"a": 1})
    assert store.answered(99) is None


def test_old_questions_are_neither_shown_nor_kept(store: Store) -> None:
    old, young = (store.ask("gw1", "plan", {}) for _ in range(2))
    date(store, old, timedelta(seconds=-61))
    date(store, young, timedelta(seconds=-50))
    store.answer(old, {})
    assert [question.id for question in store.questions("gw1")] == [young]
    assert store.answered(old) == {}
    newest = store.ask("gw1", "plan", {})
    assert store.answered(old) is None
    assert [question.id for question in store.questions("gw1")] == [young, newest]
    assert newest > young > old


def test_a_question_that_was_asked_by_a_clock_since_set_back_is_forgotten(store: Store) -> None:
    ahead = store.ask("gw1", "plan", {})
    date(store, ahead, timedelta(hours=1))
    assert store.questions("gw1") == []
    newest = store.ask("gw1", "plan", {})
    store.answer(ahead, {})
    assert store.answered(ahead) is None
    assert [question.id for question in store.questions("gw1")] == [newest]


def date(store: Store, question: int, ago: timedelta) -> None:
    """Have a question been asked at another time than now."""
    with store._database.writing() as connection:
        connection.execute(update(requests).where(requests.c.id == question).values(asked_at=datetime.now(UTC) + ago))
