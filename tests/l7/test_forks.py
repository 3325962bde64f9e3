"""Processes that fork with limits in them, as gunicorn with `--preload`, Celery and multiprocessing do."""

from __future__ import annotations

import subprocess
import sys

from tests.l7.redis.driving import PATIENT
from tests.l7.redis.servers import Server

BEGINNING = """
import os, signal, sys, threading, time
from netlimit.l7.decorator import RateLimited, rate_limit
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.rules import Rule

def in_child(function):
    child = os.fork()
    if not child:
        signal.alarm(10)  # one that hangs
        try:
            function()
        except RateLimited:
            os._exit(9)
        os._exit(0)
    return child

def find_fate(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def make_rule(amount, **others):
    return Rule("calls", "forked", None, Limit(amount, 60, Algorithm.CONCURRENCY), **others)
"""


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + script, *arguments], capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_a_child_calls_what_its_parent_has_called() -> None:
    said = run("""
call = rate_limit(make_rule(1))(lambda: None)
call()
print(find_fate(in_child(call)), find_fate(in_child(lambda: find_fate(in_child(call)) and os._exit(1))))
call()
""")
    assert said == "0 0\n"


def test_a_child_of_a_parent_whose_threads_call_meanwhile() -> None:
    said = run("""
call = rate_limit("1000000/second")(lambda: None)
ending = threading.Event()
def call_on():
    while not ending.is_set():
        call()
threads = [threading.Thread(target=call_on) for _ in range(3)]
for thread in threads:
    thread.start()
print([find_fate(in_child(call)) for _ in range(8)])
ending.set()
""")
    assert said == "[0, 0, 0, 0, 0, 0, 0, 0]\n"


def test_a_call_under_way_in_the_parent_ends_in_the_child_too() -> None:
    said = run("""
fates = []
@rate_limit(make_rule(1))
def call():
    fates.append(os.fork())
signal.alarm(20)
call()
call()
if not all(fates):
    os._exit(0)
print([find_fate(child) for child in fates])
""")
    assert said == "[0, 0]\n"


def test_children_share_places_in_redis(server: Server) -> None:
    """Also where the function has been called before; each request in flight has a name of its own in all processes."""
    for called in ("", "call(0)"):
        said = run(
            f"""
call = rate_limit(make_rule(2), counters=sys.argv[1])(time.sleep)
{called}
children = [in_child(lambda: call(3)) for _ in range(4)]
print(sorted(map(find_fate, children)))
""",
            server.url + PATIENT,
        )
        assert said == "[0, 0, 9, 9]\n"
