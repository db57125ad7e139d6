"""smp.save() and smp.load(): a file, or one for each rank that has a part of the model.

A partial save of `f` is f_0, f_1, …, by mp_rank; of state dicts that copies of the model share f_0_0_0, …, by pp_rank,
tp_rank and rdp_rank. Each is what torch.save() writes, with a record beside it that says
which save it is of. All ranks write under another name first, and take the files' names when all have written; so a
save that was interrupted leaves the files of the one before it, or those of this one, perhaps under both names.
"""
import contextlib
import dataclasses
import glob
import itertools
import json
import os
import pickle as python_pickle
import uuid
import zipfile

import torch

from ..errors import CheckpointError, ConfigError, IoError, StateError
from . import messages, ranks, states
from .config import state

_RECORD = "trireme_save.json"
WRITTEN = ".written"  #: the end of the name under which a file of a save stands that has not ended


@dataclasses.dataclass(frozen=True)
class _Record:
    """Which save a file is of."""

    save: str  # the same in all of its files
    count: int  # of its files
    rank: int


def save(obj, f, partial=True, pickle_module=python_pickle, pickle_protocol=2, v3=False):  # pylint: disable=unused-argument
    """torch.save() of `obj` as `f`, a path; `partial`: of each mp_rank's as f_{mp_rank}. Collective over the ranks of
    the first copy of the model where it is partial (`if smp.rdp_rank() == 0`); of all ranks where a state dict in it is
    one of local_state_dict(gather_if_shard=False), each as f_{pp_rank}_{tp_rank}_{rdp_rank}.

    The save before it stands until all of this one is written.

    Raises  ConfigError: a path that is none, or another one on another rank. StateError: a partial save of another
            copy. IoError: it could not be written.
    """
    path = _path("save", f)
    if not partial:
        with replacing(path) as written:
            write(obj, written, pickle_module, pickle_protocol)
        return
    is_shard = states.has_shard(obj)
    if ranks.rdp_rank() != 0 and not is_shard:
        raise StateError(f"smp.save({f!r}): this is copy {ranks.rdp_rank()} of the model, whose files would be those of copy 0; call it where smp.rdp_rank() == 0")
    members = ranks.get_whole_group() if is_shard else ranks.get_mp_group()
    name = messages.value_of("save", uuid.uuid4().hex, members, 0)
    place = (ranks.pp_rank(), ranks.tp_rank(), ranks.rdp_rank()) if is_shard else (ranks.mp_rank(),)
    own = _file_at(path, place)
    failure = None
    try:
        write(obj, own + WRITTEN, pickle_module, pickle_protocol, _Record(name, len(members), members.index(ranks.rank())))
    except Exception as error:  # pylint: disable=broad-exception-caught
        failure = error
    told = messages.of_all("save", {"path": path, "failure": failure and f"{type(failure).__name__}: {failure}"}, members)
    failed = {member: one["failure"] for member, one in zip(members, told) if one["failure"]}
    if failed or len({one["path"] for one in told}) > 1:
        with contextlib.suppress(OSError):
            os.remove(own + WRITTEN)
        if failure is not None:
            raise failure
        if failed:
            raise IoError(f"smp.save({f!r}): nothing was saved, since rank {next(iter(failed))} failed: {next(iter(failed.values()))}")
        raise ConfigError(f"smp.save: ranks {members} save as {sorted({one['path'] for one in told})}; a save has one name")
    os.replace(own + WRITTEN, own)
    sync_folder(own)
    places = messages.of_all("save", list(place), members)  # all have their names
    if members[0] == ranks.rank():
        _remove_more(path, {tuple(one) for one in places})


def load(f, map_location=None, pickle_module=None, pickle_load_args=None, partial=True, **more):
    """The object that smp.save() has saved as `f`; `partial`: this rank's. Where it was saved by another number of
    ranks, the state dicts of stages in it (`_smp_is_partial`) are those of the whole, and all else is rank 0's.

    pickle_load_args    arguments of torch.load(); they may be given directly, too, such as weights_only=False for
                        objects that pickle alone reads

    Raises  CheckpointError: files are missing or damaged, or are of different saves; names them.
    """
    path = _path("load", f)
    arguments = {"map_location": map_location, "pickle_module": pickle_module, **(pickle_load_args or {}), **more}
    if not partial:
        return read(path, arguments)
    files, are_shards = _files_of(path)
    members = ranks.get_whole_group() if are_shards else ranks.get_mp_group()
    if len(files) == len(members) and not (are_shards and state.cfg.zero_stage == 0):
        return read(files[members.index(ranks.rank())], arguments)
    return _merged([read(one, arguments) for one in files])


def _path(call, f):
    if not isinstance(f, str):
        raise ConfigError(f"smp.{call}: f is {type(f).__name__}; expected a path, a text")
    return f


@contextlib.contextmanager
def replacing(path):
    """With it: the name under which to write what stands as `path` when this ends."""
    written = f"{path}.{uuid.uuid4().hex}{WRITTEN}"
    try:
        yield written
        os.replace(written, path)
        sync_folder(path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(written)


def write(obj, path, pickle_module=python_pickle, pickle_protocol=2, record=None, call="smp.save"):
    """torch.save() of `obj` as `path`, on disk when it returns, with the fields of `record` beside it.

    Raises  IoError: it could not be written; there is no `path` then.
    """
    try:
        with open(path, "w+b") as file:
            torch.save(obj, file, pickle_module=pickle_module, pickle_protocol=pickle_protocol)
            if record is not None:
                file.seek(0)
                with zipfile.ZipFile(file, "a") as archive:
                    archive.writestr(f"{os.path.dirname(archive.namelist()[0])}/{_RECORD}", json.dumps(dataclasses.asdict(record)))
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.remove(path)
        raise IoError(f"{call}: '{path}' could not be written: {error}; what stood there before is as it was") from error
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(path)
        raise


def sync_folder(path):
    """Makes the names in the folder of `path` last."""
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_more(path, places):
    """Files of an earlier save, by other ranks, that would be taken for parts of this one, which has those of
    `places`."""
    for place, one in _numbered(path, "").items():
        if place not in places and record_of(one) is not None:
            os.remove(one)


def _file_at(path, place):
    return "_".join([path, *map(str, place)])


def _numbered(path, end):
    """{(mp_rank,) or (pp_rank, tp_rank, rdp_rank): file} of a partial save."""
    found = {}
    for one in glob.glob(f"{glob.escape(path)}_*{end}"):
        numbers = one[len(path) + 1:len(one) - len(end)].split("_")
        if len(numbers) in (1, 3) and all(number.isdigit() for number in numbers):
            found[tuple(map(int, numbers))] = one
    return found


def record_of(path, kind=_Record, call="smp.load"):
    """The record of a file, a `kind`; None: it has none. Raises CheckpointError: it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((name for name in archive.namelist() if name.endswith(f"/{_RECORD}")), None)
            return None if name is None else kind(**json.loads(archive.read(name)))
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{call}: '{path}' is damaged, or no file of torch.save(): {error}; take another save") from error


def _files_of(path):
    """(The files of the save `path`, by rank, whether copies of the model share what is in them). Raises
    CheckpointError: there is none that is whole."""
    files = _numbered(path, "")
    if not files:
        raise CheckpointError(f"smp.load: there is no '{path}_0'" + (f"; '{path}' is a full save, which partial=False reads" if os.path.isfile(path) else
                                                                      ", the first file of a partial save; give the name that smp.save() was given"))
    records = {one: record_of(one) for one in files.values()}
    if all(record is None for record in records.values()):  # smp's own
        absent = [place for place in itertools.product(*(range(most + 1) for most in map(max, zip(*files, strict=True)))) if place not in files]
        if absent:
            raise CheckpointError(f"smp.load: '{_file_at(path, absent[0])}' is missing; there are {', '.join(map(os.path.basename, sorted(files.values())))}")
        return [files[place] for place in sorted(files)], len(next(iter(files))) == 3
    written = {}
    for one in _numbered(path, WRITTEN).values():  # of a save that was interrupted, perhaps while it was written
        with contextlib.suppress(CheckpointError):
            written[one] = record_of(one)
    of_saves = {}
    for one, record in [*written.items(), *records.items()]:  # names that a save has taken come last
        if record is not None:
            of_saves.setdefault(record.save, {"count": record.count, "files": {}})["files"][record.rank] = one
    present = {record.save for record in records.values() if record is not None}
    whole = {name: one for name, one in of_saves.items() if len(one["files"]) == one["count"]}
    if len(present) == 1 and len(records) == sum(record is not None for record in records.values()) and present <= whole.keys():
        found = whole[present.pop()]
        return [found["files"][number] for number in range(found["count"])], len(next(iter(files))) == 3
    raise CheckpointError(f"smp.load: the files '{path}_…' are of {len(present)} saves: {_listed(records)}. " + _advice(whole))


def _listed(records):
    return ", ".join(f"{os.path.basename(one)} of {'no save of this library' if record is None else record.save[:8]}" for one, record in sorted(records.items()))


def _advice(whole):
    for name, one in whole.items():
        moves = [f"mv {file} {file.removesuffix(WRITTEN)}" for file in one["files"].values() if file.endswith(WRITTEN)]
        return f"Save {name[:8]} is whole: " + (f"its last files have not got their names; {'; '.join(moves)}" if moves else "remove the files of the others")
    return "None of them is whole; take another one"


def read(path, arguments):
    try:
        return torch.load(path, **arguments)
    except FileNotFoundError as error:
        raise CheckpointError(f"smp.load: there is no '{path}'; give the name that smp.save() was given, and partial=True where it was partial") from error
    except (EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"smp.load: '{path}' is damaged: {error}; take another save") from error


def _merged(parts):
    """The first of `parts`, whose state dicts of stages are joined with those at the same place of the others."""
    first = parts[0]
    if not isinstance(first, dict):
        return first
    if states.is_partial(first):
        return states.merged(parts)
    for name in first:
        first[name] = _merged([one[name] for one in parts if isinstance(one, dict) and name in one])
    return first
