"""A worker process: cells in, answers out, as JSON lines over pipes.

::

    -> {"do":"open","out":...,"seal":...,"code":...,"folder":...,"replay":...}
    <- {"answer":"ready","process":{...}}     or {"answer":"refused","error":...}
    -> {"do":"run","stage":...,"cell":...,"seals":{...}}
    <- {"answer":"progress",...} ...
    <- {"answer":"finished","outcome":...,"attached":...}  or  failed, stopped, refused

What a cell prints goes to standard error. When the pipe closes, its parent is gone: the worker ends at
once, in the middle of a cell if need be.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from halfulp import canonical
from halfulp.errors import HalfulpError
from halfulp.study import ledger
from halfulp.study.running import Message, Session, limit_threads


class Worker:
    """The conversation with the parent."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self.source, self.sink = source, sink
        self.requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.session: Session | None = None

    def listen(self) -> None:
        """Take requests until the pipe closes; in a thread, so that this is seen during a cell."""
        for line in self.source:
            self.requests.put(canonical.parse(line))
        os._exit(0)

    def tell(self, message: Message) -> None:
        self.sink.write(canonical.dumps(message) + b"\n")
        self.sink.flush()

    def work(self) -> None:
        """Answer requests, for ever."""
        while True:
            request = self.requests.get()
            try:
                self.tell(self.answer(request))
            except BrokenPipeError:
                os._exit(0)

    def answer(self, request: Message) -> Message:
        try:
            if request["do"] == "open":
                folder = Path(request["folder"]) if request["folder"] else None
                self.session = Session(
                    Path(request["out"]), request["seal"], request["code"], folder, replay=request["replay"]
                )
                self.session.tell = self.tell
                limit_threads(self.session.protocol.threads, self.session.protocol.threads)
                return {"answer": "ready", "process": ledger.process()}
            if self.session is None:
                return {"answer": "refused", "error": "No study is open.", "exit_code": 2}
            return self.session.run(request["stage"], request["cell"], request["seals"])
        except HalfulpError as error:
            return {"answer": "refused", "error": str(error), "exit_code": error.exit_code}


def main() -> None:
    """Keep the real standard output for the conversation; whatever prints goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    worker = Worker(sys.stdin.buffer, sink)
    threading.Thread(target=worker.listen, daemon=True).start()
    worker.work()


if __name__ == "__main__":
    main()
