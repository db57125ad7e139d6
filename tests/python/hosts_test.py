"""Training over torch.distributed's process group between two hosts: network, PID and UTS namespaces that the test
makes itself. Where the store listens at which ranks meet, on one host and between two.

Between two: skipped, with the reason, where the system does not let the test make them."""
import concurrent.futures
import json
import os
import shutil
import subprocess
import uuid

import harness
from harness import PYTHON, Case, free_port, main

_TRAIN = """
import json, os, pathlib, sys
import torch, trireme as deepspeed
folder, steps = pathlib.Path(sys.argv[1]), 5
torch.distributed.init_process_group("gloo")

def build():
    torch.manual_seed(3)
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(12, 300), torch.nn.Tanh(), linear(300, 40), torch.nn.Tanh(), linear(40, 3))

def loss_of(model, step, rank=0, size=1):
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))[rank * 8 // size:(rank + 1) * 8 // size]
    return (model(x) - x[:, :3]).square().mean()

def plain():
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        losses.append(loss_of(model, step))
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]

model = build()
config = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config)
losses = []
for step in range(steps):
    loss = loss_of(engine, step, engine.global_rank, engine.world_size)
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    losses.append(mean.item() / 2)
engine.save_checkpoint(folder / "saved")
result = {"losses": losses, "plain": plain(), "shares_memory": engine.world.shares_memory, "local_rank": engine.local_rank,
          "world_size": engine.world_size}
(folder / f"result{engine.global_rank}").write_text(json.dumps(result))
engine.destroy()
"""

# Rank 0 writes down at which addresses the store of torch.distributed listens, as the kernel prints them.
_LISTEN = """
import json, pathlib, sys
import torch, trireme
options = json.loads(sys.argv[2])
trireme.init_distributed(**options)
store = torch.distributed.distributed_c10d._get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
total = torch.ones(1)
torch.distributed.all_reduce(total)
if torch.distributed.get_rank() == 0:
    port = getattr(store, "port", 0)
    lines = [line.split() for name in ("tcp", "tcp6") for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]]
    places = [line[1].split(":")[0] for line in lines if line[3] == "0A" and int(line[1].split(":")[1], 16) == port]
    (pathlib.Path(sys.argv[1]) / "listens").write_text(json.dumps({"port": port, "places": places, "total": total.item()}))
torch.distributed.barrier()
"""
_LOOPBACK = "0100007F"


def _system(*words):
    return subprocess.run(words, text=True, capture_output=True, check=False)


class Hosts(Case):
    """Two hosts that a cable connects."""

    def setUp(self):
        super().setUp()
        if not shutil.which("ip") or not shutil.which("unshare"):
            self.skipTest("the programs ip (iproute2) and unshare (util-linux) are not there")
        mark = uuid.uuid4().hex[:8]
        self.spaces, self.cables = [f"trireme-{mark}-{i}" for i in (0, 1)], [f"trm{mark}{i}" for i in (0, 1)]
        self.addCleanup(self._take_down)
        self._set_up("unshare", "--uts", "--pid", "--fork", "true")
        for space in self.spaces:
            self._set_up("ip", "netns", "add", space)
        self._set_up("ip", "link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for number, (space, cable) in enumerate(zip(self.spaces, self.cables)):
            self._set_up("ip", "link", "set", cable, "netns", space)
            self._set_up("ip", "-n", space, "address", "add", f"10.213.7.{number + 1}/24", "dev", cable)
            self._set_up("ip", "-n", space, "address", "add", f"fd00:10:213:7::{number + 1}/64", "dev", cable, "nodad")
            for device in ("lo", cable):
                self._set_up("ip", "-n", space, "link", "set", device, "up")

    def _set_up(self, *words):
        done = _system(*words)
        if done.returncode:
            self.skipTest(f"{' '.join(words)}: {done.stderr.strip()}")

    def _take_down(self):
        _system("ip", "link", "delete", self.cables[0])  # where it has not been moved yet
        for space in self.spaces:
            _system("ip", "netns", "delete", space)
        left = _system("ip", "netns", "list").stdout + "".join(os.listdir("/sys/class/net"))
        for name in self.spaces + self.cables:
            self.assertNotIn(name, left)

    def _run_host(self, number, words, master="10.213.7.1", names=None):
        """Rank `number` of two. `names`: lines of the host's own table of names."""
        inside = f'hostname "trireme{number}" && exec "$@"'
        if names:
            table = self.write(f"names{number}", names)
            inside = f'mount --bind "{table}" /etc/hosts && {inside}'
        host = ["ip", "netns", "exec", self.spaces[number], "unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        variables = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": master, "MASTER_PORT": "29511",
                     "GLOO_SOCKET_IFNAME": self.cables[number], "TRIREME_TIMEOUT_S": "60"}
        return harness.run([*host, "sh", "-c", inside, "sh", PYTHON, "-B", *words], environment=variables, timeout_s=120)

    def _places(self, **options):
        """Where the store listens while two hosts meet by `options` of _run_host(): one for each, or one for both."""
        script = self.write("listen.py", _LISTEN)
        words = [script, self.folder, "{}"]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            names = options.pop("names", (None, None))
            done = list(pool.map(lambda number: self._run_host(number, words, names=names[number], **options), (0, 1)))
        for status, out, err in done:
            self.assertEqual(status, 0, out + err)
        found = json.loads((self.folder / "listens").read_text())
        self.assertEqual((found["port"], found["total"]), (29511, 2.0))
        return found["places"]

    def test_the_store_listens_at_the_address_that_the_other_host_sees(self):
        self.assertEqual(self._places(), ["0107D50A"])
        table = "127.0.0.1 localhost\n{} master\n"
        self.assertEqual(self._places(master="master", names=[table.format("10.213.7.1")] * 2), ["0107D50A"])

    def test_the_store_listens_at_an_address_of_ipv6(self):
        (place,) = self._places(master="fd00:10:213:7::1")
        self.assertNotEqual(place, "0" * 32)
        self.assertEqual(len(place), 32)

    def test_hosts_meet_where_the_first_ones_own_table_calls_it_127_0_1_1(self):
        names = ["127.0.0.1 localhost\n127.0.1.1 master\n", "127.0.0.1 localhost\n10.213.7.1 master\n"]
        self.assertEqual(self._places(master="master", names=names), ["0" * 32])

    def test_two_hosts_train_over_gloo_as_plain_pytorch(self):
        script = self.write("train.py", _TRAIN)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            done = list(pool.map(lambda number: self._run_host(number, [script, self.folder]), (0, 1)))
        for status, out, err in done:
            self.assertEqual(status, 0, out + err)
        results = [json.loads((self.folder / f"result{rank}").read_text()) for rank in (0, 1)]
        for result in results:
            self.assertEqual((result["shares_memory"], result["local_rank"], result["world_size"]), (False, 0, 2))
            self.assert_close(result["losses"], result["plain"], 1e-5)
        self.assertEqual(results[0]["losses"], results[1]["losses"])
        self.assertLess(results[0]["losses"][-1], results[0]["losses"][0])
        self.assertRegex(done[0][2], r"c10d process group \(gloo\) among 2 ranks on 2 hosts: trireme0, trireme1")


class OneHost(Case):
    """The store of torch.distributed that init_distributed() makes, where all ranks are on this host."""

    def _listens(self, variables, options=({}, {})):
        script = self.write("listen.py", _LISTEN)
        with concurrent.futures.ThreadPoolExecutor(len(variables)) as pool:
            done = list(pool.map(lambda of: harness.run([PYTHON, "-B", script, self.folder, json.dumps(of[1])], environment=of[0],
                                                        timeout_s=120), zip(variables, options)))
        for status, out, err in done:
            self.assertEqual(status, 0, out + err)
        return json.loads((self.folder / "listens").read_text())

    def test_listens_at_loopback_under_a_launcher_like_torchrun(self):
        port = str(free_port())
        ranks = [{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
                 for rank in (0, 1)]
        found = self._listens([{**variables, "TRIREME_TOKEN": "secret"} for variables in ranks])
        self.assertEqual(found, {"port": int(port), "places": [_LOOPBACK], "total": 2.0})
        here = [{**variables, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "0.0.0.0"} for variables in ranks]
        self.assertEqual(self._listens(here)["places"], [_LOOPBACK])

    def test_listens_at_loopback_where_the_program_names_the_address(self):
        port = free_port()
        options = [{"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": 2} for rank in (0, 1)]
        self.assertEqual(self._listens([{}, {}], options), {"port": port, "places": [_LOOPBACK], "total": 2.0})

    def test_listens_at_loopback_under_mpirun(self):
        job = self.folder / "job"
        job.mkdir(mode=0o700)
        ranks = [{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                  "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "77", "PMIX_SERVER_TMPDIR": str(job)} for rank in (0, 1)]
        found = self._listens(ranks)
        self.assertEqual((found["places"], found["total"]), ([_LOOPBACK], 2.0))

    def test_of_one_rank_listens_nowhere(self):
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.assertEqual(self._listens([alone]), {"port": 0, "places": [], "total": 1.0})


if __name__ == "__main__":
    main()
