"""A process in which the time of day is set while requests wait: what the machine's own must not be, is told otherwise
here, before anything can look at it.

Arguments: the backlog's URL, and by how many seconds it is set. What becomes of each request is printed, within 20 s.
"""

from __future__ import annotations

import asyncio
import sys
import time

_told, _set_by = time.time, [0.0]
time.time = lambda: _told() + _set_by[0]

from netlimit.l7.deferral.deferral import Deferral  # noqa: E402, after the clock
from netlimit.l7.identity import header  # noqa: E402
from netlimit.l7.limit import Limit  # noqa: E402
from netlimit.l7.middleware import RateLimit  # noqa: E402
from netlimit.l7.rules import OnLimit, Rule  # noqa: E402
from tests.l7.deferral.test_deferral import Recorder, await_end, living, post  # noqa: E402


async def main(url: str, seconds: float) -> None:
    rule = Rule("app", "user", Limit(1, 2), on_limit=OnLimit.DEFER)
    recorder = Recorder()
    async with living(RateLimit(recorder, rule, key=header("X-User"), deferral=Deferral(url))) as app:
        answers = [await post(app, b"%d" % number) for number in range(3)]
        await asyncio.sleep(0.5)  # the first that waits has been tried, and is to wait for its second
        _set_by[0] = seconds
        async with asyncio.timeout(20):
            for number, answer in enumerate(answers[1:], 1):
                print(number, (await await_end(app, answer))["state"])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
