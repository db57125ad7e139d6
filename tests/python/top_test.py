"""`trireme top`: what the ranks of a running job do, told to who asks."""
import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

from harness import PROGRAM, Case, main, run

_JOB = """
import pathlib, sys, time
import torch, deepspeed
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 37), torch.nn.Linear(37, 3))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3},
    "trireme": {"gather": "copy", "record": sys.argv[1] + ".record"}})
while not pathlib.Path(sys.argv[1]).exists():
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    engine.step()
    pathlib.Path(sys.argv[1] + f".{engine.global_rank}").touch()
    while engine.global_rank == 0 and pathlib.Path(sys.argv[1] + ".hold").exists():
        time.sleep(0.3)
    time.sleep(0.01)
"""
_ROW = re.compile(r"^ *(\d+) +(\d+) +(\d+|–) +([\d.e+-]+|–) +[\d.]+ [kMG]B +(.*)$", re.MULTILINE)


class Top(Case):
    def job(self, ranks):
        """The process of a job's launcher that trains now, until the test's end."""
        script, end = self.write("job.py", _JOB), self.folder / f"end{time.monotonic_ns()}"
        process = subprocess.Popen([PROGRAM, "launch", "--as-deepspeed", "--num_gpus", str(ranks), sys.executable, script, end],
                                   env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def finish():
            end.touch()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.addCleanup(finish)
        for rank in range(ranks):
            until = time.monotonic() + 120
            while not end.with_name(f"{end.name}.{rank}").exists():
                self.assertLess(time.monotonic(), until, "the job does not train")
                time.sleep(0.05)
        self.end = end
        return process

    def rows(self, text):
        return {int(rank): (int(pid), step, loss, now) for rank, pid, step, loss, now in _ROW.findall(text)}

    def test_shows_ranks_and_who_is_stopped(self):
        job = self.job(4)
        status, out, err = run([PROGRAM, "top", job.pid])
        self.assertEqual(status, 0, err)
        self.assertRegex(out, r"job \S+: 4 of 4 ranks here, step \d+, .* samples/s, last step 0:0\d ago, memory ")
        rows = self.rows(out)
        self.assertEqual(list(rows), [0, 1, 2, 3])
        for _, step, loss, _ in rows.values():
            self.assertGreater(int(step), 0)
            self.assertGreater(float(loss), 0)
        job_name = re.match(r"job (\S+):", out)[1]
        self.assertEqual(list(self.rows(run([PROGRAM, "top", job_name])[1])), [0, 1, 2, 3])

        terminal, inner = pty.openpty()
        with subprocess.Popen([PROGRAM, "top", str(job.pid), "--interval", "0.2"], stdout=inner, stderr=inner) as top:
            os.close(inner)
            stopped = rows[2][0]
            os.kill(stopped, signal.SIGSTOP)
            try:
                shown, begin = b"", time.monotonic()
                wanted = re.compile(rb"rank 0 waits for rank 2 \(stopped\): [a-z_]+ #\d+")
                while not wanted.search(shown):
                    self.assertLess(time.monotonic() - begin, 10, shown[-3000:])
                    if select.select([terminal], [], [], 0.1)[0]:
                        shown += os.read(terminal, 65536)
                print(f"named after {time.monotonic() - begin:.2f} s")
                self.assertIn(b"\x1b[H", shown)
            finally:
                os.kill(stopped, signal.SIGCONT)
                top.send_signal(signal.SIGINT)
                # EIO, once it has ended; a terminal that nobody reads would hold it up
                with contextlib.suppress(OSError):
                    while os.read(terminal, 65536):
                        pass
                self.assertEqual(top.wait(20), 0)
        os.close(terminal)
        before = int(self.rows(run([PROGRAM, "top", job.pid])[1])[2][1])
        time.sleep(0.5)
        self.assertGreater(int(self.rows(run([PROGRAM, "top", job.pid])[1])[2][1]), before)

    def test_a_run_is_named_by_the_folder_of_its_record_and_a_rank_that_sleeps_outside_the_engine_is_told(self):
        self.job(2)
        record = self.end.with_name(self.end.name + ".record")
        link = self.folder / "link"
        link.symlink_to(record)
        for name in (record, link):
            self.assertEqual(list(self.rows(run([PROGRAM, "top", name])[1])), [0, 1])
        self.assertIn(f"writes to {record}", run([PROGRAM, "top", "nothing"])[2])
        hold = self.end.with_name(self.end.name + ".hold")
        hold.touch()
        until = time.monotonic() + 30
        while True:
            rows = self.rows(run([PROGRAM, "top", record])[1])
            if found := re.fullmatch(r"sleeps, outside the engine since (\d+\.\d) s", rows[0][3]):
                break
            self.assertLess(time.monotonic(), until, rows)
        self.assertGreaterEqual(float(found[1]), 0.2)
        hold.unlink()

    def test_a_job_that_is_not_there_is_told_with_those_that_are(self):
        job = self.job(1)
        status, _, err = run([PROGRAM, "top", "runs/nothing"])
        self.assertEqual(status, 1)
        self.assertRegex(err, r"'runs/nothing' names no running job; there are:\n(.*\n)*  \S.*: 1 process, the first is \d+")
        self.assertIn("top", run([PROGRAM, "top", "--help"])[1])
        self.assertEqual(len(self.rows(run([PROGRAM, "top", job.pid])[1])), 1)


if __name__ == "__main__":
    main()
