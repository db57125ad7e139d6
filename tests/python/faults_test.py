"""Ranks that raise, are killed or do not come; Ctrl-C and other threads while a rank waits; exits without destroy()."""
import os
import pathlib
import re
import uuid

import harness
from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import, in each fork

_MARK = "TRIREME_TEST_RUN"  # in the environment of every process of a launch

# Rank 0 has a fault before its third step; rank 1 says what it met, even when the launcher wants it to end.
_FAULT = """
import json, os, pathlib, signal, sys, time
import torch, trireme as deepspeed
folder, fault, stage = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ["RANK"] == "1" else signal.SIG_DFL)
(folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
engine, *_ = deepspeed.initialize(model=model, config=config)
try:
    for step in range(4):
        if step == 2 and engine.global_rank == 0:
            if fault == "raises":
                raise ValueError("the fault of rank 0")
            os.kill(os.getpid(), signal.SIGKILL) if fault == "is killed" else time.sleep(60)
        began = time.time()
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
except deepspeed.errors.Error as error:
    said = [type(error).__name__, isinstance(error, deepspeed.errors.CommError), str(error), time.time() - began]
    (folder / "said").write_text(json.dumps(said))
    raise
"""

# Rank 1 is late for a call in which rank 0 gives up, without a word, and then fails by itself.
_LATE = """
import os, pathlib, sys, time, trireme
trireme.init_distributed()
world = trireme.comm.world()
world.barrier()
ends = pathlib.Path(sys.argv[1])
if world.rank == 1:
    while not ends.exists():
        time.sleep(0.01)
    time.sleep(0.3)  # rank 0 is gone
    sys.stderr.write("this is why\\n")
    os._exit(7)
try:
    world.barrier()
except trireme.errors.CommTimeoutError:
    ends.touch()
    os._exit(3)
"""

# Ranks that are forked from one process, where torch has been imported once, and end as any Python program.
_FORKED = """
import gc, json, os, pathlib, signal, socket, sys, threading, time
import torch, trireme as deepspeed

folder = pathlib.Path(folder)
signal.signal(signal.SIGINT, signal.default_int_handler)

def make(stage=2, optimizer=None, width=8, **more):
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 2))
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **more}
    if optimizer is None:
        config["optimizer"] = {"type": "AdamW"}
    return deepspeed.initialize(model=model, optimizer=optimizer and optimizer(model.parameters()), config=config)[0]

def backward(engine):
    engine.backward(engine(torch.ones(1, 8)).sum())

def train(engine):
    backward(engine)
    engine.step()

def wait_for(path, seconds=20):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)

def on_forks(name, program, size=2):
    '''[(exit status, stderr)] of the ranks that ran program(rank).'''
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(size):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                              MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.dup2(os.open(folder / f"{name}.{rank}.err", os.O_CREAT | os.O_WRONLY), 2)
            program(rank)
            sys.exit(0)
        pids.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return [(status, (folder / f"{name}.{rank}.err").read_text()) for rank, status in enumerate(statuses)]
"""


def _processes_with(mark):
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{_MARK}={mark}".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


class Fault(Case):
    """The error in the other rank's Python, and the leftovers: none."""

    def _fault(self, fault, stage):
        """[type, whether it is a CommError, text, seconds] of rank 1; the launcher's last lines."""
        script, mark = self.write("fault.py", _FAULT), uuid.uuid4().hex
        status, out, err = harness.launch(2, [script, self.folder, fault, stage],
                                          environment={_MARK: mark, "TRIREME_TIMEOUT_S": "3"}, timeout_s=60)
        self.assertNotEqual(status, 0)
        said = self.folder / "said"
        self.assertTrue(said.exists(), f"rank 1 met no error\n{out}\n{err}")
        self.assertEqual(_processes_with(mark), [])
        pids = [(self.folder / f"pid{rank}").read_text() for rank in (0, 1)]
        left = [name for name in os.listdir("/dev/shm") if "trireme" in name or any(pid in re.split(r"\D+", name) for pid in pids)]
        self.assertEqual(left, [])
        return harness.json.loads(said.read_text()), err

    def test_a_rank_that_raises_is_named_to_a_peer_that_waits_in_backward(self):
        (kind, is_comm, text, seconds), err = self._fault("raises", 2)
        self.assertEqual((kind, is_comm), ("PeerLostError", True))
        self.assertIn("rank 0", text)
        self.assertLess(seconds, 2.5)
        self.assertIn("the fault of rank 0", err)

    def test_the_rank_that_another_waited_for_is_to_blame_whatever_they_write(self):
        script = self.write("late.py", _LATE)
        status, _, err = harness.launch(2, [script, str(self.folder / "ends")], environment={"TRIREME_TIMEOUT_S": "4"}, timeout_s=60)
        self.assertEqual(status, 7, err)
        self.assertIn("trireme launch: after that: rank 0 exited with code 3\ntrireme launch: rank 1 exited with code 7; its last lines:\n", err)
        self.assertTrue(err.endswith("    this is why\n"), err)

    def test_a_rank_that_is_killed_is_named_to_a_peer_that_waits_in_step(self):
        (kind, is_comm, text, seconds), err = self._fault("is killed", 3)
        self.assertEqual((kind, is_comm), ("PeerLostError", True))
        self.assertRegex(text, "rank 0 .*died")
        self.assertLess(seconds, 1.0)
        self.assertIn("SIGKILL", err)

    def test_a_rank_that_does_not_come_is_named_after_the_timeout(self):
        (kind, is_comm, text, seconds), _ = self._fault("sleeps", 1)
        self.assertEqual((kind, is_comm), ("CommTimeoutError", True))
        self.assertIn("rank 0", text)
        self.assertGreater(seconds, 2.5)
        self.assertLess(seconds, 6.0)


class Waiting(Case):
    """Python lives on while a rank waits for a peer."""

    def test_ctrl_c_is_heard_within_a_second_wherever_a_rank_waits(self):
        heard = self.on_ranks(0, _FORKED + """
PLACES = {"forward": (3, lambda e: e(torch.ones(1, 8)), {"trireme": {"gather": "copy", "merge_below_bytes": 0}}),
          "backward": (2, backward, {}), "step": (3, train, {}), "barrier": (0, lambda e: e.world.barrier(), {}),
          "save": (1, lambda e: e.save_checkpoint(folder / "saved"), {})}

def interrupted(place):
    stage, wait, more = PLACES[place]
    def program(rank):
        engine = make(stage, **more)
        train(engine)
        engine.world.barrier()
        if rank == 0:
            (folder / f"{place}.pid").write_text(str(os.getpid()))
            try:
                wait(engine)
                heard = "did not wait"
            except KeyboardInterrupt:
                heard = time.time() - float((folder / f"{place}.sent").read_text())
            (folder / f"{place}.new").write_text(json.dumps(heard))
            os.rename(folder / f"{place}.new", folder / f"{place}.heard")
        else:
            wait_for(folder / f"{place}.pid")
            time.sleep(0.4)  # rank 0 waits now
            (folder / f"{place}.sent").write_text(str(time.time()))
            os.kill(int((folder / f"{place}.pid").read_text()), signal.SIGINT)
            wait_for(folder / f"{place}.heard", 5)
    return program

result = {}
for place in PLACES:
    ends = on_forks(place, interrupted(place))
    heard = folder / f"{place}.heard"
    result[place] = [json.loads(heard.read_text()) if heard.exists() else "nothing", ends]
""", timeout_s=240)
        for place, (seconds, ends) in heard.items():
            with self.subTest(place=place):
                self.assertIsInstance(seconds, float, ends)
                self.assertLess(seconds, 1.0)
                self.assertEqual(ends[0][0], 0, ends)

    def test_another_thread_runs_in_collectives_and_in_a_save(self):
        told = self.on_ranks(0, _FORKED + """
class Turns:
    '''Another thread, which says after a hundred turns that it had them. Rank 1 waits for that before it joins the call.'''
    def __init__(self, call):
        self.file, self.goes_on = folder / call, True
        self.thread = threading.Thread(target=self.take)

    def take(self):
        turns = 0
        while self.goes_on and turns < 100:
            turns += 1
            time.sleep(0.002)
        if turns == 100:
            self.file.touch()

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.goes_on = False
        self.thread.join()

def program(rank):
    engine = make(3)
    train(engine)
    told = {}
    for call in (engine.world.barrier, lambda: engine.save_checkpoint(folder / "saved")):
        name = f"turns{len(told)}"
        if rank == 1:
            end = time.monotonic() + 20
            while not (folder / name).exists() and time.monotonic() < end:
                time.sleep(0.01)
            told[name] = (folder / name).exists()
            call()
        else:
            told[name] = True
            with Turns(name):
                call()
    (folder / f"told{rank}").write_text(json.dumps(told))

ends = on_forks("threads", program)
assert [status for status, _ in ends] == [0, 0], ends
result = json.loads((folder / "told1").read_text())
""", timeout_s=240)
        self.assertEqual(told, {"turns0": True, "turns1": True})


class Exits(Case):
    """Programs that just end."""

    def check_without_destroy(self, count):
        ends = self.on_ranks(0, f"count = {count}\n" + _FORKED + """
def program(turn):
    def run(rank):
        optimizer = torch.optim.RMSprop if turn % 2 else None
        engine = make(turn % 4, optimizer, checkpoint={"async_save": turn % 3 == 0})
        train(engine)
        deepspeed.utils.logger.warning("rank %d ends", rank)
        if turn % 3 < 2:
            engine.save_checkpoint(folder / f"saved{turn}")
        if turn % 5 == 0:
            engine.saved_loss = engine(torch.ones(1, 8)).sum()  # a graph that was not used
    return run

result = [on_forks(f"exit{turn}", program(turn), 2 if turn % 4 == 0 else 1) for turn in range(count)]
""", timeout_s=300)
        self.assertEqual(len(ends), count)
        for turn, ranks in enumerate(ends):
            for rank, (status, err) in enumerate(ranks):
                with self.subTest(turn=turn, rank=rank):
                    self.assertEqual(status, 0, err)
                    self.assertIn(f"rank {rank} ends", err)
                    # A message's further lines are indented; a host without a name is Gloo's; what nanobind counts are
                    # the classes of torch 2.15's Triton, which forks of a process that has them keep.
                    expected = (r"\[[-0-9]+ [:0-9]+\] \[\w+\] \[trireme\] |  \w|.*Gloo.*Unable to resolve hostname|nanobind: |"
                                r" - leaked \w+ .*|See https://nanobind| - \.\.\. skipped remainder")
                    others = [line for line in err.splitlines() if not re.match(expected, line)]
                    self.assertEqual(others, [])

    def check_with_a_mesh(self, count):
        """The program has taken its group down, but a mesh keeps it."""
        program = self.write("mesh.py", """
import torch, torch.distributed as dist, trireme as deepspeed
from torch.distributed.device_mesh import init_device_mesh
deepspeed.init_distributed()
mesh = init_device_mesh("cpu", (2,))
dist.all_reduce(torch.zeros(1000000))
dist.barrier()
dist.destroy_process_group()
""")
        # The first ends as a program does, with all that torch has made.
        for runs in (harness.launch, *[RankServer.run] * (count - 1)):
            status, _, err = runs(2, [program])
            self.assertEqual(status, 0, err)


class Exit(Exits):
    """faults_slow_test.py has more of them."""

    def test_exits_without_destroy_are_clean(self):
        self.check_without_destroy(8)

    def test_exits_with_a_mesh_are_clean(self):
        self.check_with_a_mesh(2)


class Forked(Case):
    """A process that a rank forks and that ends by sys.exit(), as from os.fork()."""

    _FORKS = """
import os, sys, torch, trireme as deepspeed
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2},
          "checkpoint": {"async_save": True}}
engine, *_ = deepspeed.initialize(model=model, config=config)
losses = []
for step in range(4):
    if step == 2:
        engine.save_checkpoint(folder)
        engine.wait_for_checkpoint()  # its thread waits for more, and is not there in the forked process
        pid = os.fork()
        if pid == 0:
            said = ""
            try:
                engine.world.barrier()
            except deepspeed.errors.StateError as error:
                said = str(error)
            with open(os.path.join(folder, f"child{engine.global_rank}"), "w") as file:
                file.write(said)
            sys.exit(7)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    loss = engine(torch.ones(1, 8)).square().sum()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
result = {"losses": losses, "child": ended, "pid": pid}
"""

    def test_ends_alone_and_its_parents_rank_trains_on(self):
        for transport in ("shm", "c10d"):
            with self.subTest(transport):
                result = self.on_ranks(2, self._FORKS, environment={"TRIREME_COMM": transport}, timeout_s=120)
                self.assertEqual(result["child"], 7)
                self.assertLess(result["losses"][3], result["losses"][0])
                said = (self.folder / "child0").read_text()
                self.assertIn(f"process {result['pid']} was forked from rank 0", said)


if __name__ == "__main__":
    main()
