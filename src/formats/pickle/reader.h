// The machine that a pickle is a program for: a stack, marks on it, and a memo.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "trireme/formats/pickle/value.h"

namespace trireme::pickle {

class Reader {
 public:
  Reader(std::string_view bytes, const std::string& origin) : bytes_(bytes), origin_(origin) {}

  /// Runs the program to its end.
  Document run();

 private:
  // Each runs `operation` if it is one of its own.
  bool run_scalar(uint8_t operation);
  bool run_text(uint8_t operation);
  bool run_container(uint8_t operation);
  bool run_memo(uint8_t operation);
  bool run_object(uint8_t operation);

  [[noreturn]] void fail(const std::string& what) const;
  void require(bool condition, const char* what) const {
    if (!condition) fail(what);
  }

  // The bytes.
  std::string_view take(uint64_t count);
  uint64_t number(int bytes);  ///< little-endian, unsigned
  std::string_view line();

  // The stack.
  void push(Value* value) { stack_.push_back(value); }
  Value* pop();
  Value* top();
  std::vector<Value*> pop_to_mark();
  void append_to(Value* container, const std::vector<Value*>& items, bool is_set);
  void set_items(Value* dict, const std::vector<Value*>& pairs);

  /// Copies of what is named again and again must not grow beyond what the bytes themselves could hold.
  void charge(size_t copied);

  // Values that operations make.
  Value* long_integer(std::string_view bytes);
  Value* text_value(Kind kind, std::string_view text);
  Value* class_named(const std::string& name);
  void memoize(uint64_t index) { memo_[index] = top(); }
  void recall(uint64_t index);
  Value* storage_of(const Value& id);
  Value* reduce(const Value& callable, Value* arguments);
  Value* rebuild_tensor(const Value& arguments, bool names_dtype);
  std::vector<int64_t> extents(const Value& tuple, const char* what);

  const std::string_view bytes_;
  const std::string& origin_;
  size_t next_ = 0;
  size_t operation_at_ = 0;  ///< of the operation that runs
  Document document_;
  // Values of one byte that nothing changes are made once: a megabyte of them would be a hundred.
  Value* const none_ = document_.none();
  Value* const true_ = document_.boolean(true);
  Value* const false_ = document_.boolean(false);
  Value* const empty_tuple_ = document_.tuple({});
  std::vector<Value*> stack_;
  std::vector<size_t> marks_;  ///< stack heights, ascending
  std::unordered_map<uint64_t, Value*> memo_;
  size_t copied_ = 0;
};

}  // namespace trireme::pickle
