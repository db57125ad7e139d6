#include "checkpoint/layouts/dcp/metadata.h"

#include <map>
#include <unordered_map>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/reshard.h"
#include "trireme/formats/pickle/classes.h"
#include "trireme/formats/pickle/pickle.h"

namespace trireme::dcp {
namespace {

using pickle::Kind;
using pickle::Value;

constexpr char kClasses[] = "torch.distributed.checkpoint.metadata.";

/// A field of a dataclass, whether it was restored from its state or is to be made by a call.
const Value* field(const Value& object, const char* name, size_t position) {
  if (const Value* found = object.attribute(name)) return found;
  return position < object.items.size() ? object.items[position] : nullptr;
}

class MetadataReader {
 public:
  MetadataReader(const Value& root, const std::string& origin) : root_(root), origin_(origin) {}

  std::vector<StoredEntry> run() {
    require(is_object(&root_, "Metadata"), "no Metadata of torch.distributed.checkpoint");
    const Value* entries = field(root_, "state_dict_metadata", 0);
    const Value* storage = field(root_, "storage_data", 2);
    require(entries && entries->is(Kind::kDict), "no state_dict_metadata");
    require(storage && storage->is(Kind::kDict), "no storage_data");
    read_storage(*storage);
    const Value* paths = field(root_, "planner_data", 1);
    std::vector<StoredEntry> result;
    for (size_t i = 0; i + 1 < entries->items.size(); i += 2)
      result.push_back(entry_of(text_of(entries->items[i], "a key"), *entries->items[i + 1], paths));
    return result;
  }

 private:
  void require(bool condition, const std::string& what) const {
    if (!condition)
      throw CheckpointError(str(origin_, ": ", what, ": not a checkpoint of torch.distributed.checkpoint"));
  }

  static bool is_object(const Value* value, const char* name) {
    return value && value->is(Kind::kObject) && value->text == std::string(kClasses) + name;
  }

  const std::string& text_of(const Value* value, const std::string& what) const {
    require(value && value->is(Kind::kString), what + " is no text");
    return value->text;
  }

  std::vector<int64_t> extents_of(const Value* value, const std::string& what) const {
    require(value && value->is(Kind::kTuple), what + " is no torch.Size");
    std::vector<int64_t> extents;
    for (const Value* item : value->items) {
      require(item->is(Kind::kInt) && item->integer >= 0, what + " is no torch.Size");
      extents.push_back(item->integer);
    }
    return extents;
  }

  int64_t count_of(const Value* value, const std::string& what) const {
    require(value && value->is(Kind::kInt) && value->integer >= 0, what + " is no number of bytes");
    return value->integer;
  }

  void read_storage(const Value& storage) {
    for (size_t i = 0; i + 1 < storage.items.size(); i += 2) {
      const Value& index = *storage.items[i];
      const Value& info = *storage.items[i + 1];
      require(is_object(&index, "MetadataIndex"), "a key of storage_data is no MetadataIndex");
      const std::string& key = text_of(field(index, "fqn", 0), "the fqn of a MetadataIndex");
      const std::string where = str("storage of \"", key, "\"");
      const Value* offset = field(index, "offset", 1);
      StoredItem item;
      if (offset && !offset->is(Kind::kNone)) item.offsets = extents_of(offset, where + ": its offset");
      item.file = text_of(field(info, "relative_path", 0), where + ": its path");
      item.begin = count_of(field(info, "offset", 1), where + ": its offset");
      item.bytes = count_of(field(info, "length", 2), where + ": its length");
      if (item.file.empty() || item.file.find('/') != std::string::npos || item.file == "..")
        throw CheckpointError(str(origin_, ": ", where, ": file \"", item.file, "\" is in another folder"));
      const Value* transforms = field(info, "transform_descriptors", 3);
      if (transforms && !transforms->is(Kind::kNone) && !transforms->items.empty())
        throw CheckpointError(
            str(origin_, ": ", where, " is compressed or encrypted; save it again without extensions"));
      storage_[key].push_back(std::move(item));
    }
  }

  StoredEntry entry_of(const std::string& key, const Value& metadata, const Value* paths) {
    StoredEntry entry{.key = key, .path = path_of(key, paths), .shape = {}, .items = {}};
    const std::string where = str("\"", key, "\"");
    const auto stored = storage_.find(key);
    require(stored != storage_.end(), where + " is stored nowhere");
    entry.is_tensor = is_object(&metadata, "TensorStorageMetadata");
    if (!entry.is_tensor) {
      require(is_object(&metadata, "BytesStorageMetadata") && stored->second.size() == 1,
              where + " is neither a tensor nor one object");
      entry.items = stored->second;
      return entry;
    }
    entry.dtype = dtype_of(field(metadata, "properties", 0), where);
    entry.shape = extents_of(field(metadata, "size", 1), where + ": its size");
    (void)checked_numel(entry.shape, key);
    const Value* chunks = field(metadata, "chunks", 2);
    require(chunks && chunks->is(Kind::kList), where + " has no chunks");
    for (const Value* chunk : chunks->items) entry.items.push_back(block_of(entry, *chunk, stored->second, where));
    return entry;
  }

  std::vector<std::string> path_of(const std::string& key, const Value* paths) const {
    const Value* found = paths ? paths->find(key) : nullptr;
    if (!found || !found->is(Kind::kTuple) || found->items.empty()) return {key};
    std::vector<std::string> path;
    for (const Value* part : found->items) {
      require(part->is(Kind::kString) || part->is(Kind::kInt), str("\"", key, "\": its path is no names"));
      path.push_back(part->is(Kind::kString) ? part->text : std::to_string(part->integer));
    }
    return path;
  }

  at::ScalarType dtype_of(const Value* properties, const std::string& where) const {
    require(is_object(properties, "TensorProperties"), where + " has no properties");
    const std::vector<Value*>& parts = properties->state ? properties->state->items : properties->items;
    require(!parts.empty() && parts[0]->is(Kind::kClass), where + " has no dtype");
    const auto known = pickle::find_class(parts[0]->text);
    require(known && known->role == pickle::Role::kDtype && known->dtype, where + " has the dtype " + parts[0]->text);
    return *known->dtype;
  }

  StoredItem block_of(const StoredEntry& entry, const Value& chunk, const std::vector<StoredItem>& stored,
                      const std::string& where) const {
    require(is_object(&chunk, "ChunkStorageMetadata"), where + ": a chunk is none");
    const std::vector<int64_t> offsets = extents_of(field(chunk, "offsets", 0), where + ": a chunk's offsets");
    for (const StoredItem& item : stored) {
      if (item.offsets != offsets) continue;
      StoredItem block = item;
      block.sizes = extents_of(field(chunk, "sizes", 1), where + ": a chunk's sizes");
      bool inside = block.sizes.size() == entry.shape.size() && offsets.size() == entry.shape.size();
      for (size_t dim = 0; inside && dim < entry.shape.size(); ++dim)
        inside = offsets[dim] <= entry.shape[dim] && block.sizes[dim] <= entry.shape[dim] - offsets[dim];
      require(inside, where + ": a chunk lies outside of the tensor");
      return block;
    }
    throw CheckpointError(str(origin_, ": ", where, ": a chunk is stored nowhere; the checkpoint is incomplete"));
  }

  const Value& root_;
  const std::string& origin_;
  std::unordered_map<std::string, std::vector<StoredItem>> storage_;
};

}  // namespace

std::vector<StoredEntry> read_metadata(const std::filesystem::path& file) {
  const std::string origin = file.string();
  if (const size_t size = posix_file_system().size(file); size > pickle::kMostBytes)
    throw CheckpointError(str(origin, " has ", size, " bytes, at most ", pickle::kMostBytes, " are read"));
  const std::string bytes = posix_file_system().read(file);
  const pickle::Document document = pickle::parse(bytes, origin);
  return MetadataReader(document.root(), origin).run();
}

void for_each_run(const std::vector<int64_t>& shape, const StoredItem& block,
                  const std::function<void(int64_t, int64_t, int64_t)>& take) {
  const size_t dims = shape.size();
  std::vector<int64_t> stride(dims, 1);
  for (size_t dim = dims; dim-- > 1;) stride[dim - 1] = stride[dim] * shape[dim];
  // Dims from `inner` on make up one run: all of them but the first are whole.
  int64_t run = 1;
  size_t inner = dims;
  while (inner > 0) {
    --inner;
    run *= block.sizes[inner];
    if (block.sizes[inner] != shape[inner]) break;
  }
  if (run == 0) return;
  int64_t base = 0, runs = 1;
  for (size_t dim = 0; dim < dims; ++dim) base += block.offsets[dim] * stride[dim];
  for (size_t dim = 0; dim < inner; ++dim) runs *= block.sizes[dim];
  for (int64_t i = 0; i < runs; ++i) {
    int64_t begin = base;
    for (int64_t rest = i, dim = static_cast<int64_t>(inner) - 1; dim >= 0; --dim) {
      begin += rest % block.sizes[dim] * stride[dim];
      rest /= block.sizes[dim];
    }
    take(begin, i * run, run);
  }
}

}  // namespace trireme::dcp
