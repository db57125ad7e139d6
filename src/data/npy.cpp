#include "data/npy.h"

#include <charconv>
#include <optional>
#include <string_view>

#include "trireme/base/error.h"

namespace trireme {
namespace {

[[noreturn]] void damaged(const std::string& path, const std::string& reason) {
  throw DataError(path + ": not a readable .npy file: " + reason);
}

/// The value of `key` in the header's Python dictionary, from its first character to the end of the header.
std::string_view value_of(std::string_view header, std::string_view key, const std::string& path) {
  for (const char quote : {'\'', '"'}) {
    const std::string quoted = quote + std::string(key) + quote;
    const size_t at = header.find(quoted);
    if (at == std::string_view::npos) continue;
    const size_t begin = header.find_first_not_of(": ", at + quoted.size());
    if (begin != std::string_view::npos) return header.substr(begin);
  }
  damaged(path, trireme::str("its header has no `", key, "`"));
}

DataFormat parse_dtype(std::string_view value, const std::string& path) {
  const std::string_view dtype = value.substr(0, value.find(value[0], 1) + 1);
  const std::string_view name = dtype.size() > 2 ? dtype.substr(1, dtype.size() - 2) : dtype;
  if (name == "<u2") return DataFormat::kUint16;
  if (name == "<u4") return DataFormat::kUint32;
  throw DataError(trireme::str(path, ": dtype ", name, " is no token type; save it as little-endian uint16 (<u2) or ",
                               "uint32 (<u4), e.g. tokens.astype('<u2')"));
}

/// "(123,)" -> 123; nothing for any other number of dims.
std::optional<int64_t> parse_shape(std::string_view value) {
  int64_t size = 0;
  if (value.empty() || value[0] != '(') return std::nullopt;
  const char* const end = value.data() + value.size();
  const auto [rest, failed] = std::from_chars(value.data() + 1, end, size);
  if (failed != std::errc() || size < 0) return std::nullopt;
  const std::string_view tail(rest, static_cast<size_t>(end - rest));
  return tail.starts_with(",)") ? std::optional(size) : std::nullopt;
}

/// Where the header text begins, and its length.
std::pair<size_t, size_t> header_place(std::span<const std::byte> file, const std::string& path) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  const std::string_view bytes(reinterpret_cast<const char*>(file.data()), file.size());
  if (!bytes.starts_with(kMagic) || file.size() < 10) damaged(path, "it does not begin as one");
  const auto byte = [&](size_t i) { return static_cast<size_t>(file[i]); };
  const size_t version = byte(6);
  if (version < 1 || version > 3) damaged(path, trireme::str("format version ", version, "; 1 to 3 are known"));
  if (version == 1) return {10, byte(8) | byte(9) << 8};
  if (file.size() < 12) damaged(path, "its header is cut off");
  return {12, byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24};
}

}  // namespace

NpyArray parse_npy(std::span<const std::byte> file, const std::string& path) {
  const auto [begin, length] = header_place(file, path);
  if (begin + length > file.size()) damaged(path, "its header is cut off");
  const std::string_view header(reinterpret_cast<const char*>(file.data()) + begin, length);

  const DataFormat format = parse_dtype(value_of(header, "descr", path), path);
  const auto shape_text = value_of(header, "shape", path);
  const auto size = parse_shape(shape_text);
  if (!size) {
    throw DataError(trireme::str(path, ": shape ", shape_text.substr(0, shape_text.find(')') + 1),
                                 " is not one-dimensional; save tokens.reshape(-1)"));
  }
  // A one-dimensional array is in both orders, and numpy then writes False; True is a sign of another writer's mistake.
  if (!value_of(header, "fortran_order", path).starts_with("False")) {
    throw DataError(path + ": fortran_order is set; save np.ascontiguousarray(tokens)");
  }
  const size_t itemsize = format == DataFormat::kUint16 ? 2 : 4;
  const size_t offset = begin + length;
  if ((file.size() - offset) / itemsize < static_cast<size_t>(*size)) {
    throw DataError(trireme::str(path, ": cut off: the header promises ", *size, " tokens of ", itemsize,
                                 " bytes, but ", file.size() - offset, " bytes follow it; copy the file again"));
  }
  return {format, offset, *size};
}

}  // namespace trireme
