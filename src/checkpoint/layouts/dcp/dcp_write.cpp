// Writes the layout of torch.distributed.checkpoint: one data file of torch.save() archives, and `.metadata`.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "checkpoint/export/convert.h"
#include "checkpoint/export/weights_plan.h"
#include "checkpoint/layouts/dcp/metadata.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/json.h"
#include "trireme/base/new_file.h"
#include "trireme/base/state_names.h"
#include "trireme/checkpoint/reshard.h"
#include "trireme/checkpoint/torch_distributed.h"
#include "trireme/checkpoint/training_values.h"
#include "trireme/formats/pickle/pickle.h"
#include "trireme/formats/pickle/torch_archive.h"
#include "trireme/formats/safetensors_header.h"

namespace trireme {
namespace {

using dcp::StoredEntry;
using dcp::StoredItem;
using pickle::Document;
using pickle::Value;
using Path = std::filesystem::path;

constexpr char kDataName[] = "__0_0.distcp";
constexpr int64_t kBlockBytes = int64_t{32} << 20;
constexpr char kDcpMetadata[] = "torch.distributed.checkpoint.metadata.";

Value* value_from(Document& document, const Json& json) {
  if (json.is_boolean()) return document.boolean(json.get<bool>());
  if (json.is_number_integer()) return document.integer(json.get<int64_t>());
  if (json.is_number()) return document.real(json.get<double>());
  if (json.is_string()) return document.string(json.get<std::string>());
  if (!json.is_array()) return document.none();
  std::vector<Value*> items;
  for (const Json& item : json) items.push_back(value_from(document, item));
  return document.list(std::move(items));
}

/// The dictionary of one parameter group as torch.optim has it.
struct TorchGroup {
  std::vector<std::pair<std::string, Json>> options;
  std::vector<std::string> names;
};

std::vector<TorchGroup> groups_of(const TrainingValues& values, const std::vector<std::string>& names) {
  const Json config = Json::parse(values.config.value_or("{}"));
  const Json optimizer = config.is_object() ? config.value("optimizer", Json::object()) : Json::object();
  const Json params = optimizer.is_object() ? optimizer.value("params", Json::object()) : Json::object();
  const std::string type = optimizer.is_object() ? optimizer.value("type", "AdamW") : "AdamW";
  const bool is_adam = type == "Adam" || type == "AdamW";
  std::vector<GroupValues> saved = values.groups;
  if (saved.empty()) saved.push_back({.names = names});
  const std::vector<double>& rates = values.group_lrs;
  std::vector<TorchGroup> groups;
  for (size_t i = 0; i < saved.size(); ++i) {
    TorchGroup group{.options = {}, .names = saved[i].names};
    const Json options = Json::parse(saved[i].options);
    const auto option = [&](const char* key, const Json& otherwise) {
      return options.contains(key) ? options[key] : params.value(key, otherwise);
    };
    group.options.emplace_back("lr", i < rates.size() ? Json(rates[i]) : option("lr", values.lr.value_or(0)));
    group.options.emplace_back("weight_decay", option("weight_decay", 0.0));
    if (is_adam) {
      group.options.emplace_back("betas", option("betas", Json::array({0.9, 0.999})));
      group.options.emplace_back("eps", option("eps", 1e-8));
      for (const char* key : {"amsgrad", "maximize", "capturable", "differentiable"})
        group.options.emplace_back(key, false);
      for (const char* key : {"foreach", "fused"}) group.options.emplace_back(key, nullptr);
      group.options.emplace_back("decoupled_weight_decay", type == "AdamW" || params.value("adam_w_mode", true));
    } else if (type == "SGD") {
      group.options.emplace_back("momentum", option("momentum", 0.0));
      group.options.emplace_back("dampening", option("dampening", 0.0));
      group.options.emplace_back("nesterov", option("nesterov", false));
      group.options.emplace_back("maximize", false);
      group.options.emplace_back("differentiable", false);
      for (const char* key : {"foreach", "fused"}) group.options.emplace_back(key, nullptr);
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

class DcpWriting {
 public:
  DcpWriting(const CheckpointSource& source, const Path& folder, const TorchDistributedOptions& options)
      : source_(source),
        folder_(folder),
        options_(options),
        files_(options.files ? *options.files : posix_file_system()),
        plan_(plan_weights(source, {.dtype = std::nullopt, .masters = true})),
        values_(training_values(source.manifest)),
        reader_(source) {}

  TorchDistributedCheckpoint run() {
    if (files_.exists(folder_ / dcp::kMetadataName) || files_.exists(folder_ / kDataName))
      throw CheckpointError(str(folder_.string(), ": a checkpoint is there already; give another folder"));
    plan_tensors();
    files_.create_directories(folder_);
    ByteProgress progress(options_.progress, total_bytes_);
    NewFiles new_files(files_);
    file_ = &new_files.add(folder_ / kDataName);
    for (size_t i = 0; i < tensors_.size(); ++i) write_tensor(tensors_[i], entries_[i], progress);
    add_aliases();
    write_optimizer_numbers();
    write_object({dcp::kValuesName}, Json(to_text(values_)));
    write_object({dcp::kRoundedName}, Json(rounded_weights().dump()));
    file_->finish();
    new_files.add(folder_ / dcp::kMetadataName, metadata_pickle());
    new_files.commit();
    return {.path = folder_, .tensor_bytes = total_bytes_};
  }

 private:
  void plan_tensors() {
    for (const PlannedWeight& weight : plan_.weights) plan_tensor({"model", weight.name}, weight.tensor);
    for (size_t i = 0; i < source_.manifest.tensors.size(); ++i) {
      const StateName name = parse_state_name(source_.manifest.tensors[i].name);
      if (name.kind != StateKind::kOptimizerState) continue;
      const std::string parameter(name.parameter);
      if (trained_set_.insert(parameter).second) trained_.push_back(parameter);
      plan_tensor({"optim", "state", parameter, std::string(name.state)}, i);
    }
  }

  void plan_tensor(std::vector<std::string> path, size_t tensor) {
    const SavedTensor& saved = source_.manifest.tensors[tensor];
    tensors_.push_back(tensor);
    entries_.push_back(entry_at(std::move(path)));
    entries_.back().is_tensor = true;
    entries_.back().dtype = saved.dtype;
    entries_.back().shape = saved.shape;
    total_bytes_ += checked_numel(saved.shape, saved.name) * static_cast<int64_t>(c10::elementSize(saved.dtype));
  }

  /// The weights in whose place their masters are written, with the dtype that they have: so they come back.
  Json rounded_weights() const {
    std::map<std::string, at::ScalarType> dtype_of;
    for (const SavedTensor& tensor : source_.manifest.tensors) dtype_of.emplace(tensor.name, tensor.dtype);
    Json dtypes = Json::object();
    for (const PlannedWeight& weight : plan_.weights) {
      const at::ScalarType dtype = dtype_of.at(weight_name(weight.name));
      if (dtype != weight.dtype) dtypes[weight.name] = safetensors_dtype(dtype);
    }
    return dtypes;
  }

  static StoredEntry entry_at(std::vector<std::string> path) {
    StoredEntry entry{.key = {}, .path = std::move(path), .shape = {}, .items = {}};
    for (const std::string& part : entry.path) entry.key += (entry.key.empty() ? "" : ".") + part;
    return entry;
  }

  /// Blocks of whole rows, so that none needs more memory than a few of them.
  void write_tensor(size_t tensor, StoredEntry& entry, ByteProgress& progress) {
    const auto itemsize = static_cast<int64_t>(c10::elementSize(entry.dtype));
    const int64_t numel = checked_numel(entry.shape, entry.key);
    const int64_t rows = entry.shape.empty() ? 1 : entry.shape[0];
    const int64_t row_numel = rows > 0 ? numel / rows : 0;
    const int64_t block_rows =
        std::clamp<int64_t>(kBlockBytes / std::max<int64_t>(row_numel * itemsize, 1), 1, std::max<int64_t>(rows, 1));
    for (int64_t row = 0; row == 0 || row < rows; row += block_rows) {
      StoredItem block{.offsets = std::vector<int64_t>(entry.shape.size()), .sizes = entry.shape, .file = kDataName};
      const int64_t count = std::min(block_rows, rows - row);
      if (!entry.shape.empty()) {
        block.offsets[0] = row;
        block.sizes[0] = count;
      }
      buffer_.resize(count * row_numel * itemsize);
      if (!buffer_.empty()) reader_.read(tensor, row * row_numel, count * row_numel, buffer_.data());
      write_block(entry.dtype, block);
      entry.items.push_back(std::move(block));
      progress.add(static_cast<int64_t>(buffer_.size()));
    }
  }

  /// `buffer_` as the archive of a tensor.
  void write_block(at::ScalarType dtype, StoredItem& block) {
    Document document;
    document.set_root(document.tensor("0", dtype, block.sizes));
    write_archive(document, block, /*has_storage=*/true);
  }

  void write_archive(const Document& document, StoredItem& item, bool has_storage) {
    item.begin = written_;
    pickle::TorchArchiveWriter archive([this](const void* data, size_t bytes) {
      file_->write(data, bytes);
      written_ += static_cast<int64_t>(bytes);
    });
    if (has_storage) archive.storage("0", buffer_.data(), buffer_.size());
    archive.finish(document);
    item.bytes = written_ - item.begin;
  }

  void write_object(std::vector<std::string> path, const Json& value, bool as_tuple = false) {
    Document document;
    Value* root = value_from(document, value);
    if (as_tuple) root = document.tuple(root->items);
    document.set_root(root);
    StoredEntry entry = entry_at(std::move(path));
    StoredItem item{.offsets = {}, .sizes = {}, .file = kDataName};
    write_archive(document, item, /*has_storage=*/false);
    entry.items.push_back(std::move(item));
    entries_.push_back(std::move(entry));
  }

  /// The same bytes under another name.
  void add_aliases() {
    for (const auto& [alias, name] : plan_.aliases) {
      const auto found = std::find_if(entries_.begin(), entries_.end(), [&, &name = name](const StoredEntry& entry) {
        return entry.path == std::vector<std::string>{"model", name};
      });
      StoredEntry copy = *found;
      copy.path[1] = alias;
      copy.key = entry_at(copy.path).key;
      entries_.push_back(std::move(copy));
    }
  }

  void write_optimizer_numbers() {
    if (trained_.empty()) return;
    for (const std::string& name : trained_) {
      const auto known = values_.steps.find(name);
      const auto step =
          static_cast<float>(known == values_.steps.end() ? values_.global_steps.value_or(0) : known->second);
      StoredEntry entry = entry_at({"optim", "state", name, "step"});
      entry.is_tensor = true;
      StoredItem item{.offsets = {}, .sizes = {}, .file = kDataName};
      buffer_.resize(sizeof step);
      std::memcpy(buffer_.data(), &step, sizeof step);
      write_block(at::kFloat, item);
      entry.items.push_back(std::move(item));
      entries_.push_back(std::move(entry));
    }
    const std::vector<TorchGroup> groups = groups_of(values_, trained_);
    for (size_t i = 0; i < groups.size(); ++i) {
      const std::string number = std::to_string(i);
      for (const auto& [key, value] : groups[i].options)
        write_object({"optim", "param_groups", number, key}, value, key == "betas");
      write_object({"optim", "param_groups", number, "params"}, Json(groups[i].names));
    }
  }

  static Value* dcp_object(Document& document, const char* name, std::vector<Value*> arguments) {
    return document.call(std::string(kDcpMetadata) + name, std::move(arguments));
  }

  std::string metadata_pickle() const {
    Document document;
    Document::Pairs metadata, paths;
    std::vector<Value*> storage;
    for (const StoredEntry& entry : entries_) {
      std::vector<Value*> chunks, parts;
      for (const StoredItem& item : entry.items) {
        if (entry.is_tensor)
          chunks.push_back(
              dcp_object(document, "ChunkStorageMetadata", {document.size(item.offsets), document.size(item.sizes)}));
        storage.push_back(
            dcp_object(document, "MetadataIndex",
                       {document.string(entry.key), entry.is_tensor ? document.size(item.offsets) : document.none()}));
        storage.push_back(
            document.call("torch.distributed.checkpoint.filesystem._StorageInfo",
                          {document.string(item.file), document.integer(item.begin), document.integer(item.bytes)}));
      }
      metadata.emplace_back(entry.key,
                            entry.is_tensor
                                ? dcp_object(document, "TensorStorageMetadata",
                                             {dcp_object(document, "TensorProperties", {document.dtype(entry.dtype)}),
                                              document.size(entry.shape), document.list(std::move(chunks))})
                                : dcp_object(document, "BytesStorageMetadata", {}));
      // The number of a parameter group is one.
      for (size_t i = 0; i < entry.path.size(); ++i)
        parts.push_back(i == 2 && entry.path[1] == "param_groups" ? document.integer(std::stoll(entry.path[i]))
                                                                  : document.string(entry.path[i]));
      paths.emplace_back(entry.key, document.tuple(std::move(parts)));
    }
    Value& storage_data = document.add(pickle::Kind::kDict);
    storage_data.items = std::move(storage);
    document.set_root(dcp_object(
        document, "Metadata",
        {document.dict(metadata), document.dict(paths), &storage_data, document.none(), document.string("1.0.0")}));
    return pickle::dump(document);
  }

  const CheckpointSource& source_;
  const Path folder_;
  const TorchDistributedOptions& options_;
  FileSystem& files_;
  const WeightsPlan plan_;
  const TrainingValues values_;
  TensorReader reader_;
  std::vector<size_t> tensors_;       ///< of the manifest
  std::vector<StoredEntry> entries_;  ///< first those of `tensors_`, in the same order
  std::vector<std::string> trained_;  ///< parameters with optimizer states
  std::set<std::string> trained_set_;
  std::vector<std::byte> buffer_;
  NewFile* file_ = nullptr;
  int64_t written_ = 0;
  int64_t total_bytes_ = 0;
};

}  // namespace

TorchDistributedCheckpoint write_torch_distributed(const CheckpointSource& source, const Path& folder,
                                                   const TorchDistributedOptions& options) {
  return DcpWriting(source, folder, options).run();
}

}  // namespace trireme
