"""Runs the programs of zoo/sequence/ on parts of sequences and, in the same processes, on whole sequences by plain
PyTorch.

    python sequence_table_run.py [--ranks 2] [--groups 1] [--attention ulysses] [--only PATTERN] [--theme NAME]
    [--sample] [--list] [--verbose]

Prints a line for each program: its name, attention, ranks of a sequence, outcome, largest difference. The outcomes:

    right      losses, every gradient, weights and the program's own numbers are those of plain PyTorch
    refused    an error of Trireme's on every rank
    different  SILENTLY: it ran, and something differs
    failed     anything else: an error that is not Trireme's, a refusal on some ranks alone, a rank that hangs, a
               refusal whose text lacks a fragment that it must have, a program that plain PyTorch does not run
Exits 1 where an outcome is not the declared one.
"""
import argparse
import copy
import json
import math
import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings
from multiprocessing import connection
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # pylint: disable=wrong-import-position
from harness import free_port  # pylint: disable=wrong-import-position
import trireme  # pylint: disable=wrong-import-position
from zoo.sequence import DOCUMENTED, ROWS, SAMPLE, uncut  # pylint: disable=wrong-import-position
from trireme import errors  # pylint: disable=wrong-import-position

RATE, STEPS = 0.1, 2
# A rank is given up where it is this much later than another; engines wait a little longer for a peer.
PATIENCE_S, TIMEOUT_S = 5, 8


def _optimizer(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.9)


def _numbers(told):
    """(loss, the program's own numbers)."""
    loss, more = told if isinstance(told, tuple) else (told, {})
    return loss, {name: value.detach().double() if isinstance(value, torch.Tensor) else torch.tensor(float(value)).double()
                  for name, value in more.items()}


def _state(model):
    """Buffers, and what modules keep beside them, such as the longest sequence that they have seen."""
    return [(module, [(name, buffer, buffer.clone()) for name, buffer in module.named_buffers(recurse=False)],
             {name: value for name, value in vars(module).items() if not name.startswith("_")}) for module in model.modules()]


def _restore(state):
    for module, buffers, attributes in state:
        for name, buffer, value in buffers:
            buffer.data.copy_(value)  # by data: backward may have saved the buffer
            setattr(module, name, buffer)
        vars(module).update(attributes)


class _Plain:
    """The program in plain PyTorch, on the batches of all sequence groups, of which this rank's is `place.index`."""

    def __init__(self, row, model, place):
        self.row, self.model, self.optimizer, self.place = row, model, _optimizer(model), place

    def run(self, number):
        """(loss, numbers) of this rank's group, and the loss to go backward from, which is the mean over groups."""
        losses = []
        for group in range(self.place.groups):
            if group != self.place.index:
                kept = _state(self.model)
                losses.append(_numbers(self.row.step(self.model, uncut, number * self.place.groups + group))[0])
                _restore(kept)
        own, more = _numbers(self.row.step(self.model, uncut, number * self.place.groups + self.place.index))
        return own, more, (own + sum(losses)) / self.place.groups if losses else own

    def backward(self, loss):
        (loss / self.row.accumulation).backward()

    def end_micro(self):
        """Between micro-batches."""

    def gradient(self, parameter):
        return parameter.grad

    def weight(self, parameter):
        return parameter.detach()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Cut:
    """The program by an engine."""

    def __init__(self, row, model, attention, place):
        self.row, self.place = row, place
        config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": row.accumulation, "gradient_clipping": 0,
                  "sequence_parallel_size": int(os.environ["WORLD_SIZE"]) // place.groups, "zero_optimization": {"stage": row.stage},
                  "trireme": {"sequence_attention": attention}, **row.config}
        if "trireme" in row.config:
            config["trireme"] = {"sequence_attention": attention, **row.config["trireme"]}
        self.model, *_ = trireme.initialize(model=model, optimizer=_optimizer(model), config=config)
        self.cut, self.backward, self.end_micro = self.model.cut, self.model.backward, self.model.step

    def run(self, number):
        loss, more = _numbers(self.row.step(self.model, self.cut, number * self.place.groups + self.place.index))
        return loss, more, loss

    def gradient(self, parameter):
        return trireme.utils.safe_get_full_grad(parameter)

    def weight(self, parameter):
        return trireme.utils.safe_get_full_fp32_param(parameter).detach()

    def step(self):
        self.model.step()


def _train(row, parameters, side):
    """{name: tensor} of everything that is compared, in the order of its making."""
    seen = {}
    for step in range(STEPS):
        has_graph = False
        for micro in range(row.accumulation):
            loss, more, total = side.run(step * row.accumulation + micro)
            at = f" of step {step}.{micro}"
            seen["loss" + at] = loss.detach().double().clone()
            seen.update({f"{name}{at}": value for name, value in more.items()})
            has_graph = loss.requires_grad
            if has_graph:
                side.backward(total)
                if micro + 1 < row.accumulation:
                    side.end_micro()
        if not has_graph:
            continue
        for name, parameter in parameters:
            gradient = side.gradient(parameter)
            seen[f"gradient of {name} of step {step}"] = (torch.zeros(parameter.shape) if gradient is None else gradient).detach().double().clone()
        side.step()
    for name, parameter in parameters:
        seen[f"weight of {name}"] = side.weight(parameter).double().clone()
    return seen


def _largest(own, plain):
    """(the largest relative difference, where). A gradient is compared by norms, one that is next to nothing by all
    gradients'."""
    scale = {step: math.sqrt(sum(value.square().sum().item() for name, value in plain.items() if name.startswith("gradient") and
                                 name.endswith(step))) for step in ("step 0", "step 1")}
    found = (0.0, "nothing")
    for name, value in plain.items():
        if own[name].shape != value.shape:
            return math.inf, f"{name} {tuple(own[name].shape)}"
        floor = 1e-2 * scale[name[-6:]] if name.startswith("gradient") else 1e-3
        difference = ((own[name] - value).norm() / max(value.norm().item(), floor, 1e-12)).item()
        if math.isnan(difference) or difference > found[0]:
            found = math.inf if math.isnan(difference) else difference, name
        if math.isnan(difference):
            break
    return found


def _is_refusal(error):
    """TorchScript passes on no more than an error's text, of which a row that uses it declares words."""
    return isinstance(error, errors.Error) or "in the TorchScript interpreter" in str(error)


def _short(error):
    return " ".join(str(error).split())[:700]


class _Place(NamedTuple):
    """Which of `groups` sequence groups, each with batches of its own, a rank belongs to."""
    groups: int
    index: int


def _outcome(row, attention, groups, verbose):
    """This rank's: {"kind", "largest", "where", "text"}."""
    place = _Place(groups, int(os.environ["RANK"]) // (int(os.environ["WORLD_SIZE"]) // groups))
    torch.manual_seed(1)
    parameters = lambda of: [(name, p) for name, p in of.named_parameters() if p.requires_grad]
    try:
        model = row.build()
        other = copy.deepcopy(model)
        plain = _train(row, parameters(other), _Plain(row, other, place))
    except Exception as error:  # pylint: disable=broad-exception-caught
        return {"kind": "broken", "text": f"plain PyTorch: {type(error).__name__}: {_short(error)}\n{traceback.format_exc() if verbose else ''}"}
    side = None
    try:
        side = _Cut(row, model, attention, place)
        own = _train(row, parameters(model), side)
    except errors.CommError as error:
        return {"kind": "lost", "text": f"{type(error).__name__}: {_short(error)}"}
    except Exception as error:  # pylint: disable=broad-exception-caught
        more = traceback.format_exc() if verbose else ""
        return {"kind": "refused" if _is_refusal(error) else "failed", "text": f"{type(error).__name__}: {_short(error)}\n{more}".strip()}
    finally:
        if side is not None:
            try:
                side.model.destroy()
            except Exception:  # pylint: disable=broad-exception-caught
                pass
    largest, where = _largest(own, plain)
    return {"kind": "right" if largest <= row.tolerance else "different", "largest": largest, "where": where, "text": ""}


def _rank(rank, setting, port, names, pipe):
    """A process: runs a row after each word from the pipe, and says its outcome."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setting.ranks), LOCAL_WORLD_SIZE=str(setting.ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), TRIREME_TIMEOUT_S=str(TIMEOUT_S))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not setting.verbose:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    rows = {row.name: row for row in ROWS}
    for name in names:
        pipe.recv()
        pipe.send(_outcome(rows[name], setting.attention, setting.groups, setting.verbose))
    os._exit(0)  # an engine that was refused may not end in good order


class Setting(NamedTuple):
    """The setting of a run of the table. `groups`: sequence groups that the ranks are divided into, which train on
    batches of their own."""
    ranks: int = 2
    attention: str = "ulysses"
    groups: int = 1
    verbose: bool = False


class _Ranks:
    """The processes of a launch, until one of them is lost."""

    def __init__(self, setting, names):
        forks, port = multiprocessing.get_context("fork"), free_port()
        self.processes, self.pipes = [], []
        for rank in range(setting.ranks):
            own, theirs = forks.Pipe()
            process = forks.Process(target=_rank, args=(rank, setting, port, names, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(own)

    def next_row(self):
        """An outcome of each rank; a rank that says nothing has the kind "lost"."""
        told = [{"kind": "lost", "text": "the rank waits for the others"} for _ in self.pipes]
        waiting = dict(zip(self.pipes, range(len(self.pipes))))
        for pipe in self.pipes:
            pipe.send(None)
        end = time.monotonic() + 120
        while waiting and time.monotonic() < end:
            for pipe in connection.wait(list(waiting), timeout=0.5):
                rank = waiting.pop(pipe)
                try:
                    told[rank] = pipe.recv()
                except EOFError:
                    told[rank] = {"kind": "lost", "text": "the process ended"}
                end = min(end, time.monotonic() + PATIENCE_S)
        return told

    def end(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _joined(row, told):
    """All ranks' outcomes as one, and whether these processes can go on."""
    kinds = [one["kind"] for one in told]
    text = next((one["text"] for one in told if one["kind"] in ("refused", "failed", "broken")), told[0]["text"])
    worst = max(told, key=lambda one: one.get("largest", 0))
    result = {"largest": worst.get("largest", 0), "where": worst.get("where", ""), "text": text}
    if len(set(kinds)) > 1:
        by_rank = ", ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
        kind = "different" if "different" in kinds and not set(kinds) - {"different", "right"} else "failed"
        return {**result, "kind": kind, "text": f"{by_rank}: {text}"}, set(kinds) <= {"different", "right"}
    kind = {"broken": "failed", "lost": "failed"}.get(kinds[0], kinds[0])
    if kind == "refused" and (missing := [word for word in row.says if word not in text]):
        return {**result, "kind": "failed", "text": f"refused without the words {missing}: {text}"}, True
    return {**result, "kind": kind}, kinds[0] not in ("lost",)


def _wanted(row, setting):
    return row.wanted(setting.attention, setting.ranks // setting.groups)


def matches(row, setting, kind):
    wanted = _wanted(row, setting)
    return kind in (("right", "refused", "different") if wanted == DOCUMENTED else (wanted,))


def run_rows(rows, setting):
    """Yields (row, outcome) of each."""
    torch.optim.SGD([torch.zeros(1)])  # imports much, here once and not in each forked rank
    if any(row.theme in ("known_models", "stock_models") for row in rows):
        import transformers  # pylint: disable=import-outside-toplevel,unused-import
    launched = None
    for at, row in enumerate(rows):
        if launched is None:
            launched = _Ranks(setting, [other.name for other in rows[at:]])
        outcome, goes_on = _joined(row, launched.next_row())
        if not goes_on:
            launched.end()
            launched = None
        yield row, outcome
    if launched is not None:
        launched.end()


def line_of(row, setting, outcome):
    is_expected = matches(row, setting, outcome["kind"])
    text = (f"{'ok ' if is_expected else 'NOT'} {row.theme:18} {row.name:62} {setting.attention:7} {setting.ranks // setting.groups} " +
            f"{outcome['kind']:9} {outcome['largest']:8.1e}")
    if not is_expected:
        text += f"   expected {_wanted(row, setting)}; {outcome['where'] if outcome['kind'] == 'different' else outcome['text']}"
    return text


def _sampled(rows, setting):
    """Rows of the quick test: in a ring each second of themes whose attention differs, on four ranks each sixth."""
    rows = [row for row in rows if row.name in SAMPLE]
    if setting.attention == "ring":
        rows = [row for row in rows if row.theme in ("attention", "attention_variants", "masks", "batches", "known_models", "stock_models")][::2]
    return rows if setting.ranks == 2 else rows[::6]


def chosen(setting, only=None, theme=None, sample=False):
    """Rows that can run here; on four ranks, unless they are asked for by name, those that are to."""
    rows = [row for row in ROWS if not row.unavailable and (not only or re.search(only, row.name)) and theme in (None, row.theme)]
    rows = [row for row in rows if setting.ranks == 2 or row.on_four or only]
    if setting.groups > 1:  # plain PyTorch would keep one state of all groups' batches
        rows = [row for row in rows if not row.keeps_state]
    return _sampled(rows, setting) if sample else rows


def _print_unknown(outcomes):
    """Operators without a row in include/trireme/operators/rules.h that ended a program, and the programs."""
    unknown = {}
    for name, outcome in outcomes.items():
        if found := re.search(r"(\S+(?: \(\S+\))?) is not known to sequence parallelism", outcome["text"] or ""):
            unknown.setdefault(found[1], []).append(name)
    for operator, names in sorted(unknown.items()):
        print(f"no row for {operator}: {len(names)} programs, {', '.join(names[:4])}")
    print(f"{len(unknown)} operators without a row")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--attention", choices=("ulysses", "ring"), default="ulysses")
    parser.add_argument("--groups", type=int, default=1, help="sequence groups with batches of their own, which the ranks are divided into")
    parser.add_argument("--only", help="a pattern of names")
    parser.add_argument("--theme")
    parser.add_argument("--sample", action="store_true", help="the rows of the quick test")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="tracebacks, and output of the ranks")
    parser.add_argument("--unknown", action="store_true", help="count the operators that are refused since the table of operators has no row for them")
    parser.add_argument("--json", help="a file for the outcomes")
    given = parser.parse_args()
    setting = Setting(given.ranks, given.attention, given.groups, given.verbose)
    rows = chosen(setting, given.only, given.theme, given.sample)
    if given.list:
        for row in rows:
            print(f"{row.theme:18} {row.name:62} {_wanted(row, setting)}")
        return 0
    counts, unexpected, outcomes, begun = {}, 0, {}, time.monotonic()
    for row, outcome in run_rows(rows, setting):
        print(line_of(row, setting, outcome), flush=True)
        counts[outcome["kind"]] = counts.get(outcome["kind"], 0) + 1
        unexpected += not matches(row, setting, outcome["kind"])
        outcomes[row.name] = {**outcome, "theme": row.theme, "expected": _wanted(row, setting)}
    print(f"{len(rows)} programs, {given.attention}, {given.ranks} ranks in {given.groups} groups, {time.monotonic() - begun:.0f} s: " +
          ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) + f"; {unexpected} not as declared")
    if given.unknown:
        _print_unknown(outcomes)
    for row in ROWS:
        if row.unavailable:
            print(f"left out: {row.name}: {row.unavailable}")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(outcomes, file, indent=1)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
