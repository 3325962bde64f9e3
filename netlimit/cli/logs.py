"""What the long-running parts say on stderr: a line each, to read or as a JSON object.

Whoever has something to say logs it as Python's own logging has it: a sentence, and in `extra` the fields that a
machine looks for (`revision`, `rules`, `request`, `actor`, `seconds` …).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, MutableMapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from netlimit.cli.patience import ImpatientStream, make_impatient, tell_loss
from netlimit.cli.secrecy import Secrecy, list_secrets
from netlimit.plain import show_line
from netlimit.settings import LogFormat, Settings

MOST_RULES = 20
"""A line names so many rules at most; `rules_total` says of how many it speaks."""
LONGEST = 4000
"""Characters of a sentence or a value at most, in lines to read and in JSON."""

Event = MutableMapping[str, Any]
_QUIET = ("alembic", "asyncio", "httpx", "pyroute2")
_FIRST = ("time", "level", "part", "host", "event")


def log_to_stderr(part: str, settings: Settings) -> None:
    """Log as this part of netlimit, the way the settings say. Nobody waits for stderr to be read any more, whatever is
    written there."""
    # Most commands log nothing; they are not to wait for what only this needs.
    from structlog.stdlib import ExtraAdder, ProcessorFormatter

    render = _write_json if settings.log_format is LogFormat.JSON else _write_console
    formatter = ProcessorFormatter(
        foreign_pre_chain=[ExtraAdder()],
        processors=[
            _Headings(part, settings.host),
            _tell_exception,
            _shorten,
            Secrecy(list_secrets(settings)),
            render,
        ],
    )
    sys.stderr = make_impatient(sys.stderr, partial(_word_loss, formatter, part))
    handler = _Handler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


class _Handler(logging.StreamHandler[Any]):
    """Tells at the end, or when another takes its place, what could not be told yet."""

    def close(self) -> None:
        if isinstance(self.stream, ImpatientStream):
            self.stream.close()
        super().close()


def _word_loss(formatter: logging.Formatter, part: str, lines: int) -> str:
    """Tell of lost lines as a line like others."""
    said = {"msg": tell_loss(lines, f"`netlimit {part}`"), "levelno": logging.WARNING, "levelname": "WARNING"}
    return formatter.format(logging.makeLogRecord({**said, "lost": lines}))


class _Headings:
    """Puts in front what every line has: when, how bad, which part of netlimit on which host, and the sentence."""

    def __init__(self, part: str, host: str) -> None:
        self._who = {"part": part, "host": host}

    def __call__(self, logger: object, method: str, event: Event) -> Event:
        record: logging.LogRecord = event["_record"]
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {"time": when.replace("+00:00", "Z"), "level": record.levelname.lower(), **self._who}
        rest = {key: value for key, value in event.items() if key not in _FIRST and not key.startswith("_")}
        rest.pop("color_message", None)  # uvicorn's: the same sentence once more
        return {**said, "event": event["event"], **rest}


def _tell_exception(logger: object, method: str, event: Event) -> Event:
    """What was raised, as `error` (a sentence) and `trace`."""
    raised = event.pop("exc_info", None)
    if raised and raised[1] is not None:
        event.setdefault("error", str(raised[1]) or type(raised[1]).__name__)
        event["trace"] = logging.Formatter().formatException(raised)
    return event


def _shorten(logger: object, method: str, event: Event) -> Event:
    """No line speaks of a hundred thousand rules, or quotes something endless."""
    rules = event.get("rules")
    if isinstance(rules, Collection) and not isinstance(rules, str):
        named = [rule_id for rule_id, _ in zip(rules, range(MOST_RULES), strict=False)]
        event["rules"] = named
        if len(rules) > MOST_RULES:
            event["rules_total"] = len(rules)
    for key, value in event.items():
        if isinstance(value, str) and len(value) > LONGEST and key != "trace":
            event[key] = value[:LONGEST] + " …"
    return event


def _write_json(logger: object, method: str, event: Event) -> str:
    return json.dumps(event, default=str)


def _write_console(logger: object, method: str, event: Event) -> str:
    """One line, whatever it quotes; only a trace takes several."""
    fields = dict(event)
    time, level, part, _, sentence = (fields.pop(key) for key in _FIRST)
    trace = fields.pop("trace", None)
    line = f"{time} {level.upper()} {part}: {show_line(str(sentence))}"
    said = " ".join(f"{key}={_write_value(value)}" for key, value in fields.items() if value is not None)
    return "\n".join(filter(None, (f"{line} [{said}]" if said else line, trace)))


def _write_value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_write_value, value))
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and text and " " not in text else json.dumps(text)
