"""ZeroMQ's reports about the connections of a socket, in a queue that cannot hold up ZeroMQ itself.

ZeroMQ's input/output thread writes what happens to connections into a queue, and when the queue is full it waits there until
somebody has read from it. In that time it moves no message and answers no heartbeat. By default the queue holds a few
thousand reports, and strangers can make as many within a second. The reader is a Python thread, which cannot read while
another one holds the interpreter lock. So the queue gets no limit, and the number of connections gets one (`doorstep.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message


class SocketEvent(NamedTuple):
    event: int  # zmq.EVENT_...
    value: int  # a descriptor or an error, depending on the event


def open_monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """The socket from which reports about `socket` can be read. End it with `socket.disable_monitor()` and its own `close`."""
    address = f"inproc://stretto.monitor-{int(socket.getsockopt(zmq.FD))}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.setsockopt(zmq.RCVHWM, 0)  # of the two ends of such a queue one without a limit is enough
    monitor.connect(address)
    return monitor


def next_report(monitor: zmq.Socket[bytes]) -> SocketEvent | None:
    """The next report, or None when there is none yet. Never blocks."""
    try:
        message = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        return None
    return SocketEvent(int(message["event"]), int(message["value"]))
