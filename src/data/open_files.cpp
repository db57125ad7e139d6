#include "data/open_files.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <span>
#include <string_view>

#include "data/compressed.h"
#include "data/file_kind.h"
#include "data/find_files.h"
#include "data/json_texts.h"
#include "data/npy.h"
#include "data/parquet.h"
#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/data/tokenizer.h"

namespace trireme {
namespace {

constexpr size_t kSmallestMapBytes = 4096;
constexpr size_t kMostMaps = 16384;  // Linux allows 65,530 per process, and others need some
constexpr size_t kTextProbeBytes = 8192;

/// The bytes of a file that is not worth a map.
class HeapFile final : public MappedFile {
 public:
  explicit HeapFile(std::string bytes) : bytes_(std::move(bytes)) {}
  const std::byte* data() const noexcept override { return reinterpret_cast<const std::byte*>(bytes_.data()); }
  size_t bytes() const noexcept override { return bytes_.size(); }

 private:
  std::string bytes_;
};

bool is_npy(const FoundFile& file) { return file.path.extension() == ".npy"; }
bool is_token_file(const FoundFile& file) { return is_npy(file) || file.path.extension() == ".bin"; }

/// The ending that says what is in the file: of records.jsonl.gz that is .jsonl.
std::filesystem::path ending_of(const FoundFile& file) {
  const auto last = file.path.extension();
  return last == ".gz" || last == ".zst" ? file.path.stem().extension() : last;
}

bool is_called_json_lines(const FoundFile& file) {
  const auto ending = ending_of(file);
  return ending == ".jsonl" || ending == ".ndjson";
}
bool is_called_parquet(const FoundFile& file) { return ending_of(file) == ".parquet"; }
bool is_called_json(const FoundFile& file) { return is_called_json_lines(file) || ending_of(file) == ".json"; }

std::span<const std::byte> bytes_of(const MappedFile& file) { return {file.data(), file.bytes()}; }
std::string_view text_of(const MappedFile& file) { return {reinterpret_cast<const char*>(file.data()), file.bytes()}; }

bool is_binary(const MappedFile& file) {
  return std::memchr(file.data(), 0, std::min(file.bytes(), kTextProbeBytes)) != nullptr;
}

/// kAuto becomes kBytes, or kUint16 where .bin files are meant (a .npy file says itself what it is).
DataFormat resolve_format(const FoundFiles& found, const DataOptions& options) {
  if (options.format != DataFormat::kAuto) return options.format;
  const auto& files = found.files;
  const auto tokens = std::find_if(files.begin(), files.end(), is_token_file);
  const auto others = std::find_if_not(files.begin(), files.end(), is_token_file);
  if (tokens != files.end() && others != files.end()) {
    throw DataError(trireme::str("data path `", options.path, "` holds token files (", tokens->relative,
                                 ") and others (", others->relative,
                                 "); set the data format to bytes, uint16 or uint32, or give a glob"));
  }
  return tokens != files.end() ? DataFormat::kUint16 : DataFormat::kBytes;
}

class Opener {
 public:
  Opener(const DataOptions& options, FoundFiles found)
      : options_(options),
        found_(std::move(found)),
        format_(resolve_format(found_, options)),
        parquet_(options.python) {
    all_json_ = std::all_of(found_.files.begin(), found_.files.end(), is_called_json);
  }

  OpenedFiles run() {
    OpenedFiles opened{{}, format_, 0};
    for (const auto& file : found_.files) {
      auto piece = open(file);
      if (piece.stored > 0) {
        opened.pieces.push_back(std::move(piece));
      } else {
        ++opened.skipped_files;
      }
    }
    opened.skipped_kinds = skipped_kinds_;
    opened.json_files = json_files_;
    opened.parquet_files = parquet_files_;
    if (opened.pieces.empty()) {
      throw DataError(trireme::str("data path `", options_.path, "` holds nothing to train on: ", opened.skipped_files,
                                   " files, all of them empty or not ", kind(), "; ",
                                   first_skipped_.empty() ? "check the path and the data format" : first_skipped_));
    }
    if (!options_.text_key.empty() && json_files_ == 0 && parquet_files_ == 0)
      throw DataError(trireme::str("text key `", options_.text_key, "` (--text-key): data path `", options_.path,
                                   "` holds no JSON and no Parquet; leave the key out, or name the files .jsonl"));
    if (format_ != DataFormat::kBytes || options_.tokenizer) opened.format = opened.pieces[0].format;
    return opened;
  }

 private:
  const char* kind() const { return format_ == DataFormat::kBytes ? "text" : ".bin or .npy files"; }

  /// A piece without tokens: the file is to be skipped.
  TokenPiece open(const FoundFile& file) {
    const bool bytes = format_ == DataFormat::kBytes;
    if (!bytes && !is_token_file(file) && !found_.by_name) return {};
    TokenPiece piece{map(file), file.path.string(), file.relative, nullptr, format_, 0, 0, bytes};
    piece.data = piece.file->data();
    if (piece.file->bytes() == 0) return {};
    if (options_.format == DataFormat::kAuto && !is_token_file(file)) {
      if (is_parquet(file, piece)) return read_parquet(file, piece);
      decompress(file, piece);
    }
    if (piece.file->bytes() == 0) return {};
    if (options_.format == DataFormat::kAuto && is_of_another_kind(file, piece)) return {};
    if (bytes) {
      const bool json = options_.format == DataFormat::kAuto && is_json(file, *piece.file);
      if (json) take_texts(piece);
      piece.stored = json || is_text(piece) ? static_cast<int64_t>(piece.file->bytes()) : 0;
      if (options_.tokenizer && piece.stored > 0) encode(piece);
      return piece;
    }
    is_npy(file) ? place_npy(piece) : place_raw(piece);
    if (options_.vocab_size > 0) check_vocabulary(piece, options_.vocab_size);
    return piece;
  }

  std::shared_ptr<const MappedFile> map(const FoundFile& file) {
    try {
      auto& files = posix_file_system();
      if (files.size(file.path) < kSmallestMapBytes || maps_ >= kMostMaps) {
        return std::make_shared<HeapFile>(files.read(file.path));
      }
      ++maps_;
      return files.map(file.path);
    } catch (const IoError& error) {
      throw DataError(trireme::str("cannot read data: ", error.what(), "; give a readable file, or exclude it"));
    }
  }

  // Parquet that was cut short is damaged where it is given by itself or called so; else it is a file of another kind.
  bool is_parquet(const FoundFile& file, const TokenPiece& piece) const {
    if (!begins_as_parquet(bytes_of(*piece.file))) return false;
    if (ends_as_parquet(bytes_of(*piece.file))) return true;
    if (!found_.by_name && !is_called_parquet(file)) return false;
    throw DataError(piece.path +
                    ": this Parquet file does not end as one does, so it was cut short, or is still being "
                    "written; copy or download it again");
  }

  TokenPiece read_parquet(const FoundFile& file, TokenPiece& piece) {
    // Files that Spark and Dask put beside others: their schema, or what stands in which of them.
    const auto name = file.path.filename();
    if (!found_.by_name && (name == "_metadata" || name == "_common_metadata")) {
      skipped_kinds_.insert("metadata of Parquet");
      return {};
    }
    std::string stored;
    parquet_.each_text(piece.path, options_.text_key.empty() ? "text" : options_.text_key, [&](std::string_view text) {
      if (options_.tokenizer) return append_tokens(text, piece.path, stored);
      if (!stored.empty()) stored += '\0';
      stored += text;
    });
    ++parquet_files_;
    options_.tokenizer ? hold_tokens(piece, std::move(stored)) : hold_text(piece, std::move(stored));
    return piece;
  }

  static void hold_text(TokenPiece& piece, std::string text) {
    piece.file = std::make_shared<HeapFile>(std::move(text));
    piece.data = piece.file->data();
    piece.stored = static_cast<int64_t>(piece.file->bytes());
  }

  static void hold_tokens(TokenPiece& piece, std::string stored) {
    stored.shrink_to_fit();
    piece.file = std::make_shared<HeapFile>(std::move(stored));
    piece.data = piece.file->data();
    piece.format = DataFormat::kUint32;
    piece.stored = static_cast<int64_t>(piece.file->bytes() / sizeof(uint32_t));
    piece.ends_document = false;  // by a token of its own
  }

  static void decompress(const FoundFile& file, TokenPiece& piece) {
    if (!is_compressed(bytes_of(*piece.file))) return;
    const auto ending = ending_of(file);
    if (ending == ".bin" || ending == ".npy")
      throw DataError(piece.path + ": tokens are read where they lie in the file, which is compressed; unpack it");
    piece.file = std::make_shared<HeapFile>(decompressed(bytes_of(*piece.file), piece.path));
    piece.data = piece.file->data();
    if (begins_as_parquet(bytes_of(*piece.file)))
      throw DataError(piece.path + ": this is a compressed Parquet file, which is read where it lies; unpack it");
  }

  // Whether the file is to be skipped for what its first bytes say. What the user has named, be it by an ending, is an
  // error instead.
  bool is_of_another_kind(const FoundFile& file, const TokenPiece& piece) {
    const bool may_be_tokens = is_token_file(file);
    if (is_npy(file) && text_of(*piece.file).starts_with("\x93NUMPY")) return false;
    const auto kind = file_kind(bytes_of(*piece.file), may_be_tokens ? Expected::kTokens : Expected::kText);
    if (!kind && is_called_parquet(file))
      throw DataError(piece.path +
                      ": this is no Parquet file, which begins with PAR1; copy or download it again, or "
                      "name it for what it is");
    if (!kind) return false;
    std::string fix = kind->what_to_do;
    if (const auto at = fix.find("FILE"); at != fix.npos) fix.replace(at, 4, piece.path);
    const std::string text = trireme::str(piece.path, ": this is a file of the kind ", kind->name, "; ", fix);
    if (found_.by_name || may_be_tokens || is_called_json_lines(file) || is_called_parquet(file))
      throw DataError(trireme::str(text, "; or set the data format (--data-format ", may_be_tokens ? "uint16" : "bytes",
                                   ") to train on its bytes all the same"));
    if (first_skipped_.empty()) first_skipped_ = text;
    skipped_kinds_.insert(kind->name);
    return true;
  }

  // Files called .json are texts of programs too, so they are data only where there is nothing else. The bytes of a
  // single file speak for themselves.
  bool is_json(const FoundFile& file, const MappedFile& bytes) const {
    return is_called_json_lines(file) || (all_json_ && is_called_json(file)) ||
           (found_.by_name && looks_like_json(text_of(bytes)));
  }

  void take_texts(TokenPiece& piece) {
    const std::string key = options_.text_key.empty() ? "text" : options_.text_key;
    hold_text(piece, json_texts(text_of(*piece.file), piece.path, key));
    ++json_files_;
  }

  /// The tokens of the documents in `piece`, which lie between NULs; no token where it is no text.
  void encode(TokenPiece& piece) {
    piece.stored = 0;
    if (const std::string wrong = not_utf8(text_of(*piece.file)); !wrong.empty()) {
      if (found_.by_name)
        throw DataError(trireme::str(piece.path, ", ", wrong, ": this is not UTF-8, which a tokenizer reads; convert ",
                                     "it: iconv -f LATIN1 -t UTF-8 ", piece.path));
      skipped_kinds_.insert("text that is not UTF-8");
      return;
    }
    std::string stored;
    std::string_view rest = text_of(*piece.file);
    while (!rest.empty()) {
      const std::string_view document = rest.substr(0, rest.find('\0'));
      rest.remove_prefix(std::min(document.size() + 1, rest.size()));
      if (!document.empty()) append_tokens(document, piece.path, stored);
    }
    hold_tokens(piece, std::move(stored));
  }

  void append_tokens(std::string_view document, const std::string& path, std::string& stored) const {
    try {
      for (const int64_t token : options_.tokenizer->encode_document(document)) {
        const auto value = static_cast<uint32_t>(token);
        stored.append(reinterpret_cast<const char*>(&value), sizeof(value));
      }
    } catch (const DataError& error) {
      throw DataError(trireme::str(path, ": ", error.what()));
    }
  }

  /// "line 7", the first that is no UTF-8; empty where all are.
  static std::string not_utf8(std::string_view text) {
    if (is_utf8(text)) return "";
    size_t line = 1;
    while (is_utf8(text.substr(0, text.find('\n')))) {
      text.remove_prefix(text.find('\n') + 1);
      ++line;
    }
    return trireme::str("line ", line);
  }

  bool is_text(const TokenPiece& piece) const {
    if (!is_binary(*piece.file)) return true;
    if (!found_.by_name) return false;
    if (options_.format == DataFormat::kBytes) return true;
    throw DataError(piece.path + ": it has NUL bytes, so it is no text; set the data format to what it is (uint16, " +
                    "uint32), or to bytes to train on its bytes all the same");
  }

  void place_raw(TokenPiece& piece) const {
    const size_t bytes = piece.file->bytes();
    if (bytes % itemsize(format_) != 0) {
      throw DataError(trireme::str(piece.path, ": ", bytes, " bytes are not a whole number of ",
                                   format_ == DataFormat::kUint16 ? "uint16" : "uint32",
                                   " tokens; set the data format, or copy the file again"));
    }
    piece.stored = static_cast<int64_t>(bytes / itemsize(format_));
  }

  void place_npy(TokenPiece& piece) const {
    const auto array = parse_npy(std::span(piece.file->data(), piece.file->bytes()), piece.path);
    if (options_.format != DataFormat::kAuto && array.format != format_) {
      throw DataError(trireme::str(piece.path, ": it holds ", 8 * itemsize(array.format), "-bit tokens, but the data ",
                                   "format is uint", 8 * itemsize(format_), "; set it to auto"));
    }
    piece.format = array.format;
    piece.data += array.offset;
    piece.stored = array.size;
  }

  const DataOptions& options_;
  const FoundFiles found_;
  const DataFormat format_;
  bool all_json_ = false;  // all files are called so
  size_t maps_ = 0;
  int64_t json_files_ = 0;
  int64_t parquet_files_ = 0;
  ParquetReader parquet_;
  std::string first_skipped_;  // path, kind and what to do
  std::set<std::string> skipped_kinds_;
};

}  // namespace

OpenedFiles open_files(const DataOptions& options) {
  auto found = find_files(options.path, options.exclude);
  if (options.tokenizer && resolve_format(found, options) != DataFormat::kBytes)
    throw DataError(trireme::str("data path `", options.path,
                                 "` holds tokens, which a tokenizer (--tokenizer) does not ",
                                 "read; leave it out, or give text"));
  auto opened = Opener(options, std::move(found)).run();
  if (opened.format == DataFormat::kBytes && options.vocab_size > 0 && options.vocab_size < kByteVocabSize) {
    throw DataError(trireme::str("data path `", options.path, "`: bytes need a vocabulary of ", kByteVocabSize,
                                 ", but the model's vocab_size=", options.vocab_size, "; give it at least 256"));
  }
  return opened;
}

}  // namespace trireme
