// The operations of a pickle but those that make objects.
#include "formats/pickle/reader.h"

#include <algorithm>
#include <bit>

#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/base/utf8.h"
#include "trireme/formats/pickle/pickle.h"

namespace trireme::pickle {
namespace {

/// Bytes that the values below `root` would take if each place where one is named had its own; a value that contains
/// itself counts once.
uint64_t unshared_bytes(const Value& root) {
  constexpr uint64_t kBytesOfValue = 32, kMost = uint64_t{1} << 60;
  struct Visit {
    const Value* value;
    size_t next;
    uint64_t bytes;
  };
  const auto own_bytes = [](const Value& value) {
    const size_t dims = value.place ? 2 * value.place->shape.size() : 0;
    return kBytesOfValue + value.text.size() + dims * sizeof(int64_t);
  };
  std::unordered_map<const Value*, uint64_t> known;  // of what has parts; 0: it is being walked
  std::vector<Visit> walk = {{&root, 0, own_bytes(root)}};
  known[&root] = 0;
  for (;;) {
    Visit& visit = walk.back();
    const size_t parts = visit.value->items.size();
    const Value* part = visit.next < parts    ? visit.value->items[visit.next]
                        : visit.next == parts ? visit.value->state
                                              : nullptr;
    if (visit.next++ > parts) {
      const uint64_t bytes = visit.bytes;
      known[visit.value] = bytes;
      walk.pop_back();
      if (walk.empty()) return bytes;
      walk.back().bytes = std::min(kMost, walk.back().bytes + bytes);
    } else if (part && part->items.empty() && !part->state) {
      visit.bytes = std::min(kMost, visit.bytes + own_bytes(*part));
    } else if (part) {
      const auto [found, is_new] = known.emplace(part, 0);
      if (is_new)
        walk.push_back({part, 0, own_bytes(*part)});
      else
        visit.bytes = std::min(kMost, visit.bytes + found->second);
    }
  }
}

}  // namespace

void Reader::fail(const std::string& what) const {
  throw CheckpointError(str(origin_, ": byte ", operation_at_, ": ", what));
}

void Reader::charge(size_t copied) {
  copied_ += copied;
  require(copied_ <= 8 * bytes_.size() + 4096, "it repeats one value beyond all measure");
}

std::string_view Reader::take(uint64_t count) {
  if (count > bytes_.size() - next_)
    fail(str("truncated: ", count, " bytes are needed, ", bytes_.size() - next_, " left"));
  const std::string_view taken = bytes_.substr(next_, count);
  next_ += count;
  return taken;
}

uint64_t Reader::number(int bytes) {
  const std::string_view digits = take(bytes);
  uint64_t value = 0;
  for (int i = bytes - 1; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(digits[i]);
  return value;
}

std::string_view Reader::line() {
  const size_t end = bytes_.find('\n', next_);
  require(end != std::string_view::npos, "truncated: a line does not end");
  const std::string_view text = bytes_.substr(next_, end - next_);
  next_ = end + 1;
  return text;
}

Value* Reader::top() {
  require(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "the stack is empty");
  return stack_.back();
}

Value* Reader::pop() {
  Value* value = top();
  stack_.pop_back();
  return value;
}

std::vector<Value*> Reader::pop_to_mark() {
  require(!marks_.empty(), "there is no mark");
  const size_t begin = marks_.back();
  marks_.pop_back();
  std::vector<Value*> items(stack_.begin() + static_cast<std::ptrdiff_t>(begin), stack_.end());
  stack_.resize(begin);
  return items;
}

void Reader::append_to(Value* container, const std::vector<Value*>& items, bool is_set) {
  require(container->is(is_set ? Kind::kSet : Kind::kList),
          is_set ? "items for what is no set" : "items for what is no list");
  container->items.insert(container->items.end(), items.begin(), items.end());
}

void Reader::set_items(Value* dict, const std::vector<Value*>& pairs) {
  require(dict->is(Kind::kDict), "keys for what is no dict");
  require(pairs.size() % 2 == 0, "a key without a value");
  dict->items.insert(dict->items.end(), pairs.begin(), pairs.end());
}

Value* Reader::long_integer(std::string_view bytes) {
  if (bytes.size() > sizeof(int64_t)) {
    Value& big = document_.add(Kind::kBigInt);
    big.text = bytes;
    return &big;
  }
  const bool negative = !bytes.empty() && (static_cast<uint8_t>(bytes.back()) & 0x80) != 0;
  uint64_t value = negative ? ~uint64_t{0} : 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return document_.integer(std::bit_cast<int64_t>(value));
}

Value* Reader::text_value(Kind kind, std::string_view text) {
  if (kind == Kind::kString && !is_utf8(text)) fail("a string is not UTF-8");
  Value& value = document_.add(kind);
  value.text = text;
  return &value;
}

bool Reader::run_scalar(uint8_t operation) {
  switch (operation) {
    case 'N':  // NONE
      return push(none_), true;
    case 0x88:  // NEWTRUE
    case 0x89:  // NEWFALSE
      return push(operation == 0x88 ? true_ : false_), true;
    case 'J':  // BININT
      return push(document_.integer(static_cast<int32_t>(number(4)))), true;
    case 'K':  // BININT1
    case 'M':  // BININT2
      return push(document_.integer(static_cast<int64_t>(number(operation == 'K' ? 1 : 2)))), true;
    case 0x8a:  // LONG1
      return push(long_integer(take(number(1)))), true;
    case 0x8b:  // LONG4
      return push(long_integer(take(number(4)))), true;
    case 'G': {  // BINFLOAT: big-endian
      uint64_t bits = 0;
      for (const char byte : take(8)) bits = bits << 8 | static_cast<uint8_t>(byte);
      return push(document_.real(std::bit_cast<double>(bits))), true;
    }
    default:
      return false;
  }
}

bool Reader::run_text(uint8_t operation) {
  switch (operation) {
    case 'X':  // BINUNICODE
      return push(text_value(Kind::kString, take(number(4)))), true;
    case 0x8c:  // SHORT_BINUNICODE
      return push(text_value(Kind::kString, take(number(1)))), true;
    case 0x8d:  // BINUNICODE8
      return push(text_value(Kind::kString, take(number(8)))), true;
    case 'B':  // BINBYTES
    case 'T':  // BINSTRING
      return push(text_value(Kind::kBytes, take(number(4)))), true;
    case 'C':  // SHORT_BINBYTES
    case 'U':  // SHORT_BINSTRING
      return push(text_value(Kind::kBytes, take(number(1)))), true;
    case 0x8e:  // BINBYTES8
    case 0x96:  // BYTEARRAY8
      return push(text_value(Kind::kBytes, take(number(8)))), true;
    default:
      return false;
  }
}

bool Reader::run_container(uint8_t operation) {
  const auto make = [&](Kind kind, std::vector<Value*> items) {
    Value& value = document_.add(kind);
    value.items = std::move(items);
    push(&value);
    return true;
  };
  switch (operation) {
    case '(':  // MARK
      return marks_.push_back(stack_.size()), true;
    case '0':  // POP
      if (!marks_.empty() && marks_.back() == stack_.size()) return marks_.pop_back(), true;
      return pop(), true;
    case '1':  // POP_MARK
      return pop_to_mark(), true;
    case '2':  // DUP
      return push(top()), true;
    case ']':  // EMPTY_LIST
      return make(Kind::kList, {});
    case '}':  // EMPTY_DICT
      return make(Kind::kDict, {});
    case ')':  // EMPTY_TUPLE
      return push(empty_tuple_), true;
    case 0x8f:  // EMPTY_SET
      return make(Kind::kSet, {});
    case 't':  // TUPLE
      return make(Kind::kTuple, pop_to_mark());
    case 'l':  // LIST
      return make(Kind::kList, pop_to_mark());
    case 0x91:  // FROZENSET
      return make(Kind::kSet, pop_to_mark());
    case 'd': {  // DICT
      const std::vector<Value*> pairs = pop_to_mark();
      make(Kind::kDict, {});
      return set_items(top(), pairs), true;
    }
    case 0x85:    // TUPLE1
    case 0x86:    // TUPLE2
    case 0x87: {  // TUPLE3
      std::vector<Value*> items(operation - 0x84);
      for (size_t i = items.size(); i-- > 0;) items[i] = pop();
      return make(Kind::kTuple, std::move(items));
    }
    default:
      return false;
  }
}

bool Reader::run_memo(uint8_t operation) {
  switch (operation) {
    case 'q':  // BINPUT
      return memoize(number(1)), true;
    case 'r':  // LONG_BINPUT
      return memoize(number(4)), true;
    case 0x94:  // MEMOIZE
      return memoize(memo_.size()), true;
    case 'h':  // BINGET
      return recall(number(1)), true;
    case 'j':  // LONG_BINGET
      return recall(number(4)), true;
    case 'a': {  // APPEND
      Value* item = pop();
      return append_to(top(), {item}, /*is_set=*/false), true;
    }
    case 'e':     // APPENDS
    case 0x90: {  // ADDITEMS
      const std::vector<Value*> items = pop_to_mark();
      return append_to(top(), items, operation == 0x90), true;
    }
    case 's': {  // SETITEM
      Value* value = pop();
      Value* key = pop();
      return set_items(top(), {key, value}), true;
    }
    case 'u': {  // SETITEMS
      const std::vector<Value*> pairs = pop_to_mark();
      return set_items(top(), pairs), true;
    }
    default:
      return false;
  }
}

void Reader::recall(uint64_t index) {
  const auto found = memo_.find(index);
  if (found == memo_.end()) fail(str("entry ", index, " of the memo is read before it is written"));
  push(found->second);
}

Document Reader::run() {
  for (;;) {
    operation_at_ = next_;
    // Pickles of Python's have two bytes for each value but those that are shared here.
    require(document_.values() <= bytes_.size() / 2 + 1024, "it has more values than a pickle of this size");
    const auto operation = static_cast<uint8_t>(number(1));
    if (operation == 0x80) {  // PROTO
      const uint64_t protocol = number(1);
      if (protocol < 2 || protocol > 5) fail(str("pickle protocol ", protocol, ", this reader knows 2 to 5"));
    } else if (operation == 0x95) {  // FRAME: its length, of use only to who reads from a pipe
      number(8);
    } else if (operation == '.') {  // STOP
      require(marks_.empty(), "it ends within a mark");
      document_.set_root(pop());
      // Two bytes name a value again, however large it is, and who reads the document may copy it each time.
      require(unshared_bytes(document_.root()) <= 40 * bytes_.size() + (uint64_t{16} << 20),
              "it repeats one value beyond all measure");
      return std::move(document_);
    } else if (!run_scalar(operation) && !run_text(operation) && !run_container(operation) && !run_memo(operation) &&
               !run_object(operation)) {
      fail(formatted("operation {:#04x} is none that torch.save() writes", operation));
    }
  }
}

Document parse(std::string_view bytes, const std::string& origin) { return Reader(bytes, origin).run(); }

}  // namespace trireme::pickle
