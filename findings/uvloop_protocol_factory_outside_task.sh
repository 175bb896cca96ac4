#!/bin/sh
# uvloop calls protocol factories outside of any task, so sniffio detects no library there.
set -eu

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  uvloop==0.23.0 sniffio==1.3.1

cat <<'END'
A server calls its protocol factory for each connection that it accepts.
  asyncio calls it inside a task of its own; uvloop calls it from a callback, outside of any task.
  sniffio, without a name that somebody has set, detects asyncio by the current task. So the same
  factory may use what asks sniffio under asyncio, and fails under uvloop. anyio asks sniffio where
  that is installed: a cancel scope cannot be made in such a factory.
END

cat > "$work/show.py" <<'END'
import asyncio
import platform
import sys
from importlib.metadata import version

import sniffio
import uvloop


async def accept_one() -> tuple[bool, str]:
    loop = asyncio.get_running_loop()
    seen = loop.create_future()

    def factory() -> asyncio.Protocol:
        try:
            detected = sniffio.current_async_library()
        except sniffio.AsyncLibraryNotFoundError as error:
            detected = type(error).__name__
        seen.set_result((asyncio.current_task() is not None, detected))
        return asyncio.Protocol()

    server = await loop.create_server(factory, "127.0.0.1", 0)
    transport, _ = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
    answer = await asyncio.wait_for(seen, 30)
    transport.close()
    server.close()
    return answer


print(f"Python {platform.python_version()}, uvloop {version('uvloop')}, sniffio {version('sniffio')}")
found = {}
for name, run in {"asyncio": asyncio.run, "uvloop": uvloop.run}.items():
    found[name] = run(accept_one())
    print(f"{name}: in a task: {found[name][0]}, sniffio says: {found[name][1]}")
expected = {"asyncio": (True, "asyncio"), "uvloop": (False, "AsyncLibraryNotFoundError")}
if found != expected:
    sys.exit("The behaviour has changed.")
END
"$work/venv/bin/python" "$work/show.py"
