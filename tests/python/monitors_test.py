"""Monitors of an engine: TensorBoard's own reader and pandas find the losses that the program saw, fake packages get
what wandb and comet_ml would, and what cannot work is refused on every rank before the model is changed."""
import json

import readers
from harness import Case, main

# {tag: [[step, value], …]} of a folder's event files, by TensorBoard; and of its CSV files, by pandas.
_READ = """
import json, pathlib, sys
import pandas
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
files = {path.stem: pandas.read_csv(path, float_precision="round_trip") for path in sorted(pathlib.Path(sys.argv[2]).glob("*.csv"))}
print(json.dumps({"events": {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]},
                  "csv": {name: [list(table.columns), table.values.tolist()] for name, table in files.items()}}))
"""

_PROGRAM = """
    import json, os, sys
    import torch
    import deepspeed
    sys.path.insert(0, folder)

    def model():
        torch.manual_seed(3)
        return torch.nn.Linear(4, 1)

    def config(**more):
        return {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.125}}, **more}

    def files(section="tensorboard", **more):
        return {section: {"enabled": True, "output_path": f"{folder}/{section}/", "job_name": "train_bert", **more}}

    def steps(engine, count, passes=1):
        losses = []
        for number in range(count):
            for _ in range(passes):
                loss = engine(torch.full((2, 4), 0.5 + number + deepspeed.comm.get_rank())).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        return losses

    def raised(function):
        try:
            function()
        except Exception as error:
            return [type(error).__name__, str(error)]
"""

_WANDB = """
import json, os
def init(**options): _say(["init", options])
def log(data, step=None, commit=None):
    if os.environ.get("FAKE_FAILS"): raise RuntimeError("the network is gone")
    _say(["log", data, step])
def _say(what):
    with open(os.path.join(os.path.dirname(__file__), "wandb.log"), "a") as file: file.write(json.dumps(what) + "\\n")
"""

_COMET = """
import json, os
def start(**options):
    _say(["start", options])
    return Experiment()
class Experiment:
    def set_name(self, name): _say(["set_name", name])
    def log_metric(self, name, value, step=None, epoch=None): _say(["log_metric", name, value, step])
def _say(what):
    with open(os.path.join(os.path.dirname(__file__), "comet.log"), "a") as file: file.write(json.dumps(what) + "\\n")
"""


class Monitors(Case):
    def read(self):
        """The events and tables that the readers find in this test's folders."""
        return readers.read(self, _READ, self.folder / "tensorboard/train_bert", self.folder / "csv_monitor/train_bert")

    def said(self, name):
        """The calls that a fake package got."""
        return [json.loads(line) for line in (self.folder / f"{name}.log").read_text().splitlines()]

    def test_readers_find_the_losses_that_the_program_saw_of_both_runs_in_one_place(self):
        program = _PROGRAM + """
    engine, *_ = deepspeed.initialize(model=model(), config=config(**files(), **files("csv_monitor")))
    first = int(engine.load_checkpoint(f"{folder}/checkpoints")[0] is not None)
    losses = steps(engine, 3)
    engine.monitor.write_events([("eval/accuracy", torch.tensor(0.75), engine.global_steps), ("Train/own count", 7, 8 * first)])
    engine.save_checkpoint(f"{folder}/checkpoints")
    result = {"losses": losses, "first": first, "events": engine.summary_events, "enabled": engine.monitor.enabled,
              "job": engine.monitor_config.csv_monitor.job_name}
"""
        runs = [self.on_ranks(2, program, as_deepspeed=True) for _ in range(2)]
        self.assertEqual([run["first"] for run in runs], [0, 1])
        for run in runs:
            self.assertEqual([run["enabled"], run["job"]], [True, "train_bert"])
        losses = runs[0]["losses"] + runs[1]["losses"]
        samples = [4 * step for step in range(1, 7)]
        self.assertEqual(runs[1]["events"], [["Train/Samples/train_loss", losses[-1], 24], ["Train/Samples/lr", 0.125, 24]])
        self.assertEqual((self.folder / "csv_monitor/train_bert/Train_Samples_lr.csv").read_text(),
                         "\n".join(["step,lr", *(f"{x},0.125" for x in samples), ""]))
        found = self.read()
        self.assertEqual(found["events"], {
            "Train/Samples/train_loss": [list(pair) for pair in zip(samples, losses)], "Train/Samples/lr": [[x, 0.125] for x in samples],
            "eval/accuracy": [[3, 0.75], [6, 0.75]], "Train/own count": [[0, 7.0], [8, 7.0]]})
        self.assertEqual(found["csv"]["Train_Samples_train_loss"], [["step", "train_loss"], [list(pair) for pair in zip(samples, losses)]])
        self.assertEqual(found["csv"]["Train_own_count"], [["step", "own count"], [[0, 7], [8, 7]]])
        # a file of each run, by rank 0
        self.assertEqual(len(list((self.folder / "tensorboard/train_bert").iterdir())), 2)

    def test_a_window_has_its_mean_and_fp16_its_scale(self):
        result = self.on_ranks(1, _PROGRAM + """
    half = {"enabled": True, "initial_scale_power": 4}
    engine, *_ = deepspeed.initialize(model=model(), config=config(gradient_accumulation_steps=2, fp16=half, **files("csv_monitor")))
    losses = []
    for scale in (1, 2, 3, 4):
        loss = engine(torch.full((2, 4), 0.25 * scale, dtype=torch.float16)).float().square().mean()
        returned = engine.backward(loss)
        returned.zero_()  # the program's own
        engine.step()
        losses.append(loss.item())
    result = {"losses": losses, "scale": engine.loss_scale}
""", as_deepspeed=True)
        lines = {path.name: [tuple(map(float, line.split(","))) for line in path.read_text().splitlines()[1:]]
                 for path in (self.folder / "csv_monitor/train_bert").iterdir()}
        losses = result["losses"]
        self.assertEqual([x for x, _ in lines["Train_Samples_train_loss.csv"]], [4, 8])
        for (_, told), expected in zip(lines["Train_Samples_train_loss.csv"], ((losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2)):
            self.assertAlmostEqual(told, expected, delta=1e-6 * expected)  # the sum is fp32
        self.assertEqual(lines["Train_Samples_loss_scale.csv"][-1], (8.0, result["scale"]))

    def test_a_programs_scheduler_has_moved_when_its_rate_is_told(self):
        rates = self.on_ranks(1, _PROGRAM + """
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config={
        "train_micro_batch_size_per_gpu": 2, **files("csv_monitor")})
    result = []
    for _ in range(3):
        steps(engine, 1)
        result.append(engine.get_lr()[0])
""", as_deepspeed=True)
        self.assertEqual(rates, [0.25, 0.125, 0.0625])
        self.assertEqual((self.folder / "csv_monitor/train_bert/Train_Samples_lr.csv").read_text(),
                         "step,lr\n2,0.25\n4,0.125\n6,0.0625\n")

    def test_a_pipeline_tells_the_mean_of_all_ranks(self):
        losses = self.on_ranks(2, _PROGRAM + """
    from deepspeed.pipe import PipelineModule
    torch.manual_seed(3)
    net = PipelineModule(layers=[torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)], num_stages=2, loss_fn=lambda out, y: (out - y).square().mean())
    engine, *_ = deepspeed.initialize(model=net, config=config(gradient_accumulation_steps=2, **files("csv_monitor")))
    data = iter([(torch.full((2, 4), 0.1 * i), torch.ones(2, 1)) for i in range(4)])
    result = [engine.train_batch(data).item() for _ in range(2)]
""", as_deepspeed=True)
        text = (self.folder / "csv_monitor/train_bert/Train_Samples_train_loss.csv").read_text().splitlines()
        self.assertEqual([tuple(map(float, line.split(","))) for line in text[1:]], [(4, losses[0]), (8, losses[1])])

    def test_times_of_a_step_are_events_under_deepspeeds_names(self):
        times = self.on_ranks(2, _PROGRAM + """
    engine, *_ = deepspeed.initialize(model=model(), config=config(wall_clock_breakdown=True, **files("csv_monitor")))
    result = []
    for _ in range(2):
        steps(engine, 1)
        result.append(engine.get_wall_clock_timers())
""", as_deepspeed=True)
        names = {"forward": "fwd", "backward": "bwd", "backward_inner": "bwd_inner", "backward_allreduce": "bwd_allreduce", "step": "step"}
        for event, timer in names.items():
            text = (self.folder / f"csv_monitor/train_bert/Train_Samples_elapsed_time_ms_{event}.csv").read_text().splitlines()
            self.assertEqual(text[0], f"step,elapsed_time_ms_{event}")
            found = [tuple(map(float, line.split(","))) for line in text[1:]]
            self.assertEqual([x for x, _ in found], [4, 8])
            for (_, ms), one in zip(found, times):
                self.assertAlmostEqual(ms, one[timer], delta=1e-4 * one[timer])

    def test_wandb_and_comet_go_through_their_packages(self):
        self.write("wandb.py", _WANDB)
        self.write("comet_ml.py", _COMET)
        losses = self.on_ranks(2, _PROGRAM + """
    engine, *_ = deepspeed.initialize(model=model(), config=config(
        wandb={"enabled": True, "team": "my_team", "group": "my_group", "project": "my_project"},
        comet={"enabled": True, "project": "my_project", "experiment_name": "my_experiment", "samples_log_interval": 8, "online": False}))
    result = steps(engine, 3)
""", as_deepspeed=True)
        self.assertEqual(self.said("wandb"), [
            ["init", {"project": "my_project", "group": "my_group", "entity": "my_team"}],
            *(["log", {"Train/Samples/train_loss": loss, "Train/Samples/lr": 0.125}, 4 * step] for step, loss in enumerate(losses, 1))])
        self.assertEqual(self.said("comet"), [
            ["start", {"api_key": None, "workspace": None, "project": "my_project", "experiment_key": None, "mode": None, "online": False}],
            ["set_name", "my_experiment"],
            *(["log_metric", f"Train/Samples/{name}", value, x] for x, loss in ((4, losses[0]), (12, losses[2]))
              for name, value in (("train_loss", loss), ("lr", 0.125)))])

    def test_what_a_package_raises_is_warned_of_once(self):
        self.write("wandb.py", _WANDB)
        result = self.on_ranks(1, _PROGRAM + """
    import logging
    os.environ["FAKE_FAILS"] = "1"
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    from trireme.log import logger
    logger.addHandler(handler)
    engine, *_ = deepspeed.initialize(model=model(), config=config(wandb={"enabled": True}))
    steps(engine, 3)
    result = {"told": [text for text in told if "wandb" in text], "steps": engine.global_steps}
""", as_deepspeed=True)
        self.assertEqual(result, {"told": ["wandb: events are lost, and training goes on: RuntimeError: the network is gone"], "steps": 3})

    def test_what_cannot_work_is_refused_on_every_rank_before_the_model_is_changed(self):
        self.write("file", "")
        result = self.on_ranks(2, _PROGRAM + """
    def refusal(**sections):
        net = model()
        error = raised(lambda: deepspeed.initialize(model=net, config=config(bf16={"enabled": True}, **sections)))
        with open(f"{folder}/rank{deepspeed.comm.get_rank()}.log", "a") as file:
            file.write(json.dumps([*error, str(net.weight.dtype)]) + "\\n")
    refusal(wandb={"enabled": True})
    refusal(comet={"enabled": True})
    refusal(tensorboard={"enabled": True, "output_path": f"{folder}/file"}, wandb={"enabled": False})
    refusal(csv_monitor={"enabled": True, "output_path": f"{folder}/file"})
    refusal(csv_monitor={"enabled": True, "output": "a"})
    result = 0
""", as_deepspeed=True)
        self.assertEqual(result, 0)
        file = f'{self.folder}/file'
        for rank in range(2):
            refusals = self.said(f"rank{rank}")
            self.assertEqual([[kind, dtype] for kind, _, dtype in refusals], [[kind, "torch.float32"] for kind in (
                "ConfigError", "ConfigError", "IoError", "IoError", "ConfigError")])
            for (_, text, _), words in zip(refusals, (
                    ["`wandb.enabled` = true needs the package wandb; pip install wandb, or set it to false"],
                    ["`comet.enabled` = true needs the package comet_ml; pip install comet_ml, or set it to false"],
                    [f'`tensorboard.output_path` is "{file}", and `tensorboard.job_name` "DeepSpeedJobName"', "name a folder that rank 0 can write"],
                    [f'`csv_monitor.output_path` is "{file}"', "or set `csv_monitor.enabled` to false"],
                    ["unknown key `csv_monitor.output`. Did you mean `output_path`?"])):
                for word in words:
                    self.assertIn(word, text)

    def test_a_program_makes_monitors_of_its_own_under_deepspeeds_names(self):
        result = self.on_ranks(2, _PROGRAM + """
    from deepspeed.monitor.monitor import MonitorMaster, TensorBoardMonitor, csvMonitor, WandbMonitor, CometMonitor
    from deepspeed.monitor.config import get_monitor_config, DeepSpeedMonitorConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    deepspeed.init_distributed()
    given = config(**files("csv_monitor"))
    read = DeepSpeedConfig(given)
    master = MonitorMaster(read.monitor_config)
    master.write_events([("My metric", 1.5, 3)])
    own = csvMonitor(get_monitor_config(given).csv_monitor)
    own.write_events([("My metric", torch.tensor(2.5), torch.tensor(6))])
    off = MonitorMaster(DeepSpeedMonitorConfig())
    off.write_events([("a", 1, 2)])
    result = {"kinds": [type(master.csv_monitor).__name__, master.tb_monitor, master.wandb_monitor, master.comet_monitor], "off": off.enabled,
              "wrong": [raised(lambda: master.write_events(events)) for events in ([("a", 1)], [(1, 2, 3)], [("a", "b", 3)])],
              "stub": WandbMonitor.__module__, "unknown": raised(lambda: get_monitor_config({"wandb": {"entity": 1}}))[0]}
""", as_deepspeed=True)
        self.assertEqual(result["kinds"], ["csvMonitor", None, None, None])
        self.assertEqual([result["off"], result["stub"], result["unknown"]], [False, "trireme.deepspeed.monitor.wandb", "ConfigError"])
        for kind, text in result["wrong"]:
            self.assertEqual(kind, "ShapeError")
            self.assertIn("expected (name, number, samples or steps so far)", text)
        self.assertEqual((self.folder / "csv_monitor/train_bert/My_metric.csv").read_text(), "step,My metric\n3,1.5\n6,2.5\n")

    def test_without_monitors_nothing_is_written_or_exchanged(self):
        result = self.on_ranks(1, _PROGRAM + """
    os.chdir(folder)
    engine, *_ = deepspeed.initialize(model=model(), config=config(tensorboard={"enabled": False, "output_path": "x"}))
    steps(engine, 2)
    engine.monitor.write_events([("a", 1, 2)])
    result = [engine.monitor.enabled, engine.summary_events, sorted(os.listdir(folder))]
""", as_deepspeed=True)
        self.assertEqual(result[:2], [False, []])
        self.assertNotIn("x", result[2])
        self.assertNotIn("DeepSpeedJobName", result[2])


if __name__ == "__main__":
    main()
