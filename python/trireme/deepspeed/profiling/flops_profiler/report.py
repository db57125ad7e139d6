"""The text of a profile."""
import dataclasses

from .quantities import duration_to_string, flops_to_string, macs_to_string, number_to_string, params_to_string

_WIDTH = 100


@dataclasses.dataclass
class Run:
    """The step as an engine knows it; without one, the model alone."""
    world: int = 1
    data_ranks: int = 1
    layer_ranks: int = 1
    samples: int | None = None  # of a micro-batch
    backward_seconds: float | None = None
    step_seconds: float | None = None
    stage: int | None = None  # of a pipeline, whose next two are there, too
    micro_batches: int = 1
    batch_seconds: float | None = None


def rate(multiply_adds, seconds):
    """"1.5 TFLOPS" of so many multiply-adds."""
    return flops_to_string(2 * multiply_adds / seconds) if seconds else "-"


def _title(text):
    return f" {text} ".center(_WIDTH, "-")


def summary(numbers, run, step, uncounted):
    """Lines of the whole step on this rank."""
    forward, backward = numbers.forward, numbers.backward + numbers.recomputed
    rows = [("ranks", run.world), ("ranks, or groups of them, with samples of their own", run.data_ranks), ("ranks that share each layer", run.layer_ranks)]
    if run.samples is not None:
        rows.append(("samples of a micro-batch", run.samples))
    rows += [("parameters of the model", params_to_string(numbers.params)),
             ("forward MACs", macs_to_string(forward)),
             ("forward FLOPs = 2 * MACs", number_to_string(2 * forward)),
             ("forward latency", duration_to_string(numbers.seconds)),
             ("forward FLOPS = FLOPs / latency", rate(forward, numbers.seconds))]
    if backward:
        rows.append(("backward FLOPs, recomputation included", number_to_string(2 * backward)))
    if numbers.recomputed:
        rows.append(("recomputation FLOPs, in backward", number_to_string(2 * numbers.recomputed)))
    if run.backward_seconds is not None:
        both = numbers.seconds + run.backward_seconds
        rows += [("backward latency", duration_to_string(run.backward_seconds)), ("backward FLOPS", rate(backward, run.backward_seconds)),
                 ("forward and backward FLOPS", rate(forward + backward, both))]
        if run.step_seconds is not None:
            whole = both + run.step_seconds
            rows += [("optimizer step latency", duration_to_string(run.step_seconds)), ("latency of all three", duration_to_string(whole))]
            if run.samples is not None and whole:
                rows.append(("samples per second, all ranks", f"{run.samples * run.data_ranks / whole:.2f}"))
    if run.batch_seconds is not None:
        rows += [("micro-batches of the step", run.micro_batches), ("latency of train_batch()", duration_to_string(run.batch_seconds)),
                 ("forward and backward FLOPS over that, waits included", rate(forward + backward, run.batch_seconds)),
                 ("samples per second, all ranks", f"{run.samples * run.micro_batches * run.data_ranks / run.batch_seconds:.2f}")]
    what = "in one micro-batch" if run.stage is None else f"in all {run.micro_batches} micro-batches"
    title = f"FLOPs profile at step {step}" if run.stage is None else f"FLOPs profile of stage {run.stage} at step {step}"
    lines = [_title(title), f"Of this rank's operators {what}. MACs are the multiply-adds of matrix products, convolutions",
             "and attention; nothing else is counted. Latencies include the counting.", ""]
    lines += [f"{name + ':':<60}{value}".rstrip() for name, value in rows]
    if uncounted:
        names = ", ".join(f"{name} ({calls})" for name, calls in sorted(uncounted.items()))
        lines += ["", f"NOT COUNTED, since nothing tells how many multiply-adds they have (calls): {names}"]
    return lines


def of_stages(sums, step, seconds):
    """Lines of a whole pipeline. `sums`: FlopsProfiler.sums() of each stage; `seconds` of train_batch()."""
    params, forward, backward, recomputed = (sum(column) for column in zip(*sums))
    rows = [("parameters of the model", params_to_string(params)), ("forward MACs", macs_to_string(forward)),
            ("forward FLOPs = 2 * MACs", number_to_string(2 * forward)),
            ("backward FLOPs, recomputation included", number_to_string(2 * (backward + recomputed))),
            ("latency of train_batch()", duration_to_string(seconds)), ("FLOPS of all stages", rate(forward + backward + recomputed, seconds))]
    return [_title(f"FLOPs profile of all {len(sums)} stages at step {step}"), "Of one pipeline's ranks, in all micro-batches of the step.", "",
            *(f"{name + ':':<60}{value}".rstrip() for name, value in rows)]


def _by_class(places, numbers):
    """{class: [params, MACs, seconds]} of one depth, each module once."""
    sums, seen = {}, set()
    for place in places:
        if id(place.module) in seen:
            continue
        seen.add(id(place.module))
        one = sums.setdefault(type(place.module).__name__, [0, 0, 0.0])
        for index, value in enumerate((numbers[place].params, numbers[place].macs, numbers[place].seconds)):
            one[index] += value
    return sums


def aggregated(root, numbers, depth, top):
    """Lines of the classes of modules that have most, at each depth or at one."""
    by_depth = {}
    for place in root.all():
        by_depth.setdefault(place.depth, []).append(place)
    deepest = max(by_depth)
    lines = [_title("Most parameters, MACs and latency by depth, summed over modules of a class")]
    for one in range(deepest + 1) if depth == -1 else [min(depth, deepest)]:
        sums = _by_class(by_depth[one], numbers)
        lines.append(f"depth {one}:")
        for index, (what, text) in enumerate((("params", params_to_string), ("MACs", macs_to_string), ("latency", duration_to_string))):
            largest = sorted(sums.items(), key=lambda item, index=index: item[1][index], reverse=True)[:top]
            lines.append(f"    {what:<8}" + ", ".join(f"{name} {text(values[index])}" for name, values in largest))
    return lines


def _share(part, whole):
    return f"{100 * part / whole:.2f}%" if whole else "0%"


def detailed(root, numbers):
    """Lines of every module: its share of the model's parameters, MACs and forward latency, and its FLOPS."""
    whole = numbers[root]
    lines = [_title("Every module: parameters, forward MACs, forward latency, FLOPS"),
             "A module has the work of all modules that it calls and of those inside of it; one that is used twice has both."]
    first = {}
    for place in root.all():
        mine, also = numbers[place], first.setdefault(id(place.module), place)
        text = ", ".join((f"{params_to_string(mine.params)} = {_share(mine.params, whole.params)}", f"{macs_to_string(mine.macs)} = "
                          f"{_share(mine.macs, whole.macs)}", f"{duration_to_string(mine.seconds)} = {_share(mine.seconds, whole.seconds)}",
                          rate(mine.macs, mine.seconds)))
        name = f"({place.name}) " if place.name else ""
        shared = "" if also is place else f" [the same module as an earlier ({also.name})]"
        lines.append(f"{'  ' * place.depth}{name}{type(place.module).__name__}: {text}{shared}")
    return lines
