// Values as a pickle of protocol 2. Nothing is memoized: readers do not need it, and values shared often are small.
#include <bit>

#include "trireme/base/error.h"
#include "trireme/formats/pickle/classes.h"
#include "trireme/formats/pickle/pickle.h"

namespace trireme::pickle {
namespace {

class Writer {
 public:
  std::string run(const Value& root) {
    out_ = "\x80\x02";
    write(root, 0);
    return std::move(out_) + '.';
  }

 private:
  void little_endian(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(value >> (8 * i) & 0xFF);
  }

  void integer(int64_t value) {
    if (value >= 0 && value < 256) {
      out_ += 'K';
      little_endian(static_cast<uint64_t>(value), 1);
    } else if (value == static_cast<int32_t>(value)) {
      out_ += 'J';
      little_endian(static_cast<uint64_t>(value), 4);
    } else {
      out_ += "\x8a\x08";
      little_endian(static_cast<uint64_t>(value), 8);
    }
  }

  void real(double value) {
    out_ += 'G';
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int i = 7; i >= 0; --i) out_ += static_cast<char>(bits >> (8 * i) & 0xFF);
  }

  void string(const std::string& text) {
    out_ += 'X';
    little_endian(text.size(), 4);
    out_ += text;
  }

  void global(const std::string& name) {
    const size_t dot = name.rfind('.');
    out_ += 'c' + name.substr(0, dot) + '\n' + name.substr(dot + 1) + '\n';
  }

  void integers(const std::vector<int64_t>& values) {
    out_ += '(';
    for (const int64_t value : values) integer(value);
    out_ += 't';
  }

  void all(const std::vector<Value*>& items, int depth) {
    for (const Value* item : items) write(*item, depth + 1);
  }

  void tuple(const std::vector<Value*>& items, int depth) {
    out_ += '(';
    all(items, depth);
    out_ += 't';
  }

  void tensor(const TensorPlace& place) {
    global("torch._utils._rebuild_tensor_v2");
    out_ += "((";  // the arguments, and the storage's id
    string("storage");
    global(storage_class(place.dtype));
    string(place.storage);
    string("cpu");
    integer(place.storage_numel);
    out_ += "tQ";
    integer(place.begin);
    integers(place.shape);
    integers(place.strides);
    out_ += '\x89';  // requires_grad: False
    global("collections.OrderedDict");
    out_ += ")RtR";  // no hooks; the end of the arguments; the call
  }

  void object(const Value& value, int depth) {
    global(value.text);
    tuple(value.items, depth);
    out_ += value.flag ? 'R' : '\x81';
    if (!value.state) return;
    write(*value.state, depth + 1);
    out_ += 'b';
  }

  void write(const Value& value, int depth) {
    if (depth > kMaxDepth) throw CheckpointError(str("values are nested more than ", kMaxDepth, " deep"));
    switch (value.kind) {
      case Kind::kNone:
        out_ += 'N';
        return;
      case Kind::kBool:
        out_ += value.flag ? '\x88' : '\x89';
        return;
      case Kind::kInt:
        return integer(value.integer);
      case Kind::kBigInt:
        out_ += '\x8b';
        little_endian(value.text.size(), 4);
        out_ += value.text;
        return;
      case Kind::kFloat:
        return real(value.real);
      case Kind::kString:
        return string(value.text);
      case Kind::kList:
        out_ += "](";
        all(value.items, depth);
        out_ += 'e';
        return;
      case Kind::kTuple:
        if (!value.text.empty()) global(value.text);
        tuple(value.items, depth);
        if (!value.text.empty()) out_ += "\x85R";
        return;
      case Kind::kDict:
        if (value.text.empty()) out_ += '}';
        if (!value.text.empty()) global(value.text), out_ += ")R";
        out_ += '(';
        all(value.items, depth);
        out_ += 'u';
        return;
      case Kind::kClass:
        return global(value.text);
      case Kind::kTensor:
        return tensor(*value.place);
      case Kind::kObject:
        return object(value, depth);
      case Kind::kBytes:
      case Kind::kSet:
      case Kind::kStorage:
        break;
    }
    throw CheckpointError(str(kind_name(value.kind), " cannot be written into a .pt file"));
  }

  std::string out_;
};

}  // namespace

std::string dump(const Document& document) { return Writer().run(document.root()); }

}  // namespace trireme::pickle
