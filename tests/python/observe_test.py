"""Keys of the configuration by which a run tells of itself: times of a step, the log of collectives, the timeline."""
import json
import pathlib
import re
import textwrap

import readers
from harness import PROGRAM, Case, RankServer, main, run

RankServer.imports = ("torch._dynamo",)

# The first violations of a schema.
_VALIDATE = """
import json, sys
import jsonschema
schema, trace = (json.load(open(path)) for path in sys.argv[1:3])
jsonschema.Draft202012Validator.check_schema(schema)
found = jsonschema.Draft202012Validator(schema).iter_errors(trace)
print(json.dumps([f"{error.json_path}: {error.message}"[:300] for error, _ in zip(found, range(5))]))
"""

_START = """
import logging, time
import torch, trireme, deepspeed
from trireme._native import core
import deepspeed.comm as dist
told = []
handler = logging.Handler()
handler.emit = lambda record: told.append(record.getMessage())
deepspeed.utils.logger.addHandler(handler)
deepspeed.utils.logger.setLevel(logging.INFO)
def made(**keys):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 37), torch.nn.GELU(), torch.nn.Linear(37, 3))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **keys})[0]
def trained(engine, steps):
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(torch.randn(4, 8, generator=generator)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses
"""


class Observe(Case):
    def on_two(self, text, **options):
        return self.on_ranks(2, _START + textwrap.dedent(text), as_deepspeed=True, **options)

    def test_times_of_each_window(self):
        lines, times, seconds, losses, plain = self.on_two("""
        engine = made(wall_clock_breakdown=True, memory_breakdown=True, dump_state=True, gradient_accumulation_steps=2)
        begin = time.perf_counter()
        losses = trained(engine, 3)
        seconds = time.perf_counter() - begin
        times = engine.get_wall_clock_timers()
        engine.destroy()
        assert not core.has_listeners()
        plain = made(gradient_accumulation_steps=2)
        assert not core.has_listeners() and plain.get_wall_clock_timers() == {}
        result = [told, times, seconds, losses, trained(plain, 3)]
        """)
        self.assertEqual(losses, plain)
        windows = [line for line in lines if "time (ms)" in line]
        self.assertEqual([line.split(",")[0] for line in windows], ["step=1", "step=2", "step=3"])
        number = r"(\d+\.\d\d)"
        total = 0.0
        for line in windows:
            found = re.search(rf"fwd: {number} \| bwd: {number} \| bwd_inner: {number} \| bwd_allreduce: {number} \| step: {number}", line)
            forward, backward, inner, reductions, step = map(float, found.groups())
            self.assertGreater(min(forward, backward, step), 0)
            self.assertAlmostEqual(backward, inner + reductions, delta=0.02)
            self.assertRegex(line, r"memory \| host resident: \d")
            total += forward + backward + step
        self.assertLess(total, seconds * 1e3)
        self.assertEqual(list(times), ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"])
        self.assertTrue([line for line in lines if line.startswith("configuration:") and '"gradient_accumulation_steps": 2' in line])

    def test_two_engines_on_a_thread_have_their_own_times(self):
        own, slow, windows = self.on_two("""
        class Slow(torch.nn.Linear):
            def forward(self, x):
                time.sleep(0.2)
                return super().forward(x)
        engine = made(wall_clock_breakdown=True)
        slow = deepspeed.initialize(model=Slow(8, 1), config={
            "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "wall_clock_breakdown": True})[0]
        x = torch.randn(4, 8)
        for _ in range(2):
            loss, other = engine(x).square().mean(), slow(x).square().mean()
            engine.backward(loss)
            slow.backward(other)
            slow.step()
            engine.step()
        result = [engine.get_wall_clock_timers(), slow.get_wall_clock_timers(), len([line for line in told if "time (ms)" in line])]
        """)
        self.assertLess(own["fwd"], 150)
        self.assertGreater(slow["fwd"], 199)
        self.assertEqual(windows, 4)

    def test_engines_timers_have_deepspeeds_names(self):
        last, elapsed, again, mean, own, line, rates = self.on_two("""
        from deepspeed.utils.timer import FORWARD_GLOBAL_TIMER, NoopTimer, SynchronizedWallClockTimer, ThroughputTimer
        engine = made(wall_clock_breakdown=True, gradient_accumulation_steps=2)
        assert isinstance(engine.timers, SynchronizedWallClockTimer) and isinstance(engine.tput_timer, ThroughputTimer)
        trained(engine, 4)
        last = engine.get_wall_clock_timers()
        elapsed = {name: engine.timers(name).elapsed(reset=False) for name in last}
        again = [engine.timers(FORWARD_GLOBAL_TIMER).elapsed(), engine.timers(FORWARD_GLOBAL_TIMER).elapsed()]
        mean = engine.timers.get_mean(["fwd", "nothing"], reset=False)
        timer = engine.timers("own")
        for _ in range(2):
            timer.start()
            time.sleep(0.02)
            timer.stop()
        own = [timer.elapsed(reset=False), timer.mean()]
        timer.start()
        own.append(timer.elapsed() > own[0] and timer.started_)
        timer.stop()
        engine.timers.log(["own", "fwd", "nothing"], normalizer=2, ranks=[dist.get_rank()])
        rates = [engine.tput_timer.global_step_count, engine.tput_timer.batch_size, engine.tput_timer.avg_samples_per_sec()]
        noop = NoopTimer()
        noop("a").start(); noop("a").stop(); noop.log(["a"])
        assert noop("a").elapsed() == 0 and noop.get_timers() == {}
        try:
            timer.stop()
        except trireme.errors.StateError as error:
            rates.append(str(error))
        result = [last, elapsed, again, mean, own, told[-1], rates]
        """)
        self.assertEqual(last, elapsed)
        self.assertEqual(again, [last["fwd"], 0])
        self.assertEqual(list(mean), ["fwd"])
        self.assertGreater(mean["fwd"], 0)
        self.assertGreaterEqual(own[0], 40)
        self.assertAlmostEqual(own[1], own[0] / 2, places=6)
        self.assertTrue(own[2])
        self.assertRegex(line, r"^\[Rank 0\] time \(ms\) \| own: \d+\.\d\d \| fwd: 0\.00$")
        self.assertEqual(rates[:2], [4, 16])
        self.assertGreater(rates[2], 0)
        self.assertIn("own timer is not started", rates[3])

    def test_a_throughput_timer_leaves_out_the_first_steps(self):
        rate, none, lines, counts = self.on_ranks(1, _START + textwrap.dedent("""
        from deepspeed.utils.timer import ThroughputTimer, trim_mean
        from deepspeed.utils.config import get_timers_config
        lines = []
        timer = ThroughputTimer(get_timers_config({}), batch_size=8, start_step=1, steps_per_output=2, logging_fn=lines.append)
        none = timer.avg_samples_per_sec() == float("-inf")
        for step in range(4):
            for micro_batch in range(2):
                timer.start()
                time.sleep(0.25 if step == 0 else 0.01)
                timer.stop(global_step=micro_batch == 1)
        off = ThroughputTimer(get_timers_config({"timers": {"throughput": {"enabled": False}}}), 8)
        off.start(); off.stop(global_step=True)
        result = [timer.avg_samples_per_sec(), none, lines, [timer.micro_step_count, timer.global_step_count, off.global_step_count, trim_mean([9, 1, 2, 3, 0], 0.2)]]
        """), as_deepspeed=True)
        self.assertTrue(none)
        self.assertTrue(50 < rate <= 400, rate)  # 8 samples in 20 ms at best; with the first step 8 in 140 ms
        self.assertEqual([line.partition(",")[0] for line in lines], ["epoch=0/micro_step=4/global_step=2", "epoch=0/micro_step=8/global_step=4"])
        self.assertEqual(counts, [8, 4, 0, 2])

    def test_the_log_counts_calls_of_the_engine_and_of_the_program(self):
        operations, of_unit, summary, after = self.on_two("""
        engine = made(comms_logger={"enabled": True}, zero_optimization={"stage": 3}, trireme={"gather": "copy"})
        trained(engine, 3)
        dist.reset_log()
        trained(engine, 2)
        ones = torch.ones(1000)
        dist.all_reduce(ones)
        assert ones[0].item() == dist.get_world_size()
        summary = dist.log_summary(show_straggler=True, return_dict=True)
        operations = dist.get_logged_comm_ops()
        assert dist.has_comm_data() and dist.get_comm_operation_count() > 4
        gathers = summary["summary"]["all_gather"]
        dist.reset_log()
        dist.configure(enabled=True, prof_all=False, prof_ops=["broadcast"])
        dist.all_reduce(ones)
        dist.broadcast(ones, 0)
        after = [dist.get_logged_comm_ops(), dist.get_comm_operation_count()]
        dist.all_reduce(ones, log_name="broadcast")
        dist.broadcast(ones, 0, log_name="weights")
        after.append(dist.get_logged_comm_ops())
        dist.configure(enabled=False)
        dist.reset_log()
        dist.broadcast(ones, 0)
        after.append(dist.get_comm_operation_count())
        table = [line for line in told if "busbw (Gbps)" in line]
        result = [operations, max(map(int, gathers)), summary, after + [len(table)]]
        """)
        self.assertIn("all_gather", operations)
        self.assertGreaterEqual(of_unit, 4 * 37 * 8)
        own = summary["summary"]["all_reduce"]["4000"]
        self.assertEqual((own["count"], own["ranks"]), (1, 2))
        self.assertAlmostEqual(own["tput_avg_gbps"], 8 * 4000 / own["avg_latency_ms"] / 1e6, places=6)
        self.assertAlmostEqual(own["busbw_avg_gbps"], own["tput_avg_gbps"], places=6)  # 2 (n-1)/n of 2 ranks
        self.assertGreaterEqual(summary["straggler_analysis"]["all_reduce"]["4000"]["straggler_ms"], 0)
        self.assertEqual(summary["metadata"]["world_size"], 2)
        self.assertEqual(after, [["broadcast"], 1, ["broadcast", "weights"], 0, 1])

    def test_a_summary_does_not_count_itself(self):
        first, second, operations = self.on_two("""
        dist.init_distributed()
        dist.configure(enabled=True)
        dist.all_reduce(torch.ones(10))
        first, second = (dist.log_summary(show_straggler=True, return_dict=True) for _ in range(2))
        result = [first, second, dist.get_logged_comm_ops()]
        """)
        self.assertEqual(operations, ["all_reduce"])
        for part in ("summary", "straggler_analysis"):
            self.assertEqual(first[part], second[part])

    def test_an_operation_that_there_is_not_is_refused_with_the_nearest(self):
        of_key, of_call = self.on_two("""
        dist.init_distributed()
        def error_of(call):
            try:
                call()
            except trireme.errors.ConfigError as error:
                return str(error)
        result = [error_of(lambda: made(comms_logger={"enabled": True, "prof_all": False, "prof_ops": ["allgather"]})),
                  error_of(lambda: dist.configure(enabled=True, prof_all=False, prof_ops=["all_reduce", "recieve"]))]
        assert not core.has_listeners()
        """)
        self.assertIn('`comms_logger.prof_ops` has "allgather", which is no operation', of_key)
        self.assertIn("Did you mean `all_gather`?", of_key)
        self.assertIn('`prof_ops` has "recieve", which is no operation', of_call)
        self.assertIn('There are "all_reduce", "reduce_scatter"', of_call)

    def test_a_call_has_the_name_that_the_program_gives_it(self):
        counts, plain = self.on_two("""
        dist.init_distributed()
        ones = torch.ones(10)
        dist.all_reduce(ones, log_name="unheard", prof=True, debug="here")
        dist.configure(enabled=True)
        dist.all_reduce(ones, log_name="sum of losses")
        dist.broadcast(ones, 0, debug="here")
        result = [dist.get_logged_comm_ops(), ones[0].item()]
        """)
        self.assertEqual((sorted(counts), plain), (["broadcast", "sum of losses"], 4.0))

    def test_a_timeline_of_all_ranks(self):
        folder = self.folder / "a timeline"
        losses, plain = self.on_two(f"""
        keys = dict(zero_optimization={{"stage": 3}}, gradient_accumulation_steps=2)
        engine = made(**keys, trireme={{"gather": "copy", "timeline": {{"enabled": True, "output_path": {str(folder)!r}, "start_step": 2, "steps": 2}}}})
        losses = trained(engine, 4)
        engine.destroy()
        plain = made(**keys, trireme={{"gather": "copy"}})
        result = [losses, trained(plain, 4)]
        """)
        self.assertEqual(losses, plain)
        self.assertEqual(sorted(path.name for path in folder.iterdir()), ["rank-0.json", "rank-1.json"])
        status, out, err = run([PROGRAM, "timeline", folder])
        self.assertEqual(status, 0, err)
        self.assertIn("has 2 ranks", out)
        trace = json.loads((self.folder / "a timeline.json").read_text())
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        tracks = {}
        for event in events:
            self.assertEqual({*event} - {"args"}, {"name", "cat", "ph", "pid", "tid", "ts", "dur"})
            self.assertIn(event["cat"], ("step", "method", "communication", "wait", "stage", "operator"))
            self.assertGreaterEqual(event["dur"], 0)
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        named = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
        self.assertEqual(named, {*tracks})
        for spans in tracks.values():  # of a track each is in another one, or after it
            open_until = []
            for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
                while open_until and open_until[-1] <= begin + 1e-3:
                    open_until.pop()
                if open_until:
                    self.assertLessEqual(end, open_until[-1] + 1e-3)
                open_until.append(end)
        for rank in (0, 1):
            names = [event["name"] for event in events if event["pid"] == rank]
            self.assertEqual([name for name in names if re.fullmatch(r"step \d+", name)], ["step 2", "step 3"])
            self.assertEqual((names.count("forward"), names.count("backward")), (4, 4))
            self.assertTrue({"aten::linear", "aten::gelu"} <= {*names})
            self.assertTrue([name for name in names if name.startswith("all_gather")])
            self.assertTrue([name for name in names if name.startswith("wait for ")])
            self.assertTrue([name for name in names if name.endswith("Backward0")])

    def test_a_joined_timeline_keeps_its_schema(self):
        schema = pathlib.Path(__file__).parents[2] / "docs/timeline.schema.json"
        self.on_two(f"""
        engine = made(zero_optimization={{"stage": 2}}, trireme={{"timeline": {{"enabled": True, "output_path": {str(self.folder / "t")!r}, "start_step": 1, "steps": 0}}}})
        trained(engine, 2)
        result = None
        """)
        self.assertEqual(run([PROGRAM, "timeline", self.folder / "t"])[0], 0)
        trace = self.folder / "t.json"
        self.assertEqual(readers.read(self, _VALIDATE, schema, trace), [])
        whole = json.loads(trace.read_text())
        next(event for event in whole["traceEvents"] if event["ph"] == "X").pop("dur")
        self.assertTrue(readers.read(self, _VALIDATE, schema, self.write("broken.json", json.dumps(whole))))

    def test_a_folder_that_cannot_be_made_is_refused_on_every_rank(self):
        blocked = self.write("file", "no folder")
        error = self.on_two(f"""
        dist.init_distributed()
        try:
            made(trireme={{"timeline": {{"enabled": True, "output_path": {str(blocked / "t")!r}}}}})
        except trireme.errors.IoError as error:
            result = str(error)
        assert not core.has_listeners()
        """)
        self.assertIn("file", error)

    def test_a_timeline_is_joined_where_there_is_one(self):
        status, _, err = run([PROGRAM, "timeline", self.folder / "nothing"])
        self.assertEqual(status, 1)
        self.assertIn("no timeline there", err)


if __name__ == "__main__":
    main()
