#include "data/compressed.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>

#include "trireme/base/error.h"

namespace trireme {
namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view kGzip = "\x1f\x8b\x08"sv;
constexpr std::string_view kZstd = "\x28\xb5\x2f\xfd"sv;
constexpr size_t kMostGrowth = size_t{1} << 26;  // bytes that are made room for at once
constexpr size_t kMostInput = size_t{1} << 30;   // zlib counts in 32 bits

std::string_view text_of(std::span<const std::byte> file) {
  return {reinterpret_cast<const char*>(file.data()), file.size()};
}

[[noreturn]] void fail(const std::string& path, const char* kind, const std::string& what, size_t offset) {
  throw DataError(
      trireme::str(path, ": this ", kind, " file ", what, " at byte ", offset, "; copy or download it again"));
}

/// A text that grows by doubling, up to a limit per time.
class Output {
 public:
  explicit Output(size_t input_bytes) { text_.resize(std::clamp<size_t>(4 * input_bytes, 4096, kMostGrowth)); }

  char* free() {
    if (used_ == text_.size()) text_.resize(text_.size() + std::min(text_.size(), kMostGrowth));
    return text_.data() + used_;
  }
  size_t free_bytes() const { return text_.size() - used_; }
  void take(size_t bytes) { used_ += bytes; }
  std::string text() {
    text_.resize(used_);
    text_.shrink_to_fit();
    return std::move(text_);
  }

 private:
  std::string text_;
  size_t used_ = 0;
};

struct EndInflate {
  void operator()(z_stream* stream) const {
    inflateEnd(stream);
    delete stream;
  }
};

std::string of_gzip(std::string_view file, const std::string& path) {
  constexpr int kGzipWindow = 15 + 16;  // of the largest window, with gzip's header
  std::unique_ptr<z_stream, EndInflate> stream(new z_stream{});
  if (inflateInit2(stream.get(), kGzipWindow) != Z_OK) throw std::bad_alloc();
  Output output(file.size());
  size_t read = 0;
  while (true) {
    output.free();
    const size_t input = std::min(file.size() - read, kMostInput);
    const size_t room = output.free_bytes();
    // The library's type is not const, and it does not write there.
    stream->next_in = reinterpret_cast<Bytef*>(const_cast<char*>(file.data() + read));
    stream->avail_in = static_cast<uInt>(input);
    stream->next_out = reinterpret_cast<Bytef*>(output.free());
    stream->avail_out = static_cast<uInt>(room);
    const int status = inflate(stream.get(), Z_NO_FLUSH);
    read += input - stream->avail_in;
    output.take(room - stream->avail_out);
    if (status == Z_STREAM_END) {
      const std::string_view rest = file.substr(read);
      if (rest.find_first_not_of('\0') == rest.npos) return output.text();
      if (!rest.starts_with(kGzip)) fail(path, "gzip", "is followed by something else", read);
      inflateReset(stream.get());
      continue;
    }
    if (status == Z_MEM_ERROR) throw std::bad_alloc();
    if (status != Z_OK && status != Z_BUF_ERROR) {
      const std::string reason = stream->msg == nullptr ? "" : trireme::str(" (", stream->msg, ")");
      fail(path, "gzip", "is damaged" + reason, read);
    }
    if (read == file.size() && stream->avail_out > 0) fail(path, "gzip", "ends before its text does,", read);
  }
}

struct FreeStream {
  void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
};

std::string of_zstd(std::string_view file, const std::string& path) {
  const std::unique_ptr<ZSTD_DStream, FreeStream> stream(ZSTD_createDStream());
  if (!stream) throw std::bad_alloc();
  // Windows beyond 128 MiB, which `zstd --long=31` makes, are memory that the reader has to agree to.
  ZSTD_DCtx_setParameter(stream.get(), ZSTD_d_windowLogMax, 31);
  Output output(file.size());
  ZSTD_inBuffer input{file.data(), file.size(), 0};
  size_t wanted = 1;  // 0 between two frames
  while (input.pos < input.size || wanted != 0) {
    char* room = output.free();
    ZSTD_outBuffer made{room, output.free_bytes(), 0};
    const size_t before = input.pos;
    const bool begins_frame = wanted == 0;
    wanted = ZSTD_decompressStream(stream.get(), &made, &input);
    if (ZSTD_isError(wanted)) {
      const std::string reason = trireme::str(" (", ZSTD_getErrorName(wanted), ")");
      fail(path, "zstd", begins_frame ? "is followed by something else" : "is damaged" + reason, before);
    }
    output.take(made.pos);
    if (wanted != 0 && input.pos == input.size && made.pos < made.size)
      fail(path, "zstd", "ends before its text does,", input.pos);
  }
  return output.text();
}

}  // namespace

bool is_compressed(std::span<const std::byte> file) {
  return text_of(file).starts_with(kGzip) || text_of(file).starts_with(kZstd);
}

std::string decompressed(std::span<const std::byte> file, const std::string& path) {
  const std::string_view text = text_of(file);
  return text.starts_with(kGzip) ? of_gzip(text, path) : of_zstd(text, path);
}

}  // namespace trireme
