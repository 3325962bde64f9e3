"""Rules: made, listed, changed, removed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as with_changes
from datetime import UTC, datetime
from heapq import nsmallest
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from netlimit.errors import RuleError
from netlimit.judgement import Change, Judge
from netlimit.records import Actor, State
from netlimit.rules import Action, Rule
from netlimit.store import Kept, Store

from . import bodies, schemas
from .auth import CallerOf
from .context import StoreOf, WaitingOf, no_query
from .cursors import read_cursor, write_cursor
from .headers import IfMatch, IfNoneMatch, Wait, etag, expect_revision, preference_applied, write_warnings
from .lockout import ForceQuery, Lockout, LockoutOf
from .openapi import body_of, one_rule
from .preview import preview
from .problems import Problem, responses
from .representation import patch, read_rule, without_read_only, write_kept
from .standing import find_state, judge
from .turns import InTurn, run_in_turn

router = APIRouter(prefix="/rules", tags=["rules"], route_class=InTurn)
MOST = 1000
"""The most rules on one page."""
MOST_LABELS = 16
"""The most labels by which rules are looked for."""
_KEY = re.compile(r"[0-9]{1,18}|[a-z][a-z0-9._-]{0,62}")

Key = Annotated[str, Path(alias="key", description="The rule's id, or its name.", examples=["1", "office-hosts"])]
"""The part of an address that names a rule."""


class KeepQuery(ForceQuery):
    """The parameters of keeping a rule."""

    dry_run: schemas.Flag = Field(
        False, description="Only check the rule, and show how it would be kept and what it would do; keep nothing."
    )


class ListQuery(schemas.Strict):
    """The parameters of listing rules."""

    name: str | None = Field(None, description="Only the rule of this name.")
    contains: str | None = Field(None, description="Only rules whose target has this address (or all of this CIDR).")
    target: str | None = Field(None, description="Only rules with this very target.")
    label: list[str] = Field(
        [], description="Only rules with this label, `key=value`; repeated, up to 16 times: with all of them."
    )
    action: Action | None = Field(None, description="Only rules with this action.")
    state: State | None = Field(None, description="Only rules in this state.")
    limit: int = Field(100, ge=1, le=MOST, description="The most rules in the answer.")
    cursor: str | None = Field(None, description="`next` of the page before.")


async def _read_object(request: Request) -> dict[str, object]:
    return bodies.parse_object(await bodies.read_body(request, bodies.SMALL, bodies.JSON))


async def _read_changes(request: Request) -> dict[str, object]:
    return bodies.parse_object(await bodies.read_body(request, bodies.SMALL, bodies.MERGE_PATCH))


Sent = Annotated[dict[str, Any], Depends(_read_object)]
Changes = Annotated[dict[str, Any], Depends(_read_changes)]


@router.post(
    "",
    status_code=201,
    summary="Add a rule",
    responses={
        **one_rule(201, "The rule, as it is kept."),
        200: {"description": "For a dry run: the rule, as it would be kept.", "model": schemas.RuleDraft},
        **responses(400, 401, 403, 409, 413, 415, 422, 503),
    },
    openapi_extra=body_of({"application/json": (schemas.NewRule, schemas.NEW_RULES)}),
)
async def add_rule(
    query: Annotated[KeepQuery, Query()],
    sent: Sent,
    caller: CallerOf,
    lockout: LockoutOf,
    store: StoreOf,
    waiting: WaitingOf,
    wait: Wait,
) -> Response:
    """Keep a rule. The controllers hear of it at once; `Prefer: wait=5` waits until the kernel holds it."""
    now = datetime.now(UTC)
    rule = lockout.claim(read_rule(sent, now), query.force)
    judge = lockout.weigh(await run_in_turn(lockout.judge, query.force))
    await run_in_turn(lockout.make_room, [rule])
    if query.dry_run:
        rule = await run_in_turn(lockout.keep, _judge, store, judge, None, rule)
        return JSONResponse(await _preview(rule, store, waiting, now, lockout))
    (kept,) = await run_in_turn(lockout.keep, store.add, [rule], caller.actor, now, judge)
    where = {"Location": f"/api/v1/rules/{kept.id}"}
    return await _answer(Kept(kept, now, now), store, waiting, wait, lockout, 201, where)


@router.get(
    "",
    summary="List rules",
    responses={200: {"model": schemas.RulePage}, **responses(401, 403, 422, 503)},
)
def list_rules(query: Annotated[ListQuery, Query()], store: StoreOf) -> Response:
    """Rules by id, a page at a time; all the filters that are given must match."""
    wanted: dict[str, Any] = {
        "contains": query.contains,
        "target": query.target,
        "labels": _read_labels(query.label),
        "action": query.action.value if query.action else None,
    }
    after = read_cursor(query.cursor) or 0
    if query.name is not None:
        page = _select_named(store, query.name, query.state, wanted)
        page, total = [kept for kept in page if kept.rule.id > after], len(page)
    elif query.state is None:
        page, total = store.select(**wanted, after=after, limit=query.limit + 1)
    else:
        page, total = _select_in_state(store, query.state, wanted, after, query.limit + 1)
    items, more = page[: query.limit], len(page) > query.limit
    following = write_cursor(items[-1].rule.id) if more else None
    return JSONResponse({"items": describe(items, store), "next": following, "total": total})


@router.get(
    "/{key}",
    summary="Show a rule",
    dependencies=[Depends(no_query)],
    responses={**one_rule(200, "The rule."), **responses(401, 403, 404, 422, 503)},
)
def get_rule(key: Key, store: StoreOf) -> Response:
    """One rule, and how it stands."""
    kept = find_kept(store, key)
    (described,) = describe([kept], store)
    return JSONResponse(described, headers={"ETag": etag(kept.rule)})


@router.put(
    "/{key}",
    summary="Replace a rule",
    responses={
        **one_rule(
            200, "The rule, as it is kept now; for a dry run, as it would be.", schemas.Rule | schemas.RuleDraft
        ),
        **responses(400, 401, 403, 404, 409, 412, 413, 415, 422, 503),
    },
    openapi_extra=body_of({"application/json": (schemas.RuleReplacement, schemas.REPLACEMENTS)}),
)
async def replace_rule(
    key: Key,
    query: Annotated[KeepQuery, Query()],
    sent: Sent,
    caller: CallerOf,
    lockout: LockoutOf,
    store: StoreOf,
    waiting: WaitingOf,
    wait: Wait,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Put a rule in the place of one that is kept. Fields that are left out go back to their defaults, but for
    `forced_by`."""
    now = datetime.now(UTC)
    before = await run_in_turn(find_kept, store, key)
    rule = read_rule(without_read_only(sent), now)
    expected = expect_revision(if_match, before.rule, if_none_match)
    judge = lockout.weigh(await run_in_turn(lockout.judge, query.force))

    def alter(kept: Rule) -> Rule:
        forced_by = rule.forced_by if "forced_by" in sent else kept.forced_by
        return lockout.claim(with_changes(rule, id=kept.id, forced_by=forced_by), query.force, kept)

    if query.dry_run:
        draft = await run_in_turn(lockout.keep, _judge, store, judge, before.rule, alter(before.rule))
        return JSONResponse(await _preview(draft, store, waiting, now, lockout))
    kept = await run_in_turn(lockout.keep, store.change, before.rule.id, alter, caller.actor, now, expected, judge)
    return await _answer(kept, store, waiting, wait, lockout)


@router.patch(
    "/{key}",
    summary="Change a rule",
    responses={
        **one_rule(
            200, "The rule, as it is kept now; for a dry run, as it would be.", schemas.Rule | schemas.RuleDraft
        ),
        **responses(400, 401, 403, 404, 409, 412, 413, 415, 422, 503),
    },
    openapi_extra=body_of(dict.fromkeys(bodies.MERGE_PATCH, (schemas.RuleChanges, schemas.RULE_CHANGES))),
)
async def change_rule(
    key: Key,
    query: Annotated[KeepQuery, Query()],
    changes: Changes,
    caller: CallerOf,
    lockout: LockoutOf,
    store: StoreOf,
    waiting: WaitingOf,
    wait: Wait,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Change some fields of a rule (JSON merge patch, RFC 7396): what is not named stays, `null` is the default."""
    judge = lockout.weigh(await run_in_turn(lockout.judge, query.force))
    now = datetime.now(UTC)

    def alter(rule: Rule) -> Rule:
        altered = patch(rule, changes, now)
        expect_revision(if_match, rule, if_none_match)
        return lockout.claim(with_changes(altered, id=rule.id), query.force, rule)

    if query.dry_run:
        before = await run_in_turn(find_kept, store, key)
        draft = await run_in_turn(lockout.keep, _judge, store, judge, before.rule, alter(before.rule))
        return JSONResponse(await _preview(draft, store, waiting, now, lockout))
    kept = await run_in_turn(lockout.keep, _change, store, key, alter, caller.actor, now, judge)
    return await _answer(kept, store, waiting, wait, lockout)


@router.delete(
    "/{key}",
    status_code=204,
    summary="Remove a rule",
    responses={204: {"description": "The rule is gone."}, **responses(401, 403, 404, 409, 412, 422, 503)},
)
async def remove_rule(
    key: Key,
    query: Annotated[ForceQuery, Query()],
    caller: CallerOf,
    lockout: LockoutOf,
    store: StoreOf,
    waiting: WaitingOf,
    wait: Wait,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Remove a rule. With `Prefer: wait=5` the kernel has forgotten it, too, when the answer comes in time. Refused for
    one that allows what a rule that was forced would hit. An open window of confirmation, which undoes it, is told by
    the header `Warning`."""
    now = datetime.now(UTC)
    kept = await run_in_turn(find_kept, store, key)
    expected = expect_revision(if_match, kept.rule, if_none_match)
    judge = await run_in_turn(lockout.judge, query.force)
    await run_in_turn(store.remove, kept.rule.id, caller.actor, now, expected, judge)
    if wait is not None:
        await waiting.applied(await run_in_turn(store.revision), wait)
    warnings = write_warnings(await run_in_turn(lockout.warn_of_window))
    return Response(status_code=204, headers={**warnings, **preference_applied(wait)})


def find_kept(store: Store, key: str) -> Kept:
    """The rule of this id or name. Raises Problem 404."""
    kept = store.find(key) if _KEY.fullmatch(key) else None
    if kept is None:
        what = f"of id {key}" if key.isdecimal() else f"named {key!r}"
        raise Problem(404, f"There is no rule {what}; it may have been removed.")
    return kept


def find_some(store: Store, keys: Sequence[str]) -> dict[str, Kept]:
    """The rules of these ids or names, in that order; keys that no rule has are left out."""
    return store.find_some([key for key in keys if _KEY.fullmatch(key)])


def describe(kept: Sequence[Kept], store: Store) -> list[dict[str, object]]:
    """Rules as they are returned, each with how it stands."""
    now, hosts = store.now(), store.hosts()
    exceptional = store.exceptional([each.rule.id for each in kept])
    return [write_kept(each, judge(each.rule, hosts, exceptional.get(each.rule.id, {}), now)) for each in kept]


async def _answer(
    kept: Kept,
    store: Store,
    waiting: WaitingOf,
    wait: int | None,
    lockout: Lockout,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Answer with a rule that was changed, as soon as the client wants."""
    if wait is not None:
        await waiting.applied(kept.rule.revision, wait)
    (described,) = await run_in_turn(describe, [kept], store)
    described["warnings"] = await run_in_turn(lockout.warn, kept.rule)
    return JSONResponse(described, status, {**(headers or {}), "ETag": etag(kept.rule), **preference_applied(wait)})


async def _preview(rule: Rule, store: Store, waiting: WaitingOf, now: datetime, lockout: Lockout) -> dict[str, object]:
    """The draft of a rule, with what somebody should know who keeps it."""
    return {**await preview(rule, store, waiting, now), "warnings": await run_in_turn(lockout.warn, rule)}


def _judge(store: Store, judge: Judge, before: Rule | None, after: Rule) -> Rule:
    """The rule as it would be kept. Raises NeedsForce."""
    return store.judge([Change(before, after)], judge)[0] or after


def _change(store: Store, key: str, alter: Callable[[Rule], Rule], actor: Actor, now: datetime, judge: Judge) -> Kept:
    """Merge and write, with nobody in between."""
    return store.change(find_kept(store, key).rule.id, alter, actor, now, judge=judge)


def _select_named(store: Store, name: str, state: State | None, wanted: Mapping[str, Any]) -> list[Kept]:
    """The rule of this name, if it is wanted."""
    kept = store.find(name) if _KEY.fullmatch(name) else None
    if kept is None or kept.rule.name != name:
        return []
    found, _ = store.select(**wanted, after=kept.rule.id - 1, limit=1)
    (described,) = describe([kept], store)
    standing: Any = described["status"]
    matches = [each.rule.id for each in found] == [kept.rule.id] and state in (None, standing["state"])
    return [kept] if matches else []


def _select_in_state(
    store: Store, state: State, wanted: Mapping[str, Any], after: int, limit: int
) -> tuple[list[Kept], int]:
    """A page of the rules in a state, and how many there are. No index knows states, but many rules stand alike."""
    now, hosts = store.now(), store.hosts()
    found: list[int] = []
    for alike, ids in store.sort_out(now, [host.applied_revision for host in hosts], **wanted):
        if find_state(alike.example, hosts, alike.exceptional, now) is state:
            found += ids
    page = nsmallest(limit, (rule_id for rule_id in found if rule_id > after))
    return list(store.find_some([str(rule_id) for rule_id in page]).values()), len(found)


def _read_labels(texts: Sequence[str]) -> dict[str, str]:
    if len(texts) > MOST_LABELS:  # a database joins each, and plans for minutes where there are hundreds
        raise RuleError("label", f"Rules are looked for by {MOST_LABELS} labels at most, and not by {len(texts)}.")
    labels: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or "\0" in text:
            raise RuleError("label", f'The label {text!r} has no value; write for example "label=customer=acme".')
        if labels.setdefault(key, value) != value:
            raise RuleError("label", f"No rule has both {key}={labels[key]} and {key}={value}.")
    return labels
