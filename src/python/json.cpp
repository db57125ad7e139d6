#include "python/json.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/utf8.h"

namespace trireme::python {
namespace {

namespace py = pybind11;

std::string text_of(const py::handle& text) {
  Py_ssize_t size = 0;
  const char* const bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (bytes != nullptr) return {bytes, static_cast<size_t>(size)};
  PyErr_Clear();
  throw ConfigError(str("the text ", py::repr(text).cast<std::string>(), " has half of a character; correct it"));
}

Json integer(const py::handle& value) {
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow == 0) return number < 0 ? Json(number) : Json(static_cast<uint64_t>(number));
  if (overflow > 0) {
    const uint64_t larger = PyLong_AsUnsignedLongLong(value.ptr());
    if (!PyErr_Occurred()) return larger;
    PyErr_Clear();
  }
  const double real = PyLong_AsDouble(value.ptr());
  if (!PyErr_Occurred()) return real;
  PyErr_Clear();
  return overflow * std::numeric_limits<double>::infinity();
}

/// Takes one value over, within the limits of a configuration's text.
class Reader {
 public:
  Json read(const py::handle& value) {
    if (++values_ > limits_.values)
      throw ConfigError(str("config: more than ", limits_.values, " values; leave out what is no option"));
    if (value.is_none()) return nullptr;
    if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
    if (py::isinstance<py::int_>(value)) return integer(value);
    if (py::isinstance<py::float_>(value)) return value.cast<double>();
    if (py::isinstance<py::str>(value)) return text_of(value);
    if (py::isinstance<py::dict>(value)) return object(py::reinterpret_borrow<py::dict>(value));
    if (!py::isinstance<py::list>(value) && !py::isinstance<py::tuple>(value))
      throw py::type_error(str("Object of type ", py::type::of(value).attr("__name__").cast<std::string>(),
                               " is not JSON serializable"));
    Json list = Json::array();
    for (const py::handle inner : value) list.push_back(read_inner(inner));
    return list;
  }

 private:
  Json read_inner(const py::handle& value) {
    if (++level_ > limits_.levels)
      throw ConfigError(
          str("config: dicts and lists nested deeper than ", limits_.levels, " levels, or inside of ", "themselves"));
    Json inner = read(value);
    --level_;
    return inner;
  }

  Json object(const py::dict& dict) {
    Json made = Json::object();
    auto& items = made.get_ref<Json::object_t&>();  // whose lookups go through all keys
    for (const auto& [key, inner] : dict) {
      if (!py::isinstance<py::str>(key)) throw py::type_error("keys must be str");
      std::string name = text_of(key);
      if (name.size() > limits_.key_bytes)
        throw ConfigError(str("config: a key of ", name.size(), " bytes, `", excerpt(name, 40), "`; at most ",
                              limits_.key_bytes, " are read"));
      Json there = read_inner(inner);
      items.emplace_back(std::move(name), std::move(there));
    }
    return made;
  }

  const JsonLimits limits_;
  size_t values_ = 0, level_ = 0;
};

}  // namespace

Json json_of(const py::handle& value) { return Reader().read(value); }

py::object object_of(const Json& json) {
  if (json.is_boolean()) return py::bool_(json.get<bool>());
  if (json.is_number_unsigned()) return py::int_(json.get<uint64_t>());
  if (json.is_number_integer()) return py::int_(json.get<int64_t>());
  if (json.is_number_float() && std::isfinite(json.get<double>())) return py::float_(json.get<double>());
  if (json.is_string()) return py::str(json.get_ref<const std::string&>());
  if (json.is_object()) {
    py::dict object;
    for (const auto& [key, inner] : json.items()) object[py::str(key)] = object_of(inner);
    return object;
  }
  if (json.is_array()) {
    py::list list;
    for (const Json& inner : json) list.append(object_of(inner));
    return list;
  }
  return py::none();
}

}  // namespace trireme::python
