#!/usr/bin/env python3
"""Turns a checkpoint of this folder into one fp32 state dictionary, with the arguments of DeepSpeed's zero_to_fp32.py.

    python zero_to_fp32.py . output_dir                        pytorch_model.bin
    python zero_to_fp32.py . output_dir --safe_serialization   model.safetensors

Where the program `trireme` is found (TRIREME_PROGRAM, or PATH), it does the work and verifies every checksum. Otherwise
this file does: with Python alone for safetensors, with torch for pytorch_model.bin. It may be imported:

    from zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint("checkpoints"))
"""
import argparse
import array
import json
import math
import os
import shutil
import struct
import subprocess
import sys

try:
    import xxhash
except ImportError:
    xxhash = None

ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4,
              "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}
FLOATING = {"F16": "e", "BF16": None, "F64": "d", "F8_E5M2": None, "F8_E4M3": None}  # besides F32: how struct calls it
PIECE_BYTES = 4 << 20
SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Checkpoint:
    """The weights of one checkpoint, as fp32: from the masters where there are any."""

    def __init__(self, checkpoint_dir, tag=None, exclude_frozen_parameters=False):
        self.folder = find_checkpoint(checkpoint_dir, tag)
        with open(os.path.join(self.folder, "manifest.json"), "rb") as file:
            text = file.read()
        self.manifest = json.loads(text)
        if self.manifest.get("format") != "trireme-checkpoint" or self.manifest.get("version") not in (1, 2):
            raise ValueError(f"{self.folder}: this script reads checkpoints of format versions 1 and 2; use `trireme consolidate`")
        self._check_manifest(text)
        self._check_files()
        saved = {tensor["name"]: tensor for tensor in self.manifest["tensors"]}
        values = self.manifest["values"]
        frozen = frozen_parameters(saved, values, self.folder) if exclude_frozen_parameters else set()
        aliases = {alias: tensor["name"][len("model."):] for tensor in self.manifest["tensors"]
                   for alias in tensor.get("values", {}).get("aliases", [])}
        aliases.update(values.get("aliases", {}))
        self.tensors = {}  # name -> tensor of the manifest: the weight's shape, the master's slices
        for name, tensor in saved.items():
            weight = name[len("model."):]
            if name.startswith("model.") and weight not in frozen:
                self.tensors[weight] = saved.get("master." + weight, tensor) if tensor["dtype"] in FLOATING else tensor
        if not self.tensors:
            raise ValueError(f"{self.folder}: this checkpoint holds no weights")
        self.aliases = {alias: name for alias, name in aliases.items() if name in self.tensors}

    def _check_manifest(self, text):
        tail = len(b'  "manifest_checksum": "') + 16 + len(b'"\n}\n')
        if xxhash and self.manifest["manifest_checksum"] != xxhash.xxh3_64_hexdigest(text[:-tail]):
            raise ValueError(f"{self.folder}/manifest.json: damaged: wrong checksum; use another checkpoint")
        if not xxhash:
            print("zero_to_fp32.py: checksums are not compared, because the Python package xxhash is missing; "
                  "`trireme inspect` compares them", file=sys.stderr)

    def _check_files(self):
        for file in self.manifest["files"]:
            path = os.path.join(self.folder, file["name"])
            found = os.path.getsize(path) if os.path.exists(path) else None
            if found != file["bytes"]:
                raise ValueError(f"{path}: {'missing' if found is None else f'{found} bytes'}, expected {file['bytes']} "
                                 "bytes; use another checkpoint")

    def dtype(self, name):
        return "F32" if self.tensors[name]["dtype"] in FLOATING else self.tensors[name]["dtype"]

    def shape(self, name):
        return self.tensors[name]["shape"]

    def numel(self, name):
        return sum(piece["numel"] for piece in self.tensors[name]["slices"])

    def bytes(self, name):
        return self.numel(name) * ITEM_BYTES[self.dtype(name)]

    def pieces(self, name):
        """Yields the tensor's bytes as fp32, or as saved where it is not floating-point."""
        tensor = self.tensors[name]
        blocks = (raw for part in tensor["slices"] for raw in self._blocks(tensor, part))
        for raw in self._joined(tensor) if "parts" in tensor else blocks:
            yield to_fp32(raw, tensor["dtype"], name)

    def _blocks(self, tensor, part):
        block_bytes = self.manifest["checksum"]["block_bytes"]
        with open(os.path.join(self.folder, self.manifest["files"][part["file"]]["name"]), "rb") as file:
            file.seek(part["offset"])
            for block, expected in enumerate(part["checksums"]):
                raw = file.read(min(block_bytes, part["bytes"] - block * block_bytes))
                if xxhash and xxhash.xxh3_64_hexdigest(raw) != expected:
                    first = part["begin"] + block * block_bytes // ITEM_BYTES[tensor["dtype"]]
                    raise ValueError(f"{file.name}: tensor \"{tensor['name']}\" is damaged from element {first} on: wrong "
                                     "checksum; use another checkpoint")
                yield raw

    def _joined(self, tensor):
        """Yields the whole tensor, which ranks have saved in parts."""
        dim, shape = tensor["parts"][0]["dim"], tensor["shape"]
        row_bytes = math.prod(shape[dim + 1:]) * ITEM_BYTES[tensor["dtype"]]  # of one index of `dim`
        whole = bytearray(math.prod(shape[:dim + 1]) * row_bytes)
        for index, part in enumerate(tensor["parts"]):
            data = b"".join(raw for piece in tensor["slices"] if piece.get("part", 0) == index
                            for raw in self._blocks(tensor, piece))
            taken = 0
            for outer in range(math.prod(shape[:dim])):
                for begin, end in part["intervals"]:
                    count = (end - begin) * row_bytes
                    to = (outer * shape[dim] + begin) * row_bytes
                    whole[to:to + count] = data[taken:taken + count]
                    taken += count
        yield bytes(whole)


def find_checkpoint(checkpoint_dir, tag):
    if tag is None:
        if os.path.isfile(os.path.join(checkpoint_dir, "manifest.json")):
            return checkpoint_dir
        latest = os.path.join(checkpoint_dir, "latest")
        if not os.path.isfile(latest):
            raise ValueError(f"Unable to find 'latest' file at {latest}; name a checkpoint with --tag")
        with open(latest, encoding="utf-8") as file:
            tag = file.read().strip()
        if os.path.isfile(os.path.join(checkpoint_dir, "model.safetensors")):
            print(f"zero_to_fp32.py: {tag} is taken, which {latest} names; model.safetensors beside it is not",
                  file=sys.stderr)
    folder = os.path.join(checkpoint_dir, tag)
    if not os.path.isfile(os.path.join(folder, "manifest.json")):
        raise FileNotFoundError(f"'{folder}' is no complete checkpoint: it has no manifest.json")
    return folder


def frozen_parameters(saved, values, folder):
    trained = {name[len("master."):] for name in saved if name.startswith("master.")}
    trained |= {name.split(".", 2)[2] for name in saved if name.startswith("optimizer.")}
    steps = dict(values.get("parameter_steps") or {})
    steps.update({name[len("model."):]: tensor["values"]["steps"] for name, tensor in saved.items()
                  if "steps" in tensor.get("values", {})})
    trained |= {name for name, count in steps.items() if count > 0}
    if not steps or not trained:
        raise ValueError(f"{folder}: nothing in this checkpoint tells frozen parameters from others; keep them")
    return set(steps) - trained


def to_fp32(raw, dtype, name):
    if dtype not in FLOATING:
        return raw
    if dtype == "BF16":  # the upper half of an fp32
        wide = bytearray(2 * len(raw))
        wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
        return wide
    if FLOATING[dtype] is None:
        raise ValueError(f"tensor {name}: this script does not read {dtype}; use `trireme consolidate`")
    numbers = struct.unpack(f"<{len(raw) // ITEM_BYTES[dtype]}{FLOATING[dtype]}", raw)
    wide = array.array("f", numbers)
    if sys.byteorder == "big":
        wide.byteswap()
    return wide.tobytes()


def torch_tensor(checkpoint, name):
    import torch
    dtypes = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
              "I64": torch.int64, "F32": torch.float32, "C64": torch.complex64}
    dtype = checkpoint.dtype(name)
    if dtype not in dtypes:
        raise ValueError(f"tensor {name}: this script does not make tensors of {dtype}; use `trireme consolidate`")
    data = bytearray().join(checkpoint.pieces(name))
    if not data:
        return torch.empty(checkpoint.shape(name), dtype=dtypes[dtype])
    return torch.frombuffer(data, dtype=dtypes[dtype]).reshape(checkpoint.shape(name))


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=None, exclude_frozen_parameters=False):
    """The state dictionary of the whole model, in host memory; tied parameters are the same tensor under each name."""
    checkpoint = Checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    state = {name: torch_tensor(checkpoint, name) for name in checkpoint.tensors}
    for alias, name in checkpoint.aliases.items():
        state[alias] = state[name]
    return state


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    """Loads the weights into `model`, moved to the host, and returns it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def parse_size(text):
    if isinstance(text, int):
        return text
    number, unit = text.strip()[:-2], text.strip()[-2:].upper()
    try:
        return int(float(number) * SIZE_UNITS[unit])
    except (KeyError, ValueError):
        raise ValueError(f"'{text}' is no size; write for example 5GB or 500MB") from None


def split_into_files(checkpoint, weights_name, max_bytes):
    """Names of the tensors by file, in the checkpoint's order."""
    shards, size = [[]], 0
    for name in checkpoint.tensors:
        if shards[-1] and size + checkpoint.bytes(name) > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += checkpoint.bytes(name)
    if len(shards) == 1:
        return {weights_name: shards[0]}
    stem, extension = os.path.splitext(weights_name)
    return {f"{stem}-{i:05d}-of-{len(shards):05d}{extension}": names for i, names in enumerate(shards, 1)}


def write_safetensors(checkpoint, names, path):
    names = sorted(names, key=lambda name: -ITEM_BYTES[checkpoint.dtype(name)])  # wide ones first: all are aligned
    metadata = {alias: name for alias, name in checkpoint.aliases.items() if name in names}
    header, offset = {"__metadata__": dict(sorted({**metadata, "format": "pt"}.items()))}, 0
    for name in names:
        header[name] = {"dtype": checkpoint.dtype(name), "shape": checkpoint.shape(name),
                        "data_offsets": [offset, offset + checkpoint.bytes(name)]}
        offset += checkpoint.bytes(name)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % 64)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            for piece in checkpoint.pieces(name):
                file.write(piece)


def write_torch(checkpoint, names, path):
    import torch
    state = {name: torch_tensor(checkpoint, name) for name in names}
    state.update({alias: state[name] for alias, name in checkpoint.aliases.items() if name in state})
    torch.save(state, path)


def trireme_program():
    return os.environ.get("TRIREME_PROGRAM") or shutil.which("trireme")


def convert_with_program(program, checkpoint_dir, output_dir, weights_name, max_shard_size, tag, exclude_frozen_parameters):
    command = [program, "consolidate", checkpoint_dir, output_dir, "--dtype", "fp32", "--overwrite", "--weights-only", "--file", weights_name,
               "--max-shard-size", str(parse_size(max_shard_size))]
    command += ["--tag", tag] if tag else []
    command += ["--exclude-frozen-parameters"] if exclude_frozen_parameters else []
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` ended with {done.returncode}; its message is above")


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, max_shard_size="5GB", safe_serialization=False,
                                               tag=None, exclude_frozen_parameters=False):
    """Writes pytorch_model.bin or model.safetensors into `output_dir`, or shards of at most `max_shard_size` and an
    index."""
    weights_name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    program = trireme_program()
    if program:
        return convert_with_program(program, checkpoint_dir, output_dir, weights_name, max_shard_size or "1000TB", tag,
                                    exclude_frozen_parameters)
    if not safe_serialization:
        try:
            import torch  # noqa: F401
        except ImportError:
            raise RuntimeError("pytorch_model.bin needs torch, or the program `trireme` on PATH; without both use "
                               "--safe_serialization") from None
    checkpoint = Checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    files = split_into_files(checkpoint, weights_name, parse_size(max_shard_size or "1000TB"))
    os.makedirs(output_dir, exist_ok=True)
    for file_name, names in files.items():
        path = os.path.join(output_dir, file_name)
        temporary = f"{path}.tmp{os.getpid()}"
        try:
            (write_safetensors if safe_serialization else write_torch)(checkpoint, names, temporary)
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)
        print(path)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(checkpoint.bytes(name) for name in checkpoint.tensors)},
                 "weight_map": {name: file_name for file_name, names in files.items() for name in names}}
        with open(os.path.join(output_dir, weights_name + ".index.json"), "w", encoding="utf-8") as file:
            file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")


def main():
    parser = argparse.ArgumentParser(description="Writes one fp32 state dictionary from a checkpoint.")
    parser.add_argument("checkpoint_dir", help="folder of the checkpoints, such as path/checkpoints")
    parser.add_argument("output_dir", help="folder that the weights go into")
    parser.add_argument("--max_shard_size", default="5GB", help="larger models become several files (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="model.safetensors instead of pytorch_model.bin")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint (default: the one that `latest` names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="show where an error came from")
    arguments = parser.parse_args()
    try:
        convert_zero_checkpoint_to_fp32_state_dict(arguments.checkpoint_dir, arguments.output_dir, arguments.max_shard_size,
                                                   arguments.safe_serialization, arguments.tag,
                                                   arguments.exclude_frozen_parameters)
    except (OSError, RuntimeError, ValueError) as error:
        if arguments.debug:
            raise
        sys.exit(f"zero_to_fp32.py: {error}")


if __name__ == "__main__":
    main()
