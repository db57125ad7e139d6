"""Loads a Llama from a folder, as every rank of a job; prints what rank 0's memory rose to, in MiB. Arguments: folder,
configuration.

What counts is memory that nothing else could use: anonymous and shared, not pages of the checkpoint, which is mapped.
"""
import json
import sys
import threading

import deepspeed
import torch
import transformers
from transformers.integrations import HfDeepSpeedConfig


def used_mib():
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 1024


def main(folder, config):
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    kind = transformers.LlamaForCausalLM  # imported here
    kept = HfDeepSpeedConfig(config)  # while it lives, from_pretrained() shards
    start, peak, done = used_mib(), [0.0], threading.Event()

    def poll():
        while not done.wait(0.005):
            peak[0] = max(peak[0], used_mib())

    poller = threading.Thread(target=poll, daemon=True)
    poller.start()
    model = kind.from_pretrained(folder)
    done.set()
    poller.join()
    sizes = [parameter.numel() * 4 / 2**20 for parameter in model.parameters()]
    engine, *_ = deepspeed.initialize(model=model, config=config)
    with torch.no_grad():
        loss = engine(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.item()
    if deepspeed.comm.get_rank() == 0:
        print("TEST_RESULT " + json.dumps({"rise": peak[0] - start, "model": sum(sizes), "largest": max(sizes), "loss": loss}))
    del kept


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
