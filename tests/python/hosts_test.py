"""Training over torch.distributed's process group between two hosts: network, PID and UTS namespaces that the test
makes itself.

Skipped, with the reason, where the system does not let the test make them."""
import concurrent.futures
import json
import os
import shutil
import subprocess
import uuid

import harness
from harness import PYTHON, Case, main

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

    def _run_host(self, number, script):
        inside = f'hostname "trireme{number}" && exec "$@"'
        host = ["ip", "netns", "exec", self.spaces[number], "unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        variables = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.213.7.1", "MASTER_PORT": "29511",
                     "GLOO_SOCKET_IFNAME": self.cables[number], "TRIREME_TIMEOUT_S": "60"}
        words = [*host, "sh", "-c", inside, "sh", PYTHON, "-B", script, self.folder]
        return harness.run(words, environment=variables, timeout_s=120)

    def test_two_hosts_train_over_gloo_as_plain_pytorch(self):
        script = self.write("train.py", _TRAIN)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            done = list(pool.map(lambda number: self._run_host(number, script), (0, 1)))
        for status, out, err in done:
            self.assertEqual(status, 0, out + err)
        results = [json.loads((self.folder / f"result{rank}").read_text()) for rank in (0, 1)]
        for result in results:
            self.assertEqual((result["shares_memory"], result["local_rank"], result["world_size"]), (False, 0, 2))
            self.assert_close(result["losses"], result["plain"], 1e-5)
        self.assertEqual(results[0]["losses"], results[1]["losses"])
        self.assertLess(results[0]["losses"][-1], results[0]["losses"][0])
        self.assertRegex(done[0][2], r"c10d process group \(gloo\) among 2 ranks on 2 hosts: trireme0, trireme1")


if __name__ == "__main__":
    main()
