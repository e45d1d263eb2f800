"""What `python`, `stretto` and `torchrun` are in `preloaded.shell`: they ask the process that has torch to be the program.

The program gets this one's arguments, environment, folder and standard streams; this one ends as the program does.
`python` with options, or without a script, is the real one.
"""

import array
import json
import os
import signal
import socket
import sys

path, *arguments = sys.argv
name = os.path.basename(path)
script = arguments[1:] if arguments[:1] == ["-u"] else arguments
is_module = script[:1] == ["-m"] and script[1] in (
    "stretto",
    "torch.distributed.run",
    "stretto.aggregate.parameter_server.process",
)
if name == "python" and not is_module and (not script or script[0].startswith("-")):
    python = os.environ["REAL_PYTHON"]
    os.execv(python, [python, *arguments])
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect(os.environ["WARM_SOCKET"])
    request = {"name": name, "arguments": arguments, "folder": os.getcwd(), "environ": dict(os.environ)}
    streams = array.array("i", [0, 1, 2])
    text = json.dumps(request).encode()
    asked.sendmsg([len(text).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    asked.sendall(text)
    code = asked.makefile("r").readline()
if not code:
    sys.exit("the process that has torch has ended")
if int(code) < 0:
    signal.signal(-int(code), signal.SIG_DFL)
    os.kill(os.getpid(), -int(code))
sys.exit(int(code))
