#include "trireme/data/dataset.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "data/hash.h"
#include "data/open_files.h"
#include "data/token_stream.h"
#include "trireme/base/error.h"
#include "trireme/base/suggest.h"
#include "trireme/data/tokenizer.h"

namespace trireme {
namespace {

struct SplitPieces {
  std::vector<TokenPiece> train;
  std::vector<TokenPiece> held_out;
};

void check_options(const DataOptions& o) {
  if (o.seq < 1) throw ConfigError(trireme::str("seq=", o.seq, ": a sample needs at least 1 token"));
  if (!(o.held_out_fraction >= 0 && o.held_out_fraction < 1)) {
    throw ConfigError(trireme::str("held_out_fraction=", o.held_out_fraction, ": must be at least 0 and below 1"));
  }
  if (o.tokenizer && !o.tokenizer->document_end())
    throw ConfigError(
        "the tokenizer has no tokenizer_config.json with an `eos_token` beside it; say which token ends a document, by "
        "--eos-token TEXT");
  if (o.vocab_size < 0) throw ConfigError(trireme::str("vocab_size=", o.vocab_size, ": must be positive, or 0"));
}

/// The tail of the file is held out.
SplitPieces split_one(TokenPiece piece, double fraction) {
  TokenPiece tail = piece;
  tail.stored = static_cast<int64_t>(static_cast<double>(piece.stored) * fraction);
  if (tail.stored == 0) return {{std::move(piece)}, {}};
  piece.stored -= tail.stored;
  piece.ends_document = false;
  tail.skipped = piece.stored;
  tail.data += piece.stored * static_cast<int64_t>(itemsize(piece.format));
  return {{std::move(piece)}, {std::move(tail)}};
}

/// Whole files are held out: those with the smallest hashes. At least one file is on each side.
SplitPieces split_files(std::vector<TokenPiece> pieces, double fraction, uint64_t seed) {
  const auto place = [&](const TokenPiece& piece) { return hash_text(piece.relative, seed); };
  const auto below = [&](const TokenPiece& a, const TokenPiece& b) { return place(a) < place(b); };
  const auto [first, last] = std::minmax_element(pieces.begin(), pieces.end(), below);
  const uint64_t smallest = place(*first);
  const uint64_t largest = place(*last);
  const double limit = fraction * 18446744073709551616.0;  // 2^64
  SplitPieces split;
  for (auto& piece : pieces) {
    const uint64_t hash = place(piece);
    const bool held_out = hash == smallest || (static_cast<double>(hash) < limit && hash != largest);
    (held_out ? split.held_out : split.train).push_back(std::move(piece));
  }
  return split;
}

SplitPieces split(std::vector<TokenPiece> pieces, const DataOptions& o) {
  if (o.held_out_fraction == 0) return {std::move(pieces), {}};
  if (pieces.size() == 1) return split_one(std::move(pieces[0]), o.held_out_fraction);
  return split_files(std::move(pieces), o.held_out_fraction, o.seed);
}

TokenDataset make_dataset(std::vector<TokenPiece> pieces, const DataOptions& o, const char* what) {
  auto stream = std::make_shared<const TokenStream>(std::move(pieces));
  TokenDataset dataset(stream, o.seq);
  if (dataset.size() == 0) {
    throw DataError(trireme::str("data path `", o.path, "`: the ", what, " split has ", stream->tokens(), " tokens in ",
                                 stream->pieces().size(), " files, but one sample needs seq + 1 = ", o.seq + 1,
                                 "; give more data or a smaller seq"));
  }
  return dataset;
}

}  // namespace

DataFormat data_format(const std::string& name) {
  if (name == "auto") return DataFormat::kAuto;
  if (name == "bytes") return DataFormat::kBytes;
  if (name == "uint16") return DataFormat::kUint16;
  if (name == "uint32") return DataFormat::kUint32;
  throw ConfigError(trireme::str("data format `", name, "` is not known; auto, bytes, uint16 and uint32 are.",
                                 did_you_mean(name, {"auto", "bytes", "uint16", "uint32"})));
}

TokenDataset::TokenDataset(std::shared_ptr<const TokenStream> stream, int64_t seq)
    : stream_(std::move(stream)), seq_(seq) {}

int64_t TokenDataset::size() const { return stream_ ? std::max<int64_t>(0, stream_->tokens() - 1) / seq_ : 0; }
int64_t TokenDataset::tokens() const { return stream_ ? stream_->tokens() : 0; }
int64_t TokenDataset::files() const { return stream_ ? static_cast<int64_t>(stream_->pieces().size()) : 0; }

int64_t TokenDataset::fingerprint() const {
  return static_cast<int64_t>(mix64((stream_ ? stream_->fingerprint() : 0) ^ static_cast<uint64_t>(seq_)));
}

TokenBatch TokenDataset::sample(int64_t index) const {
  auto [input, target] = batch({index});
  return {input.squeeze(0), target.squeeze(0)};
}

TokenBatch TokenDataset::batch(const std::vector<int64_t>& indices) const {
  const auto rows = static_cast<int64_t>(indices.size());
  TokenBatch batch{at::empty({rows, seq_}, at::kLong), at::empty({rows, seq_}, at::kLong)};
  auto* input = batch.input.mutable_data_ptr<int64_t>();
  auto* target = batch.target.mutable_data_ptr<int64_t>();
  std::vector<int64_t> tokens(static_cast<size_t>(seq_) + 1);
  for (const int64_t index : indices) {
    if (index < 0 || index >= size()) {
      throw ShapeError(trireme::str("sample ", index, " of a data set of ", size(), " samples"));
    }
    stream_->copy(index * seq_, seq_ + 1, tokens.data());
    input = std::copy(tokens.begin(), tokens.end() - 1, input);
    target = std::copy(tokens.begin() + 1, tokens.end(), target);
  }
  return batch;
}

DataSplits open_data(const DataOptions& options) {
  check_options(options);
  auto opened = open_files(options);
  auto parts = split(std::move(opened.pieces), options);
  DataSplits splits;
  splits.train = make_dataset(std::move(parts.train), options, "training");
  if (options.held_out_fraction > 0) splits.held_out = make_dataset(std::move(parts.held_out), options, "held-out");
  splits.vocab_size = opened.format == DataFormat::kBytes ? kByteVocabSize
                      : options.tokenizer                 ? options.tokenizer->vocab_size()
                                                          : options.vocab_size;
  splits.format = opened.format;
  splits.skipped_files = opened.skipped_files;
  splits.skipped_kinds = {opened.skipped_kinds.begin(), opened.skipped_kinds.end()};
  splits.json_files = opened.json_files;
  splits.parquet_files = opened.parquet_files;
  splits.is_encoded = options.tokenizer != nullptr;
  return splits;
}

}  // namespace trireme
