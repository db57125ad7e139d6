"""smp.save_checkpoint() and smp.resume_from_checkpoint(): model, optimizer and the program's own values under a tag.

    PATH/newest                                         the tag of the last save
    PATH/TAG_partial/{model,optimizer}_{pp}_{tp}.pt     partial state dicts, one of each rank of the first copy
    PATH/TAG_partial/user_content.pt, partition.json    the program's values; which stage had which tensor
    PATH/TAG, optimizer_TAG, user_content_TAG           a full save: whole state dicts, which torch.load() reads

All of a save is written under other names, then takes its own, and `newest` comes last. So a rank that is killed leaves
the save before it or this one. Each file says which save it is of; files of several are never loaded together.
"""
import contextlib
import dataclasses
import glob
import io
import json
import os
import shutil
import uuid
import zipfile

import torch

from ..errors import CheckpointError, ConfigError, IoError, UnsupportedError
from ..log import logger
from . import files, messages, program, ranks, states
from .config import state
from .files import WRITTEN
from .model import DistributedModel

_SAVE, _LOAD, _FULL = "smp.save_checkpoint", "smp.resume_from_checkpoint", "smp.get_full_state_dict_from_sharded_data_parallel_checkpoint"
_PARTIAL, _NEWEST, _MANIFEST, _CONTENT = "_partial", "newest", "partition.json", "user_content.pt"
_BEFORE = ".before"  # the end of the name of a folder whose place another one of its tag takes
_REMOVED = ".removed"


@dataclasses.dataclass(frozen=True)
class _Record:
    """Which save a file is of."""

    save: str  # the same in all of its files
    parts: list  # of a full save: "model", "optimizer", "user_content", as far as it has them


@dataclasses.dataclass(frozen=True)
class _Found:
    """A checkpoint that was read."""

    where: str
    save: str
    model: dict
    optimizer: object  # a state dict; None: there is none
    user_content: object


# --- saving ----------------------------------------------------------------------------------------------------------


def save_checkpoint(path, tag, partial=True, model=None, optimizer=None, user_content=None, translate_if_full=True,  # pylint: disable=unused-argument
                    num_kept_partial_checkpoints=None):
    """Saves under `tag` in the folder `path`: a file for each rank of a copy of the model, or, where not `partial`,
    whole state dicts. Collective over all ranks.

    user_content                    rank 0's is saved: what resume_from_checkpoint() returns
    translate_if_full               accepted: models keep the names of their tensors
    num_kept_partial_checkpoints    older partial checkpoints are removed, but for so many with this one, when this one
                                    is complete

    Raises  ConfigError, UnsupportedError: an argument. StateError: ranks give different ones; a partial save of a model
            whose tensors have no stages yet. IoError: it could not be written, on every rank; the save before stands.
    """
    messages.meet(_SAVE, _world(), {"path": repr(path), "tag": repr(tag), "partial": bool(partial), "optimizer": optimizer is not None,
                                    "num_kept_partial_checkpoints": repr(num_kept_partial_checkpoints)})
    _together(_SAVE, IoError, lambda: _check_arguments(path, tag, model, optimizer, user_content, num_kept_partial_checkpoints))
    path = os.fspath(path)
    name = messages.value_of(_SAVE, uuid.uuid4().hex, _world(), 0)
    if partial:
        _save_partial(path, tag, name, model, optimizer, user_content, num_kept_partial_checkpoints)
    else:
        _save_full(path, tag, name, model, optimizer, user_content)


def _check_arguments(path, tag, model, optimizer, user_content, kept):
    _check_place(_SAVE, path, tag)
    if not isinstance(model, DistributedModel):
        raise ConfigError(f"{_SAVE}: model={type(model).__name__}; give the smp.DistributedModel")
    if optimizer is not None and not hasattr(optimizer, "local_state_dict"):
        raise ConfigError(f"{_SAVE}: optimizer={type(optimizer).__name__}; give the smp.DistributedOptimizer, or None to save none")
    if kept is not None and (not isinstance(kept, int) or isinstance(kept, bool) or kept < 1):
        raise ConfigError(f"{_SAVE}: num_kept_partial_checkpoints={kept!r}; expected a whole number of 1 or more, or None to keep all")
    if ranks.rank() == 0 and not messages.trusts_pickle():
        buffer = io.BytesIO()
        torch.save(user_content, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise UnsupportedError(f"{_SAVE}: user_content has objects of other classes than tensors, numbers, texts and their lists, tuples and dicts, which only pickle "
                                   "reads, and pickle runs what a file says; save what is in them, as vars(args), or start the program by `trireme launch --as-smp` "
                                   f"({str(error).splitlines()[0][:120]})") from None


def _save_partial(path, tag, name, model, optimizer, user_content, kept):
    folder = f"{path}/{tag}{_PARTIAL}"
    written = folder + WRITTEN
    own = {"model": model.local_state_dict(), "optimizer": optimizer and optimizer.local_state_dict()}
    own = {f"{noun}_{ranks.pp_rank()}_{ranks.tp_rank()}.pt": value for noun, value in own.items() if value is not None} if ranks.rdp_rank() == 0 else {}
    if ranks.rank() == 0:
        own[_CONTENT] = user_content
    names = sorted(set().union(*messages.of_all(_SAVE, list(own), _world())))
    manifest = {"save": name, "tag": tag, "pipeline_parallel_degree": ranks.pp_size(), "tensor_parallel_degree": ranks.tp_size(), "files": names,
                "stages": model.engine(_SAVE).homes}

    def write():
        for file, value in own.items():
            files.write(value, f"{written}/{file}", record=_Record(name, []), call=_SAVE)

    try:
        for act in (lambda: ranks.rank() == 0 and _begin(path, folder), write, lambda: ranks.rank() == 0 and _publish(path, folder, manifest, kept)):
            _together(_SAVE, IoError, act)
    except Exception:
        if ranks.rank() == 0:
            shutil.rmtree(written, ignore_errors=True)
        raise


def _begin(path, folder):
    os.makedirs(path, exist_ok=True)
    _settle(path)
    if os.path.isfile(folder):
        raise CheckpointError(f"{_SAVE}: '{folder}' is a file; give another tag, or move it away")
    os.mkdir(folder + WRITTEN)


def _publish(path, folder, manifest, kept):
    """Gives the folder that was written its name, and removes older ones."""
    written = folder + WRITTEN
    if absent := [file for file in manifest["files"] if not os.path.isfile(f"{written}/{file}")]:
        raise IoError(f"{_SAVE}: '{path}' has not what other hosts have written, such as {absent[0]}; give a folder of a file system that all hosts share")
    number = 1 + max((found["number"] for _, found in _partials(path)), default=0)
    _write_text(f"{written}/{_MANIFEST}", json.dumps({**manifest, "number": number}, indent=1))
    if os.path.isdir(folder):
        os.rename(folder, folder + _BEFORE)
    os.rename(written, folder)
    files.sync_folder(folder)
    _write_text(f"{path}/{_NEWEST}", manifest["tag"])
    _remove(folder + _BEFORE)
    if kept is not None:
        for older, _ in sorted(_partials(path), key=lambda found: found[1]["number"])[:-kept]:
            _remove(older)


def _save_full(path, tag, name, model, optimizer, user_content):
    # renamed in this order
    found = {"user_content": user_content, "optimizer": optimizer and optimizer.state_dict(), "model": model.state_dict(gather_to_rank0=True)}
    parts = [part for part, value in found.items() if value is not None or part == "user_content"]
    places = _places(path, tag)

    def write():
        if ranks.rank() != 0:
            return
        os.makedirs(path, exist_ok=True)
        if folder := next((place for place in places.values() if os.path.isdir(place)), None):
            raise CheckpointError(f"{_SAVE}: '{folder}' is a folder; give another tag, or move it away")
        _settle_full(places)
        try:
            for part in parts:
                files.write(found[part], places[part] + WRITTEN, record=_Record(name, parts), call=_SAVE)
        except BaseException:
            _remove_written(places)
            raise
        for part in parts:
            os.replace(places[part] + WRITTEN, places[part])
        files.sync_folder(places["model"])
        _write_text(f"{path}/{_NEWEST}", tag)
        if "optimizer" not in parts and _record_or_none(places["optimizer"]) is not None:  # of an earlier save
            os.remove(places["optimizer"])

    _together(_SAVE, IoError, write)


def _settle(path):
    """Ends what killed partial saves have left in `path`."""
    for before in glob.glob(f"{glob.escape(path)}/*{_PARTIAL}{_BEFORE}"):
        if os.path.isdir(before.removesuffix(_BEFORE)):
            _remove(before)
        else:
            os.rename(before, before.removesuffix(_BEFORE))
    for end in (WRITTEN, _REMOVED):
        for left in glob.glob(f"{glob.escape(path)}/*{_PARTIAL}{end}"):
            shutil.rmtree(left)


def _settle_full(places):
    """Ends what a killed full save has left: its files take their names where some have."""
    with contextlib.suppress(CheckpointError):
        for part, file in _files_of_full(places)[1].items():
            if file != places[part]:
                os.replace(file, places[part])
    _remove_written(places)


def _remove_written(places):
    for place in places.values():
        with contextlib.suppress(FileNotFoundError):
            os.remove(place + WRITTEN)


def _remove(folder):
    """Removes a folder, which has another name while some of it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, folder.removesuffix(_BEFORE) + _REMOVED)
        shutil.rmtree(folder.removesuffix(_BEFORE) + _REMOVED)


def _write_text(path, text):
    with files.replacing(path) as written, open(written, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# --- loading ---------------------------------------------------------------------------------------------------------


def resume_from_checkpoint(path, tag=None, partial=True, strict=True, load_optimizer=True, load_sharded_optimizer_state=True, translate_function=None):
    """Loads what save_checkpoint() has saved in the folder `path` into the program's model and optimizer, at any number
    of stages, before or after tensors have theirs. Collective over all ranks. Returns the `user_content`.

    tag                             None: the one in `newest`
    strict                          as of torch's load_state_dict()
    load_sharded_optimizer_state    False: states of the optimizer stay where ranks have parts of these
    translate_function              makes the model's state dict of a full checkpoint's, whose names are others

    Raises  CheckpointError: there is none, it is of another kind, damaged or of several saves; nothing has changed
            then. StateError, ShapeError: it does not fit. ConfigError: an argument. All on every rank.
    """
    messages.meet(_LOAD, _world(), {"path": repr(path), "tag": repr(tag), "partial": bool(partial), "strict": bool(strict), "load_optimizer": bool(load_optimizer),
                                    "load_sharded_optimizer_state": bool(load_sharded_optimizer_state), "translate_function": translate_function is not None})
    if len(program.models()) > 1:
        raise UnsupportedError(f"{_LOAD}: it does not know which of the program's {len(program.models())} models is meant; load each by model.load_state_dict() and "
                               "optimizer.load_state_dict()")
    optimizer = program.optimizer_of(program.model(_LOAD)) if load_optimizer else None
    if not load_sharded_optimizer_state and (state.cfg.shard_optimizer_state or state.cfg.sharded_data_parallel_degree > 1):
        optimizer = None

    def read():
        program.model(_LOAD)
        if translate_function is not None and not callable(translate_function):
            raise ConfigError(f"{_LOAD}: translate_function={translate_function!r:.60}; expected a function of a state dict, or None")
        _check_place(_LOAD, path, tag or "tag")
        known = tag if tag is not None else _newest(os.fspath(path))
        found = (_read_partial if partial else _read_full)(os.fspath(path), known, optimizer is not None)
        if not partial and translate_function is not None:
            found = dataclasses.replace(found, model=translate_function(found.model))
        if optimizer is not None and found.optimizer is not None:
            _check_groups(optimizer, found)
        return found

    found = _together(_LOAD, CheckpointError, read)
    if len({save for save in messages.of_all(_LOAD, found.save, _world())}) > 1:
        raise CheckpointError(f"{_LOAD}: ranks have read different saves as {found.where}; give a folder of a file system that all hosts share")
    program.model(_LOAD).load_state_dict(found.model, strict=strict)
    if optimizer is not None and found.optimizer is not None:
        optimizer.load_state_dict(found.optimizer)
    elif optimizer is not None and ranks.rank() == 0:
        logger.warning("%s: %s has no optimizer: its states stay as they are", _LOAD, found.where)
    return found.user_content


def get_full_state_dict_from_sharded_data_parallel_checkpoint(path, tag, dtype=None):
    """The model's whole state dict out of the partial checkpoint `tag` in the folder `path`, on the host. A call of one
    process, which needs no smp.init().

    dtype   of floating-point tensors; None: as they were saved

    Raises  CheckpointError: as resume_from_checkpoint(). ConfigError: an argument.
    """
    _check_place(_FULL, path, tag)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"{_FULL}: dtype={dtype!r}; expected a floating-point one, or None to leave them")
    folder, manifest = _partial_at(os.fspath(path), tag)
    merged = states.merged([_read(f"{folder}/{file}") for file in manifest["files"] if file.startswith("model_")])
    if dtype is None:
        return merged
    copies = {}  # what is one tensor is one there, too
    for name, value in merged.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            key = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
            merged[name] = copies.setdefault(key, value.to(dtype)) if value.numel() else value.to(dtype)
    return merged


def _newest(path):
    """The tag in `newest`. Raises CheckpointError: there is none."""
    try:
        with open(f"{path}/{_NEWEST}", encoding="utf-8") as file:
            tag = file.read().strip()
    except OSError as error:
        raise CheckpointError(f"{_LOAD}: '{path}/{_NEWEST}', which names the last save, cannot be read: {error.strerror}; give the folder that smp.save_checkpoint() was "
                              f"given, or the tag{_shown_tags(path)}") from None
    _check_tag(_LOAD, tag)
    return tag


def _partial_at(path, tag):
    """(folder, manifest) of a partial checkpoint, whose files are all there, and of one save. Raises
    CheckpointError."""
    folder = f"{path}/{tag}{_PARTIAL}"
    if not os.path.isdir(folder) and os.path.isdir(folder + _BEFORE):  # a save in its place was killed
        folder += _BEFORE
    if not os.path.isdir(folder):
        other = f"; '{path}/{tag}' is a full checkpoint, which partial=False loads" if os.path.isfile(f"{path}/{tag}") else _shown_tags(path)
        raise CheckpointError(f"{_LOAD}: there is no partial checkpoint '{folder}'{other}")
    manifest = _manifest_of(folder)
    if manifest is None:
        raise CheckpointError(f"{_LOAD}: '{folder}' has no {_MANIFEST} of smp.save_checkpoint(), so it is a folder of another kind, or damaged; give another tag")
    for file in manifest["files"]:
        record = _record_or_none(f"{folder}/{file}") if os.path.isfile(f"{folder}/{file}") else None
        if record is None or record.save != manifest["save"]:
            what = "is missing" if not os.path.isfile(f"{folder}/{file}") else "is of another save than partition.json beside it"
            raise CheckpointError(f"{_LOAD}: '{folder}/{file}' {what}; put back the file of save {manifest['save'][:8]}, or give another tag")
    return folder, manifest


def _read_partial(path, tag, reads_optimizer):
    folder, manifest = _partial_at(path, tag)
    models, optimizers = ([file for file in manifest["files"] if file.startswith(noun)] for noun in ("model_", "optimizer_"))
    share = slice(ranks.mp_rank(), None, ranks.mp_size())  # all ranks of a copy together have all files
    partial = {**states.merged([_read(f"{folder}/{file}") for file in models[share]] or [{}]), states.PARTIAL: True}
    optimizer = None
    if reads_optimizer and not optimizers:
        raise CheckpointError(f"{_LOAD}: '{folder}' has no states of an optimizer; give load_optimizer=False, or another tag")
    if reads_optimizer:
        first = {**_read(f"{folder}/{optimizers[0]}"), "state": {}}
        optimizer = {**states.merged([first, *(_read(f"{folder}/{file}") for file in optimizers[share])]), states.PARTIAL: True}
    return _Found(f"'{folder}'", manifest["save"], partial, optimizer, _read_content(f"{folder}/{_CONTENT}"))


def _places(path, tag):
    return {"model": f"{path}/{tag}", "optimizer": f"{path}/optimizer_{tag}", "user_content": f"{path}/user_content_{tag}"}


def _read_full(path, tag, reads_optimizer):
    save, found = _files_of_full(_places(path, tag))
    model = _read(found["model"])
    if not isinstance(model, dict):
        raise CheckpointError(f"{_LOAD}: '{found['model']}' has an object of class {type(model).__name__}; expected a state dict")
    optimizer = _read(found["optimizer"]) if reads_optimizer and "optimizer" in found else None
    return _Found(f"'{found['model']}'", save, model, optimizer, _read_content(found["user_content"]) if "user_content" in found else None)


def _files_of_full(places):
    """(save, {part: file}) of a full checkpoint. One of a save that was killed while its files took their names is
    whole under both. Raises  CheckpointError: none is whole."""
    place, own = places["model"], None
    found = {}
    for part, name in places.items():
        for file in (name + WRITTEN, name):
            record = None
            with contextlib.suppress(CheckpointError):
                record = _record_or_none(file)
            if record is not None:
                found.setdefault(record.save, (record.parts, {}))[1][part] = file
                own = record.save if file == place else own
    whole = {save: of_save for save, (parts, of_save) in found.items() if set(parts) <= set(of_save)}
    if os.path.isfile(place):
        if own is None and _record_or_none(place) is None:
            return "", {"model": place}  # of another program
        if own in whole:
            return own, whole[own]
    elif not whole:
        other = f"; '{place}{_PARTIAL}' is a partial one, which partial=True loads" if os.path.isdir(place + _PARTIAL) else _shown_tags(os.path.dirname(place))
        raise CheckpointError(f"{_LOAD}: there is no full checkpoint '{place}'{other}")
    if not whole:
        raise CheckpointError(f"{_LOAD}: '{place}' and the files beside it are of {len(found)} saves, none of which is whole; put back those of one, or give another tag")
    return next(iter(whole.items()))


def _record_or_none(file):
    """The _Record of a file; None: it is none of save_checkpoint()'s. Raises CheckpointError: it is damaged."""
    if not os.path.isfile(file):
        return None
    with open(file, "rb") as opened:
        if opened.read(4) not in (b"PK\x03\x04", b""):  # another format of torch's
            return None
    try:
        return files.record_of(file, _Record, _LOAD)
    except CheckpointError as error:
        if isinstance(error.__cause__, TypeError):  # smp.save()'s
            return None
        raise


def _read(file):
    return files.read(file, {"map_location": "cpu", "mmap": zipfile.is_zipfile(file)})


def _read_content(file):
    try:
        return files.read(file, {"map_location": "cpu", "weights_only": not messages.trusts_pickle()})
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{_LOAD}: '{file}' has objects that only pickle reads, and pickle runs what a file says; start the program by `trireme launch --as-smp`, which "
                              f"allows that, if you trust the file ({str(error).splitlines()[0][:120]})") from None


def _check_groups(optimizer, found):
    here, there = ([len(group["params"]) for group in groups] for groups in (optimizer.param_groups, found.optimizer["param_groups"]))
    if here != there:
        raise CheckpointError(f"{_LOAD}: groups of {there} parameters in {found.where}, and of {here} in the optimizer; make the optimizer with the same groups, or give "
                              "load_optimizer=False")


def _manifest_of(folder):
    """The manifest of a partial checkpoint; None: there is none."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"{folder}/{_MANIFEST}", encoding="utf-8") as file:
            found = json.load(file)
        if isinstance(found, dict) and {"save", "number", "files"} <= found.keys():
            return found
    return None


def _partials(path):
    """(folder, manifest) of all partial checkpoints in `path`."""
    found = ((folder, _manifest_of(folder)) for folder in glob.glob(f"{glob.escape(path)}/*{_PARTIAL}"))
    return [(folder, manifest) for folder, manifest in found if manifest is not None]


def _shown_tags(path):
    tags = sorted(os.path.basename(folder).removesuffix(_PARTIAL) for folder, _ in _partials(path))
    return f"; there are partial ones of the tags {', '.join(tags[-5:])}" if tags else "; give the folder and the tag that smp.save_checkpoint() was given"


# --- both ------------------------------------------------------------------------------------------------------------


def _world():
    return list(range(ranks.size()))


def _check_place(call, path, tag):
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"{call}: path={path!r:.60}; expected the path of a folder, a text")
    _check_tag(call, tag)


def _check_tag(call, tag):
    if not isinstance(tag, str) or not tag or "/" in tag or tag.startswith(".") or tag == _NEWEST or tag.endswith((WRITTEN, _BEFORE, _REMOVED)):
        raise ConfigError(f"{call}: tag={tag!r:.60}; expected a text without '/' that begins with no '.' and is not '{_NEWEST}'")


def _together(call, kind, function):
    """function(), where no rank fails. Collective over all ranks. Raises  what it raises here, a `kind` where it failed
    on another rank."""
    result = failure = None
    try:
        result = function()
    except Exception as error:  # pylint: disable=broad-exception-caught
        failure = error
    told = messages.of_all(call, failure and f"{type(failure).__name__}: {failure}", _world())
    if isinstance(failure, OSError) and not isinstance(failure, IoError):
        raise kind(f"{call}: {failure}; free the disk or give another folder") from failure
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text is not None:
            raise kind(f"{call}: rank {rank} failed: {text}")
    return result
