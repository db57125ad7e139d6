"""Forks ranks out of one Python that has imported torch, which takes each new process about two seconds of a processor.

    rank_server.py [MODULE ...]       serves the test that started it, which also needs these modules
    rank_server.py --listen SOCKET    serves all tests that connect: in the background, until --end, or two minutes
                                      without a test
    rank_server.py --end SOCKET

Reads a request a line, runs its ranks with the variables that `trireme launch` gives them, and answers with their exit
statuses. A test that connects first sends a line with the modules that it needs.
"""
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time

import torch

_PATIENCE_S = 5  # of ranks whose peer has failed, before they are ended as well
_IDLE_S = 120
_PR_SET_PDEATHSIG = 1


def _die_with_parent():
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _variables(rank, ranks, port):
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "GROUP_RANK": 0,
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in own.items()}


def _become(request, variables):
    """The forked process is a rank from here on."""
    _die_with_parent()
    os.setpgid(0, 0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(request[name], os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update({**request["environment"], **variables})
    if request["folder"]:
        os.chdir(request["folder"])
    torch.seed()  # a new process has its own; `random` sees to itself
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _has_hung_up():
    """Whether the test that asks is there no more."""
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _wait(children, timeout_s):
    """Exit statuses by rank, and whether the time was up. Who outlives a failure, the time or the test is killed."""
    statuses, end, timed_out = {}, time.monotonic() + timeout_s, False
    while len(statuses) < len(children):
        for rank, child in enumerate(children):
            if rank not in statuses:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
                    if statuses[rank]:
                        end = min(end, time.monotonic() + _PATIENCE_S)
        if time.monotonic() > end or (end < float("inf") and _has_hung_up()):
            timed_out = not any(statuses.values())
            for rank, child in enumerate(children):
                if rank not in statuses:
                    os.killpg(child, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.005)
    return [statuses[rank] for rank in range(len(children))], timed_out


def serve(imports):
    """Returns the request in each rank, and None where there are no more."""
    for module in imports:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a rank that ends would look at all that is imported here, for half a second of a processor
    for line in sys.stdin:
        request = json.loads(line)
        ranks = request["ranks"]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        children = []
        for rank in range(max(1, ranks)):
            child = os.fork()
            if child == 0:
                _become(request, _variables(rank, ranks, port) if ranks else {})
                return request
            children.append(child)
        statuses, timed_out = _wait(children, request["timeout_s"])
        print(json.dumps({"statuses": statuses, "timed_out": timed_out}), flush=True)
    return None


def _serve_socket(connection):
    """serve() of a test that has connected."""
    _die_with_parent()
    for number in (0, 1):
        os.dup2(connection.fileno(), number)
    connection.close()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # pylint: disable=consider-using-with
    modules = json.loads(sys.stdin.readline() or "[]")
    if modules is None:  # end()
        os.kill(os.getppid(), signal.SIGTERM)
        return None
    return serve(modules)


def _accept(listener):
    """A test's connection in a process of its own; None at the end."""
    tests = set()
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if not tests:
                return None
            connection = None
        if connection is not None:
            child = os.fork()
            if child == 0:
                listener.close()
                return connection
            tests.add(child)
            connection.close()
        tests = {test for test in tests if os.waitpid(test, os.WNOHANG) == (0, 0)}


def listen(path):
    """serve() for each test that connects to the socket `path`. The caller goes on when they can; here it is the
    background."""
    end(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    listener.settimeout(_IDLE_S)
    if os.fork():
        os._exit(0)
    os.setsid()
    with open(os.devnull, "r+b") as nothing:
        for number in (0, 1, 2):
            os.dup2(nothing.fileno(), number)
    gc.collect()
    gc.freeze()
    connection = _accept(listener)
    return _serve_socket(connection) if connection is not None else None


def end(path):
    """Ends the server at `path`, if there is one."""
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
        except OSError:
            pass
        else:
            server.sendall(b"null\n")
            server.recv(1)  # its end
    if os.path.exists(path):
        os.remove(path)


def run(words, names):
    """Runs `words`, a script and its arguments, as Python would: in the module __main__, whose names are `names`."""
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    with open(words[0], encoding="utf-8") as script:
        code = compile(script.read(), words[0], "exec")
    names.update(__file__=words[0], __doc__=None)
    exec(code, names)  # pylint: disable=exec-used


if __name__ == "__main__":
    if sys.argv[1:2] == ["--end"]:
        end(sys.argv[2])
        sys.exit()
    if sys.argv[1:2] == ["--listen"]:
        REQUEST = listen(sys.argv[2])
    else:
        _die_with_parent()
        REQUEST = serve(sys.argv[1:])
    if REQUEST and REQUEST["as_deepspeed"]:
        import trireme.as_deepspeed
        sys.argv = ["as_deepspeed", *REQUEST["words"]]
        trireme.as_deepspeed.main(REQUEST["words"])
    elif REQUEST:
        run(REQUEST["words"], globals())
