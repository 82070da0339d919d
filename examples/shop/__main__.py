"""`python -m examples.shop`: database, migrations, both web servers and three workers, until Ctrl-C or SIGTERM."""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import alembic.command
import alembic.config
from sqlalchemy import make_url

from fairqueue import embedded

#: A part that dies within so many seconds has failed to start; so often in a row, and everything ends.
SECONDS, FAILURES = 5, 5

#: Not an Event: a second signal, in the middle of its set(), would wait for the lock that the first one has.
stopping: list[int] = []


class Part:
    """A process of the shop, which is started again when it dies."""

    def __init__(self, name: str, *command: str) -> None:
        self.name = name
        self.command = [sys.executable, "-m", *command]
        self.failures = 0

    def start(self) -> None:
        self.started = time.monotonic()
        # In a process group of its own: Ctrl-C in the terminal is for us, who stop the parts then.
        self.process = subprocess.Popen(self.command, process_group=0)
        print(f"{self.name}: process {self.process.pid}", flush=True)

    def look(self, failures: int) -> None:
        if (code := self.process.poll()) is None:
            return
        self.failures = self.failures + 1 if time.monotonic() - self.started < SECONDS else 0
        if self.failures >= failures:
            raise SystemExit(f"{self.name} doesn't start (exit code {code}), so everything is stopped.")
        print(f"{self.name}: ended with exit code {code}, is started again", flush=True)
        self.start()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # all of them finish what they are doing

    def wait(self) -> None:
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            print(f"{self.name}: didn't stop, was killed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.shop", description=__doc__)
    parser.add_argument("--web", type=int, default=0, metavar="PORT", help="of the website (default: a free one)")
    parser.add_argument("--api", type=int, default=0, metavar="PORT", help="of the API (default: a free one)")
    parser.add_argument("--workers", type=int, default=3, metavar="N", help="worker processes (default: 3)")
    options = parser.parse_args()
    for port in (options.web, options.api):
        if not 0 <= port < 2**16:
            parser.error(f"a port must be from 1 to 65535, not {port}")
        if port and is_open(port):
            parser.error(f"port {port} is taken: name another one, or none to get a free one")
    if options.web and options.web == options.api:
        parser.error(f"--web and --api are both {options.web}: name another one, or none to get a free one")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the last as the terminal is closed
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, _: stopping.append(number))
    with embedded.database_url() as url:  # FAIRQUEUE_DSN, or a server of our own that goes with us
        os.environ["DATABASE_URL"] = url
        alembic.command.upgrade(alembic.config.Config(Path(__file__).with_name("alembic.ini")), "head")
        run(url, options.web or free_port(), options.api or free_port(), options.workers)


def run(url: str, web: int, api: int, workers: int) -> None:
    parts = [
        Part("web", "waitress", f"--listen=127.0.0.1:{web}", "examples.shop.web:app"),
        Part("api", "uvicorn", f"--port={api}", "--log-level=warning", "examples.shop.api:app"),
        *(Part(f"worker {n + 1}", "fairqueue.cli", "worker", "examples.shop.jobs:app") for n in range(workers)),
    ]
    try:
        for part in parts:
            part.start()
        watch(parts, until_open=[web, api])
        if not stopping:
            hello = HELLO.format(
                web=f"http://127.0.0.1:{web}",
                api=f"http://127.0.0.1:{api}",
                url=shlex.quote(make_url(url).render_as_string()),  # a password is not for the screen
                python=shlex.quote(sys.executable),
            )
            print(hello, flush=True)
        watch(parts)
        print("Stopping.", flush=True)  # not below: it fails where the terminal is gone
    finally:
        started = [part for part in parts if hasattr(part, "process")]
        for part in started:
            part.stop()
        for part in started:
            part.wait()


def watch(parts: list[Part], until_open: list[int] | None = None) -> None:
    """Keep the parts running until we are to stop, or until the ports are open."""
    while not stopping and not (until_open and all(map(is_open, until_open))):
        for part in parts:
            part.look(failures=1 if until_open else FAILURES)
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


HELLO = """
The shop is open. Website: {web}  API: {api}

  curl -d 'one two three' '{web}/acme/documents?name=first'     upload at the website
  curl --json '{{"text": "four five"}}' '{api}/acme/documents'    upload at the API
  curl '{web}/acme/documents'                                   the documents of acme, with their words
  curl '{api}/acme/documents/1'                                 one document
  curl '{api}/status'                                           what stands in the queue
  curl -i -d 'a virus' '{web}/acme/documents'                   fails after it has enqueued: nothing is left of it

The queue from the command line, in this folder:

  DATABASE_URL={url} {python} -m flask --app examples.shop.web fairqueue status

Kill any of these processes, with -9 if you like: it is started again, and no document is lost or counted twice.
Ctrl-C stops everything.
"""

if __name__ == "__main__":
    main()
