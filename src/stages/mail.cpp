#include "stages/mail.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"

namespace trireme {
namespace {

void put(std::string& text, int64_t number) { text.append(reinterpret_cast<const char*>(&number), sizeof(number)); }

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}
  int64_t number() {
    int64_t number = 0;
    std::memcpy(&number, text_.data() + at_, sizeof(number));
    at_ += sizeof(number);
    return number;
  }
  std::string rest() const { return text_.substr(at_); }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

/// Dtypes, shapes and flags of the tensors, then the structure around them.
std::string description_of(const Letter& letter) {
  std::string text;
  put(text, static_cast<int64_t>(letter.value.tensors.size()));
  for (size_t i = 0; i < letter.value.tensors.size(); ++i) {
    const at::Tensor& tensor = letter.value.tensors[i];
    put(text, tensor.defined());
    if (!tensor.defined()) continue;
    put(text, static_cast<int64_t>(tensor.scalar_type()));
    put(text, letter.requires_grad[i]);
    put(text, tensor.dim());
    for (const int64_t size : tensor.sizes()) put(text, size);
  }
  return text + letter.value.structure;
}

/// A letter as it was described, its tensors without values.
Letter empty_letter(const std::string& description, c10::Device device) {
  Reader reader(description);
  Letter letter;
  for (int64_t count = reader.number(); count > 0; --count) {
    if (reader.number() == 0) {
      letter.value.tensors.emplace_back();
      letter.requires_grad.push_back(false);
      continue;
    }
    const auto dtype = static_cast<at::ScalarType>(reader.number());
    letter.requires_grad.push_back(reader.number() != 0);
    std::vector<int64_t> sizes(static_cast<size_t>(reader.number()));
    for (int64_t& size : sizes) size = reader.number();
    letter.value.tensors.push_back(at::empty(sizes, at::TensorOptions().dtype(dtype).device(device)));
  }
  letter.value.structure = reader.rest();
  return letter;
}

std::string shapes_text(const std::string& description) {
  std::string text;
  for (const at::Tensor& tensor : empty_letter(description, c10::kMeta).value.tensors)
    text += tensor.defined() ? str(text.empty() ? "" : ", ", tensor.scalar_type(), " ", tensor.sizes()) : "None";
  return text;
}

constexpr size_t kPreamble = 1024;                         // bytes; a longer text follows by itself
constexpr size_t kRoom = kPreamble - 2 * sizeof(int64_t);  // behind the sizes of the description and of the text

std::string text_of(const at::Tensor& bytes, size_t begin, size_t count) {
  return {static_cast<const char*>(bytes.const_data_ptr()) + begin, count};
}

}  // namespace

Mail::Mail(Group& stages, c10::Device device, bool dynamic_shapes)
    : stages_(stages), device_(device), dynamic_shapes_(dynamic_shapes) {}

void Mail::send(int to, int kind, const Letter& letter) {
  const std::string description = description_of(letter);
  std::string& known = sent_[{to, kind}];
  if (!known.empty() && known != description && !dynamic_shapes_)
    throw ShapeError(str("pipeline: stage ", stages_.rank(), " sent stage ", to, " values of ", shapes_text(known),
                         " before, and now of ", shapes_text(description),
                         "; set dynamic_shape, or call reset_activation_shape() where shapes change"));
  const auto post = [&](const at::Tensor& tensor) { leaving_.emplace_back(stages_.send(tensor, to), tensor); };
  std::string text = description;
  for (size_t i = 0; i < letter.is_missing.size(); ++i)
    if (letter.is_missing[i]) put(text, static_cast<int64_t>(i));
  const std::array<int64_t, 2> sizes{static_cast<int64_t>(description.size()), static_cast<int64_t>(text.size())};
  const at::Tensor preamble = at::zeros({static_cast<int64_t>(kPreamble)}, at::kByte);
  auto* const data = static_cast<char*>(preamble.mutable_data_ptr());
  std::memcpy(data, sizes.data(), sizeof(sizes));
  const size_t here = std::min(text.size(), kRoom);
  std::memcpy(data + sizeof(sizes), text.data(), here);
  post(preamble);
  if (text.size() > here) {
    const at::Tensor rest = at::empty({static_cast<int64_t>(text.size() - here)}, at::kByte);
    std::memcpy(rest.mutable_data_ptr(), text.data() + here, text.size() - here);
    post(rest);
  }
  for (const at::Tensor& tensor : letter.value.tensors)
    if (tensor.defined() && tensor.numel() > 0) post(tensor.detach().contiguous());
  known = description;
  while (!leaving_.empty() && leaving_.front().first.done()) {
    leaving_.front().first.wait();
    leaving_.pop_front();
  }
}

void Mail::expect(int from, const std::vector<Expected>& letters) {
  Lane& lane = lanes_[from];
  lane.expected.insert(lane.expected.end(), letters.begin(), letters.end());
  look_ahead(from);
}

// The tensors of a letter whose shapes are known already are received beside computations.
void Mail::look_ahead(int from) {
  Lane& lane = lanes_[from];
  if (lane.next || lane.expected.empty()) return;
  const SubjectScope subject(lane.expected.front().subject);
  Incoming& incoming = lane.next.emplace();
  incoming.preamble = at::empty({static_cast<int64_t>(kPreamble)}, at::kByte);
  incoming.preamble_arrives = stages_.recv(incoming.preamble, from);
  const auto known = received_.find({from, lane.expected.front().kind});
  if (dynamic_shapes_ || known == received_.end() || known->second.size() > kRoom / 2) return;
  incoming.ahead = empty_letter(known->second, device_);
  for (const at::Tensor& tensor : incoming.ahead->value.tensors)
    if (tensor.defined() && tensor.numel() > 0) incoming.arrivals.push_back(stages_.recv(tensor, from));
}

Letter Mail::receive(int from) {
  Lane& lane = lanes_[from];
  if (!lane.next) throw Error(ErrorCode::kInternal, str("pipeline: no letter from stage ", from, " is expected"));
  Incoming incoming = *std::exchange(lane.next, std::nullopt);
  const int kind = lane.expected.front().kind;
  lane.expected.pop_front();
  incoming.preamble_arrives.wait();
  std::array<int64_t, 2> sizes{};
  std::memcpy(sizes.data(), incoming.preamble.const_data_ptr(), sizeof(sizes));
  const auto total = static_cast<size_t>(sizes[1]);
  std::string text = text_of(incoming.preamble, sizeof(sizes), std::min(total, kRoom));
  if (total > kRoom) {
    const at::Tensor rest = at::empty({static_cast<int64_t>(total - kRoom)}, at::kByte);
    stages_.recv(rest, from).wait();
    text += text_of(rest, 0, total - kRoom);
  }
  const std::string missing = text.substr(static_cast<size_t>(sizes[0]));
  text.resize(static_cast<size_t>(sizes[0]));
  Letter letter = incoming.ahead ? *std::move(incoming.ahead) : empty_letter(text, device_);
  if (!incoming.ahead)
    for (const at::Tensor& tensor : letter.value.tensors)
      if (tensor.defined() && tensor.numel() > 0) incoming.arrivals.push_back(stages_.recv(tensor, from));
  for (Pending<void>& arrival : incoming.arrivals) arrival.wait();
  letter.is_missing.assign(letter.value.tensors.size(), false);
  Reader indices(missing);
  for (size_t i = 0; i < missing.size() / sizeof(int64_t); ++i)
    letter.is_missing[static_cast<size_t>(indices.number())] = true;
  received_[{from, kind}] = std::move(text);
  look_ahead(from);
  return letter;
}

void Mail::flush() {
  for (auto& [pending, tensor] : leaving_) pending.wait();
  leaving_.clear();
}

void Mail::forget_shapes() {
  sent_.clear();
  received_.clear();
}

}  // namespace trireme
