"""Models of Hugging Face on two samples of which ranks may have parts, and which begin with tokens without a label."""
import functools

import torch
import zoo
from zoo import hugging_face

LENGTH = 22


def _batch(number, padded, has_types):
    """Named arguments; where `padded` the second sample ends early."""
    ids = torch.randint(3, hugging_face.SIZES["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(number))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :LENGTH // 2 - 1] = -100
    whole = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH).unsqueeze(0)}
    if has_types:  # which the model else makes up itself
        whole["token_type_ids"] = torch.zeros_like(ids)
    if padded:
        mask[1, -5:] = 0
        labels[mask == 0] = -100
        whole["attention_mask"] = mask
    return (whole,)


PROGRAMS = zoo.Collection("samples", loss=lambda call, _, whole: call(**whole).loss, sorted_by_words=False)
for _name, _kind, _more in (*((kind, kind, {"use_cache": False}) for kind in ("llama", "gpt2", "qwen2", "phi3")), ("bert", "BertForMaskedLM", {})):
    for _padded in (False, True):
        PROGRAMS.add(f"samples {_name}{', padded' * _padded}", functools.partial(hugging_face.model, _kind, **_more),
                     batch=functools.partial(_batch, padded=_padded, has_types=_name == "bert"), train_micro_batch_size_per_gpu=2)
