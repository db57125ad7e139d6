"""The rows of the quick test: some of each theme."""

SAMPLE = frozenset({
    # tokenwise
    "a language model", "parts of unequal length", "normalize over features", "convolution of width 1", "gate and up by slices",
    "drop path as timm writes it", "experts by index put", "router with a capacity",
    # attention
    "grouped queries", "packed qkv by a view", "attention written out", "attention with five dims", "a cache of one forward",
    "transformer encoder evaluated without gradients", "attention of a tensor that numpy has held", "attention by baddbmm", "recomputed layers",
    # losses
    "masked mean by sums", "masked mean by an item", "sum divided by numel", "soft targets", "mse_loss, sum", "z loss", "weight decay as a term",
    "a loss of weights alone", "nothing is cut", "accuracy beside the loss", "dot of flattened features", "a loss of one rank s tokens",
    # pooling
    "mean over tokens", "masked mean over tokens", "last token of each sample", "first token", "attention pooling by a product",
    "flattened tokens into features", "mean of masked tokens over all", "embedding bag of a sample",
    # masks
    "a causal mask of booleans", "a sliding window larger than a part", "alibi of the local length", "an additive padding mask",
    "local queries times local keys", "packed documents by a cut tensor", "a whole window",
    # positions
    "learned positions by arange", "positions added in place", "positions chosen by where", "ids times positions",
    "positions by cumsum of ids that are no padding", "positions by cumsum of the mask", "rotary of given positions",
    "rotary with frequencies by the largest position", "positions of merged tokens",
    # shifts
    "labels shifted by pad", "labels shifted by slices", "ids shifted by roll", "ids shifted by pad", "ids shifted by cat", "logits against the next ids",
    "tokens shifted as rwkv does", "tokens rolled by dim",
    # shorter
    "shorter: over its length", "uncut beside cut: shifted labels", "tokens taken along a dim by whole places", "read: bytes of a storage",
    "whole queries of sharded keys", "a view taken before a part is written",
    # integers
    "a branch on any", "the largest id", "frequencies by bincount", "image features by masked scatter", "one token of each sample written",
    "a running count of chosen experts", "targets behind a separator", "a branch on a sum and a number that is a part s length",
    # merges
    "convolution of width 3", "average pool of width 3", "max pool of width 3", "rolled without a dim", "flipped tokens by fliplr",
    "sorted along the first dim by msort, tokens first", "a triangle of tokens and features", "a gradient along all dims", "shuffled channels",
    "pairs of neighbours by a view", "pairs of distant tokens by a view", "sums of flattened samples added to tokens", "a GRU",
    "samples swapped", "softmax over tokens",
    # batches
    "dpo", "two padded batches cut before either runs", "an encoder s padding beside a decoder of equal length", "one batch cut and one not",
    "samples contrasted", "an encoder and a decoder of two lengths",
    # steps
    "two batches accumulated", "uncut terms at stage 3", "a list of layers recomputed wholly by the engine", "recomputed wholly by the engine",
    "frozen parameters",
    "evaluation between training", "an operator of another library",
    # families
    "Llama", "Llama without position_ids", "T5", "Mistral with a window larger than a part", "Phi-3 with longrope", "RoBERTa without position_ids", "OPT with a mask", "GPT-2", "BLOOM",
    "BERT with padding",
    # attention_variants
    "a window of five by positions", "a window of five as floats", "a sample that ends in the first part", "a sample padded on the left beyond a part",
    "queries mixed over heads causal", "queries with features before tokens", "queries with heads last",
    # lengths
    "queries scaled by the log of the length", "weights where positions are near the length", "last token by the length less one",
    "sum divided by the sum of ones", "positions by a range of python",
    # selections
    "losses of the first fifteen tokens", "all samples first fifteen tokens pooled", "masked tokens of each sample by a view",
    "binary losses of selected floats", "cross entropy of selected tokens", "selected divided by numel of labels",
    # functions
    "vmapped loss of samples", "vmapped mean over tokens", "a masked mean with a backward of its own", "a linear with a backward of its own",
    "a scripted pool by the length",
    # others of these
    "metrics of many kinds", "mean of means of chunks", "windows of a part attend", "windows as long as the sequence attend", "the first three tokens added to",
    "everything is the part", "siglip where the batch is the part", "a decision by a random number", "axial attention along cut rows",
    "nothing cut and the engine cuts all", "DeepSeek-V3 dense",
    # combinations
    "a single token of a rank put back", "keys of one sample for all", "quantiles of ids", "two masks of equal counts", "a penalty by a length",
})
