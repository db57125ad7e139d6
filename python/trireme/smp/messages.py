"""Messages of ranks beside steps: objects from rank to rank, barriers, and what a pipeline's ranks tell each other."""
import ctypes
import enum
import io
import re

import torch
import torch.distributed as dist

from .. import ranks as world_ranks
from ..errors import CommTimeoutError, ConfigError, StateError, UnsupportedError
from . import ranks
from .config import state

_groups = {}  # torch.distributed's, by their ranks
_of_programs = {}  # those of its own backend, where that is another


class _Trust:
    pickles_anything = False


def pickles_anything():
    """From here on `pickle` is True where a program does not say so, as in smp's own scripts."""
    _Trust.pickles_anything = True


def trusts_pickle():
    """Whether pickles_anything() was called."""
    return _Trust.pickles_anything


class CommGroup(enum.Enum):
    """Groups of ranks, of which each rank is in one of each kind."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(enum.Enum):
    """The ranks whose numbers `dest` and `src` are: those of this group."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


WORLD, MP_GROUP, DP_GROUP, PP_GROUP, TP_GROUP, RDP_GROUP = CommGroup

_MEMBERS = {"world": lambda: list(range(ranks.size())), "mp": ranks.get_mp_group, "dp": ranks.get_dp_group, "pp": ranks.get_pp_group, "tp": ranks.get_tp_group,
            "rdp": ranks.get_rdp_group}


def barrier(group=WORLD):
    """Returns when every rank of the group has called it. Collective over them."""
    if _checked("barrier", "group", group, CommGroup) is WORLD:
        state.world.barrier()
    else:
        _barrier(_members(group))


def dp_barrier():
    """Returns when every rank of this stage has called it. Collective over them."""
    barrier(DP_GROUP)


def mp_barrier():
    """Returns when every rank of this copy of the model has called it. Collective over them."""
    barrier(MP_GROUP)


def broadcast(obj, group, *, pickle=False):
    """Sends `obj` to every other rank of the group, which call recv_from() of this one. Returns when they have it.

    Tensors, numbers, texts and their lists, tuples and dicts; with `pickle`, here and in recv_from(), anything that can
    be pickled.

    Raises  UnsupportedError: another object.
    """
    packed = _packed("broadcast", obj, pickle)
    for member in _members(_checked("broadcast", "group", group, CommGroup)):
        if member != ranks.rank():
            _send(packed, member)


def send(obj, dest, rank_type, *, pickle=False):
    """Sends `obj` to the rank of this number among `rank_type`, which calls recv_from(). As broadcast().

    Raises  ConfigError: there is no such rank, or it is this one.
    """
    member = _member("send", "dest", dest, rank_type)
    _send(_packed("send", obj, pickle), member)


def recv_from(src, rank_type, *, pickle=False):
    """The next object that the rank of this number among `rank_type` sends, by send() or broadcast(). Waits for it.

    Raises  ConfigError: there is no such rank, or it is this one. UnsupportedError: an object that was pickled.
    """
    member = _member("recv_from", "src", src, rank_type)
    group, size = _group_of(_members(WORLD)), torch.empty(1, dtype=torch.int64)
    dist.recv(size, member, group=group)
    payload = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(payload, member, group=group)
    return _unpacked("recv_from", payload, pickle)


def allgather(obj, group, *, pickle=False):
    """The `obj` of every rank of the group, a list in their order. Collective over them. As broadcast()."""
    members = _members(_checked("allgather", "group", group, CommGroup))
    return [_unpacked("allgather", one, pickle) for one in _all_packed(_packed("allgather", obj, pickle), members)]


# --- what the library itself says ------------------------------------------------------------------------------------


def broadcast_bytes(payload, members, source=0):
    """Fills `payload`, uint8 on the host, with that of the member of number `source`. Collective over `members`."""
    if payload.numel() and len(members) > 1:
        dist.broadcast(payload, members[source], group=_group_of(members))


def of_all(call, value, members):
    """`value` of each of `members`, plain containers and tensors, in their order. Collective over them."""
    return [_unpacked(call, one, False) for one in _all_packed(_packed(call, value, False), members)]


def value_of(call, value, members, source):
    """`value` of the member of number `source`, plain containers and tensors; the others give any. Collective over
    `members`."""
    if len(members) == 1:
        return value
    is_mine = members[source] == ranks.rank()
    packed = _packed(call, value, False) if is_mine else None
    size = torch.tensor([packed.numel() if is_mine else 0])
    dist.broadcast(size, members[source], group=_group_of(members))
    payload = packed if is_mine else torch.empty(int(size), dtype=torch.uint8)
    broadcast_bytes(payload, members, source)
    return value if is_mine else _unpacked(call, payload, False)


def meet(call, members, agenda):
    """Returns when all of `members` have come to `call` with the same `agenda`, what JSON has. Collective over them.

    Raises  CommTimeoutError: some have not; the text names them. StateError: another agenda, or call.
    """
    if len(members) == 1:
        return
    try:
        dist.monitored_barrier(_group_of(members), timeout=world_ranks.TIMEOUT, wait_all_ranks=True)
    except RuntimeError as error:
        named = re.search(r"Ranks? ([\d, ]+) failed", str(error))
        absent = [members[int(number)] for number in named[1].split(",")] if named else []
        who = f"ranks {absent} have not" if absent else "some have not"
        raise CommTimeoutError(f"{call}: every rank of {members} makes this call, and {who} within {world_ranks.TIMEOUT}; call it on all of them") from None
    for member, other in zip(members, of_all(call, [call, agenda], members)):
        if other != [call, agenda]:
            raise StateError(f"{call}: {agenda} here (rank {ranks.rank()}), and {other[0]}: {other[1]} on rank {member}; every rank of {members} makes the same call")


def _all_packed(packed, members):
    if len(members) == 1:
        return [packed]
    group = _group_of(members)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in members]
    dist.all_gather(sizes, torch.tensor([packed.numel()]), group=group)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[:packed.numel()] = packed
    found = [torch.empty(longest, dtype=torch.uint8) for _ in members]
    dist.all_gather(found, padded, group=group)
    return [one[:int(size)] for one, size in zip(found, sizes)]


def _packed(call, obj, may_pickle):
    """`obj` as bytes. Raises UnsupportedError: reading it would need pickle, which the program did not allow."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    if not (may_pickle or _Trust.pickles_anything) and not _is_plain(obj):
        _unpacked(call, packed, False)
    return packed


def _is_plain(obj):
    return isinstance(obj, (torch.Tensor, bool, int, float, str, type(None)))


def _unpacked(call, packed, may_pickle):
    may_pickle = may_pickle or _Trust.pickles_anything
    try:
        return torch.load(io.BytesIO(ctypes.string_at(packed.data_ptr(), packed.numel())), weights_only=not may_pickle)
    except Exception as error:
        if may_pickle:
            raise
        raise UnsupportedError(f"smp.{call}: an object of other classes than tensors, numbers, texts and their lists, tuples and dicts, which only pickle reads, and "
                               f"pickle runs what it is sent; give pickle=True on both sides, or send its parts ({str(error).splitlines()[0][:120]})") from None


def _send(packed, member):
    group = _group_of(_members(WORLD))
    dist.send(torch.tensor([packed.numel()]), member, group=group)
    dist.send(packed, member, group=group)


def _member(call, argument, number, rank_type):
    members = _MEMBERS[_checked(call, "rank_type", rank_type, RankType).value]()
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(members):
        raise ConfigError(f"smp.{call}: {argument}={number!r} among {rank_type.name}: expected a number from 0 to {len(members) - 1}")
    if members[number] == ranks.rank():
        raise ConfigError(f"smp.{call}: {argument}={number} among {rank_type.name} is this rank itself; a rank sends to others")
    return members[number]


def _members(group):
    return _MEMBERS[group.value]()


def _checked(call, argument, value, kind):
    if not isinstance(value, kind):
        raise ConfigError(f"smp.{call}: {argument}={value!r}; expected one of {', '.join(f'smp.{kind.__name__}.{one.name}' for one in kind)}")
    return value


def _barrier(members):
    if len(members) > 1:
        dist.barrier(group=_group_of(members))


def make_groups():
    """The groups of this rank, on the host, and for programs of torch.distributed's own backend. Collective over the
    world, since torch names a group by how many a rank has made before."""
    own_backend = dist.get_backend()
    for members in (tuple(of_kind()) for of_kind in _MEMBERS.values()):
        if members in _groups or ranks.size() == 1:
            continue
        _groups[members] = dist.new_group(members, backend="gloo", use_local_synchronization=True, timeout=world_ranks.TIMEOUT)
        if own_backend != "gloo" and len(members) < ranks.size():
            _of_programs[members] = dist.new_group(members, use_local_synchronization=True, timeout=world_ranks.TIMEOUT)


def _process_group(call, members):
    """torch.distributed's group of these ranks, for the program's own collectives."""
    members = tuple(members)
    if not dist.is_initialized():
        raise StateError(f"smp.{call}: torch.distributed was taken down; leave out destroy_process_group() until the program ends")
    if len(members) == ranks.size():
        return dist.group.WORLD
    return _of_programs.get(members) or _groups[members]


def get_world_process_group():
    """torch.distributed's group of all ranks."""
    return _process_group("get_world_process_group()", range(ranks.size()))


def get_pp_process_group():
    """torch.distributed's group of the stages of this copy of the model."""
    return _process_group("get_pp_process_group()", ranks.get_pp_group())


def get_tp_process_group():
    """torch.distributed's group of the ranks that have slices of the same layers."""
    return _process_group("get_tp_process_group()", ranks.get_tp_group())


def get_rdp_process_group():
    """torch.distributed's group of the ranks that have the same parameters."""
    return _process_group("get_rdp_process_group()", ranks.get_rdp_group())


def get_mp_process_group():
    """torch.distributed's group of the ranks that have one copy of the model together."""
    return _process_group("get_mp_process_group()", ranks.get_mp_group())


def get_dp_process_group():
    """torch.distributed's group of the ranks of this stage, which take different samples."""
    return _process_group("get_dp_process_group()", ranks.get_dp_group())


def _group_of(members):
    return _groups[tuple(members)]
