"""How a script ends when it is told to: a run after its step, anything else at once; neither with a traceback."""

import contextlib
import os
import signal
import sys


class Stop:
    """The number of the signal that asked this run to end, or 0."""

    number = 0


@contextlib.contextmanager
def signals():
    """SIGINT and SIGTERM set the number of the Stop that this gives; a second SIGINT ends the process at once."""
    stop, old = Stop(), {}

    def handler(number, frame):
        if stop.number and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        stop.number = number

    try:
        old = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread
        pass
    try:
        yield stop
    finally:
        for number, action in old.items():
            signal.signal(number, action)


def start(main):
    """Calls a script's main; Ctrl-C ends it at once, without a traceback."""
    try:
        try:
            main()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all that is left is the exit
    except KeyboardInterrupt:
        print("stopped at once", file=sys.stderr, flush=True)
        os._exit(130)  # the usual exit takes down what JAX was in the middle of, and crashes
