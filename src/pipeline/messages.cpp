#include "pipeline/messages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"

namespace trireme {
namespace {

void put(std::string& text, int64_t number) { text.append(reinterpret_cast<const char*>(&number), sizeof(number)); }

/// Reads a description, of which nothing is trusted.
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}
  /// Throws std::out_of_range: it ends before, or the number is none of [least, most].
  int64_t number(int64_t least, int64_t most) {
    int64_t number = 0;
    if (text_.size() - at_ < sizeof(number)) throw std::out_of_range("it ends too early");
    std::memcpy(&number, text_.data() + at_, sizeof(number));
    at_ += sizeof(number);
    if (number < least || number > most)
      throw std::out_of_range(str("it says ", number, " for a number from ", least, " to ", most));
    return number;
  }
  bool flag() { return number(0, 1) != 0; }
  bool is_at_end() const { return at_ == text_.size(); }
  std::string rest() const { return text_.substr(at_); }
  /// Throws std::out_of_range: it ends before.
  std::string text(size_t bytes) {
    if (text_.size() - at_ < bytes) throw std::out_of_range("it ends too early");
    at_ += bytes;
    return text_.substr(at_ - bytes, bytes);
  }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

/// Dtypes, shapes, flags and cuts of the tensors, then the structure around them.
std::string description_of(const Message& message) {
  std::string text;
  put(text, static_cast<int64_t>(message.value.tensors.size()));
  for (size_t i = 0; i < message.value.tensors.size(); ++i) {
    const at::Tensor& tensor = message.value.tensors[i];
    put(text, tensor.defined());
    if (!tensor.defined()) continue;
    put(text, static_cast<int64_t>(tensor.scalar_type()));
    put(text, message.requires_grad[i]);
    put(text, tensor.dim());
    for (const int64_t size : tensor.sizes()) put(text, size);
    const std::string& cut = message.cuts.empty() ? std::string() : message.cuts[i];
    put(text, static_cast<int64_t>(cut.size()));
    text += cut;
  }
  return text + message.value.structure;
}

constexpr int64_t kMost = int64_t{1} << 48;     // elements of a tensor
constexpr int64_t kLongest = int64_t{1} << 30;  // bytes of a text

/// A message as it was described, its tensors without values. Throws std::out_of_range: the description is damaged.
Message empty_message(const std::string& description, c10::Device device) {
  Reader reader(description);
  Message message;
  for (int64_t count = reader.number(0, static_cast<int64_t>(description.size())); count > 0; --count) {
    if (!reader.flag()) {
      message.value.tensors.emplace_back();
      message.requires_grad.push_back(false);
      message.cuts.emplace_back();
      continue;
    }
    const auto dtype =
        static_cast<at::ScalarType>(reader.number(0, static_cast<int64_t>(at::ScalarType::NumOptions) - 1));
    message.requires_grad.push_back(reader.flag());
    std::vector<int64_t> sizes(static_cast<size_t>(reader.number(0, 64)));
    int64_t numel = 1;
    for (int64_t& size : sizes) {
      size = reader.number(0, kMost / std::max<int64_t>(numel, 1));
      numel *= size;
    }
    message.value.tensors.push_back(at::empty(sizes, at::TensorOptions().dtype(dtype).device(device)));
    message.cuts.push_back(reader.text(static_cast<size_t>(reader.number(0, kLongest))));
  }
  message.value.structure = reader.rest();
  return message;
}

std::string shapes_text(const std::string& description) {
  std::string text;
  for (const at::Tensor& tensor : empty_message(description, c10::kMeta).value.tensors)
    text += tensor.defined() ? str(text.empty() ? "" : ", ", tensor.scalar_type(), " ", tensor.sizes()) : "None";
  return text;
}

uint64_t checksum_of(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

/// Before the text: the description of the tensors, then the indices of those that are missing.
struct Header {
  int64_t mark = kMark;
  int64_t kind = 0, micro_batch = 0;
  int64_t description_bytes = 0, text_bytes = 0;
  uint64_t text_checksum = 0;
  uint64_t checksum = 0;  // of the header before this

  uint64_t own_checksum() const {
    return checksum_of({reinterpret_cast<const char*>(this), offsetof(Header, checksum)});
  }
  static constexpr int64_t kMark = 0x7374616765206c74;  // "stage lt"
};

constexpr size_t kPreamble = 1024;                    // bytes; a longer text follows by itself
constexpr size_t kRoom = kPreamble - sizeof(Header);  // for the text

std::string text_of(const at::Tensor& bytes, size_t begin, size_t count) {
  return {static_cast<const char*>(bytes.const_data_ptr()) + begin, count};
}

}  // namespace

Messages::Messages(Group& stages, c10::Device device, bool dynamic_shapes)
    : stages_(stages), device_(device), dynamic_shapes_(dynamic_shapes) {}

void Messages::send(int to, const Key& key, const Message& message) {
  const std::string description = description_of(message);
  std::string& known = sent_[{to, key.kind}];
  if (!known.empty() && known != description && !dynamic_shapes_)
    throw ShapeError(str("pipeline: stage ", stages_.rank(), " sent stage ", to, " values of ", shapes_text(known),
                         " before, and now of ", shapes_text(description),
                         "; set dynamic_shape, or call reset_activation_shape() where shapes change"));
  const auto post = [&](const at::Tensor& tensor) { leaving_.emplace_back(stages_.send(tensor, to), tensor); };
  std::string text = description;
  for (size_t i = 0; i < message.is_missing.size(); ++i)
    if (message.is_missing[i]) put(text, static_cast<int64_t>(i));
  Header header{.kind = key.kind,
                .micro_batch = key.micro_batch,
                .description_bytes = static_cast<int64_t>(description.size()),
                .text_bytes = static_cast<int64_t>(text.size()),
                .text_checksum = checksum_of(text)};
  header.checksum = header.own_checksum();
  const at::Tensor preamble = at::zeros({static_cast<int64_t>(kPreamble)}, at::kByte);
  auto* const data = static_cast<char*>(preamble.mutable_data_ptr());
  std::memcpy(data, &header, sizeof(header));
  const size_t here = std::min(text.size(), kRoom);
  std::memcpy(data + sizeof(header), text.data(), here);
  post(preamble);
  if (text.size() > here) {
    const at::Tensor rest = at::empty({static_cast<int64_t>(text.size() - here)}, at::kByte);
    std::memcpy(rest.mutable_data_ptr(), text.data() + here, text.size() - here);
    post(rest);
  }
  for (const at::Tensor& tensor : message.value.tensors)
    if (tensor.defined() && tensor.numel() > 0) post(tensor.detach().contiguous());
  known = description;
  while (!leaving_.empty() && leaving_.front().first.done()) {
    leaving_.front().first.wait();
    leaving_.pop_front();
  }
}

void Messages::expect(int from, const std::vector<Expected>& messages) {
  Lane& lane = lanes_[from];
  lane.expected.insert(lane.expected.end(), messages.begin(), messages.end());
  look_ahead(from);
}

// The tensors of a message whose shapes are known already are received beside computations.
void Messages::look_ahead(int from) {
  Lane& lane = lanes_[from];
  if (lane.next || lane.expected.empty()) return;
  const SubjectScope subject(lane.expected.front().subject);
  Incoming& incoming = lane.next.emplace();
  incoming.preamble = at::empty({static_cast<int64_t>(kPreamble)}, at::kByte);
  incoming.preamble_arrives = stages_.recv(incoming.preamble, from);
  const auto known = received_.find({from, lane.expected.front().key.kind});
  if (dynamic_shapes_ || known == received_.end() || known->second.size() > kRoom / 2) return;
  incoming.ahead = empty_message(known->second, device_);
  for (const at::Tensor& tensor : incoming.ahead->value.tensors)
    if (tensor.defined() && tensor.numel() > 0) incoming.arrivals.push_back(stages_.recv(tensor, from));
}

Message Messages::receive(int from) {
  Lane& lane = lanes_[from];
  if (!lane.next) throw Error(ErrorCode::kInternal, str("pipeline: no message from stage ", from, " is expected"));
  Incoming incoming = *std::exchange(lane.next, std::nullopt);
  const Expected expected = std::move(lane.expected.front());
  lane.expected.pop_front();
  incoming.preamble_arrives.wait();
  const auto refuse = [&](const std::string& why) {
    throw CommError(ErrorCode::kDiverged, str("pipeline: ", expected.subject, ": the message from stage ", from, " ",
                                              why, "; the stages do not run the same step"));
  };
  Header header;
  std::memcpy(&header, incoming.preamble.const_data_ptr(), sizeof(header));
  if (header.mark != Header::kMark) refuse("does not begin as one of a pipeline");
  if (header.checksum != header.own_checksum()) refuse("is damaged: its header has another checksum");
  if (header.kind != expected.key.kind || header.micro_batch != expected.key.micro_batch)
    refuse(str("is ", name_of(header.kind), " of micro-batch ", header.micro_batch, ", and expected is ",
               name_of(expected.key.kind), " of micro-batch ", expected.key.micro_batch));
  if (header.description_bytes < 0 || header.text_bytes < header.description_bytes || header.text_bytes > kLongest)
    refuse(str("is damaged: its description has ", header.description_bytes, " of ", header.text_bytes, " bytes"));
  const auto total = static_cast<size_t>(header.text_bytes);
  std::string text = text_of(incoming.preamble, sizeof(header), std::min(total, kRoom));
  if (total > kRoom) {
    const at::Tensor rest = at::empty({static_cast<int64_t>(total - kRoom)}, at::kByte);
    stages_.recv(rest, from).wait();
    text += text_of(rest, 0, total - kRoom);
  }
  if (checksum_of(text) != header.text_checksum) refuse("is damaged: its description has another checksum");
  const std::string missing = text.substr(static_cast<size_t>(header.description_bytes));
  text.resize(static_cast<size_t>(header.description_bytes));
  if (incoming.ahead && text != received_[{from, expected.key.kind}])
    refuse("has other shapes than the one before, for which memory is ready");
  Message message;
  try {
    message = incoming.ahead ? *std::move(incoming.ahead) : empty_message(text, device_);
    message.is_missing.assign(message.value.tensors.size(), false);
    for (Reader indices(missing); !indices.is_at_end();)
      message.is_missing[indices.number(0, static_cast<int64_t>(message.is_missing.size()) - 1)] = true;
  } catch (const std::out_of_range& error) {
    refuse(str("is damaged: ", error.what()));
  }
  if (!incoming.ahead)
    for (const at::Tensor& tensor : message.value.tensors)
      if (tensor.defined() && tensor.numel() > 0) incoming.arrivals.push_back(stages_.recv(tensor, from));
  for (Pending<void>& arrival : incoming.arrivals) arrival.wait();
  received_[{from, expected.key.kind}] = std::move(text);
  look_ahead(from);
  return message;
}

std::string Messages::name_of(int64_t kind) {
  const char* const names[] = {"the activation of part ", "the evaluated activation of part ", "the gradient of part "};
  return kind < 0 ? str("a message of kind ", kind) : str(names[kind % 3], kind / 3);
}

void Messages::flush() {
  for (auto& [pending, tensor] : leaving_) pending.wait();
  leaving_.clear();
}

void Messages::forget_shapes() {
  sent_.clear();
  received_.clear();
}

}  // namespace trireme
