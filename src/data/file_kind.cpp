#include "data/file_kind.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

namespace trireme {
namespace {

using std::string_view_literals::operator""sv;

constexpr size_t kProbeBytes = 8192;

constexpr const char* kTable =
    "write one of its columns as JSON lines, such as by Python's pandas: "
    "pandas.read_parquet(\"FILE\").to_json(\"data.jsonl\", orient=\"records\", lines=True), and name the column by "
    "--text-key";
constexpr const char* kWeights = "these are weights; give --data text or tokens (first weights are for --init-from)";
constexpr const char* kPickled = "write its texts as JSON lines, or its tokens by numpy.save() as a .npy of uint16";
constexpr const char* kNoText = "there is no text in it; give text, JSON lines or tokens";
constexpr const char* kUnpack = "unpack it, and give the folder";

struct Magic {
  std::string_view bytes;
  size_t offset;
  bool
      is_weak;  ///< these bytes may open a text, or be tokens: only a file with NUL bytes where text is expected counts
  FileKind kind;
};

constexpr Magic kMagics[] = {
    {"\x1f\x8b\x08"sv, 0, false, {"gzip", "unpack it: gunzip -k FILE"}},
    {"\x28\xb5\x2f\xfd"sv, 0, false, {"zstd", "unpack it: zstd -d FILE"}},
    {"\xfd"
     "7zXZ\0"sv,
     0,
     false,
     {"xz", "unpack it: xz -dk FILE"}},
    {"BZh"sv, 0, true, {"bzip2", "unpack it: bunzip2 -k FILE"}},
    {"\x04\x22\x4d\x18"sv, 0, false, {"lz4", "unpack it: lz4 -d FILE"}},
    {"7z\xbc\xaf\x27\x1c"sv, 0, false, {"7z", kUnpack}},
    {"Rar!\x1a\x07"sv, 0, false, {"rar", kUnpack}},
    {"ustar"sv, 257, false, {"tar", "unpack it, tar -xf FILE, and give the folder"}},
    {"PAR1"sv, 0, true, {"Parquet that does not end as Parquet does", "copy or download it again"}},
    {"PARE"sv, 0, true, {"encrypted Parquet", "write it again without encryption"}},
    {"ARROW1"sv, 0, true, {"Arrow", kTable}},
    {"FEA1"sv, 0, true, {"Feather", kTable}},
    {"\xff\xff\xff\xff"sv, 0, true, {"Arrow stream", kTable}},
    {"ORC"sv, 0, true, {"ORC", kTable}},
    {"Obj\x01"sv, 0, true, {"Avro", kTable}},
    {"SQLite format 3\0"sv, 0, false, {"SQLite", kTable}},
    {"\x89HDF\r\n\x1a\n"sv, 0, false, {"HDF5", kPickled}},
    {"MMIDIDX\0"sv, 0, false, {"Megatron index", "give the .bin beside it, with --data-format of its tokens"}},
    {"\x93NUMPY"sv, 0, false, {"NumPy array", "name it .npy: its tokens are then read"}},
    {"GGUF"sv, 0, true, {"GGUF", kWeights}},
    {"%PDF-"sv, 0, false, {"PDF", "take its text out: pdftotext FILE"}},
    {"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, 0, false, {"Microsoft Office", "save it as plain text in UTF-8"}},
    {"\xff\xfe"sv, 0, true, {"UTF-16", "save it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE"}},
    {"\xfe\xff"sv, 0, true, {"UTF-16", "save it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE"}},
    {"\x89PNG\r\n\x1a\n"sv, 0, false, {"PNG", kNoText}},
    {"\xff\xd8\xff"sv, 0, false, {"JPEG", kNoText}},
    {"GIF8"sv, 0, true, {"GIF", kNoText}},
    {"RIFF"sv, 0, true, {"RIFF (sound, pictures or films)", kNoText}},
    {"ID3"sv, 0, true, {"MP3", kNoText}},
    {"OggS"sv, 0, true, {"Ogg", kNoText}},
    {"ftyp"sv, 4, true, {"MP4", kNoText}},
    {"\x7f"
     "ELF"sv,
     0,
     false,
     {"ELF (a program)", kNoText}},
    {"version https://git-lfs.github.com/spec/"sv,
     0,
     false,
     {"Git LFS pointer", "its contents are not here yet: git lfs pull"}},
};

bool stands_at(std::string_view text, size_t offset, std::string_view bytes) {
  return text.size() >= offset && text.substr(offset).starts_with(bytes);
}

// torch.save() and numpy.savez() write zip files; the first member's name says which it is.
FileKind kind_of_zip(std::string_view text) {
  const std::string_view first = text.substr(std::min<size_t>(30, text.size()), 256);
  if (first.find("data.pkl") != first.npos || first.find("/version") != first.npos)
    return {"PyTorch archive (torch.save)", kPickled};
  if (first.find(".npy") != first.npos) return {"NumPy archive (.npz)", "write its array by numpy.save() as a .npy"};
  return {"zip", "unpack it, unzip FILE -d FOLDER, and give the folder (of an Office document: save it as plain text)"};
}

// A pickle opens with its protocol, and an opcode behind it that makes a container, a text, a number or a frame.
bool is_pickle(std::string_view text) {
  return text.size() > 2 && text[0] == '\x80' && text[1] >= 2 && text[1] <= 5 &&
         "\x95}](cX\x8a\x8cKGN)"sv.find(text[2]) != std::string_view::npos;
}

// The length of a JSON header in eight bytes, and the header.
bool is_safetensors(std::string_view text, size_t bytes) {
  uint64_t header = 0;
  if (!stands_at(text, 8, "{\"")) return false;
  std::memcpy(&header, text.data(), sizeof(header));
  return header >= 2 && header <= bytes - 8;
}

}  // namespace

std::optional<FileKind> file_kind(std::span<const std::byte> file, Expected expected) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), std::min(file.size(), kProbeBytes));
  if (text.starts_with("PK\x03\x04"sv) || text.starts_with("PK\x05\x06"sv)) return kind_of_zip(text);
  if (is_pickle(text)) return FileKind{"pickle", kPickled};
  if (is_safetensors(text, file.size())) return FileKind{"safetensors", kWeights};
  const bool weak_count = expected == Expected::kText && text.find('\0') != text.npos;
  for (const Magic& magic : kMagics)
    if (stands_at(text, magic.offset, magic.bytes) && (weak_count || !magic.is_weak)) return magic.kind;
  return std::nullopt;
}

}  // namespace trireme
